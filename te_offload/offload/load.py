"""One slot while it is decided on, or several small ones that go together: its memory, and how it gets on a cargo.

In: a slot with its live handles. Out: runs of its memory, the cargo for them, and on each handle where its bytes are then.
Keeps true: each byte of memory is in one run; handles whose tensors have no elements hold no memory for it. Does not:
choose (decide.py does), take host memory, or copy.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from te_offload.offload.allocator import joins_storages
from te_offload.offload.cargo import Cargo, Lot
from te_offload.offload.extents import (
    ALIGNMENT,
    Apart,
    Run,
    Runs,
    Scattered,
    Strip,
    apart,
    find_runs,
    lone,
    lone_runs,
    storage_key,
    strips_of,
    usual_strides,
)
from te_offload.offload.plain import has_storage
from te_offload.offload.saved import Part, Saved, SlotEntry, let_go
from te_offload.offload.spots import Spot, runs_of, spots_of
from te_offload.slots import Fate, Reason

if TYPE_CHECKING:
    from te_offload.offload.transfer import Mark

_FEW = 16  # tensors; more are cut from few pieces of memory when they come back
_LONE = 8  # slots of one tensor each that go together; of more, those of one lot are cut at once when back
_TENSORS, _DTYPE, _NBYTES, _SHAPE = map(attrgetter, ("tensors", "dtype", "nbytes", "shape"))


class Load:
    """One slot while it is decided on; then what of it goes.

    Attributes:
        entry: the slot. others: small slots that go with it. last: the slot that was saved last of those with bytes in it.
        handles: its live handles; of a slot that goes, those whose bytes go with it, also from other slots.
        tensors: of the handles, one handle's behind the other's; dense ones if the slot may go.
        strips: of the tensors, runs: of all strips, where they were needed.
        nbytes: that its tensors read. contiguous: it is one contiguous tensor.
        apart: the tensors, if they are that; spots: the same; then there are no strips.
        order: numbers of the tensors by address, if the runs are of such tensors, whether of one slot or of several that go
            together.
        bases: for each strip what to add to its members to get numbers of tensors.
        cargo: carries the bytes, if the slot goes and has any of its own.
        ready: the mark after which it may be copied, where those of its slots are not enough.
    """

    __slots__ = (
        "_storages",
        "apart",
        "bases",
        "cargo",
        "contiguous",
        "entry",
        "handles",
        "last",
        "nbytes",
        "order",
        "others",
        "ready",
        "runs",
        "spots",
        "strips",
        "tensors",
    )

    def __init__(self, entry: SlotEntry, handles: list[Saved]) -> None:
        self.entry = self.last = entry
        self.handles = handles
        if len(handles) == 1:
            self.tensors = handles[0].held
        else:
            self.tensors = list(chain.from_iterable(map(_TENSORS, handles)))
        self.strips: list[Strip] = []
        self.bases: list[int] = []
        self.runs: Runs | None = None
        self.apart: Apart | None = None
        self.spots: list[Spot] | None = None
        self.order: Sequence[int] | None = None
        self.nbytes = 0
        self.contiguous = False
        self.cargo: Cargo | None = None
        self.ready: Mark | None = None
        self.others: Sequence[Load] = ()
        self._storages: frozenset[int] | None = None

    @property
    def storages(self) -> frozenset[int]:
        """Identities of the storages of its tensors, where they have one."""
        if self._storages is None:
            if len(self.strips) == 1:
                self._storages = self.strips[0].storages
            elif self.contiguous:
                self._storages = frozenset((storage_key(self.tensors[0]),))
            elif self.spots is not None:
                self._storages = frozenset([spot.storage for spot in self.spots])
            elif self.apart is not None:
                self._storages = frozenset(self.apart.keys)
            elif self.strips:
                self._storages = frozenset().union(*[strip.storages for strip in self.strips])
            else:
                self._storages = frozenset([storage_key(tensor) for tensor in self.tensors if has_storage(tensor)])
        return self._storages

    def measure(self, device: torch.device) -> Runs:
        """Find the runs of its tensors, which are dense, and their strips, unless it has spots or they are `Apart`."""
        if self.runs is None:
            if self.spots is not None:
                self.runs = runs_of(self.spots, across_storages=joins_storages(device.type))
            elif self.contiguous or (len(self.tensors) == 1 and self.tensors[0].is_contiguous()):
                strip, self.runs = lone(self.tensors[0])
                self.strips, self.bases = [strip], [0]
            else:
                across = joins_storages(device.type)
                ends = self.tensors[:2], self.tensors[-2:]
                if len(self.tensors) > 1 and False in [_touch(*pair) for pair in ends]:  # else most do, one may say
                    begins = list(map(torch.Tensor.data_ptr, self.tensors))
                    self.apart = None if any(map(ALIGNMENT.__rmod__, begins)) else apart(self.tensors, begins)
                if self.apart is None:
                    return self.find_strips(across)
                begins, lengths, _ = self.apart
                self.runs, self.order = lone_runs(begins, lengths, across_storages=across)
        return self.runs

    def few_spots(self) -> list[Spot] | None:
        """The spots of its tensors, which are dense, if they are few, and have elements and a handle each."""
        return spots_of(self.tensors) if len(self.handles) == len(self.tensors) <= _FEW else None

    def find_strips(self, across_storages: bool) -> Runs:
        """Find strips and runs of its tensors, which are dense, in any case."""
        self.apart = self.order = self.spots = None
        self.strips = strips_of(self.tensors, across_storages=across_storages)
        self.bases = [0] * len(self.strips)
        self.runs = find_runs(self.strips, across_storages=across_storages)
        return self.runs

    def make_cargo(self, device: torch.device) -> None:
        """The cargo of its handles."""
        entry, others = self.entry, self.others
        if self.contiguous and self.runs is None:
            begin, nbytes = self.tensors[0].data_ptr(), self.nbytes
            if nbytes and not begin % ALIGNMENT:  # as most are on a GPU: it is its own and only run
                entry.cargo = self.cargo = Cargo(entry.label, nbytes, (Run(begin, nbytes),))
                entry.bytes_out = nbytes
                return
        runs = self.runs or self.measure(device)
        entry.cargo = self.cargo = cargo = Cargo(entry.label, runs.covered, runs.runs, 1 + len(others))
        entry.bytes_out = cargo.copied
        for other in others:
            other.entry.cargo = cargo
            other.entry.bytes_out = other.nbytes
            entry.bytes_out -= other.nbytes

    def put_on(self) -> list[Saved]:
        """Let the handles go with the cargo; those that do. The others have no elements."""
        cargo, handles = self.cargo, self.handles
        assert cargo is not None
        if self.runs is None:
            handles[0].go_alone(cargo, cargo.lots[0], 0)
            return handles
        if self.spots is not None:
            self._put_spots(cargo, self.spots)
            return handles
        if self.order is not None:
            self._put_apart(cargo, self.order)
            return handles
        if len(handles) == 1 and len(self.strips) == 1 and cargo.copied:
            place = self.runs.places[0]
            assert place is not None
            lot, begin = cargo.places[0]
            handles[0].go_as_one(cargo, Part(self.strips[0], lot, begin + place[1]))
            return handles
        parts = []
        for strip, place in zip(self.strips, self.runs.places, strict=True):
            if place is None:
                parts.append(Part(strip, None, 0))
            else:
                lot, begin = cargo.places[place[0]]
                parts.append(Part(strip, lot, begin + place[1]))
        if len(handles) == 1:
            if handles[0].go_with(cargo, parts):
                return handles
            let_go(handles)
            return []
        if len(handles) == len(self.tensors):  # one each, as autograd's hooks save them
            alone = len(self.runs.runs) == len(parts)
            for part, base in zip(parts, self.bases, strict=True):
                part.share(cargo, handles, base, alone=alone)
            return self._that_go()
        ends = list(accumulate([len(handle.held) for handle in handles]))
        for part, base in zip(parts, self.bases, strict=True):
            members = part.strip.members
            owner = bisect.bisect_right(ends, base)  # with which a handle begins
            if base + max(members) < ends[owner]:
                handles[owner].add_part(cargo, part, None, 0)
                continue
            for position, member in enumerate(members):
                number = base + member
                owner = bisect.bisect_right(ends, number)
                first = ends[owner - 1] if owner else 0
                handles[owner].add_part(cargo, part, position, number - first)
        return self._that_go()

    def _put_spots(self, cargo: Cargo, spots: Sequence[Spot]) -> None:
        """The same for spots: each handle knows where its tensor is."""
        assert self.runs is not None
        at = cargo.places
        for handle, spot, place in zip(self.handles, spots, self.runs.places, strict=True):
            run, distance = place  # type: ignore[misc]
            lot, begin = at[run]
            handle.go_to(cargo, lot, (spot.size, spot.stride, spot.dtype, begin + distance))

    def _put_apart(self, cargo: Cargo, order: Sequence[int]) -> None:
        """The same for tensors that are `Apart`: those of one lot and dtype, of one handle or one a handle, are cut at once
        when back.
        """
        assert self.runs is not None
        handles, tensors, places, at = self.handles, self.tensors, self.runs.places, cargo.places
        one_each = len(handles) == len(tensors)
        if one_each and len(handles) <= _LONE:
            for handle, (run, distance) in zip(handles, places, strict=True):  # type: ignore[misc]
                lot, begin = at[run]
                handle.go_alone(cargo, lot, begin + distance)
            return
        counts = [1] if one_each else [len(handle.held) for handle in handles]
        owners = [number for number, count in enumerate(counts) for _ in range(count)]
        bases = list(accumulate(counts, initial=0))
        found: dict[tuple[Lot, torch.dtype, int], list[int]] = {}
        if len(cargo.lots) == len(counts) == 1 and len(dtypes := set(map(_DTYPE, tensors))) == 1:
            found[cargo.lots[0], dtypes.pop(), 0] = list(order)
        else:
            for number in order:
                run, _ = places[number]  # type: ignore[misc]
                owner = 0 if one_each else owners[number]
                found.setdefault((at[run][0], tensors[number].dtype, owner), []).append(number)
        for (lot, dtype, owner), members in found.items():
            begins = [at[run][1] + distance for run, distance in map(places.__getitem__, members)]  # type: ignore[misc]
            if one_each and len(members) == 1:
                handles[members[0]].go_alone(cargo, lot, begins[0])
                continue
            those = [tensors[member] for member in members]
            lengths = list(map(_NBYTES, those))
            base = bases[owner]
            numbers = [member - base for member in members] if base else members
            strip = Scattered(begins[0], numbers, begins, lengths, list(map(_SHAPE, those)), dtype)
            if one_each:
                Part(strip, lot, begins[0]).share(cargo, handles, 0, alone=False)
                continue
            if lot.nbytes == lengths[0]:  # one tensor is all of it
                lot.shape = tuple(those[0].shape), those[0].stride(), dtype
            handles[owner].add_part(cargo, Part(strip, lot, begins[0]), None, 0)

    def stay(self, reason: Reason) -> None:
        """It does not go after all, and holds no host memory."""
        cargo = self.cargo
        if cargo is not None:
            cargo.watch, cargo.users = None, ()
            if cargo.lease is not None:
                cargo.lease.release()
                cargo.lease = None
        for handle in self.handles:
            handle.cargo = None
        for load in (self, *self.others):
            load.entry.cargo, load.entry.bytes_out = None, 0
        others = [load.entry for load in self.others]
        for entry in {self.entry, *others, *[handle.entry for handle in self.handles]}:
            if all(handle.cargo is None for handle in entry.live_handles()):  # no bytes of it went with another slot
                entry.fate, entry.reason = Fate.KEPT, reason

    def _that_go(self) -> list[Saved]:
        """The handles that are on a cargo."""
        handles = self.handles
        assert self.runs is not None
        if None not in self.runs.places:
            return handles
        let_go([handle for handle in handles if handle.cargo is None])  # they would hold a storage for nothing
        return [handle for handle in handles if handle.cargo is not None]


def _touch(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one tensor begins where another one ends."""
    return one.data_ptr() + one.nbytes == other.data_ptr()


