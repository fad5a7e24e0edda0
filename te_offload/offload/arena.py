"""Which bytes of a range are free: the bookkeeping of host memory, without the memory.

In: numbers of bytes. Out: `Block` values. Keeps true: blocks never overlap and start at multiples of 512 bytes; free
neighbours are one range again; a block that was given back carries the copies that may still use its bytes, and so does
every later block that overlaps it. Does not: own memory, or wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from te_offload.errors import StateError
from te_offload.offload.extents import ALIGNMENT
from te_offload.offload.transfer import Done


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of 512, at least 512."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


@dataclass(frozen=True)
class Block:
    """Bytes ``offset`` to ``offset + nbytes`` of an arena.

    Attributes:
        pending: copies that may still read or write them; a new copy must be ordered after these.
    """

    offset: int
    nbytes: int
    pending: tuple[Done, ...] = ()

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.nbytes


class Arena:
    """Hands out blocks of ``nbytes`` bytes.

    Args:
        nbytes: size of the range; a multiple of 512.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = [Block(0, nbytes)] if nbytes else []
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes in no block."""
        return sum(block.nbytes for block in self._free)

    def take(self, nbytes: int) -> Block | None:
        """The smallest free range that fits, cut to size; ``None`` if none fits."""
        size = aligned(nbytes)
        best = min((block for block in self._free if block.nbytes >= size), key=lambda b: b.nbytes, default=None)
        if best is None:
            return None
        pending = tuple(done for done in best.pending if not done.is_over())
        position = self._free.index(best)
        rest = Block(best.offset + size, best.nbytes - size, pending)
        self._free[position : position + 1] = [rest] if rest.nbytes else []
        self._taken[best.offset] = size
        return Block(best.offset, size, pending)

    def give(self, block: Block, uses: Iterable[Done] = ()) -> None:
        """Take a block back. ``uses``: copies that may still use its bytes.

        Raises:
            StateError: the block is not out.
        """
        if self._taken.pop(block.offset, None) != block.nbytes:
            raise StateError(f"A block of {block.nbytes} bytes at {block.offset} was given back, but is not out.")
        freed = Block(block.offset, block.nbytes, tuple(uses))
        before = [other for other in self._free if other.end == freed.offset]
        after = [other for other in self._free if other.offset == freed.end]
        pending = (*(done for other in (*before, *after) for done in other.pending), *freed.pending)
        start = before[0].offset if before else freed.offset
        end = after[0].end if after else freed.end
        merged = Block(start, end - start, tuple(done for done in pending if not done.is_over()))
        self._free = [*(other for other in self._free if other not in (*before, *after)), merged]

    def pending(self) -> list[Done]:
        """All copies that may still use free bytes."""
        return [done for block in self._free for done in block.pending]
