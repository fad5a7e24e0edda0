"""Megatron-core's hooks that wait for parameters, where nobody else calls them: in a Sequential, and before a replay.

In: a module. Out: calls of its hooks. Keeps true: parameters have been gathered when they are read. Does not: call any
other hook, whose arguments nobody has here.

Megatron-core's data parallelism (0.16.1, ``overlap_param_gather``) has a forward pre-hook on each module that waits for the
gather of its parameters and starts the next one. It looks at its module alone and does nothing the second time. Transformer
Engine's Sequential calls no hooks of its ops (Megatron-core's own module around it does), nor does the replay of a graph.
"""

from __future__ import annotations

from typing import Any

import torch

_MODULE = "megatron.core.distributed.distributed_data_parallel"
_MAKER = "DistributedDataParallel._make_forward_pre_hook."


def is_gather(hook: Any) -> bool:
    """Whether a forward pre-hook is one of those."""
    return getattr(hook, "__module__", None) == _MODULE and getattr(hook, "__qualname__", "").startswith(_MAKER)


def wait_for_parameters(module: torch.nn.Module) -> None:
    """Call a module's hooks that do so, if it has any."""
    if module._forward_pre_hooks:
        for hook in tuple(module._forward_pre_hooks.values()):
            if is_gather(hook):
                hook(module, ())
