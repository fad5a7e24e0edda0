"""The handle that stands in the autograd graph for a saved tensor, or for all tensors of a slot.

In: saved tensors, and later the cargo that their bytes went with. Out: the same tensors, bit for bit. Keeps true: sizes,
strides, dtype and aliasing are the original's, and of tensors of three dimensions and more that no op of te_offload saved
the place in their storage, too (Transformer Engine tells by it how queries, keys and values are packed, and an attention
that is computed again gets them from here); tensors of te.ops are given out once (Transformer Engine cannot run a second
backward), others as often as autograd asks; a tensor that was written to since it was saved is an error, as it is without
hooks. Does not: decide whether its bytes move.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_offload.errors import BackwardTwiceError, SavedTensorModifiedError, StepEndedError
from te_offload.offload.cargo import Cargo, Hold, Label, Lot, name_of
from te_offload.offload.extents import Scattered, Strip, extent
from te_offload.offload.plain import is_discarded
from te_offload.offload.states import LEAVING, RELEASED, RETURNED
from te_offload.offload.unmoved import version_of
from te_offload.ops import te_adapter
from te_offload.slots import Fate, Reason, SlotName, slot_title

if TYPE_CHECKING:
    from te_offload.offload.transfer import Mark
    from te_offload.offload.visit import LayerVisit


_LOOKED_AT = 3  # dimensions that queries, keys and values have at least
_WRITTEN = -2  # the version of a handle whose tensors were written to while they left


class SlotEntry:
    """One slot of one forward while the forward runs, and its fate afterwards.

    Attributes:
        visit: the forward. op, slot: its name in the layer. ordinal: number of an unnamed one in its forward.
        keep: the op, or the region, said ``no_offload_activation``.
        once: the tensors are of te.ops, which reads them once.
        ready: the mark after which its bytes are there; ``None``: the end of the forward.
        handles: its saved tensors; weak, since the autograd graph alone decides how long they live.
        fate, reason: what became of it. nbytes, tensors, bytes_out, format, shared, part_of: as in `SlotRecord`.
        counts_elsewhere: bytes of it that count with another slot that stays, if it stays.
        cargo: what carries its bytes, alone or with those of other small slots; ``None`` if another slot has its memory.
    """

    fate = Fate.KEPT
    reason = Reason.NONE
    nbytes = 0
    tensors = 0
    bytes_out = 0
    format = ""
    shared = 0
    counts_elsewhere = 0
    part_of = ""
    ready: Mark | None = None
    cargo: Cargo | None = None

    def __init__(
        self, visit: LayerVisit, op: str, slot: SlotName, *, keep: bool, once: bool, ordinal: int | None = None
    ) -> None:
        self.visit = visit
        self.op = op
        self.slot = slot
        self.ordinal = ordinal
        self.keep = keep
        self.once = once
        self.handles: list[weakref.ref[Saved]] = []

    @property
    def title(self) -> str:
        """``layer/op.slot``; all that nobody named is one slot of its layer."""
        return slot_title(self.visit.layer, self.op, self.slot)

    @property
    def whole(self) -> str:
        """As `SlotRecord.whole`."""
        return self.part_of or self.title

    @property
    def label(self) -> Label:
        """What its name is made of."""
        return self.visit.layer, self.op, self.slot, self.ordinal

    @property
    def name(self) -> str:
        """The title, with a number where nobody named it."""
        return name_of(self.label)

    def hold(self, handles: Sequence[Saved]) -> None:
        """These are the handles."""
        self.handles = [weakref.ref(handle) for handle in handles]
        for handle in handles:
            handle.entry = self

    def live_handles(self) -> list[Saved]:
        """The handles that are still in an autograd graph and still hold their tensors."""
        if len(self.handles) == 1:
            handle = self.handles[0]()
            return [] if handle is None or handle.tensors is None else [handle]
        return [one for refer in self.handles if (one := refer()) is not None and one.tensors is not None]


class Part:
    """A strip, and where it is when it is back.

    Args:
        strip: which. lot: the allocation; ``None``: the strip has no elements. offset: its first byte there.

    Attributes:
        cut: the strip's tensors in its own order, from when the first of several handles asked to when the last one has.
        untaken: how often handles will ask that have not.
    """

    __slots__ = ("cut", "lot", "offset", "strip", "untaken")

    def __init__(self, strip: Strip | Scattered, lot: Lot | None, offset: int) -> None:
        self.strip = strip
        self.lot = lot
        self.offset = offset
        self.cut: Sequence[torch.Tensor] | None = None
        self.untaken = 0

    def tensors(self, device: torch.device) -> Sequence[torch.Tensor]:
        """The strip's tensors, in its own order."""
        if self.cut is not None:
            return self.cut
        strip, lot = self.strip, self.lot
        if lot is None:
            assert isinstance(strip, Strip)
            return strip.without_elements(device)
        tensors = lot.tensors(strip, self.offset)
        if self.untaken > 1:
            self.cut = tensors
        return tensors

    def share(self, cargo: Cargo, handles: Sequence[Saved], base: int, *, alone: bool) -> None:
        """Be on a cargo for the handles of the strip's tensors, which have one each.

        Args:
            cargo: which. handles: of which that of the strip's member m is number ``base + m``.
            alone: whether no other strip has bytes in the strip's run.
        """
        strip, lot = self.strip, self.lot
        carried_by = None if lot is None else cargo
        for position, member in enumerate(strip.members):
            handle = handles[base + member]
            handle.part, handle.position, handle.cargo = self, position, carried_by
        if alone and lot is not None and isinstance(strip, Strip) and strip.end - strip.begin == lot.nbytes:
            lot.shape = strip.shape()
        self.wait_for(cargo, len(strip.members))

    def wait_for(self, cargo: Cargo, times: int) -> None:
        """Handles will ask so many times more."""
        if self.lot is not None:
            if not self.untaken:
                self.lot.untaken += 1
                cargo.untaken += 1
            self.untaken += times

    def hand_over(self, cargo: Cargo) -> None:
        """One has asked. With a lot's last tensor only those that were given out hold its memory."""
        self.untaken -= 1
        if self.untaken == 0:
            self.handed_over(cargo)

    def handed_over(self, cargo: Cargo) -> None:
        """All have."""
        self.cut = None
        if self.lot is not None:
            self.lot.hand_over(cargo)


