"""A process group of one rank, that meets nobody; a program on two."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[2]


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """The default group, of ``"gloo"`` or ``"nccl"``."""
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def on_two_ranks(program: str, *arguments: str) -> list[str]:
    """Run a program twice at once, its rank before some arguments; what each prints. Both must succeed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), *arguments],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs
