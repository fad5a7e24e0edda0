"""Memory at addresses for good, where a GPU has no virtual memory.

In: numbers of bytes. Out: the same calls as `virtual.CudaVirtualMemory` has, of memory of torch's allocator. Keeps true:
addresses have their memory as long as they are reserved. Does not: give anything back before.
"""

from __future__ import annotations

import torch


class ResidentMemory:
    """See `virtual.VirtualMemory`.

    Args:
        device: where.
    """

    granule = 2 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved: dict[int, torch.Tensor] = {}

    def reserve(self, nbytes: int) -> int:
        """See `VirtualMemory.reserve`."""
        whole = torch.empty(nbytes + self.granule, dtype=torch.uint8, device=self._device)
        address = -(-whole.data_ptr() // self.granule) * self.granule
        self._reserved[address] = whole
        return address

    def free(self, address: int, nbytes: int) -> None:
        """See `VirtualMemory.free`."""
        del self._reserved[address]

    def create(self, nbytes: int) -> int | None:
        """See `VirtualMemory.create`."""
        return 0

    def release(self, memory: int) -> None:
        """See `VirtualMemory.release`."""

    def map(self, address: int, pieces: list[tuple[int, int]]) -> None:
        """See `VirtualMemory.map`."""

    def unmap(self, address: int, nbytes: int) -> None:
        """See `VirtualMemory.unmap`."""
