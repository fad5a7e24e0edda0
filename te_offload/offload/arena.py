"""Which bytes of some ranges of memory are free: the bookkeeping of host memory, without the memory.

In: ranges, and numbers of bytes. Out: `Block` values. Keeps true: blocks never overlap, begin and end at multiples of
512 bytes from their range's begin, and lie in one range; as many bytes as are free can be taken, in several blocks where
no gap is long enough, and free neighbours are one gap then; a gap carries the copies that may still use its bytes, and so
does every block cut from it. Does not: own memory, or wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from te_offload.errors import StateError
from te_offload.offload.extents import aligned
from te_offload.offload.transfer import Mark


class Block(NamedTuple):
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
    """Hands out blocks of the ranges that it was given.

    A block that comes back waits, as it is, for a request of its own length: a step asks for what the step before asked
    for. The first request that finds none has all of them joined to gaps.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.free_bytes = 0
        self._gaps: list[Block] = []
        self._given: dict[int, list[Block]] = {}  # by length; not joined to gaps yet
        self._taken: dict[int, Block] = {}
        self._ranges = 0

    def add(self, begin: int, nbytes: int) -> None:
        """One more range, free at first. ``nbytes``: a multiple of 512."""
        self._gaps.append(Block(self._ranges, begin, nbytes))
        self._ranges += 1
        self.nbytes += nbytes
        self.free_bytes += nbytes

    def take(self, nbytes: int) -> list[Block] | None:
        """Blocks of ``nbytes`` bytes together, rounded up to 512: one if a gap is long enough (the shortest such gap, or a
        block of just this length), else the longest gaps. ``None`` if not so many bytes are free.
        """
        missing = aligned(nbytes)
        given = self._given.get(missing)
        if given:
            block = given.pop()
            self._taken[block.begin] = block
            self.free_bytes -= missing
            return [block]
        if missing > self.free_bytes:
            return None
        self._join()
        blocks: list[Block] = []
        while missing:
            gap = min((gap for gap in self._gaps if gap.nbytes >= missing), key=_length, default=None)
            if gap is None:
                gap = max(self._gaps, key=_length)
            blocks.append(self._cut(gap, min(missing, gap.nbytes)))
            missing -= blocks[-1].nbytes
        return blocks

    def _cut(self, gap: Block, nbytes: int) -> Block:
        pending = _unfinished(gap.pending)
        position = self._gaps.index(gap)
        rest = Block(gap.range_id, gap.begin + nbytes, gap.nbytes - nbytes, pending)
        self._gaps[position : position + 1] = [rest] if rest.nbytes else []
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
            range_id, begin, nbytes, before = block
            if self._taken.pop(begin, None) is not block:
                raise StateError(f"A block of {nbytes} bytes at {begin:#x} was given back, but is not out.")
            self.free_bytes += nbytes
            back = Block(range_id, begin, nbytes, pending) if pending or before else block
            self._given.setdefault(nbytes, []).append(back)

    def _join(self) -> None:
        """Join the blocks that came back to gaps, free neighbours to one."""
        if not self._given:
            return
        joined: list[Block] = []
        for block in sorted([*self._gaps, *itertools.chain(*self._given.values())], key=_place):
            last = joined[-1] if joined else None
            if last is not None and last.range_id == block.range_id and last.end == block.begin:
                pending = _unfinished((*last.pending, *block.pending))
                joined[-1] = Block(last.range_id, last.begin, last.nbytes + block.nbytes, pending)
            else:
                joined.append(block)
        self._gaps = joined
        self._given = {}

    def forget_uses(self) -> None:
        """No copy uses free bytes any more, or what comes next is ordered after those that do."""
        self._gaps = [gap._replace(pending=()) for gap in self._gaps]
        self._given = {
            length: [block._replace(pending=()) for block in blocks] for length, blocks in self._given.items()
        }

    def pending(self) -> list[Mark]:
        """All copies that may still use free bytes."""
        return [mark for gap in (*self._gaps, *itertools.chain(*self._given.values())) for mark in gap.pending]


def _unfinished(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    return tuple([mark for mark in marks if not mark.is_over()])


def _length(block: Block) -> int:
    return block.nbytes


def _place(block: Block) -> tuple[int, int]:
    return block.range_id, block.begin
