"""Numbers of the GPU on the host, past the copies that are on their way there.

In: a tensor of a few numbers. Out: what its `tolist` gives. Keeps true: the host waits for the work that is queued on the
current stream, as `tolist` does, and for nothing else. A kernel writes the numbers into page-locked memory, where `tolist`
has the GPU's copy engine bring them, which first does what is queued on it, up to all that a session or another engine has
on its way out (docs/results/, offload). Does not: know other numbers than int32, int64, float32: `tolist` then.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

_TYPES = {torch.int32: "<i4", torch.int64: "<i8", torch.float32: "<f4"}  # as NumPy's array interface names them
_PLAIN = torch.Tensor, torch.nn.Parameter
_MOST = 4096  # numbers, since the page-locked memory of each shape is kept


class _OnGpu:
    """Page-locked memory as the GPU sees it, for `torch.as_tensor`: at the same address (CUDA's unified addressing)."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": _TYPES[host.dtype],
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def numbers_on_host(tensor: torch.Tensor) -> Any:
    """`tensor.tolist()`, without waiting for copies from the GPU that other streams have queued.

    For what a training step asks for while activations are on their way out: split sizes in a token dispatcher, a loss, a
    norm. Where nothing is on its way it takes the host somewhat longer than `tolist`.

    Args:
        tensor: of any shape and device; up to 4,096 numbers of int32, int64 or float32 on a GPU, else this is `tolist`.

    Returns:
        a number for a tensor without dimensions, else a list, of lists for each dimension after the first.
    """
    if (
        not tensor.is_cuda
        or type(tensor) not in _PLAIN
        or tensor.dtype not in _TYPES
        or not 0 < tensor.numel() <= _MOST
    ):
        return tensor.tolist()
    host, target = _memory(threading.get_ident(), tensor.get_device(), tensor.dtype, tensor.shape)
    if target is None:
        return tensor.tolist()
    torch.mul(tensor.detach(), 1, out=target)  # a kernel; a copy would be the copy engine's
    torch.cuda.current_stream(tensor.device).synchronize()
    return host.tolist()


@functools.lru_cache(maxsize=64)
def _memory(
    thread: int, device: int, dtype: torch.dtype, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Page-locked memory for one thread's use at a time, from the host and from the GPU.

    Returns:
        ``None`` for the latter where the memory is of another GPU's context.
    """
    with torch.inference_mode(mode=False):
        host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        target = torch.as_tensor(_OnGpu(host), device=f"cuda:{device}")  # a copy there, if it is not that GPU's
    return host, target if target.data_ptr() == host.data_ptr() else None
