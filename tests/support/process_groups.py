"""A process group of one rank, that meets nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """The default group, of ``"gloo"`` or ``"nccl"``."""
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
