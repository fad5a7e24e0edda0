"""Which tensors are dense memory: those whose bytes, copied out and back, are the same tensor again.

In: tensors. Out: whether they are, and where. Keeps true: what is not known to be is not. Does not: look at bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

_DEVICE, _DTYPE, _IS_NESTED, _LAYOUT = map(attrgetter, ("device", "dtype", "is_nested", "layout"))
_PLAIN_DEVICES = frozenset(("cuda", "cpu"))
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
_REAL = frozenset((*_FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense memory that a copy of its bytes restores."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and (tensor.dtype in _REAL or not (tensor.is_conj() or tensor.is_quantized))
        and not tensor.is_neg()
        and not tensor.is_nested
        and (tensor.is_cuda or tensor.is_cpu)
    )


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of some memory, which may be another's too."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def is_discarded(tensor: torch.Tensor) -> bool:
    """Whether somebody has given up a dense tensor's memory, and will fill it again before it is read
    (``untyped_storage().resize_(0)``; Megatron-core does so with what it computes again).
    """
    return not tensor.untyped_storage().nbytes() and tensor.numel() > 0


def devices_of_plain(tensors: Sequence[torch.Tensor]) -> frozenset[torch.device]:
    """Where some tensors are, if all are plain; else nothing."""
    nowhere: frozenset[torch.device] = frozenset()
    if set(map(type, tensors)) != {torch.Tensor} or set(map(_LAYOUT, tensors)) != {torch.strided}:
        return nowhere
    if True in map(torch.Tensor.is_neg, tensors) or True in map(_IS_NESTED, tensors):
        return nowhere
    if not _REAL.issuperset(map(_DTYPE, tensors)) and False in map(
        is_plain, tensors
    ):  # quantized, or a conjugate view?
        return nowhere
    devices = frozenset(map(_DEVICE, tensors))
    return devices if _PLAIN_DEVICES.issuperset([device.type for device in devices]) else nowhere
