"""Modules that another holds without registering them, so that its framework sees no module and no state of theirs.

In: a module. Out: its parts, those among them. Keeps true: what is held so goes with copies and pickles of its holder.
Does not: move or convert what is held; that has no parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_HELD = "_te_offload_inside"


def hold(holder: torch.nn.Module, name: str, part: torch.nn.Module) -> None:
    """Have a module hold another under a name of its own."""
    holder.__dict__.setdefault(_HELD, {})[name] = part


def held(holder: torch.nn.Module, name: str) -> torch.nn.Module:
    """What a module holds under a name."""
    found: torch.nn.Module = holder.__dict__[_HELD][name]
    return found


def named_parts(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """`Module.named_modules`, and the parts of what its modules hold."""
    for name, part in module.named_modules():
        yield name, part
        for inner, other in part.__dict__.get(_HELD, {}).items():
            yield from other.named_modules(prefix=f"{name}.{inner}" if name else inner)
