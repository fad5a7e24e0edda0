"""One forward of one attached layer: what it saved, what of that goes to the host, and the rows of the record.

In: tensors from the pack hook, and slots from the ops. Out: handles for the autograd graph; rows. Keeps true: a slot
moves whole or stays whole; memory that a staying tensor shares does not move (it would free nothing); parameters,
weights' copies and metadata pass through untouched. Does not: copy (mover.py does).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from te_offload.offload.chunk import Chunk
from te_offload.offload.extents import Interval, ViewSpec, covering, merge, storage_key
from te_offload.offload.mover import Mover
from te_offload.offload.record import SlotRecord
from te_offload.offload.saved import Saved, SavedWrapper, SlotEntry, give_out, is_plain
from te_offload.ops import te_adapter
from te_offload.slots import Fate, Reason, SavedSlot, SaveState, SlotName


@dataclass(frozen=True)
class Rules:
    """What a session offloads.

    Attributes:
        enabled: whether it offloads at all; if not it only records.
        min_bytes: a slot with fewer bytes stays.
    """

    enabled: bool
    min_bytes: int


class LayerVisit:
    """One forward of one layer.

    Args:
        layer: the layer's name. module: the layer. forward: number of its forward in the step.
        rules: what goes. mover: who moves. fetch: called before a moved tensor is read, with this visit.
        stays: why nothing of this forward is taken (`Reason.NONE`: it is).
    """

    def __init__(
        self,
        layer: str,
        module: torch.nn.Module,
        forward: int,
        rules: Rules,
        mover: Mover,
        fetch: Any,
        stays: Reason,
    ) -> None:
        self.layer = layer
        self.forward = forward
        self.chunks: list[Chunk] = []
        self.exempt_bytes = 0
        self.fetched = False  # whether its copies back were started
        self._module = module
        self._rules = rules
        self._mover = mover
        self._fetch = functools.partial(fetch, weakref.ref(self))
        self._stays = stays
        self._entries: list[SlotEntry] = []
        # By id, with a weak reference that tells a tensor from a later one at its place: an op's tensors must not live
        # longer than they would without a session (a checkpoint inside the layer drops them at once).
        # Several ops may save one object; they are packed in the order in which they named it. None: exempt.
        self._named: dict[int, tuple[weakref.ref[torch.Tensor], list[SlotEntry | None]]] = {}
        self._by_storage: dict[int, SlotEntry] = {}
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    # While the forward runs ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to take what the forward saves, unless it must be left alone."""
        if self._stays is Reason.NONE:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, give_out)
            self._hooks.__enter__()

    def slot_saved(self, op: str, name: SlotName, keep: bool, saved: SavedSlot) -> None:
        """An op of te_offload saved its slot; its tensors reach `pack` afterwards."""
        entry = SlotEntry(self.layer, op, saved.name or name, keep=keep, once=True)
        self._entries.append(entry)
        if saved.state is not SaveState.SAVED:
            recomputed = saved.state is SaveState.RECOMPUTED
            entry.fate = Fate.RECOMPUTED if recomputed else Fate.NOT_SAVED
            entry.reason = Reason.REBUILT if recomputed else Reason.FROZEN
        else:
            entry.reason = self._stays
            entry.nbytes = sum(buffer.numel() * buffer.element_size() for buffer in saved.buffers)
            entry.tensors = len(saved.buffers)
        if self._stays is Reason.NONE:
            for tensor in saved.buffers:
                self._name(tensor, entry)
            for tensor in saved.exempt:
                self._name(tensor, None)

    def _name(self, tensor: torch.Tensor, owner: SlotEntry | None) -> None:
        reference, owners = self._named.get(id(tensor), (None, []))
        if reference is None or reference() is not tensor:
            self._named[id(tensor)] = weakref.ref(tensor), [owner]
        else:
            owners.append(owner)

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook: a handle, or the tensor itself where it must not be touched."""
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return tensor  # also a view of one: whoever shards parameters may free their memory while a copy reads it
        reference, owners = self._named.get(id(tensor), (None, []))
        entry = None
        if reference is not None and reference() is tensor and owners:
            if owners[0] is None:  # exempt, for good
                self.exempt_bytes += tensor.numel() * tensor.element_size()
                return tensor
            entry = owners.pop(0)
        apart = te_adapter.take_apart(tensor)
        if apart is not None:
            if entry is not None or te_adapter.is_marked_not_offload(tensor):
                for buffer in apart[1]:
                    if buffer is not None:
                        owner = entry or self._entry_of_other(buffer, keep_marked=True)
                        self._name(buffer, owner)
            return SavedWrapper(apart[0], [None if buffer is None else self.pack(buffer) for buffer in apart[1]])
        entry = entry or self._entry_of_other(tensor)
        handle = Saved(tensor, entry, self._fetch, self._mover)
        entry.handles.append(weakref.ref(handle))
        return handle

    def _entry_of_other(self, tensor: torch.Tensor, *, keep_marked: bool = False) -> SlotEntry:
        """The entry of a tensor that no op of te_offload named: one for each storage."""
        key = storage_key(tensor) if is_plain(tensor) else id(tensor)
        entry = self._by_storage.get(key)
        if entry is None:
            entry = SlotEntry(self.layer, "", SlotName.OTHER, keep=False, once=False)
            if keep_marked:
                entry.reason = Reason.MARKED
            self._by_storage[key] = entry
            self._entries.append(entry)
        return entry

    # At its end ------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """The forward raised: stop taking tensors, and move none."""
        self._close_hooks()
        self._forget()
        self._entries.clear()

    def commit(self) -> None:
        """The forward is over: decide, and start the copies out."""
        self._close_hooks()
        if self._stays is not Reason.NONE and not self._entries:  # no op of ours said what it saved: say that much
            self._entries.append(SlotEntry(self.layer, "", SlotName.OTHER, keep=False, once=False, reason=self._stays))
        if self._stays is Reason.NONE:
            handles = {id(entry): entry.live_handles() for entry in self._entries}
            self._decide(handles)
            self._make_chunks(handles)
        self._forget()
        self._mover.settle()

    def _close_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _forget(self) -> None:
        self._named.clear()
        self._by_storage.clear()

    def _decide(self, handles: dict[int, list[Saved]]) -> None:
        owned = _storages_of(self._module)
        for entry in self._entries:
            live = handles[id(entry)]
            if not live and entry.reason is Reason.NONE:  # saved, but not here; or not needed any more
                entry.reason = Reason.GRAPH_GONE if entry.handles else Reason.FOREIGN_HOOK
            if live:
                entry.tensors = len(live)
                entry.nbytes = _nbytes(live)
                entry.reason = self._reason_to_stay(entry, live, owned)
                entry.fate = Fate.KEPT if entry.reason is not Reason.NONE else Fate.OFFLOADED
        self._keep_shared_memory(handles)

    def _reason_to_stay(self, entry: SlotEntry, handles: list[Saved], owned: set[int]) -> Reason:
        tensors = [handle.held for handle in handles]
        if not self._rules.enabled:
            return Reason.DISABLED
        if entry.keep:
            return Reason.ASKED
        if entry.reason is Reason.MARKED or any(te_adapter.is_marked_not_offload(tensor) for tensor in tensors):
            return Reason.MARKED
        if any(handle.spec is None for handle in handles):
            return Reason.NOT_PLAIN
        if any(tensor.device != self._mover.device for tensor in tensors):
            return Reason.OTHER_DEVICE
        if any(handle.key in owned for handle in handles):
            return Reason.PARAMETER
        return Reason.TOO_SMALL if entry.nbytes < self._rules.min_bytes else Reason.NONE

    def _keep_shared_memory(self, handles: dict[int, list[Saved]]) -> None:
        """Keep every slot that shares a storage with something that stays, then what the host has no room for."""
        exempt = [reference() for reference, owners in self._named.values() if None in owners]
        staying = {storage_key(tensor) for tensor in exempt if tensor is not None and is_plain(tensor)}
        storages = {id(e): {h.key for h in handles[id(e)] if h.spec is not None} for e in self._entries}
        room = {id(e): _room_needed(handles[id(e)]) for e in self._entries if e.fate is Fate.OFFLOADED}
        changed = True
        while changed:
            changed, room_for = False, 0
            for entry in self._entries:
                if entry.fate is Fate.OFFLOADED:
                    if storages[id(entry)] & staying:
                        entry.fate, entry.reason, changed = Fate.KEPT, Reason.ALIAS, True
                    elif not self._mover.pool.has_room(room_for + room[id(entry)]):
                        entry.fate, entry.reason, changed = Fate.KEPT, Reason.NO_ROOM, True
                    else:
                        room_for += room[id(entry)]
                if entry.fate is Fate.KEPT:
                    staying |= storages[id(entry)]

    def _make_chunks(self, handles: dict[int, list[Saved]]) -> None:
        by_storage: dict[int, list[Saved]] = {}
        for entry in self._entries:
            for handle in handles[id(entry)]:
                ours = handle.spec is not None and entry.reason not in (Reason.PARAMETER, Reason.OTHER_DEVICE)
                if ours and handle.held.device == self._mover.device:
                    by_storage.setdefault(handle.key, []).append(handle)
        leaving: list[tuple[Chunk, torch.UntypedStorage]] = []
        for users in by_storage.values():
            chunks = {interval: Chunk(interval) for interval in merge(handle.spec for handle in users if handle.spec)}
            storage = users[0].held.untyped_storage()
            if users[0].entry.fate is Fate.OFFLOADED:
                leaving += [(chunk, storage) for chunk in chunks.values()]
            self._connect(users, chunks, goes=users[0].entry.fate is Fate.OFFLOADED)
            self.chunks += chunks.values()
        for chunk in self.chunks:
            self._mover.count(chunk)
        self._mover.note(f"{self.layer} saved")
        for chunk, storage in leaving:
            self._mover.send_out(chunk, storage)
            self._mover.settle()

    def _connect(self, users: Iterable[Saved], chunks: dict[Interval, Chunk], goes: bool) -> None:
        paid: set[Interval] = set()
        for handle in users:
            assert handle.spec is not None
            interval = covering(list(chunks), handle.spec)
            if interval is None:
                if goes:
                    handle.go_with(None)
                continue
            chunk = chunks[interval]
            chunk.alive += 1
            chunk.untaken += 1
            chunk.users.append(weakref.ref(handle, functools.partial(_user_died, self._mover, chunk)))
            if goes:
                handle.go_with(chunk)
                if interval not in paid:
                    paid.add(interval)
                    handle.entry.bytes_out += interval.nbytes

    def rows(self) -> list[SlotRecord]:
        """A row for each slot; tensors that no op named share a row where their fate and reason are the same."""
        rows: dict[Any, SlotRecord] = {}
        for position, entry in enumerate(self._entries):
            key = position if entry.slot is not SlotName.OTHER else (entry.fate, entry.reason)
            before = rows.get(key)
            rows[key] = SlotRecord(
                layer=entry.layer,
                op=entry.op,
                slot=entry.slot,
                forward=self.forward,
                nbytes=entry.nbytes + (before.nbytes if before else 0),
                tensors=entry.tensors + (before.tensors if before else 0),
                fate=entry.fate,
                reason=entry.reason,
                bytes_out=entry.bytes_out + (before.bytes_out if before else 0),
            )
        return list(rows.values())


def _user_died(mover: Mover, chunk: Chunk, _: Any) -> None:
    mover.user_died(chunk)


def _storages_of(module: torch.nn.Module) -> set[int]:
    """Keys of the storages of a module's dense parameters and buffers; of a sharded one, of its local shard."""
    owned = [getattr(tensor, "_local_tensor", tensor) for tensor in (*module.parameters(), *module.buffers())]
    return {
        storage_key(tensor) for tensor in owned if type(tensor.data) is torch.Tensor and tensor.device.type != "meta"
    }


def _specs_by_storage(handles: list[Saved]) -> list[list[ViewSpec]]:
    specs: dict[int, list[ViewSpec]] = {}
    for handle in handles:
        if handle.spec is not None:
            specs.setdefault(handle.key, []).append(handle.spec)
    return list(specs.values())


def _nbytes(handles: list[Saved]) -> int:
    """Bytes that the tensors of a slot read, each byte of memory once."""
    other = sum(h.held.numel() * h.held.element_size() for h in handles if h.spec is None)
    return other + sum(_covered(specs) for specs in _specs_by_storage(handles))


def _room_needed(handles: list[Saved]) -> int:
    """Bytes of host memory that a slot takes: its intervals, which begin at aligned bytes."""
    return sum(interval.nbytes for specs in _specs_by_storage(handles) for interval in merge(specs))


def _covered(specs: list[ViewSpec]) -> int:
    """Bytes from the first to the last one that each run of touching views reads."""
    total, end = 0, -1
    for spec in sorted(specs, key=lambda spec: spec.offset):
        total += max(0, spec.end - max(spec.offset, end))
        end = max(end, spec.end)
    return total
