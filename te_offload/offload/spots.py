"""Tensors one by one, wherever they lie: their runs, and each one's place there. Takes the host least where there are few.

In: saved tensors. Out: `Spot` values, and their `Runs`. Keeps true: what extents.py does. Does not: cut several tensors
from one piece of memory at once (strips do); know tensors without elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from te_offload.offload.extents import ALIGNMENT, SEGMENT, Run, Runs, extent, union


class Spot(NamedTuple):
    """One tensor with elements, wherever it lies: what takes the host least where there are few.

    Attributes:
        begin, end: addresses of its first byte, and behind its last. start: where a run may begin for it.
        storage: its storage's identity, valid while something holds the storage. size, stride, dtype: the tensor's.
    """

    begin: int
    end: int
    start: int
    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def spots_of(tensors: Sequence[torch.Tensor]) -> list[Spot] | None:
    """The spots of strided tensors; ``None`` if one has no elements."""
    found = []
    for tensor in tensors:
        begin, nbytes, size, stride = tensor.data_ptr(), tensor.nbytes, tensor.shape, tensor.stride()
        if not nbytes:
            return None
        storage, lead, dtype = tensor.untyped_storage(), begin % ALIGNMENT, tensor.dtype
        if not tensor.is_contiguous():
            nbytes = extent(size, stride) * dtype.itemsize
        start = max(begin - lead, storage.data_ptr()) if lead else begin
        found.append(Spot(begin, begin + nbytes, start, storage._cdata, tuple(size), stride, dtype))
    return found


def covered_by(spots: Sequence[Spot]) -> int:
    """Bytes that spots have, each byte once."""
    if len({spot[3] for spot in spots}) == len(spots):
        return sum([end - begin for begin, end, *_ in spots])
    return union([(begin, end) for begin, end, *_ in spots])


def runs_of(spots: Sequence[Spot], *, across_storages: bool) -> Runs:
    """The runs of spots: what `find_runs` says of strips. ``across_storages``: as there."""
    runs: list[Run] = []
    places: list[tuple[int, int] | None] = [None] * len(spots)
    begin = end = read_to = last = -1
    covered = 0
    for number in sorted(range(len(spots)), key=[spot[0] for spot in spots].__getitem__):
        first, behind, start, storage, *_ = spots[number]
        joins = last != -1 and start < end + ALIGNMENT
        if joins and storage != last:  # in one segment of the allocator's?
            joins = across_storages and (end - 1) // SEGMENT == first // SEGMENT
        if not joins:
            if last != -1:
                runs.append(Run(begin, end - begin))
            begin, end = start, behind
        elif behind > end:
            end = behind
        if behind > read_to:
            covered += behind - max(first, read_to)
            read_to = behind
        last = storage
        places[number] = len(runs), first - begin
    runs.append(Run(begin, end - begin))
    return Runs(tuple(runs), tuple(places), covered)
