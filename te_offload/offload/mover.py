"""Moves chunks: out to the host, back to the device, and away; and counts the bytes while doing so.

In: chunks. Out: device memory for them. Keeps true: bytes held only for a copy out stay within `max_in_flight` (the
compute stream waits for the oldest copy first); device memory that a copy still reads or writes is not freed before the
compute stream waits for that copy. Does not: choose chunks, or know slots.
"""

from __future__ import annotations

import collections

import torch

from te_offload.offload.chunk import Chunk, Residence, version_of
from te_offload.offload.host_pool import HostPool
from te_offload.offload.record import Residency
from te_offload.offload.transfer import make_transfer


class Counts:
    """Bytes and copies of one step, and the resident bytes over it."""

    def __init__(self) -> None:
        self.bytes_out = 0
        self.bytes_back = 0
        self.copies_out = 0
        self.copies_back = 0
        self.peak_in_flight = 0
        self.resident = 0
        self.residency: list[Residency] = [Residency("step begins", 0)]


class Mover:
    """Executes copies for one session.

    Args:
        device: where the saved tensors are.
        host_limit: most bytes of host memory; ``None``: no limit.
        max_in_flight: most bytes on the device that wait for nothing but the end of their copy out.
    """

    def __init__(self, device: torch.device, host_limit: int | None, max_in_flight: int) -> None:
        self.device = device
        self.pool = HostPool(host_limit, pinned=device.type == "cuda")
        self.counts = Counts()
        self._transfer = make_transfer(device)
        self._max_in_flight = max_in_flight
        self._leaving: collections.deque[Chunk] = collections.deque()
        self._in_flight = 0

    def send_out(self, chunk: Chunk, storage: torch.UntypedStorage) -> None:
        """Start the copy out of a chunk of ``storage``."""
        source = chunk.interval.bytes_of(storage)
        chunk.lease = self.pool.acquire(chunk.interval.nbytes)
        chunk.out_done = self._transfer.copy_out(source, chunk.lease.memory, after=chunk.lease.pending)
        chunk.source = source
        chunk.move(Residence.LEAVING)
        self._leaving.append(chunk)
        self._in_flight += chunk.interval.nbytes
        self.counts.bytes_out += chunk.interval.nbytes
        self.counts.copies_out += 1

    def settle(self) -> None:
        """Let go of device memory whose copy out has ended, or must be waited for to stay within the bound."""
        while self._leaving:
            chunk = self._leaving[0]
            if chunk.residence is Residence.LEAVING:
                assert chunk.out_done is not None
                if self._in_flight <= self._max_in_flight and not chunk.out_done.is_over():
                    break
                self._finish_out(chunk)
            self._leaving.popleft()
        self.counts.peak_in_flight = max(self.counts.peak_in_flight, self._in_flight)

    def _finish_out(self, chunk: Chunk) -> None:
        assert chunk.out_done is not None
        chunk.out_done.block_compute()
        chunk.modified = any(version_of(tensor) != version for tensor, version in chunk.versions)
        chunk.versions.clear()
        chunk.source = None
        chunk.move(Residence.ON_HOST)
        self._in_flight -= chunk.interval.nbytes
        self.uncount(chunk, "copied out")

    def start_back(self, chunk: Chunk) -> None:
        """Start the copy back of a chunk, unless it is on its way, back, or gone."""
        if chunk.residence is Residence.LEAVING:
            self._finish_out(chunk)
        if chunk.residence is not Residence.ON_HOST:
            return
        assert chunk.lease is not None and chunk.out_done is not None
        chunk.memory = torch.empty(chunk.interval.nbytes, dtype=torch.uint8, device=self.device)
        chunk.back_done = self._transfer.copy_back(chunk.lease.memory, chunk.memory, after=chunk.out_done)
        chunk.move(Residence.RETURNING)
        self.count(chunk)
        self.note("coming back")
        self.counts.bytes_back += chunk.interval.nbytes
        self.counts.copies_back += 1

    def bring_back(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's bytes on the device, ready for work queued from now on; started now if not before."""
        self.start_back(chunk)
        if chunk.residence is Residence.RETURNING:
            assert chunk.back_done is not None
            chunk.back_done.block_compute()
            chunk.move(Residence.RETURNED)
        assert chunk.memory is not None
        return chunk.memory

    def hand_over(self, chunk: Chunk, *, first: bool) -> None:
        """A user has its tensor (``first``: for the first time). With the last one only those tensors hold the memory."""
        chunk.untaken -= first
        if chunk.untaken == 0 and chunk.residence is Residence.RETURNED:
            chunk.memory = None
            chunk.move(Residence.ON_HOST)

    def release(self, chunk: Chunk) -> None:
        """Give back what a chunk holds on either side. Does nothing for a chunk that was released."""
        if chunk.residence is Residence.RELEASED:
            return
        if chunk.residence is Residence.LEAVING:
            self._finish_out(chunk)
        if chunk.residence is Residence.RETURNING:
            self.bring_back(chunk)  # nobody will read it, but its memory may be freed only after the copy
        if chunk.lease is not None:
            chunk.lease.release([done for done in (chunk.out_done, chunk.back_done) if done is not None])
            chunk.lease = None
        chunk.memory = None
        self.uncount(chunk, "released")
        chunk.move(Residence.RELEASED)

    def user_died(self, chunk: Chunk) -> None:
        """One handle of the chunk left the autograd graph; with the last one the chunk is released."""
        chunk.alive -= 1
        if chunk.alive == 0:
            self.release(chunk)
            chunk.users.clear()

    def count(self, chunk: Chunk) -> None:
        """The chunk's bytes are on the device now."""
        if not chunk.counted:
            chunk.counted = True
            self.counts.resident += chunk.interval.nbytes

    def uncount(self, chunk: Chunk, label: str) -> None:
        """The chunk's bytes are no longer on the device."""
        if chunk.counted:
            chunk.counted = False
            self.counts.resident -= chunk.interval.nbytes
            self.note(label)

    def note(self, label: str) -> None:
        """Write down how many bytes are on the device, and what has just happened."""
        self.counts.residency.append(Residency(label, self.counts.resident))
