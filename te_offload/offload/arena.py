"""Which bytes of some ranges of memory are free: the bookkeeping of host memory, without the memory.

In: ranges, and numbers of bytes. Out: `Block` values. Keeps true: blocks never overlap, begin and end at multiples of
512 bytes from their range's begin, and lie in one range; as many bytes as are free can be taken, in several blocks where
no gap is long enough; free neighbours are one gap again; a gap carries the copies that may still use its bytes, and so
does every block cut from it. Does not: own memory, or wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from te_offload.errors import StateError
from te_offload.offload.extents import ALIGNMENT
from te_offload.offload.transfer import Mark


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of 512."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes ``begin`` to ``begin + nbytes``, as addresses.

    Attributes:
        range_id: the range that it lies in; blocks of two ranges are never joined.
        pending: copies that may still read or write them; a new copy must be ordered after these.
    """

    range_id: int
    begin: int
    nbytes: int
    pending: tuple[Mark, ...] = ()

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.begin + self.nbytes


class Arena:
    """Hands out blocks of the ranges that it was given."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.free_bytes = 0
        self._free: list[Block] = []
        self._taken: dict[int, Block] = {}
        self._ranges = 0

    def add(self, begin: int, nbytes: int) -> None:
        """One more range, free at first. ``nbytes``: a multiple of 512."""
        self._free.append(Block(self._ranges, begin, nbytes))
        self._ranges += 1
        self.nbytes += nbytes
        self.free_bytes += nbytes

    def take(self, nbytes: int) -> list[Block] | None:
        """Blocks of ``nbytes`` bytes together, rounded up to 512: one if a gap is long enough (the shortest such gap),
        else the longest gaps. ``None`` if not so many bytes are free.
        """
        missing = aligned(nbytes)
        if missing > self.free_bytes:
            return None
        blocks: list[Block] = []
        while missing:
            gap = min((gap for gap in self._free if gap.nbytes >= missing), key=_length, default=None)
            if gap is None:
                gap = max(self._free, key=_length)
            blocks.append(self._cut(gap, min(missing, gap.nbytes)))
            missing -= blocks[-1].nbytes
        return blocks

    def _cut(self, gap: Block, nbytes: int) -> Block:
        pending = tuple(mark for mark in gap.pending if not mark.is_over())
        position = self._free.index(gap)
        rest = Block(gap.range_id, gap.begin + nbytes, gap.nbytes - nbytes, pending)
        self._free[position : position + 1] = [rest] if rest.nbytes else []
        block = Block(gap.range_id, gap.begin, nbytes, pending)
        self._taken[block.begin] = block
        self.free_bytes -= nbytes
        return block

    def give(self, blocks: Iterable[Block], uses: Iterable[Mark] = ()) -> None:
        """Take blocks back. ``uses``: copies that may still use their bytes.

        Raises:
            StateError: a block is not out.
        """
        pending = tuple(uses)
        for block in blocks:
            if self._taken.pop(block.begin, None) is not block:
                raise StateError(f"A block of {block.nbytes} bytes at {block.begin:#x} was given back, but is not out.")
            self.free_bytes += block.nbytes
            gap = Block(block.range_id, block.begin, block.nbytes, pending)
            sides = [g for g in self._free if g.range_id == gap.range_id and gap.begin in (g.end, g.begin - gap.nbytes)]
            for side in sides:
                self._free.remove(side)
                begin, end = min(side.begin, gap.begin), max(side.end, gap.end)
                both = tuple(mark for mark in (*side.pending, *gap.pending) if not mark.is_over())
                gap = Block(gap.range_id, begin, end - begin, both)
            self._free.append(gap)

    def pending(self) -> list[Mark]:
        """All copies that may still use free bytes."""
        return [mark for gap in self._free for mark in gap.pending]


def _length(block: Block) -> int:
    return block.nbytes