class Saved:
    """Plain saved tensors, on the device or moved: one that came through the pack hook, or all of a slot.

    Args:
        tensors: held until they move, or are given out if their slot is read once.
        entry: their slot.
    """

    __slots__ = (
        *("__weakref__", "_lot", "_parts", "_place", "cargo", "entry", "hold", "part"),
        *("at", "position", "taken", "tensors", "version"),
    )
    at: int  # where its one tensor was in its storage, in elements; -1: nobody looks
    cargo: Cargo | None
    hold: Hold | None
    part: Part | None  # with its one tensor, at this position
    position: int
    _lot: Lot | None  # else: its one tensor is all of it, or has a place there: size, stride, dtype, first byte
    _place: tuple[Sequence[int], Sequence[int], torch.dtype, int] | None
    _parts: list[tuple[Part, int | None, int]] | None  # else: parts, the position of a tensor in each, its number here
    taken: bool  # were they given out?

    def __init__(self, tensors: list[torch.Tensor], entry: SlotEntry) -> None:
        self.tensors: list[torch.Tensor] | None = tensors
        self.entry = entry
        self.cargo = self.hold = self.part = self._lot = self._place = self._parts = None
        self.taken = False
        self.at = -1
        try:
            self.version = tensors[0]._version
        except RuntimeError:
            self.version = version_of(tensors)

    def take(self) -> list[torch.Tensor]:
        """The saved tensors, on the device and ready for work queued from now on.

        Raises:
            BackwardTwiceError: te.ops asked before.
            StepEndedError: their step has ended, and their bytes are gone.
            SavedTensorModifiedError: one was written to since it was saved.
            CorruptionError: ``verify=True`` found other bytes than were saved.
        """
        entry = self.entry
        first, self.taken = not self.taken, True
        if not first and entry.once:
            raise BackwardTwiceError.of_te_ops(entry.name)
        visit = entry.visit
        if entry.once:
            visit.mover.begin_use()
        if not visit.read:
            visit.first_read()  # which may send it away first
        if self.was_written:
            self._fail_modified()
        tensors, cargo = self.tensors, self.cargo
        if not first and cargo is not None and cargo.state is RETURNED and self._memory_is_gone():
            cargo.leave_again()
        if tensors is None and cargo is not None and cargo.state is not RETURNED:
            if cargo.state is RELEASED:
                raise StepEndedError(
                    f"{entry.name} was offloaded in a step that has ended, or its session was closed, so its bytes are "
                    "gone. Call backward inside the same `with session.step():` as the forward."
                )
            visit.bring_back(cargo)
        if tensors is not None:
            if self.was_modified():
                self._fail_modified()
            if cargo is not None and cargo.state is LEAVING:
                visit.recall(cargo)
            if entry.once:
                self.tensors = None
            return tensors
        tensors = self._restore(visit.device)
        if first and cargo is not None:
            self._hand_over(cargo)
        return tensors

    def _memory_is_gone(self) -> bool:
        """Whether what was brought back for it was given out and is not held any more, though others' still is."""
        lots = [self._lot, *[part.lot for part in self._all_parts() if part.cut is None]]
        return None in [lot.memory for lot in lots if lot is not None]

    def _restore(self, device: torch.device) -> list[torch.Tensor]:
        """The tensors over the memory that is back."""
        tensors = self._cut(device)
        return tensors if self.at < 0 else [_as_it_was(tensors[0], self.at)]

    def _cut(self, device: torch.device) -> list[torch.Tensor]:
        if self._lot is not None:
            return [self._lot.whole() if self._place is None else self._lot.part(*self._place)]
        if self.part is not None:
            return [self.part.tensors(device)[self.position]]
        parts = self._parts or ()
        if len(parts) == 1 and parts[0][1] is None and isinstance(parts[0][0].strip.members, range):
            # All of them, in the order in which they were saved.
            return list(parts[0][0].tensors(device))
        tensors: dict[int, torch.Tensor] = {}
        for part, position, number in parts:
            if position is None:
                tensors.update(zip(part.strip.members, part.tensors(device), strict=True))
            else:
                tensors[number] = part.tensors(device)[position]
        return [tensors[number] for number in range(len(tensors))]

    def _hand_over(self, cargo: Cargo) -> None:
        """With a lot's last tensor only those that were given out hold its memory."""
        if self._lot is not None:
            self._lot.hand_over(cargo)
        elif self.part is not None:
            self.part.hand_over(cargo)
        else:
            for part, _, _ in self._parts or ():
                part.hand_over(cargo)

    @property
    def name(self) -> str:
        """The slot's, for messages."""
        return self.entry.name

    @property
    def is_here(self) -> bool:
        """See `SlotHandle.is_here`."""
        return self.tensors is not None

    @property
    def held(self) -> list[torch.Tensor]:
        """The tensors, while the handle holds them."""
        assert self.tensors is not None
        return self.tensors

    def go_with(self, cargo: Cargo, parts: Sequence[Part]) -> bool:
        """From now on the bytes are also in the cargo's runs; whether there are any.

        Args:
            cargo: which. parts: those of its tensors alone.
        """
        for part in parts:
            self.add_part(cargo, part, None, 0)
        return self.cargo is not None

    def go_alone(self, cargo: Cargo, lot: Lot, offset: int) -> None:
        """The same for one contiguous tensor, which has elements, from a byte of a lot on."""
        tensor = self.held[0]
        shape = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.go_to(cargo, lot, (*shape, offset))
        if lot.nbytes == tensor.nbytes:
            lot.shape, self._place = shape, None

    def go_to(self, cargo: Cargo, lot: Lot, place: tuple[Sequence[int], Sequence[int], torch.dtype, int]) -> None:
        """The same for one tensor, which has elements and a place in a lot: size, stride, dtype, first byte."""
        self.cargo, self._lot, self._place = cargo, lot, place
        lot.untaken += 1
        cargo.untaken += 1

    def go_as_one(self, cargo: Cargo, part: Part) -> None:
        """The same for one part with all of its tensors, which have elements: nobody else's are in its lot."""
        strip, lot = part.strip, part.lot
        assert lot is not None and isinstance(strip, Strip)
        self.cargo = cargo
        part.wait_for(cargo, 1)
        if len(strip.members) == 1:
            self.part, self.position = part, 0
        else:
            self._parts = [(part, None, 0)]
        if strip.end - strip.begin == lot.nbytes:
            lot.shape = strip.shape()

    def add_part(self, cargo: Cargo, part: Part, position: int | None, number: int) -> None:
        """The same for one part.

        Args:
            cargo, part: which.
            position: of this handle's one tensor in the strip; ``None``: all of the strip is this handle's, and its members
                are numbers of the handle's tensors.
            number: of that one tensor among the handle's.
        """
        if part.lot is not None:
            self.cargo = cargo
            part.wait_for(cargo, 1)
        if self._parts is None:
            self._parts = []
        self._parts.append((part, position, number))

    def spans(self, lot: Lot) -> list[tuple[int, int]]:
        """First byte and end, in a lot, of these tensors, or of the strips that they are in."""
        if self._lot is lot:
            if self._place is None:
                return [(0, lot.nbytes)]
            size, stride, dtype, begin = self._place
            return [(begin, begin + extent(size, stride) * dtype.itemsize)]
        if self.part is not None and isinstance(self.part.strip, Scattered):
            return self.part.strip.parts()[self.position : self.position + 1] if self.part.lot is lot else []
        return [
            (begin - part.strip.begin + part.offset, end - part.strip.begin + part.offset)
            for part in self._all_parts()
            if part.lot is lot
            for begin, end in part.strip.parts()
        ]

    def _all_parts(self) -> list[Part]:
        return [part for part, _, _ in self._parts or ()] if self.part is None else [self.part]

    def forget_memory(self) -> None:
        """The bytes are gone: hold no views of the memory in which they were back."""
        for part in self._all_parts():
            part.cut = None

    @property
    def was_written(self) -> bool:
        """Whether a tensor was written to while the copy out may have read it: nobody knows what was copied."""
        return self.version == _WRITTEN

    def was_modified(self) -> bool:
        """Whether a tensor was written to since it was saved, while the handle holds them."""
        tensors = self.held
        return self.version >= 0 and tensors[0]._version != self.version  # an inference tensor has none, for good

    def _fail_modified(self) -> None:
        raise SavedTensorModifiedError(
            f"{self.entry.name}: a saved tensor was written to in place after the forward had saved it, so its "
            "gradient would be wrong. Write to a clone instead."
        )


