"""Moves cargos: out to the host, back to the device, and away; and counts the bytes while doing so.

In: cargos. Out: device memory for them. Keeps true: every copy out comes after its producer, every copy back after its
own copy out and after the work that may still use its new memory; a saved tensor is held until its copy out is over;
bytes held only for a copy out stay within the bound (the compute stream waits for the oldest copy first), but for one
cargo; beside what was read before it had left, the bytes of the forward that is read next count too. Does not: choose
what moves, or when it comes back (returns.py does).
"""

from __future__ import annotations

import collections
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from te_offload.offload.cargo import Cargo
from te_offload.offload.extents import ALIGNMENT
from te_offload.offload.host_pool import HostPool
from te_offload.offload.saved import let_go
from te_offload.offload.states import KEPT, LEAVING, ON_HOST, RELEASED, RETURNED, RETURNING
from te_offload.offload.timeline import Departures, Key
from te_offload.offload.transfer import Mark, Transfer

_current_backward = torch._C._current_graph_task_id  # which backward this thread is in
_NO_BACKWARD = -1


class Counts:
    """Bytes and copies of one step, the resident bytes over it, and the waits of the compute stream."""

    def __init__(self) -> None:
        self.bytes_out = 0
        self.bytes_back = 0
        self.copies_out = 0
        self.copies_back = 0
        self.peak_in_flight = 0
        self.peak_ahead = 0
        self.resident = 0
        self.residency: list[tuple[str, int]] = [("step begins", 0)]
        self.throttles: list[tuple[Mark, Mark]] = []  # where the compute stream was, and which copy it waited for


class Home(Protocol):
    """Addresses to which tensors come back."""

    def place_of(self, begin: int, nbytes: int) -> Callable[[], torch.Tensor | None] | None:
        """To be asked while a tensor lies at some addresses, which may be others' once it is gone.

        Returns:
            if they are the home's: gives them, as a tensor of bytes that work queued from then on may write, or ``None``
            if they are the home's no more.
        """


class _Collections:
    """Follows Python's garbage collector, which may run in the middle of anything, and on any thread.

    Attributes:
        thread: on which it runs now.
    """

    def __init__(self) -> None:
        self.thread: int | None = None

    def __call__(self, phase: str, _: object) -> None:
        """For ``gc.callbacks``."""
        self.thread = threading.get_ident() if phase == "start" else None


