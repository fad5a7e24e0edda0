"""Captures and replays: the one place that calls CUDA's graphs.

In: a function without arguments. Out: a `Recording`. Keeps true: whatever happens while capturing, afterwards the current
stream and Python's garbage collector are what they were, and nothing is being captured. Does not: know inputs or outputs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from te_offload.graphs.recovery import recover
from te_offload.offload.allocator import is_native
from te_offload.offload.streams import new_stream

Function = Callable[[], Any]


class Recording(Protocol):
    """A captured function."""

    def replay(self) -> None:
        """Run it on the current stream."""

    def close(self) -> None:
        """Give its memory back. Idempotent."""


class Backend(Protocol):
    """Where functions are captured."""

    device: torch.device

    def in_capture(self) -> bool:
        """Whether someone else captures the current stream."""

    def warm_up(self, function: Function) -> Any:
        """Run it, not captured, on the stream on which it is, or would be, captured; the current stream waits for it."""

    def record(self, function: Function, generators: Sequence[torch.Generator]) -> tuple[Recording, Any]:
        """Capture it; what it returned, whose memory is the recording's, comes too."""

    def wait_for(self, producer: Any) -> None:
        """Have the current stream wait for a stream or an event."""

    def settle(self) -> None:
        """Wait until the device has done all that was asked of it."""


class Pool:
    """Memory that several captures share, which must then be replayed in the order in which they were captured.

    They are captured on the thread's capture stream: torch's allocator gives memory out again only on the stream it was
    made for, and cuBLAS keeps a workspace (64 MiB on an H200) for each stream that it has seen.

    Args:
        handle: of a pool of torch's; ``None``: a new one. keeper: keeps its memory as long as this object lives.
    """

    def __init__(self, handle: Any = None, keeper: object = None) -> None:
        self.handle = handle
        self._given = handle is not None
        self._keeper = keeper
        self._graphs = 0
        self._stream: torch.cuda.Stream | None = None

    def take_handle(self) -> Any:
        """For a capture; made if there is none."""
        if self.handle is None:
            self.handle = torch.cuda.graph_pool_handle()
        return self.handle

    def graph_came(self) -> None:
        """A graph has memory of it now."""
        self._graphs += 1

    def graph_went(self) -> None:
        """A graph was taken down, or a capture failed. torch gives up a pool with its last graph, and takes its handle no
        more as long as anything that was made in it lives.
        """
        self._graphs = max(self._graphs - 1, 0)
        if not self._graphs and not self._given:
            self.handle = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The one on which its captures are made."""
        if self._stream is None:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._stream = _capture_stream(index, threading.get_ident())
        return self._stream

    @classmethod
    def kept(cls, device: torch.device) -> Pool:
        """A new one whose memory stays as long as this object, also when its graphs are gone. An empty one where none are
        captured (`check_captures`).
        """
        if device.type != "cuda" or not is_native():
            return cls()
        keeper = torch.cuda.MemPool()
        return cls(keeper.id, keeper)


@functools.cache
def _capture_stream(index: int, thread: int) -> torch.cuda.Stream:
    """Of a GPU and a thread: another thread's warm-up must not run into a capture."""
    return new_stream(index)


class CudaBackend:
    """See `Backend`.

    Args:
        device: a GPU. pool: memory shared with other captures; ``None``: its own.
        stream: on which functions are captured; ``None``: the pool's.
    """

    def __init__(self, device: torch.device, pool: Pool | None, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self._pool = pool if pool is not None else Pool()
        self._stream = stream if stream is not None else self._pool.stream(device)

    def in_capture(self) -> bool:
        """See `Backend.in_capture`."""
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, function: Function) -> Any:
        """See `Backend.warm_up`."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return function()
        finally:
            current.wait_stream(self._stream)

    def record(self, function: Function, generators: Sequence[torch.Generator]) -> tuple[CudaRecording, Any]:
        """See `Backend.record`."""
        handle = self._pool.take_handle()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # a capture cannot give back what warm-up runs left in torch's cache
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        began = False
        try:
            with _no_garbage_collection(), torch.cuda.stream(self._stream):
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                began = True
                try:
                    result = function()
                except BaseException as error:
                    try:
                        graph.capture_end()
                    except RuntimeError as second:  # broken already, by what is being raised
                        if sys.version_info >= (3, 11):
                            error.add_note(f"Ending the capture then failed too: {second}")
                    raise
                graph.capture_end()
        except BaseException:
            recover(graph, self._stream, handle if began else None, generators)
            self._pool.graph_came()
            self._pool.graph_went()
            raise
        self._pool.graph_came()
        return CudaRecording(graph, self._pool), result

    def wait_for(self, producer: Any) -> None:
        """See `Backend.wait_for`."""
        current = torch.cuda.current_stream(self.device)
        if isinstance(producer, torch.cuda.Stream):
            current.wait_stream(producer)
        else:
            current.wait_event(producer)

    def settle(self) -> None:
        """See `Backend.settle`."""
        torch.cuda.synchronize(self.device)


class CudaRecording:
    """See `Recording`. ``pool``: where its memory is."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool

    def replay(self) -> None:
        """See `Recording.replay`."""
        assert self._graph is not None
        self._graph.replay()

    def close(self) -> None:
        """See `Recording.close`."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()
            self._pool.graph_went()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection could free what CUDA must not free while it captures."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
