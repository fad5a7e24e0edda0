"""Copies between the device and the host, what orders them, and what times them.

In: pieces (source address, target address, bytes). Out: `Copy` values, whose `Mark` values can be waited for and timed.
Keeps true: a copy starts after every mark that it is told to come after; the host never blocks, except in `Mark.wait`.
Does not: own memory, or decide.

A GPU has one stream back and two out, which take turns: each waits for the other, so that copies out end in their order, as
on one stream, but what the host asks the GPU for in between waits for the turn that is under way and not for all that is
queued (cuda_queue.c says why). What a copy asks of CUDA goes through compiled code (cuda_queue.py) where there is some,
else through torch and ctypes, which take the host longer; while a CUDA graph is captured through these too, without turns.
On the CPU the same calls copy at once.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from te_offload.offload.cuda_copies import Copier
from te_offload.offload.cuda_queue import new_queue
from te_offload.offload.streams import new_stream

Piece = tuple[int, int, int]  # source address, target address, bytes
_OUT, _BACK = 0, 1  # ways of a queue
_TURN = 32 << 20  # bytes out on one stream before it is the other one's turn; cuda_queue.c has it too


class Mark(Protocol):
    """A moment in the work of a device."""

    def is_over(self) -> bool:
        """Whether it has passed. Never blocks."""

    def wait(self) -> None:
        """Block the host until it has passed."""


class Copy(NamedTuple):
    """One copy: when it began, if it is timed, and ended."""

    began: Mark | None
    ended: Mark


class Transfer(Protocol):
    """Copies out to the host and back.

    Attributes:
        timed: whether the marks made now can be timed. Marks cost the host less if they cannot.
    """

    timed: bool

    def capture(self, *, on: bool) -> None:
        """From now on, until it is turned off, copies become nodes of the CUDA graph that is being captured.

        No mark made before may be waited for while it is on, and none made meanwhile after it.
        """

    def mark(self) -> Mark:
        """The end of the work queued so far on the compute stream."""

    def border(self) -> Callable[[], Mark]:
        """A moment in the CUDA graph that is being captured on the compute stream, for work outside of it to come after.

        Returns:
            makes the mark of that moment in the last replay so far; one for each replay.
        """

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        """Start a copy from the device to the host after some marks, at least one."""

    def copy_back(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        """Start a copy from the host to the device after some marks, at least one."""

    def block_compute(self, mark: Mark) -> None:
        """Make later work of the compute stream wait for a mark. Does not block the host on a GPU."""

    def milliseconds(self, first: Mark, second: Mark) -> float:
        """Time between two marks that have passed and can be timed; negative if the second one passed first."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """A mark of the CPU, where all work is over when the call returns."""

    seconds: float

    def is_over(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class CpuTransfer:
    """Between two pools of CPU memory: each copy is over when the call returns."""

    timed = True

    def capture(self, *, on: bool) -> None:
        """See `Transfer.capture`: a CPU has no graphs."""

    def mark(self) -> Mark:
        """See `Transfer.mark`."""
        return _Moment(time.perf_counter())

    def border(self) -> Callable[[], Mark]:
        """See `Transfer.border`: a CPU has no graphs."""
        return self.mark

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        """See `Transfer.copy_out`."""
        began = self.mark() if self.timed else None
        for source, target, nbytes in pieces:
            ctypes.memmove(target, source, nbytes)
        return Copy(began, self.mark())

    copy_back = copy_out

    def block_compute(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def milliseconds(self, first: Mark, second: Mark) -> float:
        """See `Transfer.milliseconds`."""
        assert isinstance(first, _Moment) and isinstance(second, _Moment)
        return 1e3 * (second.seconds - first.seconds)


class _TorchMark:
    """An event, which goes back to its transfer for later use when nobody asks for the mark any more."""

    __slots__ = ("_pool", "event")

    def __init__(self, event: torch.cuda.Event, pool: list[torch.cuda.Event]) -> None:
        self.event = event
        self._pool = pool

    def is_over(self) -> bool:
        """See `Mark.is_over`."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.event.synchronize()

    def __del__(self) -> None:
        self._pool.append(self.event)


class _CapturedMark:
    """A moment in a graph. When a replay passes it, nobody knows."""

    __slots__ = ("_device", "event")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def is_over(self) -> bool:
        """See `Mark.is_over`."""
        return False

    def wait(self) -> None:
        """Wait for all replays so far."""
        torch.cuda.synchronize(self._device)


class _ReplayedMark:
    """A moment in the last replay of a graph, which records its event anew each time."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_over(self) -> bool:
        """See `Mark.is_over`."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.event.synchronize()