def as_one(loads: list[Load], device: torch.device) -> Load:
    """Slots that share no memory, as the first of them."""
    if len(loads) == 1:
        return loads[0]
    first = Load(loads[0].entry, [handle for load in loads for handle in load.handles])
    first.others, first.last = loads[1:], loads[-1].last
    if False in [load.last is load.entry for load in loads]:  # with an earlier one go bytes of a later one
        first.last = max([load.last for load in loads], key=first.entry.visit.entries.index)
    across = joins_storages(device.type)
    alone = [load.tensors[0] for load in loads if load.contiguous]
    few = len(first.tensors) == len(first.handles) <= _LONE
    usual = few or False not in usual_strides(alone, list(map(_SHAPE, alone)))
    if usual and False not in [load.contiguous or load.apart is not None for load in loads]:
        begins, lengths = _begins_and_lengths(loads)
        if 0 not in lengths and not any(map(ALIGNMENT.__rmod__, begins)):
            first.runs, first.order = lone_runs(begins, lengths, across_storages=across)
            return first
    spots = [load.spots or load.few_spots() for load in loads]
    if None not in spots:
        first.spots = [*chain.from_iterable(spots)]  # type: ignore[arg-type]
        first.runs = runs_of(first.spots, across_storages=across)
        return first
    base = covered = 0
    runs: list[Run] = []
    places: list[tuple[int, int] | None] = []
    for load in loads:
        found = load.measure(device)
        if load.apart is not None or load.spots is not None:
            found = load.find_strips(across)
        first.strips += load.strips
        first.bases += [base] * len(load.strips)
        base += len(load.tensors)
        count = len(runs)
        places += [place if place is None else (place[0] + count, place[1]) for place in found.places]
        runs += found.runs
        covered += found.covered
    first.runs = Runs(tuple(runs), tuple(places), covered)
    return first


def _begins_and_lengths(loads: list[Load]) -> tuple[list[int], list[int]]:
    """Of the tensors of slots that are one contiguous tensor, or `Apart`."""
    begins: list[int] = []
    lengths: list[int] = []
    for load in loads:
        if load.apart is not None:
            begins += load.apart.begins
            lengths += load.apart.lengths
        else:
            begins.append(load.tensors[0].data_ptr())
            lengths.append(load.nbytes)
    return begins, lengths
