"""Static copies of tensors, which graphs read in place of those that come in.

In: tensors, to be like. Out: memory for copies of such, while it is asked for; copies. Keeps true: order and shapes are
those of the tensors. Does not: decide which tensors need a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        ground: where. tensors: like which. layouts: other strides than the tensors', by number.

    Attributes:
        segments: their addresses. nbytes: of all.
    """

    def __init__(
        self, ground: Ground, tensors: Sequence[torch.Tensor], layouts: Mapping[int, tuple[int, ...]] | None = None
    ) -> None:
        self._space = ground.space
        places, end = [], 0
        for number, tensor in enumerate(tensors):
            if layouts and number in layouts:
                tensor = torch.empty_strided(tensor.size(), layouts[number], dtype=tensor.dtype, device="meta")
            nbytes = tensor.numel() * tensor.element_size()
            places.append((end, tensor.dtype, tensor.size(), _dense_strides(tensor)))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.segments = [ground.space.add_segment(end)] if end else []
        self.nbytes = end
        self._items = [
            Item(Extent(self.segments[0] if end else 0, end), offset, dtype, size, strides)
            for offset, dtype, size, strides in places
        ]

    def storage(self) -> Any:
        """Their memory."""
        if not self.segments:
            return torch.UntypedStorage(0, device=self._space.device)
        return self._space.storage(self.segments[0], self.nbytes)

    def like(self) -> list[torch.Tensor]:
        """Tensors such as these, in memory of their own."""
        device = self._space.device
        return [torch.empty_strided(item.size, item.stride, dtype=item.dtype, device=device) for item in self._items]

    def are_like(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether others have their strides."""
        return all(
            item.stride == tensor.stride() or strides_of(tensor) == _told(item.size, item.stride)
            for item, tensor in zip(self._items, tensors, strict=True)
        )

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


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its strides, as far as they make a difference."""
    return _told(tensor.size(), tensor.stride())


def _told(size: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    if 0 in size:
        return ()
    return tuple([stride if length != 1 else 0 for length, stride in zip(size, strides, strict=True)])


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor of its size without gaps, in the order of its own where that has none."""
    return torch.empty_like(tensor, device="meta").stride()
