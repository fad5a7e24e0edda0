"""A model of torch's caching allocator of one stream of a GPU, and what a step allocates and lets go of, for it.

In: what tensors on the CPU do under `Traced`. Out: whether a card of so many bytes has room for that. Keeps true: best fit;
what is left of a block stays beside it, and joins its neighbours when both are free; before it fails it gives back segments
in which nothing is. Does not: small blocks (under 1 MiB), streams, expandable segments, rounding of large sizes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MIB = 1 << 20
GIVE_BACK = (0, 0)  # an event: what nobody uses goes back to the device
FILL = -1  # what an event has in place of an identity, with bytes: as many at the most of what nobody uses are filled
EMPTY = (-2, 0)  # an event: what was filled is let go of


class OutOfMemory(Exception):
    """The card is too small."""


class _Block:
    __slots__ = ("nbytes", "segment", "used")

    def __init__(self, nbytes: int, segment: list[_Block]) -> None:
        self.nbytes = nbytes
        self.segment = segment
        self.used = False


class CachingAllocator:
    """See the module.

    Args:
        card: bytes; ``None``: any number.

    Attributes:
        allocated, reserved: bytes now. most_allocated, most_reserved: at the most.
    """

    def __init__(self, card: int | None = None) -> None:
        self._card = card
        self._segments: list[list[_Block]] = []
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0

    def allocate(self, nbytes: int) -> _Block:
        """Raises: OutOfMemory."""
        block = min(self._free(nbytes), key=lambda block: block.nbytes, default=None) or self._segment(nbytes)
        if block.nbytes - nbytes > MIB:
            rest = _Block(block.nbytes - nbytes, block.segment)
            block.nbytes = nbytes
            block.segment.insert(block.segment.index(block) + 1, rest)
        block.used = True
        self.allocated += block.nbytes
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def release(self, block: _Block) -> None:
        """The opposite."""
        block.used = False
        self.allocated -= block.nbytes
        segment = block.segment
        place = segment.index(block)
        for one, other in ((place, place + 1), (place - 1, place)):
            if one >= 0 and other < len(segment) and not segment[one].used and not segment[other].used:
                segment[one].nbytes += segment.pop(other).nbytes

    def give_back(self) -> None:
        """Segments in which nothing is."""
        self._segments = [segment for segment in self._segments if len(segment) > 1 or segment[0].used]
        self.reserved = sum(block.nbytes for segment in self._segments for block in segment)

    def fill(self, most: int) -> list[_Block]:
        """Whole segments, the largest first, of so many bytes at the most."""
        found = []
        free = [segment[0] for segment in self._segments if len(segment) == 1 and not segment[0].used]
        for block in sorted(free, key=lambda block: -block.nbytes):
            if block.nbytes <= most:
                found.append(self.allocate(block.nbytes))
                most -= block.nbytes
        return found

    def _free(self, nbytes: int) -> Iterator[_Block]:
        return (block for segment in self._segments for block in segment if not block.used and block.nbytes >= nbytes)

    def _segment(self, nbytes: int) -> _Block:
        size = 20 * MIB if nbytes < 10 * MIB else -(-nbytes // (2 * MIB)) * 2 * MIB
        if self._card is not None and self.reserved + size > self._card:
            self.give_back()
            if self.reserved + size > self._card:
                raise OutOfMemory
        segment: list[_Block] = []
        segment.append(_Block(size, segment))
        self._segments.append(segment)
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return segment[0]


class Traced(TorchDispatchMode):
    """Storages as they come and go.

    Args:
        least: bytes of those that are looked at.

    Attributes:
        events: of each an identity and its bytes, then the same and minus its bytes; or `GIVE_BACK`, `FILL`, `EMPTY`.
        nbytes: now.
    """

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least = least
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.events: list[tuple[int, int]] = []
        self.nbytes = 0
        self._most = 0

    def take_most(self) -> int:
        """Bytes at the most since the last call."""
        found, self._most = self._most, self.nbytes
        return found

    def fill(self, most: int) -> list[torch.Tensor]:
        """As a session's `fill_unused`: what it gives stands for what is filled."""
        self.events.append((FILL, most))
        stands = torch.empty(0)
        weakref.finalize(stands, self.events.append, EMPTY)
        return [stands]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, nbytes = storage._cdata, storage.nbytes()
                if nbytes >= self._least and key not in self._live:
                    self._live[key] = weakref.ref(storage, lambda _, key=key, nbytes=nbytes: self._ends(key, nbytes))  # type: ignore[misc]
                    self._note(key, nbytes)
        return found

    def _ends(self, key: int, nbytes: int) -> None:
        del self._live[key]
        self._note(key, -nbytes)

    def _note(self, key: int, nbytes: int) -> None:
        self.events.append((key, nbytes))
        self.nbytes += nbytes
        self._most = max(self._most, self.nbytes)


def run(events: Sequence[tuple[int, int]], scale: int, card: int | None = None) -> CachingAllocator:
    """The allocator after events, whose bytes count so many times. Raises: OutOfMemory."""
    allocator = CachingAllocator(card)
    blocks: dict[int, _Block] = {}
    filled: list[_Block] = []
    for key, nbytes in events:
        if (key, nbytes) == GIVE_BACK:
            allocator.give_back()
        elif key == FILL:
            filled += allocator.fill(nbytes * scale)
        elif (key, nbytes) == EMPTY:
            while filled:
                allocator.release(filled.pop())
        elif nbytes > 0:
            blocks[key] = allocator.allocate(nbytes * scale)
        elif key in blocks:
            allocator.release(blocks.pop(key))
    return allocator


def least_card(events: Sequence[tuple[int, int]], scale: int, grain: int) -> int:
    """Bytes of the smallest card, in multiples of ``grain``, that has room for the events."""
    roomy = run(events, scale)
    low, high = -(-roomy.most_allocated // grain), -(-roomy.most_reserved // grain)
    while low < high:
        middle = (low + high) // 2
        try:
            run(events, scale, middle * grain)
        except OutOfMemory:
            low = middle + 1
        else:
            high = middle
    return high * grain
