"""Tensors at given addresses, which have memory while such a tensor lives.

In: segments of addresses, and what lies where in them. Out: storages; a place for what an offload session brings back.
Keeps true: no address that a living storage covers loses its memory, whoever holds the storage and whatever is closed.
Does not: decide what lies where (torch's allocator does, while a graph is captured).
"""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from te_offload.graphs.layers.bank import Bank, Zone


class Extent(NamedTuple):
    """Bytes of one allocation: the first address, and how many."""

    begin: int
    nbytes: int


class _Place:
    """Held by a storage over given addresses, and gone with it; so is ``keeps``."""

    def __init__(self, address: int, nbytes: int, keeps: object = None) -> None:
        self.keeps = keeps
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Space:
    """Segments of addresses of one device, cut into zones.

    Args:
        device: which. bank: gives zones memory.
    """

    def __init__(self, device: torch.device, bank: Bank) -> None:
        self.device = device
        self.bank = bank
        self._begins: list[int] = []  # of the zones, in order
        self._zones: list[Zone] = []
        self._segments: dict[int, int] = {}

    def add_segment(self, nbytes: int) -> int:
        """New addresses, one zone; the first one. ``nbytes`` is rounded up to the granule."""
        granule = self.bank.memory.granule
        nbytes = -(-nbytes // granule) * granule
        begin = self.bank.memory.reserve(nbytes)
        self._segments[begin] = nbytes
        self._insert([Zone(begin, nbytes)])
        return begin

    def cut(self, segment: int, ranges: Iterable[tuple[int, int]]) -> tuple[list[Zone], list[Zone]]:
        """Cut a segment, which nobody owns and which has no memory, into zones: those of some ranges, and those of none.

        Args:
            segment: its first address. ranges: of addresses (begin, bytes) that live together. Granules of the same ranges
                are one zone; so is what is in none.
        """
        granule, nbytes = self.bank.memory.granule, self._segments[segment]
        owners: list[list[int]] = [[] for _ in range(nbytes // granule)]
        for number, (begin, length) in enumerate(ranges):
            if length and segment <= begin < segment + nbytes:
                last = (begin + length - 1 - segment) // granule
                for one in range((begin - segment) // granule, last + 1):
                    owners[one].append(number)
        self._remove(segment)
        zones: list[Zone] = []
        for number, who in enumerate(owners):
            if zones and who == owners[number - 1]:
                zones[-1].nbytes += granule
            else:
                zones.append(Zone(segment + number * granule, granule))
        self._insert(zones)
        used = {zone.begin for zone in zones if owners[(zone.begin - segment) // granule]}
        return [zone for zone in zones if zone.begin in used], [zone for zone in zones if zone.begin not in used]

    def edges(self, extents: Iterable[Extent]) -> list[Extent]:
        """The granules in which some addresses begin and end, where others lie there too, each once."""
        granule = self.bank.memory.granule
        places = [place for begin, nbytes in extents for place in (begin, begin + nbytes) if place % granule]
        return [Extent(place, granule) for place in sorted({place // granule * granule for place in places})]

    def drop_segment(self, segment: int) -> None:
        """Give addresses back, which nobody owns and which have no memory."""
        self._remove(segment)
        self.bank.memory.free(segment, self._segments.pop(segment))

    def zones(self, begin: int, nbytes: int) -> list[Zone]:
        """Those that some addresses lie in."""
        first = bisect.bisect_right(self._begins, begin) - 1
        last = bisect.bisect_left(self._begins, begin + nbytes)
        return [zone for zone in self._zones[max(first, 0) : last] if zone.end > begin]

    def zones_of(self, segment: int) -> list[Zone]:
        """Those of a segment."""
        return self.zones(segment, self._segments[segment])

    def are_owned(self, zones: Iterable[Zone]) -> bool:
        """Whether one of some zones has an owner."""
        self.bank.count()
        return any(zone.owners for zone in zones)

    def mirror(self, begin: int, tensor: torch.Tensor) -> Zone | None:
        """Have a tensor readable at other addresses, without a copy, if it begins a zone of the length of the one there.

        Args:
            begin: of the other addresses, which are one zone that nobody owns.

        Returns:
            that zone, whose `left` is to be set once nothing reads there; ``None`` if it cannot be.
        """
        if not self.bank.memory.mirrors:
            return None
        (zone,) = self.zones(begin, 1)
        found = self.zones(tensor.data_ptr(), tensor.nbytes) if tensor.is_contiguous() else []
        if len(found) != 1 or zone.owners or found[0] is zone:
            return None
        source = found[0]
        if source.begin != tensor.data_ptr() or source.nbytes != zone.nbytes or not source.has_memory:
            return None
        self.bank.mirror(zone, source)
        return zone

    def storage(self, begin: int, nbytes: int, zones: Sequence[Zone] | None = None) -> torch.UntypedStorage:
        """Addresses as a storage; they have memory until it is gone. What lies there is undefined if nobody owned them.

        Args:
            begin, nbytes: which. zones: theirs, if known.
        """
        if zones is None:
            zones = self.zones(begin, nbytes)
        self.bank.occupy(zones)
        place = _Place(begin, nbytes)
        weakref.finalize(place, self.bank.drop, zones).atexit = False  # type: ignore[misc]
        return _storage_at(place, self.device)

    # A place for what comes back: see `offload.mover.Home` ----------------------------------------------------------

    def place_of(self, begin: int, nbytes: int) -> Callable[[], torch.Tensor | None] | None:
        """See `offload.mover.Home.place_of`. Addresses whose segment has gone since are others', also when another segment
        has them again.
        """
        zones = self.zones(begin, nbytes)
        if not zones or zones[0].begin > begin or zones[-1].end < begin + nbytes:
            return None
        return lambda: self.bytes_at(begin, nbytes) if self.zones(begin, nbytes) == zones else None

    def bytes_at(self, begin: int, nbytes: int) -> torch.Tensor:
        """Some addresses as a tensor of bytes."""
        return tensor_of(self.storage(begin, nbytes), torch.uint8, (nbytes,), (1,), 0)

    def _insert(self, zones: Sequence[Zone]) -> None:
        at = bisect.bisect_left(self._begins, zones[0].begin)
        self._zones[at:at] = zones
        self._begins[at:at] = [zone.begin for zone in zones]

    def _remove(self, segment: int) -> None:
        first = bisect.bisect_left(self._begins, segment)
        last = bisect.bisect_left(self._begins, segment + self._segments[segment])
        del self._zones[first:last], self._begins[first:last]


def storage_over(begin: int, nbytes: int, device: torch.device, keeps: object) -> torch.UntypedStorage:
    """Addresses as a storage that does not own them. ``keeps``: an object that lives as long as it."""
    return _storage_at(_Place(begin, nbytes, keeps), device)


def _storage_at(place: _Place, device: torch.device) -> torch.UntypedStorage:
    interface: dict[str, Any] = place.__cuda_array_interface__
    if device.type == "cuda":
        return torch.as_tensor(place, device=device).untyped_storage()
    buffer = (ctypes.c_char * interface["shape"][0]).from_address(interface["data"][0])
    buffer.place = place
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def tensor_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor in a storage that is no view of another one. ``offset``: in bytes."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, tuple(size), tuple(stride))
