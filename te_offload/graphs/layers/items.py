"""Tensors of a graph, remembered by where they lie, and made again over the same memory for each replay.

In: tensors, and the extents that torch's allocator gave out. Out: `Item` values; tensors over storages, copies there. Keeps
true: size, strides and dtype are those of the capture; tensors that lay in one allocation share one storage again. Does
not: own memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from te_offload.graphs.layers.space import Extent, tensor_of


@dataclass(frozen=True)
class Item:
    """A tensor.

    Attributes:
        extent: the allocation in which it lies. offset: of its first byte there.
        dtype, size, stride: its own. requires_grad: whether it does.
    """

    extent: Extent
    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool = False

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.extent.begin + self.offset

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor has its dtype, size and strides."""
        return tensor.dtype == self.dtype and tensor.size() == self.size and tensor.stride() == self.stride

    def over(self, storages: Mapping[Extent, torch.UntypedStorage]) -> torch.Tensor:
        """The tensor, over its extent's storage."""
        return tensor_of(storages[self.extent], self.dtype, self.size, self.stride, self.offset)

    def is_followed_by(self, other: Item) -> bool:
        """Whether another tensor of the same kind begins where this one, which is dense, ends."""
        nbytes = self.size.numel() * self.dtype.itemsize
        kind = self.extent, self.dtype, self.size, self.stride
        return kind == (other.extent, other.dtype, other.size, other.stride) and other.offset == self.offset + nbytes


class Extents:
    """Allocations, to look up in which one a tensor lies.

    Args:
        extents: which.
    """

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = sorted(extents)
        self._begins = [extent.begin for extent in self._extents]

    def find(self, address: int) -> Extent | None:
        """The one that an address is in."""
        number = bisect.bisect_right(self._begins, address) - 1
        if number < 0:
            return None
        extent = self._extents[number]
        return extent if address < extent.begin + extent.nbytes else None

    def item(self, tensor: torch.Tensor) -> Item | None:
        """A tensor in one of them; ``None`` for another tensor, and one without elements."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return None
        extent = self.find(tensor.data_ptr()) if tensor.numel() else None
        if extent is None:
            return None
        offset = tensor.data_ptr() - extent.begin
        return Item(extent, offset, tensor.dtype, tensor.size(), tensor.stride(), tensor.requires_grad)


def span(item: Item) -> tuple[int, int]:
    """Addresses of its first byte and behind its last one; it has elements."""
    last = sum([(size - 1) * step for size, step in zip(item.size, item.stride, strict=True)])
    return item.address, item.address + (last + 1) * item.dtype.itemsize


def put(item: Item, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
    """Copy a tensor to where an item is, and what lies between its elements with it, if it has the item's strides."""
    begin, end = span(item)
    if tensor.stride() == item.stride:
        count = (end - begin) // item.dtype.itemsize
        target = tensor_of(storage, item.dtype, (count,), (1,), item.offset)
        target.copy_(tensor.detach().as_strided((count,), (1,)))
        return
    target = item.over({item.extent: storage})
    for place, step in enumerate(item.stride):
        if not step:  # the same elements, so often
            target, tensor = target.narrow(place, 0, 1), tensor.narrow(place, 0, 1)
    target.copy_(tensor)


def grouped(items: Sequence[Item]) -> list[tuple[Item, int]]:
    """Runs of dense tensors of one kind that lie one behind the other: the first of each, and how many."""
    runs: list[tuple[Item, int]] = []
    last: Item | None = None
    for item in items:
        dense = tensor_is_dense(item)
        if last is not None and dense and last.is_followed_by(item):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((item, 1))
        last = item if dense else None
    return runs


def tensor_is_dense(item: Item) -> bool:
    """Whether its elements lie in order, with no gap."""
    expected = 1
    for size, stride in zip(reversed(item.size), reversed(item.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def made(runs: Sequence[tuple[Item, int]], storages: Mapping[Extent, torch.UntypedStorage]) -> list[torch.Tensor]:
    """The tensors of `grouped` runs, in order."""
    tensors: list[torch.Tensor] = []
    for item, count in runs:
        if count == 1:
            tensors.append(item.over(storages))
        else:
            size, stride = (count, *item.size), (item.size.numel(), *item.stride)
            tensors += tensor_of(storages[item.extent], item.dtype, size, stride, item.offset).unbind(0)
    return tensors
