"""Host memory for offloaded bytes: leases over slabs that stay, a limit, and the counts of both.

In: numbers of bytes. Out: `Lease` values over uint8 tensors, page-locked where the device is a GPU. Keeps true: the live
bytes never pass the limit; memory is taken from the system, and page-locked, only when no slab has room, and between
steps the slabs become one of their size together; a lease is released once (twice is an error). Does not: wait for
copies, except when it gives slabs up; a new lease says which copies its user must come after.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable

import torch

from te_offload.errors import StateError
from te_offload.offload.arena import Arena, Block, aligned
from te_offload.offload.transfer import Done
from te_offload.units import format_bytes


class _Slab:
    """Some memory from the system, exactly as long as asked for, page-locked on request until it goes."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.arena = Arena(nbytes)
        self._unpin: Callable[[], object] | None = None
        if pinned:  # not through torch's pinned allocator, which rounds up to powers of two
            self.memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            _check(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0), "page-lock", nbytes)
            unpin = weakref.finalize(self, _unregister, self.memory)
            unpin.atexit = False  # type: ignore[misc]  # the driver is gone by then
            self._unpin = unpin
        else:
            self.memory = torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """End the page-locking, after the copies that use the memory."""
        for done in self.arena.pending():
            done.wait()
        if self._unpin is not None:
            self._unpin()


def _check(error: object, what: str, nbytes: int) -> None:
    if int(error) != 0:  # type: ignore[call-overload]
        raise StateError(
            f"Host pool: could not {what} {format_bytes(nbytes)} (CUDA error {int(error)}). "  # type: ignore[call-overload]
            "Lower host_limit, or raise the machine's limit of locked memory (ulimit -l)."
        )


def _unregister(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class Lease:
    """Some host bytes on loan from a pool.

    Attributes:
        nbytes: how many.
        pending: copies that may still use the memory; what is done with it must come after these.
    """

    def __init__(self, pool: HostPool, slab: _Slab, block: Block, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pending = block.pending
        self._pool = pool
        self._slab: _Slab | None = slab
        self._block = block

    @property
    def memory(self) -> torch.Tensor:
        """The bytes, a uint8 tensor of one dimension.

        Raises:
            StateError: the lease was released.
        """
        if self._slab is None:
            raise StateError("This lease of host memory was released; its bytes may belong to another slot now.")
        return self._slab.memory[self._block.offset : self._block.offset + self.nbytes]

    def release(self, uses: Iterable[Done] = ()) -> None:
        """Give the bytes back. ``uses``: copies that may still use them.

        Raises:
            StateError: they were given back before.
        """
        if self._slab is None:
            raise StateError("This lease of host memory was released before.")
        slab, self._slab = self._slab, None
        slab.arena.give(self._block, uses)
        self._pool.live_bytes -= self.nbytes


class HostPool:
    """Hands out host memory up to a limit.

    Args:
        limit: bytes that may be live at once; ``None``: no limit.
        pinned: page-locked memory, as copies from and to a GPU need it to be asynchronous.

    Attributes:
        live_bytes, peak_bytes: bytes on loan, now and at most.
        allocations: how often memory was taken from the system.
    """

    def __init__(self, limit: int | None, *, pinned: bool) -> None:
        self.limit = limit
        self.pinned = pinned
        self.live_bytes = 0
        self.peak_bytes = 0
        self.allocations = 0
        self._slabs: list[_Slab] = []

    @property
    def held_bytes(self) -> int:
        """Bytes taken from the system."""
        return sum(slab.arena.nbytes for slab in self._slabs)

    def has_room(self, nbytes: int) -> bool:
        """Whether a lease of so many bytes would stay within the limit."""
        return self.limit is None or self.live_bytes + nbytes <= self.limit

    def acquire(self, nbytes: int) -> Lease:
        """A lease of exactly ``nbytes`` bytes.

        Raises:
            StateError: the limit forbids it (ask `has_room` first), or the system has no memory to page-lock.
        """
        if not self.has_room(nbytes):
            raise StateError(
                f"Host pool: {format_bytes(nbytes)} asked for, but {format_bytes(self.live_bytes)} of a limit of "
                f"{format_bytes(self.limit or 0)} are in use. Raise host_limit, or keep more slots on the GPU."
            )
        for slab in self._slabs:
            block = slab.arena.take(nbytes)
            if block is not None:
                break
        else:
            slab = self._grow(aligned(nbytes))
            block = slab.arena.take(nbytes)
        assert block is not None
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return Lease(self, slab, block, nbytes)

    def settle(self) -> None:
        """Between steps: if nothing is on loan and there are several slabs, make one of their size together."""
        if self.live_bytes == 0 and len(self._slabs) > 1:
            nbytes = self.held_bytes
            self.close()
            self._grow(nbytes)

    def close(self) -> None:
        """Give all memory back to the system, after the copies that use it.

        Raises:
            StateError: some of it is on loan.
        """
        if self.live_bytes:
            raise StateError(f"Host pool: {format_bytes(self.live_bytes)} are on loan; release them before closing.")
        for slab in self._slabs:
            slab.close()
        self._slabs = []

    def _grow(self, nbytes: int) -> _Slab:
        slab = _Slab(nbytes, pinned=self.pinned)
        self._slabs.append(slab)
        self.allocations += 1
        return slab
