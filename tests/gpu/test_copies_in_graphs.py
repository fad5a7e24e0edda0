"""Where the copies of a session are in a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_offload.offload.transfer import CudaTransfer

pytestmark = pytest.mark.gpu

MEMCPY = 1  # cudaGraphNodeTypeMemcpy


def _all(call: Callable[..., int], *before: Any) -> list[int]:
    """What a function of the CUDA runtime lists: it is asked for the number, then for the list."""
    count = ctypes.c_size_t()
    empty = [None] * (len(call.argtypes) - len(before) - 1)  # type: ignore[attr-defined]
    assert (error := call(*before, *empty, ctypes.byref(count))) == 0, error
    if not count.value:
        return []
    found = (ctypes.c_void_p * count.value)()
    assert (error := call(*before, found, *empty[1:], ctypes.byref(count))) == 0, error
    return [one or 0 for one in found]


def _order(graph: torch.cuda.CUDAGraph) -> list[list[bool]]:
    """For each node, its successors in their order: whether each is a copy."""
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '0').split('.')[0]}")
    pointer = ctypes.c_void_p
    runtime.cudaGraphGetNodes.argtypes = pointer, pointer, pointer
    runtime.cudaGraphNodeGetDependentNodes.argtypes = pointer, pointer, pointer, pointer
    runtime.cudaGraphNodeGetType.argtypes = pointer, pointer

    def is_copy(node: int) -> bool:
        kind = ctypes.c_int()
        assert runtime.cudaGraphNodeGetType(node, ctypes.byref(kind)) == 0
        return kind.value == MEMCPY

    nodes = _all(runtime.cudaGraphGetNodes, graph.raw_cuda_graph())
    return [
        [is_copy(other) for other in _all(runtime.cudaGraphNodeGetDependentNodes, node)]
        for node in nodes
        if not is_copy(node)
    ]


@pytest.mark.parametrize("way", ["out", "back"])
def test_copy_is_not_the_first_to_follow_the_work_that_it_comes_after(way: str) -> None:
    """Where a copy back was the first one, or one out at a layer's end in te.ops, all copies out were slow."""
    device = torch.device("cuda", torch.cuda.current_device())
    transfer = CudaTransfer(device)
    host = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
    x, back = torch.ones(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        transfer.capture(on=True)
        y = x + 1
        mark = transfer.mark()
        if way == "back":
            copy = transfer.copy_back([(host.data_ptr(), back.data_ptr(), 4 << 20)], (mark,))
        else:
            copy = transfer.copy_out([(y.data_ptr(), host.data_ptr(), 4 << 20)], (mark,))
        z = y * 2
        transfer.block_compute(copy.ended)
        result = back + z
        transfer.capture(on=False)
    forks = [successors for successors in _order(graph) if True in successors]
    assert forks == [[False, True]]
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result.cpu(), host + 4 if way == "back" else torch.full_like(host, 4))
    assert way == "back" or torch.equal(host, torch.full_like(host, 2))