class _Way:
    """One direction: its stream, and the last mark that the stream was told to wait for first.

    Args:
        stream: whose turn it is first. beside: the one that takes turns with it, if one does.
    """

    def __init__(self, stream: torch.cuda.Stream, beside: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self.beside = beside
        self.since = 0  # bytes since the last turn
        self.first: Mark | None = None

    @property
    def handle(self) -> int:
        """Of the stream whose turn it is."""
        return int(self.stream.cuda_stream)

    def take_turns(self) -> None:
        """It is the other stream's turn, if enough has gone on this one: what is next comes after all so far."""
        if self.beside is not None and self.since >= _TURN:
            self.beside.wait_stream(self.stream)
            self.stream, self.beside, self.since = self.beside, self.stream, 0

    def parts(self, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
        """The pieces in order, cut where a turn ends; it is over when the next part is asked for."""
        if self.beside is None:
            yield pieces
            return
        part: list[Piece] = []
        for source, target, nbytes in pieces:
            done = 0
            while done < nbytes:
                if self.since >= _TURN:
                    if part:
                        yield part
                    part = []
                    self.take_turns()
                left = nbytes - done
                length = left if left < _TURN + _TURN // 4 else _TURN  # no rest is much shorter than a turn
                part.append((source + done, target + done, length))
                self.since += length
                done += length
        if part:
            yield part


class CudaTransfer:
    """Between a GPU and page-locked host memory, on one stream back and two out.

    Args:
        device: the GPU. stream: for both ways instead, without turns.
        compiled: whether compiled code is used, where there is some.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None, *, compiled: bool = True) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._out = _Way(stream or new_stream(self._index), None if stream else new_stream(self._index))
        self._back = _Way(stream or new_stream(self._index))
        self._copier = Copier(self._index)
        self.timed = True
        # Those of `torch.cuda.Event` without the Python around them, which takes a quarter of a microsecond each.
        self._record_event = torch._C._CudaEventBase.record
        self._wait_event = torch._C._CudaEventBase.wait
        self._events: dict[bool, list[torch.cuda.Event]] = {True: [], False: []}
        self._compute_streams: dict[int, torch.cuda.Stream] = {}
        self._capturing = False
        beside = 0 if self._out.beside is None else self._out.beside.cuda_stream
        streams = self._out.handle, self._back.handle, beside
        self._compiled = new_queue(self._index, streams, Copy) if compiled else None
        self._queue = self._compiled  # none while a graph is captured

    def capture(self, *, on: bool) -> None:
        """See `Transfer.capture`."""
        self._capturing = on
        self._copier.one_by_one = on  # a graph takes no batches
        self._out.first = self._back.first = None
        if self._compiled is not None:
            self._queue = None if on else self._compiled
            self._compiled.forget()
        if on:
            self.timed = False

    def mark(self) -> Mark:
        """See `Transfer.mark`."""
        if self._queue is not None:
            return self._queue.mark(self.timed)
        return self._record(self._compute())

    def border(self) -> Callable[[], Mark]:
        """See `Transfer.border`."""
        event = torch.cuda.Event(external=True)
        event.record(self._compute())
        return functools.partial(_ReplayedMark, event)

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        """See `Transfer.copy_out`."""
        if self._queue is not None:
            return self._queue.copy(_OUT, pieces, after, self.timed)  # type: ignore[no-any-return]
        return self._copy(self._out, pieces, after)

    def copy_back(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        """See `Transfer.copy_back`."""
        if self._queue is not None:
            return self._queue.copy(_BACK, pieces, after, self.timed)  # type: ignore[no-any-return]
        return self._copy(self._back, pieces, after)

    def block_compute(self, mark: Mark) -> None:
        """See `Transfer.block_compute`."""
        if self._queue is not None:
            self._queue.block_compute(mark)
            return
        self._wait_event(mark.event, self._compute())  # type: ignore[attr-defined]

    def milliseconds(self, first: Mark, second: Mark) -> float:
        """See `Transfer.milliseconds`."""
        if isinstance(first, _TorchMark):
            return float(first.event.elapsed_time(second.event))  # type: ignore[attr-defined]
        return first.milliseconds_to(second)  # type: ignore[attr-defined,no-any-return]

    def _copy(self, way: _Way, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        if not self._capturing:
            way.take_turns()
        known = after[0] is way.first  # the stream waits for it already
        if self._capturing and not known:
            self._continue_compute()
        for mark in after[1:] if known else after:
            self._wait_event(mark.event, way.stream)  # type: ignore[attr-defined]
        way.first = after[0]
        began = self._record(way.stream) if self.timed else None  # not what it comes after: the host may be late
        for part in (pieces,) if self._capturing else way.parts(pieces):
            self._copier.start(part, way.handle)
        return Copy(began, self._record(way.stream))

    def _continue_compute(self) -> None:
        """Have more work of the compute stream follow its last work before a copy does.

        A CUDA graph seems to run a node's first successor where it ran the node, and the others elsewhere. Where a copy was
        the first one, the copies out of the whole forward ran at 49 to 54 GB/s, and at 55 where it was the second
        (docs/results/, graphs).
        """
        torch.zeros(1, device=torch.device("cuda", self._index))

    def _record(self, stream: torch.cuda.Stream) -> Mark:
        if self._capturing:
            return _CapturedMark(stream)
        events = self._events[self.timed]
        event = events.pop() if events else torch.cuda.Event(enable_timing=self.timed)
        self._record_event(event, stream)
        return _TorchMark(event, events)

    def _compute(self) -> torch.cuda.Stream:
        """Torch's current stream; `torch.cuda.current_stream` costs ten times as much."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._compute_streams.get(handle)
        if stream is None:
            stream = self._compute_streams[handle] = torch.cuda.current_stream(self._index)
        return stream


def duration(transfer: Transfer, copy: Copy) -> float:
    """Milliseconds of a timed copy that has ended."""
    assert copy.began is not None
    return transfer.milliseconds(copy.began, copy.ended)


def make_transfer(device: torch.device, stream: torch.cuda.Stream | None = None) -> Transfer:
    """The transfer for a device: `CudaTransfer` (on ``stream``, if given) or `CpuTransfer`."""
    return CudaTransfer(device, stream) if device.type == "cuda" else CpuTransfer()
