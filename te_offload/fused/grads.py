"""Gradients of a GroupedLinear's parameters, where they are asked for: new ones, or into ``main_grad``.

In: the op, the gradient of its output, and what multiplies. Out: gradients in the order of the parameters. Keeps true: each
is written once, in the backward or in ``backward_dw``, and added only where the op accumulates. Does not: know how the
product is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_offload.errors import ArgumentError
from te_offload.fused import parameters
from te_offload.fused.kernels.interface import Kernels
from te_offload.ops import te_adapter


def wide_scales(scales: torch.Tensor) -> torch.Tensor:
    """Router scales side by side, in float32; in float64 where they are, on the CPU: the kernels read float32."""
    if scales.dtype is torch.float32 and scales.dim() == 1 and scales.is_contiguous():
        return scales
    wider = scales.dtype is torch.float64 and not scales.is_cuda
    return scales.reshape(-1).contiguous().to(torch.float64 if wider else torch.float32)


def bias_grads(
    op: Any,
    kernels: Kernels,
    dy: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    bias_scales: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of FC2's biases and of their scales, where there are any. ``bias``: the forward's, where it has scales."""
    if not op.has_bias:
        return None, None
    return kernels.bias_grads(dy, offsets, bias, None if bias_scales is None else wide_scales(bias_scales))


def fc1_bias_grads(op: Any, kernels: Kernels, dact_input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
    """Of FC1's biases, where there are any."""
    return kernels.fc1_bias_grads(dact_input, offsets) if op.has_bias else None


def weight_grads(
    name: str,
    op: Any,
    ctx: te_adapter.OperationContext,
    kernels: Kernels,
    dy: torch.Tensor,
    multiply: Callable[..., None],
    *,
    together: bool,
) -> list[torch.Tensor | None]:
    """Compute the weights' gradients, into ``main_grad`` where asked; one a weight parameter. Those of an op that delays
    its wgrad are left to its ``backward_dw``.

    Args:
        dy: of the op's output, of whose dtype new gradients are. multiply: computes them, of what `Kernels.prepare`
            returns and whether to ``accumulate``. together: one tensor stands for all weights (`StandIns`).
    """
    in_one = together or parameters.in_one(op)
    count = 1 if in_one else op.num_groups
    if not ctx.weight_requires_grad:
        return [None] * count
    shape = (op.num_groups, op.out_features, op.in_features)
    main_grads: Any = None
    accumulate, dtype = False, dy.dtype
    if op._accumulate_into_main_grad:
        weights: Any = parameters.weight_parameters(op)
        accumulate = te_adapter.accumulates_into_main_grad(weights[0])
        if op.single_grouped_weight:
            main_grads = te_adapter.main_grad_of(weights[0])
            main_grads = te_adapter.view_main_grad_as_grouped_buffer(main_grads, shape[0], shape[1:], label="weight")
            dtype = main_grads.dtype
        else:
            main_grads = te_adapter.main_grads_of(weights, shape[1:])
            dtype = main_grads[0].dtype
    write = functools.partial(
        _write,
        name,
        kernels,
        multiply if dy.shape[0] else None,
        main_grads,
        functools.partial(torch.empty, shape, dtype=dtype, device=dy.device),
        accumulate=accumulate,
    )
    packed = None
    if op.need_backward_dw():
        te_adapter.delay_wgrad(op, write)
    else:
        packed = write()
    if main_grads is not None:
        return [dy.new_empty(())] if together else te_adapter.dummy_grads(weights)  # which it will give out
    if packed is None:
        return [None] * count
    return [packed] if in_one else list(packed.unbind(0))


def _write(
    name: str,
    kernels: Kernels,
    multiply: Callable[..., None] | None,
    main_grads: Any,
    make: Callable[[], torch.Tensor],
    *,
    accumulate: bool,
) -> torch.Tensor | None:
    """The gradients of all weights, in one tensor that ``make`` gives; ``None`` where they go into ``main_grads``. Without
    ``multiply`` they are zero.
    """
    if main_grads is None:
        packed = make()
        if multiply is None:
            return packed.zero_()
        multiply(kernels.prepare(f"{name}'s gradient", packed), accumulate=False)
        return packed
    if multiply is not None:
        try:
            multiply(kernels.prepare(f"{name}'s main_grad", main_grads, written=True), accumulate=accumulate)
        except ArgumentError:  # where TMA cannot reach it
            packed = make()
            multiply(kernels.prepare(f"{name}'s gradient", packed), accumulate=False)
            (torch._foreach_add_ if accumulate else torch._foreach_copy_)(list(main_grads), list(packed.unbind(0)))
    elif not accumulate:
        torch._foreach_zero_(list(main_grads))
    return None
