"""A module's parameters as other tensors over the same memory, while its forward and backward are captured.

In: a module. Out: what stands for its parameters. Keeps true: who reads a parameter of the module, or of an op's pipeline,
reads the same numbers; what the capture sets on an alias is set on the parameter afterwards; then the parameters are where
they were, whatever happened. Does not: find parameters that a module keeps anywhere else, or those of TorchScript: they
stay themselves.

Autograd's nodes of the parameters themselves belong to others. Data parallelism holds them, with its hooks, on the stream
on which they were made: mostly the default one, for which no capture may wait. And hooks of a parameter would run in the
graph, and again when its gradient leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from te_offload.ops import te_adapter


class Aliases:
    """What stands for parameters, in the order in which they were asked for."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        # TorchScript's are no dicts.
        entries = [part._parameters for part in module.modules() if isinstance(part._parameters, dict)]
        places = [(each, name, parameter) for each in entries for name, parameter in each.items()]
        self._places: list[tuple[Any, str, Any]] = [place for place in places if place[2] is not None]
        self._of = {id(parameter): _alias(parameter) for parameter in module.parameters()}
        self._had = {number: dict(alias.__dict__) for number, alias in self._of.items()}

    def of(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """The aliases of some of the module's parameters."""
        return [self._of[id(parameter)] for parameter in parameters]

    @staticmethod
    def one_each(grads: Sequence[torch.Tensor | None], count: int) -> list[torch.Tensor | None]:
        """Of gradients the last of which are those of ``count`` aliases, and of their parameters: one for both. Parameters
        have gradients of their own where the module keeps them elsewhere too.
        """
        begin, middle = len(grads) - 2 * count, len(grads) - count
        pairs = zip(grads[begin:middle], grads[middle:], strict=True)
        return [
            *grads[:begin],
            *(other if one is None else one if other is None else one + other for one, other in pairs),
        ]

    def put(self) -> None:
        """Have them stand for the parameters."""
        for entries, name, parameter in self._places:
            entries[name] = self._of[id(parameter)]
        te_adapter.put_parameters(self._module, self._of)

    def put_back(self) -> None:
        """Have the parameters stand for themselves again."""
        own: dict[int, Any] = {}
        for entries, name, parameter in self._places:
            alias = self._of[id(parameter)]
            own[id(alias)] = parameter
            if entries.get(name) is alias:
                entries[name] = parameter
            had = self._had[id(parameter)]
            news = {key: value for key, value in alias.__dict__.items() if key not in had or had[key] is not value}
            parameter.__dict__.update(news)
        te_adapter.put_parameters(self._module, own)


@contextmanager
def aliased(module: torch.nn.Module) -> Iterator[Aliases]:
    """Aliases in place of a module's parameters."""
    aliases = Aliases(module)
    try:
        aliases.put()
        yield aliases
    finally:
        aliases.put_back()


def _alias(parameter: Any) -> Any:
    alias: Any = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    if type(alias) is not type(parameter):
        alias.__class__ = type(parameter)
    alias.__dict__.update(parameter.__dict__)
    return alias
