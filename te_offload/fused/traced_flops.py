"""Floating-point operations of the traced ops, for torch's `FlopCounterMode` and what asks it.

In: nothing. Out: formulas, registered when imported. Keeps true: a step counts as the products of its linears do, forward
once and backward twice, and what is computed again once more; all rows count, those of no expert too. Does not: count
activations or quantizers, as torch's own formulas do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from te_offload.fused import traced, traced_quantized  # noqa: F401  whose ops these are

_OPS = torch.ops.te_offload
Shape = tuple[int, ...]


def _product(rows: Shape, weights: Shape) -> int:
    """Of rows (T, ...) and (N, columns, depth)."""
    return 2 * rows[0] * weights[1] * weights[2]


@register_flop_formula(
    [_OPS.grouped_mlp, _OPS.grouped_mlp_forward, _OPS.grouped_mlp_quantized, _OPS.grouped_mlp_quantized_forward]
)
def _forward(x: Shape, w1: Shape, w2: Shape, *_: Any, **__: Any) -> int:
    return _product(x, w1) + _product(x, w2)


@register_flop_formula(
    [_OPS.grouped_mlp_fc1, _OPS.grouped_mlp_fc1_again, _OPS.grouped_mlp_fc2, _OPS.grouped_mlp_fc1_dgrad]
)
def _one(rows: Shape, weights: Shape, *_: Any, **__: Any) -> int:
    return _product(rows, weights)


@register_flop_formula(_OPS.grouped_mlp_fc1_wgrad)
def _wgrad(dact_input: Shape, x: Shape, w1: Shape, *_: Any, **__: Any) -> int:
    return _product(dact_input, w1)


@register_flop_formula(_OPS.grouped_mlp_quantized_fc1_again)
def _quantized_again(x: Shape | None, w1: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return _product(out_shape, w1)


@register_flop_formula([_OPS.grouped_mlp_fc2_backward, _OPS.grouped_mlp_quantized_fc2_backward])
def _fc2_backward(dy: Shape, w2: Shape, *how: Any, **_: Any) -> int:
    return _product(dy, w2) * (2 if how[-1] else 1)


@register_flop_formula(_OPS.grouped_mlp_quantized_fc1_backward)
def _fc1_backward(dact_input: Shape, magnitudes: Shape, x: Shape | None, w1: Shape, *how: Any, **_: Any) -> int:
    return _product(dact_input, w1) * (2 if how[-1] else 1)
