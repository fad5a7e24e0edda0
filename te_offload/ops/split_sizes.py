"""Split sizes on the host: read once a call of a pipeline, and not in each of its ops, forward and backward.

Where Transformer Engine has no grouped GEMM (its split path), each grouped linear asks the GPU for its split sizes in the
forward and again in the backward. Each time the host waits for all work that it has queued, and for copies out that are in
the way; then the GPU waits for the host.

In: the split sizes of a call. Out: their numbers; and a tensor that holds the same, shares the caller's memory and version
where its dtype and device are right already, and answers `tolist` with what was read. Keeps true: what was read in one call
is not used in another one, nor after autograd's version counter says that the tensor was written to; nothing is set on the
caller's tensors. Does not: check numbers, or keep any tensor alive.
"""

from __future__ import annotations

import contextvars
import functools
import weakref

import torch

from te_offload.ops.host_numbers import numbers_on_host

_Read = tuple[weakref.ref[torch.Tensor], int | None, tuple[int, ...]]
_READ: contextvars.ContextVar[list[_Read] | None] = contextvars.ContextVar("te_offload_split_sizes", default=None)


def begin_call() -> None:
    """A pipeline is called: whatever was read before may have been written to by a kernel that no counter knows of."""
    found = _READ.get()
    if found:
        found.clear()


def read(split_sizes: torch.Tensor) -> tuple[int, ...]:
    """The numbers; waits for the GPU, unless they have been read in this call.

    Args:
        split_sizes: (N,), of any device.
    """
    found = _READ.get()
    if found is None:
        found = []
        _READ.set(found)
    version = _version(split_sizes)
    for reference, before, sizes in found:
        if reference() is split_sizes and before == version:
            return sizes
    sizes = tuple(numbers_on_host(split_sizes))
    found.append((weakref.ref(split_sizes), version, sizes))
    return sizes


def answering(split_sizes: torch.Tensor, sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The same split sizes, in int64 and on ``device`` as Transformer Engine keeps them, which answer `tolist` themselves.

    Args:
        split_sizes: (N,), of any device. sizes: their numbers.
    """
    known = split_sizes.detach()  # another object, of the same memory and version
    if known.dtype is not torch.int64 or known.device != device:
        known = known.to(device, torch.int64)
    known.tolist = functools.partial(list, sizes)  # type: ignore[method-assign]
    return known


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
