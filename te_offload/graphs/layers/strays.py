"""Gradients that go past a layer's graphs: of what its forward has read beside parameters and inputs, and of what it has
left in attributes beside its outputs.

In: a layer, and what its captured forward has returned. Out: a reason against its graphs. Keeps true: no replayed backward
leaves out a gradient that an eager one would have given. Does not: find what needs none; a graph reads that where it was,
and does not renew it. Nor may an output be inside of an object that no pytree opens.

Autograd knows what was read: as leaves that nobody asks for, and as nodes that are older than the forward, such as those of
a weight that a hook of the layer has computed, or of an input inside of an object that no pytree opens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def sequence_number() -> int:
    """Of the calling thread; autograd's nodes that come later have larger ones."""
    with torch.enable_grad():
        node: Any = torch.empty(0, device="cpu", requires_grad=True).view(0).grad_fn
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


class Attributes:
    """What the modules of a layer have as attributes before its forward is captured."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before: dict[int, dict[str, tuple[Any, Any]]] = {}  # values, and what is in them
        self._known: list[torch.Tensor] = []
        for part in module.modules():
            self._before[id(part)] = {name: (value, _contents(value)) for name, value in part.__dict__.items()}
            self._known += [one for value in part.__dict__.values() for one in _computed(value)]

    def clear(self) -> None:
        """Keep nothing any longer."""
        self._before, self._known = {}, []

    def left_behind(self) -> str | None:
        """What the forward has put there that needs a gradient, such as a router's auxiliary loss. It is taken away again:
        it has memory of the capture's, and autograd's nodes that no replay renews.
        """
        known = set(map(id, self._known))
        found: list[str] = []
        for title, part in self._module.named_modules():
            had = self._before.get(id(part), {})
            for name, value in list(part.__dict__.items()):
                if not {id(one) for one in _computed(value)} - known:
                    continue
                found.append(f"{title}.{name}" if title else name)
                if name not in had:
                    del part.__dict__[name]
                    continue
                part.__dict__[name], contents = had[name]
                if isinstance(contents, list):
                    had[name][0][:] = contents
                elif contents is not None:
                    had[name][0].clear()
                    had[name][0].update(contents)
        if not found:
            return None
        return (
            f"its forward leaves a tensor that needs a gradient in {', '.join(found)}, which no replay would do. Return "
            "it; or detach it, if it is for looking at"
        )


def hides_tensors(value: Any) -> bool:
    """Whether what a forward has returned is an object with tensors inside, such as a dataclass's, that no pytree opens."""
    inside = [*getattr(value, "__dict__", {}).values()]
    inside += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return any(isinstance(one, torch.Tensor) for one in inside)


def _contents(value: Any) -> Any:
    return list(value) if type(value) is list else dict(value) if type(value) is dict else None


def _computed(value: Any) -> list[torch.Tensor]:
    """By autograd: itself, or those in a list, a tuple or a dict."""
    values = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor) and one.grad_fn is not None]
