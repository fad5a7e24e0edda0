"""Copies and their marks in compiled code: what cuda_queue.c has, seen from Python, and how it gets here.

In: a GPU and streams. Out: a `Queue`, or why there is none. Keeps true: it is built for this Python by the machine's C
compiler, once: Triton, which comes with torch and builds its own launchers so, keeps it in its cache on disk. Does not:
fail: where it cannot be built, torch's calls and those of ctypes do the same, and `te-offload doctor` says why.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from te_offload.errors import CopyError
from te_offload.offload.cuda_runtime import handled, runtime

_FUNCTIONS = (  # in the order of cuda_marks.h
    *("cudaEventCreateWithFlags", "cudaEventDestroy", "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize"),
    *("cudaEventElapsedTime", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaMemcpyBatchAsync"),
    *("cudaGetDevice", "cudaSetDevice", "cudaGetLastError"),
)
_MARKS = '#include "cuda_marks.h"\n'
_BATCH = "cudaMemcpyBatchAsync"  # cuda_copies.py has its signature, that of CUDA 13


class QueueMark(Protocol):
    """A recorded event, for a new mark again when nobody holds this one any more."""

    def is_over(self) -> bool:
        """Whether it has passed. Never blocks."""

    def wait(self) -> None:
        """Block the host until it has passed."""

    def milliseconds_to(self, other: QueueMark) -> float:
        """Time to another mark; both have passed and are timed."""


class Queue(Protocol):
    """Streams of one GPU for copies each way, those out by turns, and the current stream of torch, which computes.

    Every call raises CopyError where the CUDA runtime refuses.
    """

    def mark(self, timed: bool) -> QueueMark:
        """The end of the work queued so far on the compute stream."""

    def block_compute(self, mark: object) -> None:
        """Make later work of the compute stream wait for a mark; a foreign one has a torch event as ``event``."""

    def copy(self, way: int, pieces: Sequence[tuple[int, int, int]], after: tuple[object, ...], timed: bool) -> Any:
        """Start a copy after some marks, at least one.

        Args:
            way: 0 out, 1 back. pieces: source address, target address, bytes.
            after: marks. timed: whether its begin and end can be timed.

        Returns:
            a ``copy_type`` of two: the mark of its begin, ``None`` unless ``timed``, and that of its end.
        """

    def forget(self) -> None:
        """Nothing is known any more of what the streams have waited for: something else happened on them."""


class Built(NamedTuple):
    """The compiled module, or why there is none."""

    module: Any
    reason: str


def new_queue(device: int, streams: tuple[int, int, int], copy_type: type[tuple[Any, ...]]) -> Queue | None:
    """A queue, if there is compiled code.

    Args:
        device: the GPU. streams: handles of the one out, the one back, and the one that copies out by turns with the first;
            0: none does. copy_type: a kind of tuple, made for each copy.
    """
    module = build().module
    if module is None:
        return None
    functions = addresses(runtime(), batches=int((torch.version.cuda or "0").split(".")[0]) >= 13)
    current_stream = torch._C._cuda_getCurrentRawStream
    queue: Queue = module.Queue(functions, device, streams, current_stream, refuse, copy_type)
    return queue


def addresses(library: Any, *, batches: bool) -> tuple[int, ...]:
    """Of the runtime's functions, 0 for the one that copies many at once, unless ``batches``."""
    functions = [getattr(library, name) if batches or name != _BATCH else ctypes.c_void_p() for name in _FUNCTIONS]
    return tuple([ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions])


def refuse(error: int, copies: int, nbytes: int) -> None:
    """Raise an error of the CUDA runtime: of some copies, or of an event where there are none.

    Raises:
        CopyError: always.
    """
    text = handled(error)
    if copies:
        raise CopyError(f"CUDA refused {copies} copies of {nbytes} bytes together, or to order them: {text}.")
    raise CopyError(f"CUDA refused to record, to wait for or to ask an event: {text}.")


@functools.cache
def build() -> Built:
    """Compile cuda_queue.c and cuda_marks.h, or find them in Triton's cache."""
    here = Path(__file__).parent  # Triton compiles one text, in a folder of its own, and knows it by its hash
    source = (here / "cuda_queue.c").read_text().replace(_MARKS, (here / "cuda_marks.h").read_text())
    try:
        from triton.runtime.build import compile_module_from_src

        return Built(compile_module_from_src(source, "te_offload_cuda_queue"), "")
    except (ImportError, OSError, RuntimeError, TypeError, subprocess.SubprocessError) as error:
        return Built(None, f"{type(error).__name__}: {error}")
