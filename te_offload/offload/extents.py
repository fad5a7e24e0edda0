"""Intervals of storages: what is copied, once, however many views of it were saved; and how a view comes back.

In: saved tensors. Out: `ViewSpec` (a tensor without its memory) and `Interval` (bytes of one storage). Keeps true:
overlapping and touching views share one interval; an interval starts at a multiple of 512 bytes in its storage, so that
a copy in a fresh allocation is aligned as the original was (kernels choose by alignment); sizes, strides, dtype and
aliasing of restored views are the originals'. Does not: copy, or decide.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 512  # bytes; what CUDA's caching allocator gives


@dataclass(frozen=True)
class ViewSpec:
    """A dense tensor without its memory. Offset in bytes from the start of its storage, size and stride in elements."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ViewSpec:
        """The spec of a strided tensor."""
        offset = tensor.storage_offset() * tensor.element_size()
        return cls(tensor.dtype, int(offset), tuple(tensor.shape), tuple(tensor.stride()))

    @functools.cached_property
    def is_empty(self) -> bool:
        """Whether the view reads no byte."""
        return 0 in self.size

    @functools.cached_property
    def end(self) -> int:
        """One past the last byte that the view reads; the offset itself for an empty view."""
        if self.is_empty:
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset + (last + 1) * self.dtype.itemsize

    def over_nothing(self, device: torch.device) -> torch.Tensor:
        """An empty view again, over no memory: the original would keep a whole storage alive for no byte."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def over(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """The view over ``memory`` (uint8, one dimension), whose first byte stands for byte ``start`` of the storage."""
        offset = (self.offset - start) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor.set_(
            memory.untyped_storage(), offset + memory.storage_offset() // self.dtype.itemsize, self.size, self.stride
        )
        return tensor


@dataclass(frozen=True)
class Interval:
    """Bytes ``start`` to ``end`` of a storage."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start

    def bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The interval as a uint8 tensor over the storage itself."""
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, self.start, (self.nbytes,), (1,))


def merge(specs: Iterable[ViewSpec]) -> list[Interval]:
    """Disjoint intervals that cover views of one storage, in order; empty views need none."""
    merged: list[Interval] = []
    for spec in sorted(specs, key=lambda spec: spec.offset):
        if spec.is_empty:
            continue
        start = spec.offset // ALIGNMENT * ALIGNMENT
        if merged and start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].end, spec.end))
        else:
            merged.append(Interval(start, spec.end))
    return merged


def covering(intervals: Sequence[Interval], spec: ViewSpec) -> Interval | None:
    """The interval that holds a view; ``None`` for an empty view."""
    if spec.is_empty:
        return None
    return next(interval for interval in intervals if interval.start <= spec.offset and spec.end <= interval.end)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, valid while something holds the storage."""
    key: int = tensor.untyped_storage()._cdata
    return key