class Mover:
    """Executes copies for one session.

    Args:
        device: where the saved tensors are. pool: host memory. transfer: who copies.

    Attributes:
        max_in_flight: most bytes on the device that wait for nothing but the end of their copy out.
        in_flight: how many do now.
        thread: that of the step.
        knows_ends: whether the end of a copy can be asked for: not while a CUDA graph is captured.
        homes: of tensors that come back to the addresses where they were.
        departures: by when copies out are over; ``None``: when the host sees that they are.
        holds: whether a plan needs them for its limit of the device: they count while a CUDA graph is captured too, and
            memory is let go of no sooner either, so that each step of it holds as much as the others.
        reused: how often host memory was given back for which the compute stream has waited, and the stream of copies out
            only will where it waits for a later moment of that.
    """

    def __init__(self, device: torch.device, pool: HostPool, transfer: Transfer, max_in_flight: int) -> None:
        self.device = device
        self.pool = pool
        self.transfer = transfer
        self.max_in_flight = max_in_flight
        self.counts = Counts()
        self.in_flight = 0
        self.reused = 0
        self.thread = threading.get_ident()
        self.knows_ends = True
        self.homes: list[Home] = []
        self.departures: Departures | None = None
        self.holds = False
        self._in_use: Cargo | None = None  # given out last, and used by an op that may not be over
        self._leaving: collections.deque[Cargo] = collections.deque()
        self._unreachable: collections.deque[Cargo] = collections.deque()  # what nobody holds, released later
        self._collections = _Collections()
        gc.callbacks.append(self._collections)
        weakref.finalize(self, gc.callbacks.remove, self._collections).atexit = False  # type: ignore[misc]
        # NVTX ranges, named by the slot, around what queues its copies. NVTX itself looks at this variable, which profilers
        # set, and does nothing without it.
        self._ranges = device.type == "cuda" and "NVTX_INJECTION64_PATH" in os.environ

    def keep(self, cargo: Cargo) -> None:
        """The cargo stays on the device."""
        cargo.move(KEPT)
        self._count(cargo)

    def send_out(self, cargo: Cargo, sources: Sequence[torch.Tensor]) -> None:
        """Start the copy out of a cargo, whose lease and whose `ready` mark are there, from its tensors."""
        assert cargo.lease is not None and cargo.ready is not None
        cargo.sources = sources
        if self.homes:
            self._note_homes(cargo)
        if self._ranges:
            torch.cuda.nvtx.range_push(f"{cargo.name} out")
        try:
            cargo.out = self.transfer.copy_out(cargo.pieces_out(), (cargo.ready, *cargo.lease.pending))
        finally:
            if self._ranges:
                torch.cuda.nvtx.range_pop()
        cargo.move(LEAVING)
        self._count(cargo)
        self._leaving.append(cargo)
        self.in_flight += cargo.copied
        counts = self.counts
        if self.in_flight > counts.peak_in_flight:
            counts.peak_in_flight = self.in_flight
        counts.bytes_out += cargo.copied
        counts.copies_out += len(cargo.runs)

    def settle(self, after: Key | None = None) -> None:
        """Let go of device memory whose copy out is over, now or when the compute stream gets here, or must be waited for
        to stay within the bound.

        Args:
            after: the forward that ends here, if one does.
        """
        place = None
        if after is not None and self.departures is not None and (self.knows_ends or self.holds):
            place = self.departures.after.get(after)
        while self._leaving:
            cargo = self._leaving[0]
            assert cargo.out is not None
            cargo.left = cargo.out.ended.is_over()
            over = place is not None and cargo.over_at <= place
            stays = self.holds and place is not None and cargo.over_at < math.inf  # until its place, if there is room
            fits = self.in_flight <= self.max_in_flight or len(self._leaving) == 1
            if not over and (stays or not cargo.left) and fits:
                break
            if not cargo.left:
                self._block_for_room(cargo.out.ended)
            self._leaving.popleft()
            self._let_go(cargo)

    def settle_recalled(self, room: int | None = None) -> None:
        """Let go of what was recalled and read by now and whose copy out is over, oldest first.

        Args:
            room: bytes of it that may stay; for more than those the compute stream waits. ``None``: it waits for none.
        """
        read = [cargo for cargo in self._leaving if cargo.state is RELEASED]
        held = sum([cargo.copied for cargo in read])
        for cargo in read:
            assert cargo.out is not None
            if not cargo.out.ended.is_over():  # nor are those after it: copies out end in their order
                if room is None or held <= room:
                    break
                self._block_for_room(cargo.out.ended)
            held -= cargo.copied
            if cargo in self._leaving:  # what was let go before it may have held the last graph of another one
                self._leaving.remove(cargo)
                self._let_go(cargo)

    def _block_for_room(self, ended: Mark) -> None:
        """The compute stream waits for a copy out, so that the memory that it reads may be used."""
        if self.transfer.timed:
            self.counts.throttles.append((self.transfer.mark(), ended))
        self.transfer.block_compute(ended)

    def let_go(self, cargo: Cargo) -> None:
        """Let go of one cargo's device memory, after its copy out."""
        if cargo in self._leaving:
            assert cargo.out is not None
            self._block_for_room(cargo.out.ended)
            self._leaving.remove(cargo)
            self._let_go(cargo)

    def drain(self) -> None:
        """Let go of all device memory that a copy out reads; the compute stream waits for those copies."""
        while self._leaving:
            self.let_go(self._leaving[0])
        self.finish_use()

    def _let_go(self, cargo: Cargo) -> None:
        self.in_flight -= cargo.copied
        cargo.sources = None
        if cargo.state is LEAVING:
            let_go([reference() for reference in cargo.users])
            cargo.move(ON_HOST)
            self._uncount(cargo, "copied out")
        elif cargo.state is RELEASED:
            self._uncount(cargo, "copied out for nobody")

    def start_back(self, cargo: Cargo, free: Mark) -> None:
        """Start to bring a cargo back, unless that was started, or there is nothing to bring. What has not left the
        device yet stays there.

        Args:
            cargo: the cargo.
            free: the mark after which memory allocated now may be written.
        """
        if cargo.state is LEAVING:
            self.recall(cargo)
        if cargo.state is not ON_HOST:
            return
        assert cargo.out is not None
        for lot in cargo.lots:
            lot.allocate(self.device)
        if torch.are_deterministic_algorithms_enabled():
            free = self.transfer.mark()  # new memory was filled with NaN, on the compute stream and after `free`
        if self._ranges:
            torch.cuda.nvtx.range_push(f"{cargo.name} back")
        try:
            after = (free,) if cargo.left else (free, cargo.out.ended)
            cargo.back = self.transfer.copy_back(cargo.pieces_back(), after)
        finally:
            if self._ranges:
                torch.cuda.nvtx.range_pop()
        self.pool.last_read = cargo.back.ended
        cargo.move(RETURNING)
        self._count(cargo)
        counts = self.counts
        counts.residency.append(("coming back", counts.resident))
        counts.bytes_back += cargo.copied
        counts.copies_back += len(cargo.runs)

    def _note_homes(self, cargo: Cargo) -> None:
        """What a layer's graph has saved will come back to where the graph reads it."""
        for (address, nbytes), (lot, begin) in zip(cargo.runs, cargo.places, strict=True):
            if lot.nbytes == begin + nbytes and begin < ALIGNMENT:  # nothing else is in the lot
                places = [home.place_of(address - begin, lot.nbytes) for home in self.homes]
                lot.home = next((place for place in places if place is not None), None)

    def recall(self, cargo: Cargo) -> None:
        """The backward needs what has not left the device yet: its tensors stay."""
        cargo.recalled = True
        cargo.move(RETURNED)

    def bring_back(self, cargo: Cargo) -> None:
        """Make a cargo's bytes ready for work queued from now on; starts the copy if nobody did."""
        if cargo.state is ON_HOST or cargo.state is LEAVING:
            self.start_back(cargo, self.transfer.mark())
        if cargo.state is RETURNING:
            assert cargo.back is not None
            cargo.asked = True
            ended = cargo.back.ended
            if not self.transfer.timed:  # to ask whether it is over takes the host as long as to wait for it
                self.transfer.block_compute(ended)
            elif ended.is_over():
                cargo.needed = ended
            else:
                cargo.needed = self.transfer.mark()
                self.transfer.block_compute(ended)
            cargo.move(RETURNED)

    def nobody_left(self, cargo: Cargo, _: object) -> None:
        """Nobody can ask for a cargo any more: release it; but not from within a garbage collection, which may have
        interrupted this object anywhere, nor on a thread that is neither the step's nor in a backward, beside whatever
        those do: then when the next forward is decided on, or the step ends.
        """
        thread = threading.get_ident()
        if thread == self._collections.thread or (thread != self.thread and _current_backward() == _NO_BACKWARD):
            self._unreachable.append(cargo)
        else:
            self.release(cargo)

    def release_unreachable(self) -> None:
        """Release what garbage collections and other threads have let go of."""
        while self._unreachable:
            self.release(self._unreachable.popleft())

    def release(self, cargo: Cargo) -> None:
        """Give back what a cargo holds on either side. Does nothing for a cargo that was released."""
        if cargo.state is RELEASED:
            return
        if cargo.state is LEAVING:
            cargo.move(ON_HOST)  # `settle` holds the tensors until the copy is over
        if cargo.state is RETURNING:
            assert cargo.back is not None
            self.transfer.block_compute(cargo.back.ended)  # nobody will read it, but its memory is being written
            cargo.move(RETURNED)
        if cargo.lease is not None:
            if cargo.back is not None:  # the compute stream has waited for it, and the lease's next user waits for that
                cargo.lease.release()
                self.reused += 1
            else:
                cargo.lease.release(() if cargo.out is None else (cargo.out.ended,))
            cargo.lease = None
        back = [lot for lot in cargo.lots if lot.memory is not None]
        for lot in back:
            lot.let_go()
        for reference in cargo.users if back else ():
            user = reference()
            if user is not None:
                user.forget_memory()
        cargo.watch, cargo.users = None, ()  # which refer to the cargo
        cargo.move(RELEASED)
        if cargo.sources is None:
            self.finish_use()  # of two that are given out to one op
            self._in_use = cargo
        if self._leaving:
            self.settle_recalled()

    def begin_use(self) -> None:
        """A slot is being given out."""
        self.finish_use()
        self.note("taken")

    def finish_use(self) -> None:
        """The op that was given a cargo last is over: it counts no more."""
        used, self._in_use = self._in_use, None
        if used is not None:
            self._uncount(used, "used")

    def _count(self, cargo: Cargo) -> None:
        if not cargo.counted:
            cargo.counted = True
            self.counts.resident += cargo.nbytes

    def _uncount(self, cargo: Cargo, label: str) -> None:
        if cargo.counted:
            cargo.counted = False
            counts = self.counts
            counts.resident -= cargo.nbytes
            counts.residency.append((label, counts.resident))

    def note(self, label: str) -> None:
        """Write down how many bytes are on the device, and what has just happened."""
        self.counts.residency.append((label, self.counts.resident))
