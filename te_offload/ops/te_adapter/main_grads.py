"""``main_grad``: where wgrad is written of parameters whose gradients Megatron-LM or an optimizer keeps, and its protocol;
and when, if an op delays it.

In: parameters. Out: where their gradients go, what stands for ``.grad``, and what a graph has to know of both. Keeps true:
what is said of a parameter is what Transformer Engine would take it to say. Does not: compute gradients.

The protocol, as Transformer Engine 2.20.2 and Megatron-core 0.16.1 have it: wgrad adds to ``main_grad``, or overwrites it
where ``overwrite_main_grad`` says so; with ``__fsdp_param__`` each backward asks ``get_main_grad()`` where that is. Of a
parameter that has an attribute ``grad_added_to_main_grad`` that is set, so that hooks do not add its ``.grad``, and
``.grad`` is a dummy, so that hooks run.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformer_engine.pytorch.ops._common import (
    get_accumulate_flag_in_param,
    get_dummy_wgrads_for_params,
    get_main_grad_from_param,
)

_MAIN_GRAD, _SHAPE = map(operator.attrgetter, ("main_grad", "shape"))
ADDED = "grad_added_to_main_grad"


def main_grad_of(weight: torch.nn.Parameter) -> torch.Tensor:
    """``main_grad`` of a weight, refreshed from FSDP where that applies. Raises RuntimeError where there is none."""
    main_grad: torch.Tensor = get_main_grad_from_param(weight, op_label="GroupedLinear")
    return main_grad


def main_grads_of(weights: Sequence[torch.nn.Parameter], shape: tuple[int, ...]) -> list[torch.Tensor]:
    """`main_grad_of` weights, as tensors of a shape; a tenth of the host's time where they are plain tensors of it.

    Raises:
        RuntimeError: one has none, or cannot be viewed so.
    """
    if True not in [hasattr(weight, "__fsdp_param__") for weight in weights]:
        try:
            grads = list(map(_MAIN_GRAD, weights))
            if list(map(_SHAPE, grads)).count(shape) == len(grads):
                return grads
        except AttributeError:  # one has none: said below
            pass
    return [main_grad_of(weight).view(shape) for weight in weights]


def dummy_grads(weights: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """What stands for ``.grad`` of the weights of one op whose ``main_grad`` was written, where they take part in
    Megatron's protocol.
    """
    take_part = [hasattr(weight, ADDED) for weight in weights]
    if True not in take_part:
        return [None] * len(weights)
    if not weights[0].is_cuda:
        return [_cpu_dummy_grad(weight) for weight in weights]
    if False in take_part or True in [getattr(weight, "zero_out_wgrad", False) for weight in weights]:
        dummies: list[torch.Tensor | None] = get_dummy_wgrads_for_params(list(weights))
        return dummies
    (first,) = get_dummy_wgrads_for_params([weights[0]])  # for each would take the host three times as long
    for weight in weights:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return [first, *[first.detach() for _ in weights[1:]]]  # each its own tensor, or autograd would copy them


def _cpu_dummy_grad(weight: Any) -> torch.Tensor | None:
    """The same on the CPU; Transformer Engine's allocates on a GPU."""
    if not hasattr(weight, ADDED):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device="cpu")


def accumulates_into_main_grad(weight: torch.nn.Parameter) -> bool:
    """Whether wgrad adds to ``main_grad``; ``False`` where the weight says ``overwrite_main_grad``."""
    return bool(get_accumulate_flag_in_param(weight))


def main_grad_places(parameters: Sequence[Any]) -> tuple[list[int], list[bool]]:
    """Where the ``main_grad`` of each parameter begins, 0 if it has none; and whether wgrad overwrites it."""
    overwrites = [getattr(parameter, "overwrite_main_grad", False) for parameter in parameters]
    grads = [getattr(parameter, "main_grad", None) for parameter in parameters]
    return [0 if grad is None else grad.data_ptr() for grad in grads], overwrites


def delay_wgrad(op: Any, write: Callable[[], torch.Tensor | None]) -> None:
    """Have a ``backward_dw`` of an op with ``delay_wgrad_compute=True`` call ``write``: the next, if nothing waits already.

    Args:
        op: a GroupedLinear. write: its weights' gradients, one tensor (N, rows, columns); or it writes ``main_grad``, and
            there is ``None``. What it refers to is kept until then.
    """
    grads: Any = types.SimpleNamespace() if op.single_grouped_weight else []

    def later(_inputs: Any, _grad_output: Any, found: Any) -> None:
        packed = write()
        if packed is None:
            return
        if op.single_grouped_weight:
            found.rowwise_data = packed
        else:
            found.extend(packed.unbind(0))

    op.wgrad_store.put([[], None, grads], later)  # as `GroupedLinear.backward_dw` of te.ops reads it


def reason_against_backward_graphs(module: torch.nn.Module) -> str | None:
    """Why a module's backward cannot be a graph of its own, for where it leaves gradients; ``None`` if it can."""
    for title, part in module.named_modules():
        delays: Any = getattr(part, "need_backward_dw", None)
        if callable(delays) and delays():
            return (
                f"{title or 'it'} delays its wgrad (delay_wgrad_compute): backward_dw would find what the capture left, "
                "and no replay leaves anything. Capture the whole step (te_offload.graphs.capture), or do not delay it"
            )
    for title, parameter in module.named_parameters():
        if hasattr(parameter, "__fsdp_param__"):
            return (
                f"{title} is sharded by Megatron's FSDP, and each backward has to ask it where main_grad is, which no "
                "replay does"
            )
    return None
