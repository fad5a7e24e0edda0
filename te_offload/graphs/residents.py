"""What a graph reads and writes without being given it: parameters, buffers and gradients of modules.

In: modules. Out: `Residents`, which notices when one has moved. Keeps true: the tensor that is looked at is the one that
the module has now. Does not: keep a module alive longer than its graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Place = tuple[str, dict[str, Any], str, torch.Tensor]


class Residents:
    """Parameters and buffers of some modules.

    Args:
        modules: of the captured function. grads: whether gradients have to stay too.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], *, grads: bool = True) -> None:
        self._looks_at_grads = grads
        places: dict[tuple[int, str], Place] = {}
        for module in modules:
            for prefix, part in module.named_modules():
                for entries in (part._parameters, part._buffers):
                    for name, tensor in entries.items():
                        if tensor is not None:
                            title = f"{prefix}.{name}" if prefix else name
                            places[id(entries), name] = (title, entries, name, tensor)
        self._places = list(places.values())
        self._parameters = [
            (title, tensor) for title, _, _, tensor in self._places if isinstance(tensor, torch.nn.Parameter)
        ]
        self._addresses: list[int] = []
        self._grads: list[int] = []
        self._learns: list[bool] = []

    def note(self) -> None:
        """Where all is now is where it has to stay."""
        self._addresses = [tensor.data_ptr() for _, _, _, tensor in self._places]
        self._grads = [_address(parameter.grad) for _, parameter in self._parameters]
        self._learns = [parameter.requires_grad for _, parameter in self._parameters]

    def moved(self) -> str | None:
        """What has moved since `note`, or been frozen or not; ``None`` if nothing has."""
        for (title, entries, name, tensor), address in zip(self._places, self._addresses, strict=True):
            if entries.get(name) is not tensor:
                return f"{title} is another tensor now"
            if tensor.data_ptr() != address:
                return f"{title} was at {address:#x} and is at {tensor.data_ptr():#x}"
        for (title, parameter), learns in zip(self._parameters, self._learns, strict=True):
            if parameter.requires_grad is not learns:
                return f"{title}.requires_grad was {learns} and is {not learns}"
        for (title, parameter), address in zip(
            self._parameters if self._looks_at_grads else (), self._grads, strict=False
        ):
            now = _address(parameter.grad)
            if now != address:
                advice = "zero it in the captured function, or with set_to_none=False"
                return f"{title}.grad was at {address:#x} and is at {now:#x} (0: there is none): {advice}"
        return None

    def grads(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each parameter and its gradient now."""
        return [(parameter, parameter.grad) for _, parameter in self._parameters]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
