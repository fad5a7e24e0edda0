"""What is known to hang when collectives of NCCL are captured.

In: the environment, and how torch's allocator is configured. Out: an error that says what to set. Keeps true: nothing is
captured that is known to hang. Does not: set anything.

With `expandable_segments`, memory is made of several mappings; NCCL registers the buffers of captured collectives, and
hangs or fails on such ones (pytorch#158029, torchtitan#3306), unless NCCL_GRAPH_REGISTER=0 keeps it from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch.fx import Node

from te_offload.errors import CaptureError

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def is_collective(node: Node) -> bool:
    """Whether a node of an FX graph is a functional collective."""
    return "c10d_functional" in str(node.target)


def conflict(environment: Mapping[str, str]) -> str | None:
    """Why captured collectives would hang; ``None`` if nothing is known against them."""
    if environment.get("NCCL_GRAPH_REGISTER", "1") == "0":
        return None
    for name in _SETTINGS:
        entries = [entry.partition(":") for entry in environment.get(name, "").split(",")]
        settings = {key.strip(): value.strip() for key, _, value in entries}
        if settings.get("expandable_segments", "False").lower() == "true":
            return (
                f"{name} has expandable_segments:True, with which NCCL hangs on captured collectives. Set "
                "NCCL_GRAPH_REGISTER=0, or turn expandable segments off, before the process group is made."
            )
    return None


def check_collectives(device: torch.device) -> None:
    """Before collectives are captured on a device.

    Raises:
        CaptureError: they would hang.
    """
    why = conflict(os.environ) if device.type == "cuda" else None
    if why is not None:
        raise CaptureError(why)


def check_process_groups() -> None:
    """Before a function is captured that may hold collectives: if there is a process group of NCCL.

    Raises:
        CaptureError: they would hang.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and "nccl" in str(distributed.get_backend()):
        check_collectives(torch.device("cuda"))
