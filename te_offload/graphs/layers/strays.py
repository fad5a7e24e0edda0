"""Tensors that need a gradient and that a layer's forward has read, though they are neither its parameters nor its inputs.

In: what a captured forward has returned. Out: a reason against its graphs. Keeps true: no replayed backward leaves out a
gradient that an eager one would have given. Does not: find what was read that needs none; a graph reads that where it was.

Autograd knows them: as leaves that nobody asks for, and as nodes that are older than the forward, such as those of a weight
that a hook of the layer has computed, or of an input inside of an object that no pytree opens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def sequence_number() -> int:
    """Of the calling thread; autograd's nodes that come later have larger ones."""
    with torch.enable_grad():
        node: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    number: int = node._sequence_nr()
    return number


def stray(outputs: Iterable[torch.Tensor], known: Iterable[torch.Tensor], since: int) -> str | None:
    """What the outputs depend on beside ``known`` leaves and what was computed from those since a `sequence_number`."""
    leaves = {id(one) for one in known}
    waiting: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen: dict[int, Any] = {}  # with the nodes, whose identities are theirs as long as someone has them
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if type(node).__name__ == "AccumulateGrad":
            if id(node.variable) not in leaves:
                return (
                    f"its forward reads a tensor {tuple(node.variable.shape)} that needs a gradient and is neither one of "
                    "its parameters nor one of its inputs, so that no replay would give it one. Register it in the layer, "
                    "or pass it as an argument"
                )
        elif node._sequence_nr() <= since:
            return (
                f"its forward reads what was computed before it ({node.name()}), as by a hook of its own, or has an input "
                "inside of an object that no pytree opens, and no replay would give that a gradient. Compute it in the "
                "forward, or pass it as an argument"
            )
        else:
            waiting += [following for following, _ in node.next_functions if following is not None]
    return None
