"""Runs of memory: what is copied, once, however many views of it were saved; and how a view comes back.

In: saved tensors. Out: `Run` values (addresses) and the place of each tensor in them. Keeps true: overlapping and
touching tensors share one run, also tensors of different storages that lie side by side on a GPU (one expert behind
the other, say); a restored tensor has the original's size, strides, dtype, aliasing, and address modulo 512 bytes
(kernels choose by alignment). Does not: copy, or decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 512  # bytes; what CUDA's caching allocator gives
SEGMENT = 2 << 20  # bytes; the allocator's segments begin at multiples, and a copy must not span two of them


class Span(NamedTuple):
    """The bytes that a dense tensor reads, by address. ``begin == end`` for a tensor without elements.

    Attributes:
        storage_begin: address of the first byte of its storage.
        storage: identity of its storage, valid while something holds the storage.
    """

    begin: int
    end: int
    storage_begin: int
    storage: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Span:
        """The span of a strided tensor."""
        storage = tensor.untyped_storage()
        base, begin = storage.data_ptr(), tensor.data_ptr()
        if tensor.is_contiguous():
            return cls(begin, begin + tensor.nbytes, base, storage._cdata)
        if 0 in tensor.shape:
            return cls(begin, begin, base, storage._cdata)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(begin, begin + (last + 1) * tensor.element_size(), base, storage._cdata)


class Run(NamedTuple):
    """Bytes at ``address`` that are copied in one piece."""

    address: int
    nbytes: int


class Runs(NamedTuple):
    """The runs of some tensors.

    Attributes:
        runs: in the order of their addresses.
        places: for each tensor the number of its run and the distance from the run's begin in bytes; ``None`` for one
            without elements.
        covered: bytes that the tensors read, each byte once.
    """

    runs: tuple[Run, ...]
    places: tuple[tuple[int, int] | None, ...]
    covered: int


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, valid while something holds the storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def find_runs(spans: Sequence[Span], *, across_storages: bool) -> Runs:
    """The runs of spans.

    Args:
        spans: in any order.
        across_storages: whether tensors of two storages may share a run where less than 512 bytes lie between them:
            they may on a GPU, whose allocator owns those bytes.
    """
    if len(spans) == 1:
        span = spans[0]
        if span.begin == span.end:
            return Runs((), (None,), 0)
        start = max(span.begin - span.begin % ALIGNMENT, span.storage_begin)
        return Runs((Run(start, span.end - start),), ((0, span.begin - start),), span.end - span.begin)
    runs: list[Run] = []
    places: list[tuple[int, int] | None] = [None] * len(spans)
    covered, begin, end, storage, read_to = 0, 0, -1, 0, -1
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        first, last, storage_begin, its_storage = spans[index]
        if first == last:
            continue
        start = max(first - first % ALIGNMENT, storage_begin)
        near = end >= 0 and start < end + ALIGNMENT
        if not (near and (its_storage == storage or (across_storages and storage_begin % SEGMENT != 0))):
            if end >= 0:
                runs.append(Run(begin, end - begin))
            begin, end = start, last
        places[index] = (len(runs), first - begin)
        storage = its_storage
        if last > end:
            end = last
        if last > read_to:
            covered += last - max(first, read_to)
            read_to = last
    if end >= 0:
        runs.append(Run(begin, end - begin))
    return Runs(tuple(runs), tuple(places), covered)


def view_over(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor over ``memory`` (uint8, one dimension, a whole storage) that begins at its byte ``offset``."""
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), offset // dtype.itemsize, size, stride)
