"""A kernel that lets the next one begin at once and copies words long afterwards."""

from __future__ import annotations

import functools
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from quack.compile_utils import make_fake_tensor

_THREADS = 32
_HOPS = 50_000  # loads, each after the one before: a millisecond or more


class _LateCopy:
    @cute.jit
    def __call__(self, chain: cute.Tensor, source: cute.Tensor, target: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel(chain, source, target).launch(grid=[1, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, chain: cute.Tensor, source: cute.Tensor, target: cute.Tensor) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        place = Int32(0)
        for _ in cutlass.range(_HOPS, unroll=1):
            place = chain[place]
        for word in cutlass.range(thread, target.shape[0], _THREADS):
            target[word] = source[word + place]


@functools.cache
def _compiled() -> Any:
    words = [make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0, divisibility=1) for _ in range(3)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(_LateCopy(), *words, stream, options="--enable-tvm-ffi")


def copy_late(source: torch.Tensor, target: torch.Tensor) -> None:
    """Have the current stream copy one tensor into another of as many bytes, a multiple of 4, at the end of a kernel that
    lets a kernel which need not wait for its end begin at its beginning.
    """
    chain = torch.zeros(1, dtype=torch.int32, device=source.device)
    words = [tensor.reshape(-1).view(torch.uint8).view(torch.int32) for tensor in (source, target)]
    _compiled()(chain, *words)
