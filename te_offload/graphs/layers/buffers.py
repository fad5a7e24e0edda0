"""Static copies of tensors, which graphs read in place of those that come in.

In: tensors, to be like. Out: memory for copies of such, while it is asked for; copies. Keeps true: order and shapes are
those of the tensors. Does not: decide which tensors need a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_offload.graphs.layers.bank import Zone
from te_offload.graphs.layers.ground import Ground
from te_offload.graphs.layers.items import Item
from te_offload.graphs.layers.space import Extent

_ALIGNMENT = 512  # bytes, as torch's allocator has it


class Buffers:
    """Static copies of some tensors, one behind the other.

    Args:
        ground: where. tensors: like which.

    Attributes:
        segments: their addresses. nbytes: of all.
    """

    def __init__(self, ground: Ground, tensors: Sequence[torch.Tensor]) -> None:
        self._space = ground.space
        places, end = [], 0
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            places.append((end, tensor.dtype, tensor.size(), nbytes))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.segments = [ground.space.add_segment(end)] if end else []
        self.nbytes = end
        self._items = [
            Item(Extent(self.segments[0] if end else 0, end), offset, dtype, size, _dense(size))
            for offset, dtype, size, _ in places
        ]

    def storage(self) -> Any:
        """Their memory."""
        if not self.segments:
            return torch.UntypedStorage(0, device=self._space.device)
        return self._space.storage(self.segments[0], self.nbytes)

    def in_use(self) -> bool:
        """Whether someone holds it."""
        return bool(self.segments) and self._space.are_owned(self._space.zones_of(self.segments[0]))

    def tensors(self, storage: Any) -> list[torch.Tensor]:
        """Over their memory."""
        return [
            item.over({item.extent: storage})
            if item.size.numel()
            else torch.empty(item.size, dtype=item.dtype, device=self._space.device)
            for item in self._items
        ]

    def mirror(self, tensors: Sequence[torch.Tensor]) -> Zone | None:
        """Have the one other tensor readable here without a copy; see `Space.mirror`."""
        if len(self._items) != 1 or not self.segments or not self._items[0].is_like(tensors[0]):
            return None
        return self._space.mirror(self.segments[0], tensors[0])

    def fill(self, storage: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Copy others into it."""
        if self._items:
            with torch.no_grad():
                torch._foreach_copy_(self.tensors(storage), list(tensors))


def _dense(size: Sequence[int]) -> tuple[int, ...]:
    stride, found = 1, []
    for length in reversed(size):
        found.append(stride)
        stride *= length
    return tuple(reversed(found))
