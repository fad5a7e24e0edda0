"""What a graph reads and writes without being given it: parameters, buffers and gradients of modules.

In: modules. Out: `Residents`, which notices when one has moved. Keeps true: the tensor that is looked at is the one that
the module has now; of a quantized one each buffer counts, and what a graph reads of it is not out of date; where gradients
go to ``main_grad``, that stays too, and a replay says so as the backward would. Does not: keep a module alive longer than
its graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from te_offload.ops import te_adapter

Place = tuple[str, dict[str, Any], str, torch.Tensor]


class Residents:
    """Parameters and buffers of some modules.

    Args:
        modules: of the captured function. grads: whether gradients have to stay too.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], *, grads: bool = True) -> None:
        self._looks_at_grads = grads
        self._modules = list(modules)
        self._find()
        self._sharded = {title for title, _, _, tensor in self._places if isinstance(tensor, DTensor)}
        self._before: list[tuple[Any, str, Any]] = []  # the capture
        self._buffers: list[tuple[int, ...]] = []
        self._turned: list[tuple[torch.Tensor, bool]] = []
        self._flags: list[tuple[Any, Any]] = []  # before the capture, of parameters in Megatron's protocol
        self._added: list[Any] = []  # to the main_grad of which the graph adds gradients
        self._with_main_grad: list[tuple[str, Any]] = []
        self._main_grads: tuple[list[int], list[bool]] = [], []
        self._addresses: list[int] = []
        self._grads: list[int] = []
        self._learns: list[bool] = []

    def _find(self) -> None:
        places: dict[tuple[int, str], Place] = {}
        for module in self._modules:
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
        self._wrappers = [(title, tensor) for title, _, _, tensor in self._places if te_adapter.has_buffers(tensor)]

    def look(self) -> None:
        """A capture begins, of what the modules have now. FP8 weights of which only the rows are right are turned, so that
        no graph has to, and the host does not take them to be right as soon as that is captured.
        """
        self._before = []
        self._flags = []
        self._find()
        self._turned = [(tensor, False) for _, tensor in self._wrappers if te_adapter.is_turned(tensor) is not None]
        self.refresh()
        self._buffers = [te_adapter.addresses(tensor) for _, tensor in self._wrappers]
        self._before = [one for _, tensor in self._wrappers for one in te_adapter.state_of(tensor)]
        if self._looks_at_grads:
            self._before += [(parameter, "grad", parameter.grad) for _, parameter in self._parameters]
        added = te_adapter.ADDED
        self._flags = [(one, getattr(one, added)) for _, one in self._parameters if hasattr(one, added)]
        self.begin_again()

    def gathered(self) -> str | None:
        """Why a forward and its backward may find parameters at different places; ``None`` if nothing is known of that."""
        for title, _, _, tensor in self._places:
            if title in self._sharded and not isinstance(tensor, DTensor):
                return f"{title} is sharded between calls, and gathered anew for each forward and backward"
        for part in (part for module in self._modules for part in module.modules()):
            if isinstance(part, (FSDPModule, FullyShardedDataParallel)):
                return "its parameters are sharded by FSDP, and gathered anew for each forward and backward"
        return None

    def begin_again(self) -> None:
        """What is captured next begins as if nothing had been captured since `look`."""
        for entry, name, value in self._before:
            setattr(entry, name, value)
        for parameter, _ in self._flags:
            setattr(parameter, te_adapter.ADDED, False)

    def restore(self) -> None:
        """Nothing was done by what was captured since `look`, and so quantized weights have no buffers of the graph's, and
        gradients are what they were.
        """
        self.begin_again()
        for parameter, value in self._flags:
            setattr(parameter, te_adapter.ADDED, value)

    def note(self) -> None:
        """A capture has ended: where all is now is where it has to stay."""
        self._added = [parameter for parameter, _ in self._flags if getattr(parameter, te_adapter.ADDED)]
        places, _ = te_adapter.main_grad_places([one for _, one in self._parameters])
        self._with_main_grad = [one for one, place in zip(self._parameters, places, strict=True) if place]
        self._main_grads = te_adapter.main_grad_places([one for _, one in self._with_main_grad])
        self._turned = [(tensor, not te_adapter.is_turned(tensor)) for tensor, _ in self._turned]
        self._before = [one for one in self._before if one[1] != "grad"]
        self.restore()
        self._before = []
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
        for (title, tensor), places in zip(self._wrappers, self._buffers, strict=True):
            now = te_adapter.addresses(tensor)
            if now != places:
                for before, after in zip(places, now, strict=True):
                    if before not in (0, after):
                        return f"a buffer of {title} was at {before:#x} and is at {after:#x} (0: it is gone)"
        for (title, parameter), learns in zip(self._parameters, self._learns, strict=True):
            if parameter.requires_grad is not learns:
                return f"{title}.requires_grad was {learns} and is {not learns}"
        found = te_adapter.main_grad_places([one for _, one in self._with_main_grad])
        if found != self._main_grads:
            rows = zip(self._with_main_grad, *self._main_grads, *found, strict=True)
            for (title, _), address, overwrites, now_at, now_overwrites in rows:
                if now_at != address:
                    return f"{title}.main_grad was at {address:#x} and is at {now_at:#x} (0: there is none)"
                if now_overwrites is not overwrites:
                    return f"{title}.overwrite_main_grad was {overwrites} and is {now_overwrites}"
        for (title, parameter), address in zip(
            self._parameters if self._looks_at_grads else (), self._grads, strict=False
        ):
            now_at = _address(parameter.grad)
            if now_at != address:
                advice = "zero it in the captured function, or with set_to_none=False"
                return f"{title}.grad was at {address:#x} and is at {now_at:#x} (0: there is none): {advice}"
        return None

    def refresh(self) -> None:
        """A replay comes next: have FP8 weights turned of which only the rows have been written since, as an eager call
        would, or by the graph itself, whose writing the host does not see.
        """
        for weight, by_graph in self._turned:
            if by_graph or not te_adapter.is_turned(weight):
                te_adapter.turn(weight)

    def moved_in_memory(self) -> str | None:
        """Which tensor has other memory than at `note`, of those that have memory of their own; quicker than `moved`."""
        now = [tensor.data_ptr() for _, _, _, tensor in self._places]
        if now == self._addresses:
            return None
        rows = zip(self._places, self._addresses, now, strict=True)
        return next(f"{title} went from {before:#x} to {at:#x}" for (title, *_), before, at in rows if before != at)

    def say_added(self) -> None:
        """A backward was replayed: its gradients are in ``main_grad``, and hooks must not add what stands for ``.grad``."""
        for parameter in self._added:
            setattr(parameter, te_adapter.ADDED, True)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
