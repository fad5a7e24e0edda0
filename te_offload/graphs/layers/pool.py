"""The memory that torch's allocator hands out while a graph is captured, at addresses of ours.

In: a space, and the lengths of the segments that a rehearsal took. Out: a pool to capture into; what lies in it. Keeps
true: no address goes back to the driver because torch lets go of it. Does not: say what is in use between replays.

torch calls Python for each new segment, holding its allocator's lock. Another thread that holds Python's lock and frees a
tensor would then wait for ever, and so would the first. Hence all segments are handed over beforehand, by a call that
keeps Python's lock (a storage's constructor), and are found in torch's cache while the graph is captured. If one more were
needed then, it is refused, and the capture fails.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from te_offload.graphs.layers.bank import Zone
from te_offload.graphs.layers.space import Extent, Space

_SMALL = (
    1 << 20
)  # bytes up to which torch cuts allocations from segments of 2 MiB (c10/core/AllocatorConfig.h, kSmallSize)
_SMALL_SEGMENT = 2 << 20

_Allocate = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class SegmentPool:
    """A memory pool of torch's whose segments are a space's.

    Args:
        space: which. lengths: of the segments it will need. stream: on which the graph will be captured.

    Attributes:
        handle: for `torch.cuda.CUDAGraph.capture_begin`. segments: their first addresses.
        sealed: whether `seal` was called; memory stays until then.
    """

    def __init__(self, space: Space, lengths: Sequence[int], stream: torch.cuda.Stream) -> None:
        self._space = space
        self.sealed = False
        lengths = sorted(lengths, reverse=True)
        self.segments = [space.add_segment(length) for length in lengths]
        self._zones = [zone for segment in self.segments for zone in space.zones(segment, 1)]
        space.bank.occupy(self._zones)
        provider = _provider()
        self._pool = torch.cuda.MemPool(provider.allocator)
        self.handle = self._pool.id
        provider.ready = dict(zip(self.segments, lengths, strict=True))
        try:
            with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool):
                made = []
                for length in lengths:
                    if length <= _SMALL_SEGMENT:  # two halves of one
                        made += [torch.UntypedStorage(_SMALL, device=space.device) for _ in range(2)]
                    else:
                        made.append(torch.UntypedStorage(length, device=space.device))
        finally:
            provider.ready = {}

    def live(self) -> list[Extent]:
        """What is allocated in it now."""
        return [
            Extent(block["address"], block["size"])
            for segment in snapshot(self.handle)
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]

    def seal(self, ranges: Sequence[tuple[int, int]]) -> list[Zone]:
        """The graph is captured, and the device does nothing with the pool: from now on zones have memory while owned, but
        what lies in no range has the memory of all graphs' such zones. Those with an owner.

        Args:
            ranges: addresses that live together.
        """
        self.sealed = True
        bank = self._space.bank
        zones, self._zones = self._zones, []
        bank.drop(zones)
        bank.count()
        for zone in zones:
            if not zone.owners:
                bank.take_back(zone)
        owned: list[Zone] = []
        scratch: list[Zone] = []
        for segment in self.segments:
            with_ranges, without = self._space.cut(segment, ranges)
            owned += with_ranges
            scratch += without
        if ranges:
            bank.share(scratch)
        return owned


def segment_lengths(handle: Any) -> list[int]:
    """Those of the segments that a graph needs which needed what lies in a pool of torch's.

    With `expandable_segments` all that is small lies in one segment of any length; memory of ours is handed out in segments
    of 2 MiB, each of which holds more than 1 MiB of it before another one is needed.
    """
    lengths: list[int] = []
    for segment in snapshot(handle):
        length = segment["total_size"]
        if segment["segment_type"] == "small" and length > _SMALL_SEGMENT:
            lengths += [_SMALL_SEGMENT] * -(-length // _SMALL)
        else:
            lengths.append(length)
    return lengths


def snapshot(handle: Any) -> list[Any]:
    """The segments of a pool of torch's.

    torch 2.11's call gives up a reference to each number of the handle, which is not its own: those beyond 256, which
    Python counts, are freed by it, and whatever looks at the handle next ends the process. They get back what they have
    lost; until then a list holds them too, for the handle's own reference may be the last one.
    """
    numbers = [*handle]
    before = [sys.getrefcount(numbers[place]) for place in range(len(numbers))]
    found: list[Any] = torch.cuda.memory_snapshot(handle)
    for place, count in enumerate(before):
        for _ in range(count - sys.getrefcount(numbers[place])):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(numbers[place]))
    return found


class _Provider:
    """Hands segments that lie ready to torch.

    Attributes:
        ready: their first addresses and lengths. allocator: for torch.
    """

    def __init__(self) -> None:
        self.ready: dict[int, int] = {}
        self._call = _Allocate(self._allocate)
        # When torch lets go of a segment, its addresses stay the space's. So nothing is to be done then, and any function
        # of C's that does nothing with its arguments will do.
        calls = self._call, ctypes.CDLL(None).getpid
        self.allocator = torch._C._cuda_customAllocator(
            *[ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls]
        )

    def _allocate(self, nbytes: int, device: int, stream: int | None) -> int:
        for begin, length in self.ready.items():
            if length == nbytes:
                del self.ready[begin]
                return begin
        return 0


@functools.cache
def _provider() -> _Provider:
    """The one of this process. torch keeps a bare pointer to its allocator, also in pools that outlive what made them, so
    it is never gone.
    """
    provider = _Provider()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(provider))
    return provider