class SavedWrapper:
    """A quantized wrapper tensor of Transformer Engine, taken apart into its buffers.

    Args:
        shell: the wrapper without its buffers. parts: the buffers' handles, in order.
    """

    __slots__ = ("_parts", "_shell")

    def __init__(self, shell: Any, parts: list[Any]) -> None:
        self._shell = shell
        self._parts = parts

    def take(self) -> torch.Tensor:
        """The wrapper around its buffers; errors as in `Saved.take`."""
        return te_adapter.put_together(self._shell, [give_out(part) for part in self._parts])


def give_out(packed: Any) -> Any:
    """The unpack hook: a handle's one tensor, or what stands for another; errors as in `Saved.take`."""
    if type(packed) is Saved:
        part = packed.part
        if part is None or part.cut is None or packed.taken or packed.entry.once or packed.version == _WRITTEN:
            return packed.take()[0]
        packed.taken = True  # another handle has brought it back
        tensor = part.cut[packed.position] if packed.at < 0 else _as_it_was(part.cut[packed.position], packed.at)
        part.untaken -= 1
        if not part.untaken:
            assert packed.cargo is not None
            part.handed_over(packed.cargo)
        return tensor
    return packed if packed is None else packed.take()


def _as_it_was(tensor: torch.Tensor, at: int) -> torch.Tensor:
    """A tensor of memory that others may have parts of, at its place in a storage, if so much memory is before it."""
    before = tensor.storage_offset() - at
    if before <= 0:
        return tensor
    storage = tensor.untyped_storage()[before * tensor.element_size() :]  # which holds all of the memory
    return tensor.new_empty(0).set_(storage, at, tensor.size(), tensor.stride())


def let_go(handles: Iterable[Saved | None]) -> None:
    """Have handles stop holding their tensors, whose copy out is over, and remember which were written to since. What the
    memory of was given up meanwhile they hold, and give out again: the copy may have read what came there next.
    """
    for handle in handles:
        if handle is not None:
            tensors = handle.tensors
            if tensors is not None and handle.cargo is not None and is_discarded(tensors[0]):
                continue
            handle.tensors = None
            if tensors is not None and not handle.entry.once and tensors[0].dim() >= _LOOKED_AT:
                handle.at = tensors[0].storage_offset()  # type: ignore[assignment]
            if tensors is not None and handle.version >= 0 and tensors[0]._version != handle.version:
                handle.version = _WRITTEN
