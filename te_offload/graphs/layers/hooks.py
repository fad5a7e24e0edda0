"""Hooks of modules inside of a layer that is replayed: which a replay leaves out, and which are called before it.

In: a module. Out: names, and calls. Keeps true: parameters that are still being gathered are waited for before a replay
reads them, as Megatron-core's own graphs do. Does not: call any other hook, or one of the layer itself, whose own call does
that.
"""

from __future__ import annotations

import torch

from te_offload.ops.gathers import is_gather, wait_for_parameters


class Hooks:
    """Those of the modules inside of a layer, as of the last `look`; a module may get hooks, and lose them, later too."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._parts: list[tuple[str, torch.nn.Module]] = []

    def look(self) -> None:
        """See which modules there are."""
        self._parts = [(title, part) for title, part in self._module.named_modules() if title]

    def uncalled(self) -> list[str]:
        """The modules with hooks that nobody calls when a graph is replayed."""
        found = [title for title, part in self._parts if _has_uncalled(part)]
        if self._parts and torch.nn.modules.module._has_any_global_hook():
            found.append("all modules, by torch.nn.modules.module.register_module_...")
        return found

    def wait_for_parameters(self) -> None:
        """All that those modules have."""
        for _, part in self._parts:
            wait_for_parameters(part)


def _has_uncalled(module: torch.nn.Module) -> bool:
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = module._forward_pre_hooks
    return bool(hooks) and not all(map(is_gather, hooks.values()))
