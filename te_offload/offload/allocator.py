"""What torch's allocator of GPU memory is, where it matters.

In: a device. Out: whether the bytes between two tensors are its own; why graphs cannot be captured with it. Keeps true:
nothing is taken for granted of an allocator other than torch's native one. Does not: allocate.

Under `PYTORCH_ALLOC_CONF=backend:cudaMallocAsync`, a pluggable allocator or `PYTORCH_NO_CUDA_MEMORY_CACHING=1` each tensor
is an allocation of the driver's, which refuses a copy over two of them. torch's native allocator cuts them from segments.
"""

from __future__ import annotations

import functools
import os

import torch

from te_offload.errors import CaptureError

_NATIVE = "native"
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"


@functools.cache
def joins_storages(device_type: str) -> bool:
    """Whether tensors of two storages that lie side by side, less than 512 bytes apart, may be one copy."""
    return device_type == "cuda" and not os.environ.get(_NO_CACHE) and is_native()


def is_native() -> bool:
    """Whether it is torch's own: not ``"cudaMallocAsync"``, or a pluggable one."""
    return torch.cuda.get_allocator_backend() == _NATIVE


def check_captures(device: torch.device) -> None:
    """Before anything is captured on a device.

    Raises:
        CaptureError: with this allocator a capture that fails would end the process, or it gives a graph no memory.
    """
    if device.type != "cuda":
        return
    if os.environ.get(_NO_CACHE):
        raise CaptureError(
            f"{_NO_CACHE} is set: each tensor takes its memory from the driver and gives it back there, which a capture "
            "does not allow. Unset it."
        )
    if not is_native():
        name = torch.cuda.get_allocator_backend()
        raise CaptureError(
            f"torch's allocator is {name}: graphs share and give back memory in ways that only the native one has, and "
            "with cudaMallocAsync a capture that failed was seen to end the process. Leave backend:... out of "
            "PYTORCH_ALLOC_CONF."
        )
