"""Host memory for offloaded bytes: leases over slabs that stay, a cap, and the counts of both.

In: numbers of bytes. Out: `Lease` values over addresses, page-locked where the device is a GPU. Keeps true: the bytes
held never pass the cap; memory is taken from the system, and page-locked, only while the pool may grow, and no more
than is missing; what does not fit is refused, not an error; a lease is released once (twice is an error). Does not:
wait for copies, except when it gives slabs up; a new lease says which copies its user must come after.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable

import torch

from te_offload.errors import StateError
from te_offload.offload import numa
from te_offload.offload.arena import Arena, Block
from te_offload.offload.cuda_runtime import handled
from te_offload.offload.extents import ALIGNMENT, aligned
from te_offload.offload.transfer import Mark
from te_offload.units import format_bytes


class _Slab:
    """Some memory from the system, exactly as long as asked for, page-locked on request until it goes.

    Raises:
        OSError: the system has no such memory, or does not lock it.
    """

    def __init__(self, nbytes: int, *, pinned: bool, node: int | None) -> None:
        self._unpin: Callable[[], object] | None = None
        # Not through torch's pinned allocator, which rounds up to powers of two. Python's mmap is shared memory: after a
        # fork the pages that the GPU knows stay the parent's.
        self.memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        if node is not None:
            numa.bind(self.address, nbytes, node)
        if pinned:
            error = int(torch.cuda.cudart().cudaHostRegister(self.address, nbytes, 0))
            if error:
                raise OSError(f"CUDA did not page-lock {format_bytes(nbytes)}: {handled(error)}")
            unpin = weakref.finalize(self, _unregister, self.memory)
            unpin.atexit = False  # type: ignore[misc]  # the driver is gone by then
            self._unpin = unpin

    def close(self) -> None:
        """End the page-locking. After the copies that use the memory."""
        if self._unpin is not None:
            self._unpin()


def _unregister(memory: torch.Tensor) -> None:
    error = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    if error:  # the memory goes all the same
        handled(error)


class Lease:
    """Some host bytes on loan from a pool.

    Attributes:
        nbytes: how many, rounded up to 512.
        pieces: where: addresses and lengths, in order.
        pending: copies that may still use the memory; what is done with it must come after these.
    """

    __slots__ = ("_blocks", "_pool", "nbytes", "pending", "pieces")

    def __init__(self, pool: HostPool, blocks: list[Block]) -> None:
        self._pool = pool
        self._blocks: list[Block] | None = blocks
        self.pieces: tuple[tuple[int, int], ...]
        self.pending: tuple[Mark, ...]
        if len(blocks) == 1:
            _, begin, self.nbytes, self.pending = blocks[0]
            self.pieces = ((begin, self.nbytes),)
        else:
            self.nbytes = sum([block.nbytes for block in blocks])
            self.pieces = tuple([(block.begin, block.nbytes) for block in blocks])
            self.pending = tuple([mark for block in blocks for mark in block.pending])

    def release(self, uses: Iterable[Mark] = ()) -> None:
        """Give the bytes back. ``uses``: copies that may still use them.

        Raises:
            StateError: they were given back before.
        """
        if self._blocks is None:
            raise StateError("This lease of host memory was released before.")
        blocks, self._blocks = self._blocks, None
        self._pool.take_back(self.nbytes, blocks, uses)


class HostPool:
    """Hands out host memory up to a cap.

    Args:
        limit: bytes that may be held at once; ``None``: no cap.
        pinned: page-locked memory, as copies from and to a GPU need it to be asynchronous.
        node: the NUMA node that the memory is asked for on; ``None``: wherever the system puts it.

    Attributes:
        live_bytes, peak_bytes: bytes on loan, now and at most.
        allocations: how often memory was taken from the system.
        may_grow: whether memory may be taken from the system when a lease needs it.
        failure: why the system refused memory, if it did; the pool does not ask again.
        last_read: the end of the copy back that was queued last, after all others; the memory goes after it.
        in_graph: a CUDA graph copies from and to the memory, which therefore stays as long as the pool.
    """

    def __init__(self, limit: int | None, *, pinned: bool, node: int | None = None) -> None:
        self.limit = limit
        self.pinned = pinned
        self.node = node
        self.live_bytes = 0
        self.peak_bytes = 0
        self.allocations = 0
        self.may_grow = True
        self.failure: str | None = None
        self.last_read: Mark | None = None
        self.in_graph = False
        self._slabs: list[_Slab] = []
        self._arena = Arena()

    @property
    def held_bytes(self) -> int:
        """Bytes taken from the system."""
        return self._arena.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes held and not on loan."""
        return self._arena.free_bytes

    @property
    def nodes(self) -> set[int]:
        """The NUMA nodes on which its pages lie, as far as sampled; empty if the system does not say."""
        return {node for slab in self._slabs for node in numa.nodes_of(slab.address, slab.memory.numel())}

    def acquire(self, nbytes: int) -> Lease | None:
        """A lease of ``nbytes`` bytes, in several pieces if need be; ``None`` if there is no room.

        Raises:
            StateError: no bytes are asked for.
        """
        if nbytes <= 0:
            raise StateError(f"Host pool: {nbytes} bytes were asked for.")
        blocks = self._arena.take(nbytes)
        if blocks is None:
            if not self.reserve(aligned(nbytes) - self._arena.free_bytes):
                return None
            blocks = self._arena.take(nbytes)
            assert blocks is not None
        lease = Lease(self, blocks)
        self.live_bytes += lease.nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return lease

    def reserve(self, nbytes: int) -> bool:
        """Take ``nbytes`` bytes more from the system; whether the cap, `may_grow` and the system let it."""
        nbytes = aligned(nbytes)
        over = self.limit is not None and self.held_bytes + nbytes > self.limit
        if over or not self.may_grow or self.failure is not None:
            return False
        try:
            slab = _Slab(nbytes, pinned=self.pinned, node=self.node)
        except (OSError, ValueError, RuntimeError) as error:
            self.failure = f"{error}; {format_bytes(self.held_bytes)} are held already"
            return False
        self._slabs.append(slab)
        self._arena.add(slab.address, nbytes)
        self.allocations += 1
        return True

    def take_back(self, nbytes: int, blocks: list[Block], uses: Iterable[Mark]) -> None:
        """For `Lease.release`."""
        self._arena.give(blocks, uses)
        self.live_bytes -= nbytes

    def forget_uses(self) -> None:
        """No copy uses memory that is not on loan, or what comes next is ordered after those that do."""
        self._arena.forget_uses()
        self.last_read = None

    def settle(self, at_least: int = 0) -> None:
        """Between steps: if nothing is on loan and there are several slabs, make one of their size together.

        Args:
            at_least: bytes that the slab has then, as far as the cap and the system let it.
        """
        if self.live_bytes or not self.may_grow:
            return
        held = self.held_bytes
        wanted = aligned(at_least)
        if self.limit is not None:
            wanted = min(wanted, self.limit // ALIGNMENT * ALIGNMENT)
        if held and (wanted > held or len(self._slabs) > 1):
            self.close()
            if not self.reserve(max(wanted, held)):
                refused, self.failure = self.failure, None
                self.reserve(held)
                self.failure = self.failure or refused

    def close(self) -> None:
        """Give all memory back to the system, after the copies that use it; unless a graph uses it.

        Raises:
            StateError: some of it is on loan.
        """
        if self.live_bytes:
            raise StateError(f"Host pool: {format_bytes(self.live_bytes)} are on loan; release them before closing.")
        for mark in (*self._arena.pending(), *((self.last_read,) if self.last_read is not None else ())):
            mark.wait()
        self.last_read = None
        if self.in_graph:
            return
        for slab in self._slabs:
            slab.close()
        self._slabs = []
        self._arena = Arena()
