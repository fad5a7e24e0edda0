"""One forward of one layer: what it saved, what of that goes to the host, and the rows of the record.

In: tensors from the pack hook, and slots from the ops. Out: handles for the autograd graph; rows. Keeps true: parameters,
weights' copies and metadata pass through untouched; the hook and Transformer Engine's switch are put back as they were
when the forward ends, however it ends. Does not: choose what goes (decide.py), or copy (mover.py).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from te_offload.errors import ConflictError
from te_offload.offload.cargo import Cargo, Hold
from te_offload.offload.decide import decide, storages_of
from te_offload.offload.extents import storage_key
from te_offload.offload.load import Load
from te_offload.offload.others import OtherSlots
from te_offload.offload.plain import has_storage, is_plain
from te_offload.offload.record import Phase
from te_offload.offload.saved import Saved, SavedWrapper, SlotEntry, give_out
from te_offload.offload.shares import Shares
from te_offload.offload.states import RELEASED
from te_offload.offload.unmoved import Unmoved, without_graph
from te_offload.ops import te_adapter
from te_offload.slots import Fate, Reason, SavedSlot, SaveState, SlotName, SlotObserver, StorageObserver, Watch

if TYPE_CHECKING:
    from te_offload.offload.engine import Engine
    from te_offload.offload.mover import Mover
    from te_offload.offload.transfer import Mark


_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_TAKES, _HOOKS, _WAS_SAVED = Watch.TAKES, Watch.HOOKS, SaveState.SAVED
_NOT_OFFLOAD, _reference = te_adapter.NOT_OFFLOAD, weakref.ref


class Region(contextlib.AbstractContextManager[None]):
    """What a forward saves between the begin and the end of ``with session.region(...)``.

    Args:
        visit: the forward; ``None``: there is none, and nothing happens.
        name: the region's. keep: whether it stays on the device.
    """

    def __init__(self, visit: LayerVisit | None, name: str, keep: bool) -> None:
        self.name = name
        self.keep = keep
        self._visit = visit

    def __enter__(self) -> None:
        if self._visit is not None:
            self._visit.enter_region(self)

    def __exit__(self, *_: object) -> None:
        if self._visit is not None:
            self._visit.leave_region(self)


class LayerVisit(SlotObserver, StorageObserver):
    """One forward of one layer.

    Args:
        layer: the layer's name. module: the layer, if it is known. forward: number of its forward in the step.
        engine: who offloads. stays: why nothing of this forward is taken (`Reason.NONE`: it is).

    Attributes:
        key: layer and forward. mover: who copies. number: of this forward among those of the step.
        cargos: what left the device, in the order in which it was saved. read: whether the backward has read of it.
        aborted: whether it raised. shared: memory that several of its slots hold.
        keep: why all of this forward stays on the device, if it does; it is recorded all the same.
        began, ended, needed: marks of the forward (if that is timed; its end also where a slot has no mark of its own), and
            of the first read; none where it is left alone.
    """

    def __init__(self, layer: str, module: torch.nn.Module | None, forward: int, engine: Engine, stays: Reason) -> None:
        self.layer = layer
        self.forward = forward
        self.key = (layer, forward)
        self.device = engine.device
        self.mover = engine.mover
        self.entries: list[SlotEntry] = []
        self.cargos: list[Cargo] = []
        self.kept: list[Cargo] = []
        self.exempt_bytes = 0
        self.read = False
        self.aborted = False
        self.shared: Shares = {}
        self.number = len(engine.visits)
        self.ahead = 0  # bytes that are back before the backward has come here
        self.sent = 0  # bytes that have begun to leave
        self.began: Mark | None = None
        self.ended: Mark | None = None
        self.needed: Mark | None = None
        self.keep = Reason.NONE
        self._loaded = False
        self._reused = engine.mover.reused
        # Which of the step's waits for copies out were before this forward, after it, and before its backward.
        self.waits_before = self.waits_after = self.waits_before_backward = (0, 0)
        self._module = module
        self._engine = engine
        self._stays = stays
        self._takes = stays is Reason.NONE
        # By id, with a weak reference that tells a tensor from a later one at its place: an op's tensors must not live
        # longer than they would without a session (a checkpoint inside the layer drops them at once).
        # Several ops may save one object; they are packed in the order in which they named it. None: exempt.
        self._named: dict[int, tuple[weakref.ref[torch.Tensor], int, list[SlotEntry | None]]] = {}
        self._others = OtherSlots()
        self._region: SlotEntry | None = None  # of the innermost one, from the first tensor on that it saves
        self._pack: Any = None
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._switch: te_adapter.OffloadSwitch | None = None

    # While the forward runs ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to take what the forward saves, unless it must be left alone."""
        if self._takes:
            if self._engine.mover.transfer.timed:
                self.began = self._engine.mover.transfer.mark()
            self._pack = self.pack  # one object, so that it is known again
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, give_out)
            self._hooks.__enter__()
            if self.device.type == "cuda":
                self._switch = te_adapter.OffloadSwitch(on=True)
                self._switch.__enter__()

    def watch(self) -> Watch:
        """See `SlotObserver.watch`."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return _TAKES if top is not None and top[0] is self._pack else _HOOKS

    def slot_saved(self, op: torch.nn.Module, saved: SavedSlot, *, take: bool) -> Saved | None:
        """See `SlotObserver.slot_saved`: an op of te_offload that nobody attached, in a context that knows no modules."""
        name = saved.name or SlotName.GROUPED_LINEAR_INPUT
        return self.note_slot(type(op).__name__, name, op.no_offload_activation, saved, take=take)  # type: ignore[arg-type]

    def note_slot(self, op: str, name: SlotName, keep: bool, saved: SavedSlot, *, take: bool) -> Saved | None:
        """An op of te_offload saved its slot. Its tensors reach `pack` afterwards, unless ``take``.

        Returns:
            the handle that stands for them, if ``take`` and there are any.

        Raises:
            ConflictError: another engine was entered inside the layer.
        """
        other = te_adapter.offload_context_active()
        if other is not None and self._takes:
            raise ConflictError(
                f"{other} was entered inside {self.layer}, which an OffloadSession offloads, and two engines cannot take "
                "the same saved tensors. Use one of them."
            )
        entry = SlotEntry(self, op, saved.name or name, keep=keep, once=True)
        entry.format = saved.format
        self.entries.append(entry)
        if saved.carried_bytes is not None and self._engine.mover.transfer.timed:
            self.exempt_bytes += saved.carried_bytes()
        if saved.state is not _WAS_SAVED:
            recomputed = saved.state is SaveState.RECOMPUTED
            entry.fate = Fate.RECOMPUTED if recomputed else Fate.NOT_SAVED
            entry.reason = Reason.REBUILT if recomputed else Reason.FROZEN
        else:
            entry.reason = saved.stays or self._stays
            if saved.stays is not None:
                entry.nbytes, entry.tensors = saved.nbytes, 1
            elif not take:
                entry.nbytes = sum([buffer.nbytes for buffer in saved.buffers])
                entry.tensors = len(saved.buffers)
                if self._takes and te_adapter.checkpoint_hook_active():  # a checkpoint inside the layer
                    entry.reason = Reason.CHECKPOINT
            entry.fate = _fate_without_us(entry.reason)
        if not self._takes or not saved.buffers:
            return None
        if not keep and (len(saved.buffers) > 1 or saved.buffers[0].nbytes >= self._engine.rules.together):
            entry.ready = saved.ready or self._engine.mover.transfer.mark()
        if take:
            return self._handle(list(saved.buffers), entry)
        for tensor in saved.buffers:
            self._name(tensor, entry)
        for tensor in saved.exempt:
            self._name(tensor, None)
        return None

    def _name(self, tensor: torch.Tensor, owner: SlotEntry | None) -> None:
        known = self._named.get(id(tensor))
        if known is None or known[0]() is not tensor:
            version = -1 if tensor.is_inference() else tensor._version
            self._named[id(tensor)] = weakref.ref(tensor), version, [owner]
        else:
            known[2].append(owner)

    def enter_region(self, region: Region) -> None:
        """What is saved from now on, and by no op of te_offload, is the region's."""
        self._region = self._others.enter(region)

    def leave_region(self, region: Region) -> None:
        """The region ends."""
        entry, self._region = self._others.leave(region)
        if entry is not None and self._takes and not entry.keep:
            # To measure many tensors takes the host longer than a mark.
            alone = len(entry.handles) > 16 or _nbytes_held(entry) >= self._engine.rules.together
            entry.ready = self._engine.mover.transfer.mark() if alone else None

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook: what stands for the tensor."""
        entry, kind, base = self._region, type(tensor), tensor._base
        if (
            entry is not None
            and kind is _TENSOR
            and (base is None or type(base) is _TENSOR)
            and id(tensor) not in self._named
            and not getattr(tensor, _NOT_OFFLOAD, False)
        ):  # a region's, as most are
            handle = Saved([tensor if tensor.is_leaf else tensor.detach()], entry)
            entry.handles.append(_reference(handle))
            return handle
        if (kind is not _TENSOR and isinstance(tensor, _PARAMETER)) or (
            base is not None and type(base) is not _TENSOR and isinstance(base, _PARAMETER)
        ):  # whoever shards parameters may free their memory while a copy reads it
            if self._module is None and has_storage(tensor.data):  # of a layer that is not known, as in the context
                self._others.staying.add(storage_key(tensor))
            return Unmoved(tensor, self.layer)
        entry = None
        known = self._named.get(id(tensor))
        if known is not None and known[0]() is tensor and known[2]:
            if known[2][0] is None:  # exempt, for good
                self.exempt_bytes += tensor.nbytes
                return Unmoved(tensor, self.layer)
            entry = known[2].pop(0)
            if entry is not None and known[1] >= 0 and tensor._version != known[1]:
                entry.ready = None  # written to after the op had saved it: there when the forward ends
        if entry is None and te_adapter.is_marked_not_offload(tensor):
            self._others.count_marked(tensor, self)
            return Unmoved(tensor, self.layer)
        apart = te_adapter.take_apart(tensor) if kind is not _TENSOR else None
        if apart is not None:
            for buffer in apart[1]:
                if entry is not None and buffer is not None:
                    self._name(buffer, entry)
            return SavedWrapper(apart[0], [None if buffer is None else self.pack(buffer) for buffer in apart[1]])
        return self._handle([without_graph(tensor)], entry or self._entry_of(tensor))

    def _handle(self, tensors: list[torch.Tensor], entry: SlotEntry) -> Saved:
        handle = Saved(tensors, entry)
        entry.handles.append(weakref.ref(handle))
        return handle

    def _entry_of(self, tensor: torch.Tensor) -> SlotEntry:
        entry = self._others.entry_of(tensor, self)
        if entry.slot is SlotName.REGION:
            self._region = entry
        return entry

    def entry_apart(self, handles: list[Saved]) -> SlotEntry:
        """An entry for tensors of a region that cannot go with the others."""
        ordinal = sum(entry.slot is SlotName.OTHER and entry.ordinal is not None for entry in self.entries)
        entry = SlotEntry(self, "", SlotName.OTHER, keep=False, once=False, ordinal=ordinal)
        entry.hold(handles)
        self.entries.append(entry)
        return entry

    def name_storages(self, op: str, slots: Iterable[tuple[SlotName, torch.Tensor, bool]]) -> None:
        """See `StorageObserver.name_storages`."""
        self._others.name(op, slots)

    # At its end ------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """The forward raised: stop taking tensors, and move none."""
        self.aborted = True
        self._close()
        self._forget()
        self.entries.clear()

    def commit(self) -> None:
        """The forward is over: decide, and start the copies out."""
        self.close()
        self.load()

    def close(self) -> None:
        """The forward is over: stop taking what is saved."""
        self._close()
        if self._takes:
            transfer = self._engine.mover.transfer
            if transfer.timed or self._lacks_a_mark():
                self.ended = transfer.mark()

    def _lacks_a_mark(self) -> bool:
        """Whether a slot may not be complete before the end of the forward."""
        return False in [entry.once and entry.ready is not None for entry in self.entries if entry.handles]

    def load(self) -> None:
        """Decide, and start the copies out. Does nothing the second time."""
        if self._loaded:
            return
        self._loaded = True
        mover = self._engine.mover
        mover.release_unreachable()
        if not self._takes and not self.entries:  # no op of ours said what it saved: say that much
            entry = SlotEntry(self, "", SlotName.OTHER, keep=False, once=False)
            entry.fate, entry.reason = _fate_without_us(self._stays), self._stays
            self.entries.append(entry)
        if self._takes:
            for reference, _, owners in self._named.values():
                tensor = reference() if None in owners else None
                if tensor is not None and is_plain(tensor):
                    self._others.staying.add(storage_key(tensor))
            going, staying, self.shared = decide(
                self.entries,
                self._owned_storages,
                self._others.staying,
                self._engine.rules,
                self.device,
                mover.pool,
                mover.max_in_flight,
            )
            for load in staying:
                self._keep(load, mover)
            if (
                mover.reused != self._reused
            ):  # a backward came in between: earlier marks do not tell of what it read last
                late = mover.transfer.mark()
                for load in going:
                    load.ready = late
            early = [load for load in going if load.entry.ready and load.last is load.entry] if len(going) > 1 else []
            order = early + [load for load in going if load not in early] if early else going
            for number, load in enumerate(order):
                try:
                    self._send(load, mover)
                except BaseException:  # a copy that was refused: no later one is tried
                    for rest in order[number:]:
                        rest.stay(Reason.REFUSED)
                    raise
            if early:  # they come back in the order in which they were saved
                sent = self.cargos
                self.cargos = [load.cargo for load in going if load.cargo in sent]
            mover.note(f"{self.layer} saved")
        self._forget()
        before = len(mover.counts.throttles)
        if self._takes:
            mover.settle(self.key)
        self.waits_after = before, len(mover.counts.throttles)
        if self._takes:
            self._engine.enter(self, Phase.AFTER)

    def _owned_storages(self) -> frozenset[int]:
        """Those of the layer's parameters, looked up once a step."""
        known = self._engine.owned_storages
        if self._module is None:
            return frozenset()
        if self.layer not in known:
            known[self.layer] = storages_of(self._module)
        return known[self.layer]

    def _keep(self, load: Load, mover: Mover) -> None:
        cargo = Cargo(load.entry.label, load.entry.nbytes - load.entry.counts_elsewhere, ())
        self._watch(cargo, load.handles)
        self.kept.append(cargo)
        mover.keep(cargo)

    def _send(self, load: Load, mover: Mover) -> None:
        cargo = load.cargo
        assert cargo is not None
        going = load.put_on()
        if cargo.copied:
            cargo.ready = load.ready or load.entry.ready or self.ended
            if load.last is not load.entry:  # without an end, all have marks of their own, in this order
                cargo.ready = load.ready or self.ended or load.last.ready
            self._watch(cargo, going)
            if self._engine.verifier is not None:
                self._engine.verifier.note(cargo, self.forward)
            self.sent += cargo.copied
            if mover.departures is not None:
                cargo.over_at = mover.departures.place(self.key, self.sent)
            whole = len(going) == len(load.handles)
            mover.send_out(cargo, [*load.tensors] if whole else [one for handle in going for one in handle.held])
            self.cargos.append(cargo)

    def _watch(self, cargo: Cargo, handles: list[Saved]) -> None:
        """Know its handles, and give its bytes back when nobody can ask for them any more."""
        nobody_left = functools.partial(self.mover.nobody_left, cargo)
        if len(handles) == 1:
            cargo.watch = watch = weakref.ref(handles[0], nobody_left)
            cargo.users = (watch,)
            return
        held = Hold()
        for handle in handles:
            handle.hold = held
        cargo.watch = weakref.ref(held, nobody_left)
        cargo.users = list(map(weakref.ref, handles))

    def _close(self) -> None:
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__(None, None, None)
            self._pack = None
        if self._switch is not None:
            switch, self._switch = self._switch, None
            switch.__exit__(None, None, None)

    def forget(self) -> None:
        """Nobody will read this forward's record: let go of what refers to it and is referred to by it."""
        self.entries, self.cargos, self.kept = [], [], []

    def _forget(self) -> None:
        self._named.clear()
        self._others.forget()

    # In the backward -------------------------------------------------------------------------------------------------

    def first_read(self) -> None:
        """The backward reads the first tensor of this forward."""
        self._engine.commit_delayed()
        self._engine.enter(self, Phase.BACKWARD)
        self.read = True
        self._engine.returns.read(self)
        if self._engine.watermarks is not None:
            self._engine.watermarks.holds(self.mover.counts.resident)

    def bring_back(self, cargo: Cargo) -> None:
        """Make a cargo's bytes ready for work queued from now on.

        Raises:
            CorruptionError: ``verify=True`` found other bytes than were saved.
        """
        self._engine.mover.bring_back(cargo)
        if self._engine.verifier is not None and not cargo.recalled:
            self._engine.verifier.check(cargo)

    def let_go(self) -> None:
        """Let go of this forward's device memory; the compute stream waits for its copies out."""
        for cargo in self.cargos:
            self._engine.mover.let_go(cargo)

    def start_back(self) -> None:
        """Start this forward's copies back."""
        free = self._engine.mover.transfer.mark()
        for cargo in reversed(self.cargos):
            self._engine.mover.start_back(cargo, free)

    def recall(self, cargo: Cargo) -> None:
        """A tensor is read before its memory was given up."""
        self._engine.mover.recall(cargo)

    def release(self) -> None:
        """The step ends: give back what is left on either side. What was kept belongs to its graph alone."""
        for cargo in self.cargos:
            if cargo.state is not RELEASED:
                self._engine.mover.release(cargo)
        for cargo in self.kept:
            cargo.counted = False


def _fate_without_us(reason: Reason) -> Fate:
    """Of a slot that is left alone for a reason, or is still to be decided on."""
    return Fate.RECOMPUTED if reason is Reason.CHECKPOINT else Fate.KEPT


def _nbytes_held(entry: SlotEntry) -> int:
    tensors = [tensor for handle in entry.live_handles() for tensor in handle.held]
    return sum([tensor.numel() * tensor.element_size() for tensor in tensors])
