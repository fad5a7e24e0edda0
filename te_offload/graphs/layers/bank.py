"""Which addresses have memory behind them: for as long as someone owns a byte of them.

In: zones of addresses, and their owners coming and going. Out: zones with memory. Keeps true: a zone's memory is its own
while it has an owner; what is queued after `order` may use the memory of what was dropped before it, as with any allocator
whose order is that of a stream; addresses lose their memory only once the device has passed their last use. Does not: know
what lies in a zone, or copy it.

Memory that a zone gave up is taken by the next one at once: it is then behind both zones' addresses, of which only the next
one's are used. The older mapping goes when its zone needs memory again and its own was taken. So the host does not wait
for the device, unless a zone comes back that soon. And after a few rounds nearly every zone finds its own memory free when
it comes again, so that next to nothing is mapped, which costs the host more than launching a graph.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

import torch

from te_offload.errors import StateError
from te_offload.graphs.layers.virtual import VirtualMemory
from te_offload.offload.transfer import Mark

LARGEST = 64 << 20  # bytes of the largest piece of memory; smaller ones are halves of halves of it
SLACK = 32 << 20  # bytes that may lie idle, in pieces of other lengths, lest they go back and are asked for again


class Piece:
    """Memory that is given out as a whole.

    Attributes:
        memory, length: which, and its bytes. user: the zone whose it is; ``None``: free.
        zones: behind whose addresses it is.
    """

    __slots__ = ("length", "memory", "user", "zones")

    def __init__(self, memory: int, length: int) -> None:
        self.memory = memory
        self.length = length
        self.user: Zone | None = None
        self.zones: list[Zone] = []


class Zone:
    """Addresses that have memory together.

    Attributes:
        begin, nbytes: which. owners: how many. pieces: the memory behind them, which may be another zone's by now.
        left: the mark after which nothing uses the addresses, once nobody owns them.
    """

    __slots__ = ("begin", "left", "nbytes", "owners", "pieces")

    def __init__(self, begin: int, nbytes: int) -> None:
        self.begin = begin
        self.nbytes = nbytes
        self.owners = 0
        self.pieces: list[Piece] = []
        self.left: Mark | None = None

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.begin + self.nbytes

    @property
    def has_memory(self) -> bool:
        """Whether the memory behind the addresses is the zone's."""
        return bool(self.pieces) and all(piece.user is self for piece in self.pieces)


