"""Memory at addresses for good, where a GPU has no virtual memory.

In: numbers of bytes. Out: the same calls as `virtual.CudaVirtualMemory` has, of plain memory of CUDA's. Keeps true:
addresses have their memory as long as they are reserved. Does not: give anything back before.
"""

from __future__ import annotations

import ctypes
import itertools

import torch

from te_offload.errors import UnsupportedError
from te_offload.offload.cuda_runtime import handled, runtime


class ResidentMemory:
    """See `virtual.VirtualMemory`.

    Args:
        device: where.
    """

    granule = 2 << 20
    mirrors = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = runtime()
        self._numbers = itertools.count(1)
        self._whole: dict[int, int] = {}

    def reserve(self, nbytes: int) -> int:
        """See `VirtualMemory.reserve`."""
        whole = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            code = self._runtime.cudaMalloc(ctypes.byref(whole), ctypes.c_size_t(nbytes + self.granule))
        if code or whole.value is None:
            raise torch.OutOfMemoryError(
                f"No {nbytes} bytes of GPU memory are left for the layers' graphs: {handled(code)}."
            )
        address = -(-whole.value // self.granule) * self.granule
        self._whole[address] = whole.value
        return address

    def free(self, address: int, nbytes: int) -> None:
        """See `VirtualMemory.free`."""
        code = self._runtime.cudaFree(ctypes.c_void_p(self._whole.pop(address)))
        if code:
            raise UnsupportedError(f"cudaFree failed: {handled(code)}.")

    def create(self, nbytes: int) -> int | None:
        """See `VirtualMemory.create`."""
        return next(self._numbers)

    def release(self, memory: int) -> None:
        """See `VirtualMemory.release`."""

    def map(self, address: int, pieces: list[tuple[int, int]]) -> None:
        """See `VirtualMemory.map`."""

    def unmap(self, address: int, nbytes: int) -> None:
        """See `VirtualMemory.unmap`."""
