"""Which addresses have memory behind them: for as long as someone owns a byte of them.

In: zones of addresses, their owners coming and going, and marks of the device. Out: zones with memory and without. Keeps
true: a zone has memory while it has an owner, and afterwards until the device has passed a mark that was made later; what
waits for such marks stays within a bound, for which the host waits; memory that leaves one zone goes to the next. Zones
that only one replay at a time uses, and needs nothing of from one to the next, have the same memory, for good. Does not:
know what lies in a zone, or copy it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import torch

from te_offload.graphs.layers.virtual import VirtualMemory
from te_offload.offload.transfer import Mark

LARGEST = 64 << 20  # bytes of the largest piece of memory; smaller ones are halves of halves of it


class Zone:
    """Addresses that have memory together.

    Attributes:
        begin, nbytes: which. owners: how many. mapped: the memory behind them, as (memory, bytes).
        scratch: whether it shares its memory with others.
    """

    __slots__ = ("begin", "mapped", "nbytes", "owners", "scratch", "ticket")

    def __init__(self, begin: int, nbytes: int) -> None:
        self.begin = begin
        self.nbytes = nbytes
        self.owners = 0
        self.mapped: list[tuple[int, int]] = []
        self.scratch = False
        self.ticket = 0  # of its last place among those that wait

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.begin + self.nbytes


class Bank:
    """Memory of a device, and the zones that have it.

    Args:
        memory: the device.
        max_waiting: most bytes that wait only for the device to pass a mark; ``None``: as many as the largest `allow` said.
        make_room: asks others for memory when the device has no more.

    Attributes:
        held: bytes taken from the device. mapped: of them, behind addresses. most_held: the most there ever were.
        waits: how often the host has waited for the device.
    """

    def __init__(self, memory: VirtualMemory, max_waiting: int | None, make_room: Callable[[], None]) -> None:
        self.memory = memory
        self.max_waiting = max_waiting or 0
        self._adapts = max_waiting is None
        self.held = 0
        self.mapped = 0
        self.most_held = 0
        self.waits = 0
        self._make_room = make_room
        self._free: dict[int, list[int]] = {}
        self._free_bytes = 0
        self._dropped: collections.deque[Sequence[Zone]] = collections.deque()
        self._left: list[Zone] = []
        self._waiting: collections.deque[tuple[Mark, Zone, int]] = collections.deque()
        self._waiting_bytes = 0
        self._tickets = 0
        self._scratch: dict[int, list[int]] = {}
        self._scratch_zones = 0

    def allow(self, nbytes: int) -> None:
        """A layer gives up so many bytes at a time."""
        if self._adapts:
            self.max_waiting = max(self.max_waiting, nbytes)

    def share(self, zones: Sequence[Zone]) -> None:
        """Give zones of one graph the memory that those of other graphs have, for good; new memory only where it lacks."""
        left = {length: list(memories) for length, memories in self._scratch.items()}
        for zone in zones:
            pieces = []
            for length in self.pieces(zone.nbytes):
                if left.get(length):
                    memory = left[length].pop()
                else:
                    memory = self._take(length)
                    self._scratch.setdefault(length, []).append(memory)
                    self.mapped += length
                pieces.append((memory, length))
            self.memory.map(zone.begin, pieces)
            zone.mapped, zone.scratch = pieces, True
            self._scratch_zones += 1

    def pieces(self, nbytes: int) -> list[int]:
        """Lengths of the pieces of memory of a zone."""
        found = [LARGEST] * (nbytes // LARGEST)
        rest, piece = nbytes % LARGEST, LARGEST
        while rest:
            piece //= 2
            if rest >= piece:
                found.append(piece)
                rest -= piece
        return found

    def occupy(self, zones: Sequence[Zone]) -> None:
        """One more owner. What lies in a zone that had none is undefined.

        Raises:
            torch.OutOfMemoryError: the device has no more memory.
        """
        for zone in zones:
            zone.owners += 1
            if not zone.mapped:
                self._map(zone)

    def drop(self, zones: Sequence[Zone]) -> None:
        """One owner less: counted by the next `order`. May be called by any thread, at any time."""
        self._dropped.append(zones)

    def count(self) -> None:
        """Count the owners that have gone."""
        while self._dropped:
            for zone in self._dropped.popleft():
                zone.owners -= 1
                if not zone.owners:
                    self._left.append(zone)

    def order(self, mark: Callable[[], Mark]) -> None:
        """What was dropped so far is used by nothing that is queued from now on.

        Args:
            mark: makes a mark of the device, now.
        """
        self.count()
        left, self._left = self._left, []
        if left:
            now = mark()
            for zone in left:
                if not zone.owners and zone.mapped:
                    self._tickets += 1
                    zone.ticket = self._tickets
                    self._waiting.append((now, zone, zone.ticket))
                    self._waiting_bytes += zone.nbytes
        self._reap()
        while self._waiting_bytes > self.max_waiting:
            self._wait()

    def settle(self) -> None:
        """Take the memory from all that nobody owns; the host waits for the device."""
        while self._waiting:
            self._wait()

    def take_back(self, zone: Zone) -> None:
        """Take the memory from a zone that nobody owns, and that the device does not use, now."""
        self.memory.unmap(zone.begin, zone.nbytes)
        pieces, zone.mapped = zone.mapped, []
        if zone.scratch:
            self._scratch_zones -= 1
            if not self._scratch_zones:
                for length, memories in self._scratch.items():
                    self.mapped -= length * len(memories)
                    for memory in memories:
                        self._give(memory, length)
                self._scratch = {}
            return
        zone.ticket = 0
        self.mapped -= zone.nbytes
        for memory, length in pieces:
            self._give(memory, length)

    def close(self) -> None:
        """Give back all memory that nobody owns."""
        self.settle()
        self._release(self._free_bytes)

    def _map(self, zone: Zone) -> None:
        pieces: list[tuple[int, int]] = []
        try:
            for length in self.pieces(zone.nbytes):
                pieces.append((self._take(length), length))
        except BaseException:
            zone.owners -= 1
            for memory, length in pieces:
                self._give(memory, length)
            raise
        self.memory.map(zone.begin, pieces)
        zone.mapped = pieces
        self.mapped += zone.nbytes

    def _take(self, length: int) -> int:
        if not self._free.get(length):
            self._reap()
        free = self._free.get(length)
        if free:
            self._free_bytes -= length
            return free.pop()
        self._release(length)  # of pieces that do not fit
        memory = self.memory.create(length)
        while memory is None and self._waiting:
            self._wait()
            if self._free.get(length):
                return self._take(length)
            self._release(length)
            memory = self.memory.create(length)
        if memory is None:
            self._make_room()
            memory = self.memory.create(length)
        if memory is None:
            raise torch.OutOfMemoryError(
                f"No {length} bytes of GPU memory are left for the layers' graphs, which hold {self.held} bytes. "
                "Offload more, or capture fewer layers."
            )
        self.held += length
        self.most_held = max(self.most_held, self.held)
        return memory

    def _give(self, memory: int, length: int) -> None:
        self._free.setdefault(length, []).append(memory)
        self._free_bytes += length

    def _release(self, nbytes: int) -> None:
        """Give free pieces back, the largest first, until so many bytes are."""
        for length in sorted(self._free, reverse=True):
            pieces = self._free[length]
            while pieces and nbytes > 0:
                self.memory.release(pieces.pop())
                self._free_bytes -= length
                self.held -= length
                nbytes -= length

    def _reap(self) -> None:
        """Take the memory from what the device has passed."""
        while self._waiting and (not self._valid(self._waiting[0]) or self._waiting[0][0].is_over()):
            self._pop()

    def _wait(self) -> None:
        if self._valid(self._waiting[0]) and not self._waiting[0][0].is_over():
            self.waits += 1
            self._waiting[0][0].wait()
        self._pop()

    @staticmethod
    def _valid(entry: tuple[Mark, Zone, int]) -> bool:
        """Whether nobody has owned the zone since."""
        _, zone, ticket = entry
        return zone.ticket == ticket and not zone.owners

    def _pop(self) -> None:
        entry = self._waiting.popleft()
        zone = entry[1]
        self._waiting_bytes -= zone.nbytes
        if self._valid(entry):
            self.take_back(zone)
