"""Hooks like those with which Megatron-core's data parallelism waits for parameters, without Megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def put_gathers(modules: Iterable[torch.nn.Module], waits: Callable[[Any], None]) -> list[RemovableHandle]:
    """One on each module, that is given the module."""

    def hook(module: torch.nn.Module, *_: Any) -> None:
        waits(module)

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    hook.__qualname__ = "DistributedDataParallel._make_forward_pre_hook.<locals>.hook"
    return [module.register_forward_pre_hook(hook) for module in modules]
