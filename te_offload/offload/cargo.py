"""What one slot of a forward, or several small ones together, send to the host: runs, host memory, where the bytes are.

In: the tensors of a slot. Out: their bytes on either side, and the moments of their copies. Keeps true: the state changes
only along `states.TRANSITIONS`; while a copy out reads the tensors, the cargo holds them. Does not: copy (mover.py does).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any

import torch

from te_offload.offload.extents import ALIGNMENT, Run, Scattered, Strip, aligned
from te_offload.offload.states import ON_HOST, SAVED, SlotState, change
from te_offload.slots import SlotName, slot_title

if TYPE_CHECKING:
    from te_offload.offload.host_pool import Lease
    from te_offload.offload.saved import Saved
    from te_offload.offload.transfer import Copy, Mark, Piece

_WIDEST = 16  # bytes of the widest dtype
Label = tuple[str, str, SlotName, int | None]  # layer, op, slot, number of one that nobody named
OWN_LOT = 1 << 20  # bytes; a run of this length or more is given back to the allocator by itself


def name_of(label: Label) -> str:
    """The name of a slot: `te_offload.slots.slot_title`, with a number where nobody named it."""
    layer, op, slot, ordinal = label
    title = slot_title(layer, op, slot)
    return title if ordinal is None else f"{title}[{ordinal}]"


class Lot:
    """Some runs that share one allocation when they are back on the device.

    Attributes:
        nbytes: length of the allocation. memory: the allocation while the cargo holds it.
        shape: size, stride and dtype of the allocation, where one tensor is all of it; ``None``: bytes.
        untaken: parts in it with tensors that were not handed over.
        home: gives the memory where the bytes were before, if they come back to there and still can; see `mover.Home`.
    """

    __slots__ = ("_typed", "home", "memory", "nbytes", "shape", "untaken")

    def __init__(self) -> None:
        self.home: Callable[[], torch.Tensor | None] | None = None
        self.nbytes = 0
        self.memory: torch.Tensor | None = None
        self.shape: tuple[Sequence[int], Sequence[int], torch.dtype] | None = None
        self.untaken = 0
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def allocate(self, device: torch.device) -> None:
        """Take device memory."""
        if self.home is not None:
            memory = self.home()
            if memory is not None:
                if self.shape is not None:
                    size, stride, dtype = self.shape
                    memory = memory.view(dtype).as_strided(size, stride)
                self.memory = memory
                return
        if self.shape is None:
            length = -(-self.nbytes // _WIDEST) * _WIDEST
            self.memory = torch.empty(length, dtype=torch.uint8, device=device)
        else:
            size, stride, dtype = self.shape
            self.memory = torch.empty_strided(size, stride, dtype=dtype, device=device)

    def tensors(self, strip: Strip | Scattered, offset: int) -> Sequence[torch.Tensor]:
        """The tensors of a strip that begins at a byte of the allocation, in the strip's order."""
        if self.shape is not None:
            return strip.cut(self.whole())
        return strip.views(self._as(strip.dtype), offset)

    def whole(self) -> torch.Tensor:
        """The one tensor that is all of it."""
        assert self.memory is not None and self.shape is not None
        return self.memory

    def part(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
        """A tensor that begins at a byte of the allocation."""
        return self._as(dtype).as_strided(size, stride, offset // dtype.itemsize)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """The allocation as numbers."""
        whole = self._typed.get(dtype)
        if whole is None:
            memory = self.memory
            assert memory is not None
            beside = memory.numel() % dtype.itemsize  # bytes of another dtype at the end of a home
            whole = self._typed[dtype] = (memory[:-beside] if beside else memory).view(dtype)
        return whole

    def hand_over(self, cargo: Cargo) -> None:
        """A part with all of its tensors was given out: after the last one only those hold the memory."""
        self.untaken -= 1
        if self.untaken == 0:
            self.let_go()
        cargo.hand_over()

    def let_go(self) -> None:
        """Hold the allocation no more."""
        self.memory = None
        if self._typed:
            self._typed = {}


class Hold:
    """Held by every handle whose bytes are a cargo's; when it dies, no one can ask for them any more."""

    __slots__ = ("__weakref__",)


class Cargo:
    """The bytes of one slot of one forward, or of several small ones.

    Args:
        label: the slot's, for messages. nbytes: bytes that its tensors read. runs: what is copied. slots: their number.

    Attributes:
        copied: bytes of the runs. places: lot and offset of each run's first byte.
        users: weak references to the handles. untaken: parts, or whole lots, with tensors that were not handed over.
        sources: the saved tensors while the copy out may read them.
        ready: the mark after which the bytes are there to be copied.
        asked: the backward asked for the bytes after they had left.
        left: the copy out was seen to be over.
        recalled: the backward read the bytes before they had left the device.
        over_at: the number of the work of its step with whose begin the copy out is over, as far as one can tell.
        needed: the moment at which the backward needed them, before it waited, if that is timed.
    """

    left = False
    asked = False
    recalled = False
    counted = False
    untaken = 0
    over_at = math.inf
    sources: Sequence[torch.Tensor] | None = None
    ready: Mark | None = None
    needed: Mark | None = None
    lease: Lease | None = None
    out: Copy | None = None
    back: Copy | None = None
    watch: weakref.ref[Any] | None = None
    users: Sequence[weakref.ref[Saved]] = ()

    def __init__(self, label: Label, nbytes: int, runs: tuple[Run, ...], slots: int = 1) -> None:
        self._label = label
        self.nbytes = nbytes
        self.runs = runs
        self.slots = slots
        self.state = SAVED
        self.lots: list[Lot] = []
        self.places: list[tuple[Lot, int]] = []
        self.copied = 0
        if runs:
            self._assign_lots()

    def _assign_lots(self) -> None:
        if len(self.runs) == 1:
            address, self.copied = self.runs[0]
            lot, lead = Lot(), address % ALIGNMENT
            lot.nbytes = lead + self.copied
            self.lots, self.places = [lot], [(lot, lead)]
            return
        addresses, lengths = zip(*self.runs, strict=True)
        self.copied = sum(lengths)
        if max(lengths) < OWN_LOT and not any(
            map(ALIGNMENT.__rmod__, addresses)
        ):  # many small ones, as most are on a GPU
            lot = Lot()
            begins = list(accumulate(map(aligned, lengths[:-1]), initial=0))
            lot.nbytes = begins[-1] + lengths[-1]
            self.lots, self.places = [lot], list(zip(repeat(lot), begins))
            return
        shared: Lot | None = None
        for address, nbytes in self.runs:
            if nbytes >= OWN_LOT:
                lot = Lot()
                self.lots.append(lot)
            elif shared is None:
                lot = shared = Lot()
                self.lots.append(lot)
            else:
                lot = shared
            begin = aligned(lot.nbytes) + address % ALIGNMENT
            lot.nbytes = begin + nbytes
            self.places.append((lot, begin))

    @property
    def name(self) -> str:
        """The slot's, for messages; of several the first one's."""
        return name_of(self._label) if self.slots == 1 else f"{name_of(self._label)} and {self.slots - 1} more"

    def move(self, to: SlotState) -> None:
        """Change the state.

        Raises:
            StateError: there is no such edge.
        """
        if to not in self.state.following:
            change(self, self.state, to)
        self.state = to

    def hand_over(self) -> None:
        """All tensors of a part, or of a whole lot, were given out: after the last ones it can be brought back again."""
        self.untaken -= 1
        if self.untaken == 0:
            self.move(ON_HOST)

    def leave_again(self) -> None:
        """Some lots with all of their tensors were given out, and one of those is asked for again: bring all back again."""
        for lot in self.lots:
            lot.let_go()
        self.move(ON_HOST)

    def __str__(self) -> str:
        return f"{self.name}, {self.nbytes} bytes,"

    def pieces_out(self) -> list[Piece]:
        """What is copied to the host: the runs, cut where the lease is."""
        assert self.lease is not None
        return cut(self.runs, self.lease.pieces)

    def pieces_back(self) -> list[Piece]:
        """What is copied back, into the lots' memory."""
        assert self.lease is not None
        if len(self.runs) == 1 and len(self.lease.pieces) == 1:
            lot, begin = self.places[0]
            assert lot.memory is not None
            return [(self.lease.pieces[0][0], lot.memory.data_ptr() + begin, self.copied)]
        bases: dict[Lot, int] = {}
        for lot in self.lots:
            assert lot.memory is not None
            bases[lot] = lot.memory.data_ptr()
        targets = [bases[lot] + begin for lot, begin in self.places]
        lengths = [nbytes for _, nbytes in self.runs]
        if len(self.lease.pieces) == 1:
            return list(zip(accumulate(lengths[:-1], initial=self.lease.pieces[0][0]), targets, lengths, strict=True))
        ranges = list(zip(targets, lengths, strict=True))
        return [(host, device, nbytes) for device, host, nbytes in cut(ranges, self.lease.pieces)]


def cut(ranges: Sequence[tuple[int, int]], others: tuple[tuple[int, int], ...]) -> list[Piece]:
    """Ranges (address, bytes) laid one behind the other into other ranges, as pieces that cross no border of either."""
    if len(others) == 1:
        if len(ranges) == 1:
            return [(ranges[0][0], others[0][0], ranges[0][1])]
        begins, lengths = zip(*ranges, strict=True)
        return list(zip(begins, accumulate(lengths[:-1], initial=others[0][0]), lengths, strict=True))
    pieces = []
    rest = iter(others)
    address, room = next(rest)
    for begin, nbytes in ranges:
        while nbytes:
            if not room:
                address, room = next(rest)
            part = min(nbytes, room)
            pieces.append((begin, address, part))
            begin, address = begin + part, address + part
            nbytes, room = nbytes - part, room - part
    return pieces
