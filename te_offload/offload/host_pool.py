"""Host memory for offloaded bytes: leases, a limit, and the counts of both.

In: numbers of bytes. Out: `Lease` values over uint8 tensors, pinned where the device is a GPU. Keeps true: the live
bytes never pass the limit; a lease is released once (twice is an error). Does not: reuse blocks itself; on a GPU torch's
pinned host allocator does so, and waits for copies that still use a block.
"""

from __future__ import annotations

import torch

from te_offload.errors import StateError
from te_offload.units import format_bytes


class Lease:
    """Some host bytes on loan from a pool."""

    def __init__(self, pool: HostPool, memory: torch.Tensor) -> None:
        self._pool = pool
        self._memory: torch.Tensor | None = memory

    @property
    def memory(self) -> torch.Tensor:
        """The bytes, a uint8 tensor of one dimension.

        Raises:
            StateError: the lease was released.
        """
        if self._memory is None:
            raise StateError("This lease of host memory was released; its bytes may belong to another slot now.")
        return self._memory

    def release(self) -> None:
        """Give the bytes back.

        Raises:
            StateError: they were given back before.
        """
        memory, self._memory = self.memory, None
        self._pool.live_bytes -= memory.numel()


class HostPool:
    """Hands out host memory up to a limit.

    Args:
        limit: bytes that may be live at once; ``None``: no limit.
        pinned: page-locked memory, as copies from and to a GPU need it to be asynchronous.
    """

    def __init__(self, limit: int | None, *, pinned: bool) -> None:
        self.limit = limit
        self.pinned = pinned
        self.live_bytes = 0
        self.peak_bytes = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether a lease of so many bytes would stay within the limit."""
        return self.limit is None or self.live_bytes + nbytes <= self.limit

    def acquire(self, nbytes: int) -> Lease:
        """A lease of exactly ``nbytes`` bytes.

        Raises:
            StateError: the limit forbids it; ask `has_room` first.
        """
        if not self.has_room(nbytes):
            raise StateError(
                f"Host pool: {format_bytes(nbytes)} asked for, but {format_bytes(self.live_bytes)} of a limit of "
                f"{format_bytes(self.limit or 0)} are in use. Raise host_limit, or keep more slots on the GPU."
            )
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return Lease(self, memory)
