"""Hooks like those with which Megatron-core's data parallelism waits for parameters, without Megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

MODULE = "megatron.core.distributed.distributed_data_parallel"
NAME = "DistributedDataParallel._make_forward_pre_hook.<locals>.hook"


def put_gathers(
    modules: Iterable[torch.nn.Module], waits: Callable[[Any], None], *, module: str = MODULE, name: str = NAME
) -> list[RemovableHandle]:
    """One on each module, that is given the module. ``module``, ``name``: where it says that it is from."""

    def hook(module: torch.nn.Module, args: Any) -> None:
        waits(module)

    hook.__module__, hook.__qualname__ = module, name
    return [one.register_forward_pre_hook(hook) for one in modules]
