"""CUDA streams of our own, made one at a time.

In: a GPU. Out: a stream that nobody else is given while it lives. Keeps true: a stream is never destroyed, since torch's
allocator knows memory by the stream it was used on; one that nobody holds is given out again. Does not: order anything.

The first `torch.cuda.Stream()` of a process makes all streams that torch will ever give out, 32 of each priority, and these
take memory of the GPU: `docs/results/` has how much.
"""

from __future__ import annotations

import ctypes
import functools
import weakref

import torch

from te_offload.offload.cuda_runtime import handled, runtime

_NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered with the default stream


def new_stream(device: int) -> torch.cuda.Stream:
    """A stream of a GPU, given by its index.

    Raises:
        RuntimeError: the CUDA runtime made none.
    """
    spare = _spare(device)
    try:
        handle = spare.pop()
    except IndexError:
        handle = _create(device)
    stream = torch.cuda.ExternalStream(handle, device=torch.device("cuda", device))
    # Not of the stream itself: torch 2.11 frees its memory without a word to weak references, which then read freed memory.
    stream.life = _Life()  # type: ignore[attr-defined]
    weakref.finalize(stream.life, spare.append, handle).atexit = False  # type: ignore[attr-defined,misc]
    return stream


class _Life:
    """Gone with the stream that holds it."""


@functools.cache
def _spare(device: int) -> list[int]:
    """Handles of this process that nobody holds."""
    return []


def _create(device: int) -> int:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        error = runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING))
    if error or not handle.value:
        raise RuntimeError(f"CUDA made no stream on GPU {device}: {handled(error)}.")
    return handle.value
