"""Puts torch right after a capture that failed.

In: the graph that never came to be. Out: nothing. Keeps true: afterwards allocations go where they went before, the graph's
memory can be given back, and random numbers can be drawn. Does not: know why it failed.

`CUDAGraph.capture_end` raises as soon as CUDA says that the capture is broken, before it has told the allocator and the
generators that the capture is over (torch 2.11): all that is allocated later would stay in the graph's pool, and the next
random number would be an error ("Offset increment outside graph capture encountered unexpectedly").
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch


def recover(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any, generators: Sequence[torch.Generator]
) -> None:
    """End what a failed capture left open.

    Args:
        graph: the one that failed. stream: on which it was captured. pool: its memory; ``None`` if it never began.
        generators: that were registered with it, beside the GPU's own.
    """
    if pool is not None and not _knows_its_end(graph):
        with contextlib.suppress(RuntimeError):  # unless it had come so far
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    graph.reset()
    spare = torch.cuda.CUDAGraph()  # whose end is the generators' too
    for generator in generators:
        spare.register_generator_state(generator)
    with torch.cuda.stream(stream):
        spare.capture_begin(capture_error_mode="thread_local")
        torch.empty(1, device=stream.device).zero_()  # torch warns of an empty graph
        spare.capture_end()
    spare.reset()


def _knows_its_end(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether ``reset`` gives the graph's pool back."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True