class Bank:
    """Memory of a device, and the zones that have it.

    Args:
        memory: the device. make_room: asks others for memory when the device has no more.

    Attributes:
        held: bytes taken from the device. used: of them, by zones with owners, and for scratch. most_held: the most ever.
        maps: how often memory was put behind addresses. waits: how often the host has waited for the device.
    """

    def __init__(self, memory: VirtualMemory, make_room: Callable[[], None]) -> None:
        self.memory = memory
        self.held = 0
        self.used = 0
        self.most_held = 0
        self.maps = 0
        self.waits = 0
        self._unlike = 0  # bytes taken though others were free, in pieces of other lengths
        self._spare = 0  # bytes that nobody had, at the least, since `relax`
        self._make_room = make_room
        self._free: dict[int, dict[int, Piece]] = {}  # by length, then by memory, the one that is free longest first
        self._dropped: collections.deque[Sequence[Zone]] = collections.deque()
        self._left: list[Zone] = []
        self._graphs = Zone(0, 0)  # whose the scratch memory is
        self._scratch: list[Piece] = []
        self._scratch_zones: set[int] = set()

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

    # Owners ----------------------------------------------------------------------------------------------------------

    def occupy(self, zones: Sequence[Zone]) -> None:
        """One more owner. What lies in a zone that had none is undefined.

        Raises:
            torch.OutOfMemoryError: the device has no more memory.
            StateError: a zone is scratch memory of graphs, which no tensor may have.
        """
        for zone in zones:
            if not zone.has_memory:
                self._fill(zone)
            zone.owners += 1

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
        if not self._left:
            return
        left, self._left = self._left, []
        now = mark()
        for zone in left:
            if not zone.owners and zone.has_memory:
                zone.left = now
                self._give_up(zone)

    # Memory for good -------------------------------------------------------------------------------------------------

    def share(self, zones: Sequence[Zone]) -> None:
        """Give zones of one graph the memory that those of other graphs have, for good; new memory only where it lacks.

        Only one graph at a time uses such zones, and needs nothing of them from one replay to the next.
        """
        left: dict[int, list[Piece]] = {}
        for piece in self._scratch:
            left.setdefault(piece.length, []).append(piece)
        for zone in zones:
            pieces = []
            for length in self.pieces(zone.nbytes):
                if left.get(length):
                    piece = left[length].pop()
                else:
                    piece = self._take(length)
                    piece.user = self._graphs
                    self._scratch.append(piece)
                    self._count_used(length)
                pieces.append(piece)
            self._map(zone, pieces)
            self._scratch_zones.add(zone.begin)

    def mirror(self, zone: Zone, source: Zone) -> None:
        """Put the memory of another zone behind addresses that nobody owns, to be read there while the other one has it."""
        if zone.pieces != source.pieces:
            self._unmap(zone)
            self._map(zone, list(source.pieces))

    def take_back(self, zone: Zone) -> None:
        """Take the memory from a zone that nobody owns, and that the device does not use, now."""
        if not zone.pieces:
            return
        if zone.begin in self._scratch_zones:
            self._scratch_zones.discard(zone.begin)
            self._unmap(zone)
            if not self._scratch_zones:
                scratch, self._scratch = self._scratch, []
                for piece in scratch:
                    self.used -= piece.length
                    self._put(piece)
            return
        if zone.has_memory:
            self._give_up(zone)
        self._unmap(zone)

    def trim(self) -> None:
        """Give back all memory that nobody owns, once the device has passed its last use."""
        self._release(self.held)
        self._unlike = 0

    def relax(self) -> None:
        """Give back what nobody has had at any time since the last call, if it is more than the slack."""
        if self._spare > SLACK:
            self._release(self._spare, at_most=True)
        self._unlike = 0
        self._spare = self.held - self.used

    # Steps -----------------------------------------------------------------------------------------------------------

    def _fill(self, zone: Zone) -> None:
        if zone.begin in self._scratch_zones:
            raise StateError(
                f"{zone.nbytes} bytes at {zone.begin:#x} are scratch memory of layers' graphs, where no tensor may lie. "
                "This is an error of te_offload; please report it."
            )
        lengths = self.pieces(zone.nbytes)
        free = [piece if piece.user is None else None for piece in zone.pieces] or [None] * len(lengths)
        for piece in free:
            if piece is not None:  # nobody has had it since
                del self._free[piece.length][piece.memory]
                piece.user = zone
        lacks = [place for place, piece in enumerate(free) if piece is None]
        found: list[Piece] = []
        try:
            for place in lacks:
                found.append(self._take(lengths[place]))
        except BaseException:
            for piece in (*found, *filter(None, free)):
                self._put(piece)
            raise
        for piece in found:
            piece.user = zone
        if found:
            self._exchange(zone, lengths, dict(zip(lacks, found, strict=True)))
        self._count_used(zone.nbytes)

    def _exchange(self, zone: Zone, lengths: Sequence[int], found: Mapping[int, Piece]) -> None:
        """Put pieces behind addresses of a zone that nobody owns. ``found``: by their place among the zone's pieces."""
        if len(found) == len(lengths):
            self._unmap(zone)
            self._map(zone, list(found.values()))
            return
        self._wait_for(zone)
        for place, piece in found.items():
            begin = zone.begin + sum(lengths[:place])
            self.memory.unmap(begin, piece.length)
            self.memory.map(begin, [(piece.memory, piece.length)])
            self.maps += 1
            zone.pieces[place].zones.remove(zone)
            zone.pieces[place] = piece
            piece.zones.append(zone)

    def _count_used(self, nbytes: int) -> None:
        self.used += nbytes
        self._spare = min(self._spare, self.held - self.used)

    def _give_up(self, zone: Zone) -> None:
        self.used -= zone.nbytes
        for piece in zone.pieces:
            self._put(piece)

    def _map(self, zone: Zone, pieces: list[Piece]) -> None:
        self.memory.map(zone.begin, [(piece.memory, piece.length) for piece in pieces])
        self.maps += 1
        zone.pieces = pieces
        for piece in pieces:
            piece.zones.append(zone)

    def _unmap(self, zone: Zone) -> None:
        """Take the memory, which may be another's, from addresses that nobody owns."""
        if not zone.pieces:
            return
        self._wait_for(zone)
        self.memory.unmap(zone.begin, zone.nbytes)
        for piece in zone.pieces:
            piece.zones.remove(zone)
        zone.pieces = []

    def _wait_for(self, zone: Zone) -> None:
        """Wait until the device has passed the last use of addresses that nobody owns."""
        if zone.left is not None and not zone.left.is_over():
            self.waits += 1
            zone.left.wait()
        zone.left = None

    def _take(self, length: int) -> Piece:
        free = self._free.get(length)
        if free:
            return free.popitem()[1]  # whoever had it last needs it last, as rounds are forwards, then backwards
        if any(self._free.values()) and self._unlike + length <= SLACK:
            self._unlike += length
        else:
            self._release(length)  # of pieces that do not fit
        memory = self.memory.create(length)
        if memory is None:
            self._make_room()
            memory = self.memory.create(length)
        if memory is None:
            self._release(self.held)
            memory = self.memory.create(length)
        if memory is None:
            raise torch.OutOfMemoryError(
                f"No {length} bytes of GPU memory are left for the layers' graphs, which hold {self.held} bytes. "
                "Offload more, or capture fewer layers."
            )
        self.held += length
        self.most_held = max(self.most_held, self.held)
        return Piece(memory, length)

    def _put(self, piece: Piece) -> None:
        piece.user = None
        self._free.setdefault(piece.length, {})[piece.memory] = piece

    def _release(self, nbytes: int, *, at_most: bool = False) -> None:
        """Give free pieces back to the device, the largest first, until so many bytes are; or no more than these."""
        for length in sorted(self._free, reverse=True):
            pieces = self._free[length]
            while pieces and nbytes > 0 and not (at_most and length > nbytes):
                piece = pieces.pop(next(iter(pieces)))
                for zone in list(piece.zones):
                    self._unmap(zone)
                self.memory.release(piece.memory)
                self.held -= length
                nbytes -= length
