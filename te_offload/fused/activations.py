"""What the fused op's kernels are told of the activation between FC1 and FC2, and which gated ones they do not take.

In: an op. Out: an `Activation`, a reason. Keeps true: numbers are those that the op computes with. Does not: compute.
"""

from __future__ import annotations

from typing import Any

import transformer_engine.pytorch as te

from te_offload.fused.kernels.interface import Activation, Gate, Gated, SquaredReLU
from te_offload.ops import te_adapter

_BLOCK = 32  # columns of each half that the kernels' tiles hold a multiple of
_HALF_TILE = 64  # columns of each half in a tile by blocks: one whose half is in two blocks of scales is not taken


def is_gated(op: Any) -> bool:
    """Whether it halves the columns."""
    return not isinstance(op, (te.ops.ScaledSReLU, te.ops.ScaledTanhSReLU))


def activation_of(op: Any) -> Activation:
    """Of a scaled activation of `te.ops` or `te_offload.ops`."""
    if not is_gated(op):
        return SquaredReLU(getattr(op, "tanh_clamp_scale", None))
    interleave = op.glu_interleave_size or 0
    if isinstance(op, te.ops.ScaledSwiGLU):
        return Gated(Gate.SWIGLU, (), interleave)
    if isinstance(op, te.ops.ScaledClampedQGeGLU):
        return Gated(Gate.CLAMPED_QGEGLU, te_adapter.clamped_numbers(op), interleave)
    return Gated(Gate.SITU_GLU, (op.beta1, op.beta2), interleave)


def reason_against(window: Any, *, quantizes: bool, by_blocks: bool, reference: bool) -> str | None:
    """Why a window with a gated activation is not taken; ``None``: it is, or its activation is not gated.

    Args:
        quantizes: there is a recipe. by_blocks: of a block-scaled format. reference: torch computes.
    """
    if not is_gated(window.activation):
        return None
    name = type(window.activation).__name__
    interleave = window.activation.glu_interleave_size or 1
    if not reference and (reason := reason_of_blocks(interleave)):
        return f"its activation is {name} with {reason}"
    columns, block = window.fc1.out_features, 2 * interleave
    if columns % block:
        return f"FC1 gives {columns} columns, which are not a multiple of {block} (2 x glu_interleave_size)"
    return reason_quantized(window.activation, columns, by_blocks=by_blocks) if quantizes and not reference else None


def reason_of_blocks(interleave: int) -> str | None:
    """Why Hopper's kernels do not take halves that alternate in blocks of so many columns; ``None`` if they do."""
    if interleave and _BLOCK % interleave:
        return f"glu_interleave_size={interleave}, which does not divide {_BLOCK}"
    return None


def reason_quantized(op: Any, columns: int, *, by_blocks: bool) -> str | None:
    """Why Hopper's kernels for FP8 do not take an activation of so many columns; ``None`` if they do."""
    if not is_gated(op):
        return None
    return reason_of_halves(type(op).__name__, op.glu_interleave_size or 0, columns) if by_blocks else None


def reason_of_halves(name: str, interleave: int, columns: int) -> str | None:
    """Why those for FP8 by blocks do not take a gated activation of so many columns; ``None`` if they do."""
    if interleave or columns % (2 * _HALF_TILE) == 0:
        return None
    return f"FC1 gives {columns} columns to {name}, which are not a multiple of {2 * _HALF_TILE}, as it takes by blocks"
