"""What the fused op's kernels are told of the activation between FC1 and FC2.

In: an op. Out: an `Activation`. Keeps true: numbers are those that the op computes with. Does not: compute.
"""

from __future__ import annotations

import os
from typing import Any

import transformer_engine.pytorch as te

from te_offload.fused.kernels.interface import Activation, Gate, Gated, SquaredReLU
from te_offload.ops import te_adapter

GLU_SWITCH = "TE_OFFLOAD_FUSED_GLU"
_BLOCK = 32  # columns of each half that the kernels' tiles hold a multiple of


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


def reason_against(window: Any, *, by_blocks: bool, reference: bool) -> str | None:
    """Why a window with a gated activation is not taken; ``None``: it is, or its activation is not gated.

    Args:
        by_blocks: there is a recipe of a block-scaled format. reference: torch computes.
    """
    if not is_gated(window.activation):
        return None
    name = type(window.activation).__name__
    if by_blocks:
        return f"its activation is {name}, which does not run fused by blocks"
    if not reference and os.environ.get(GLU_SWITCH) != "1":
        return f"its activation is {name}, whose kernels have not been seen on a card yet; {GLU_SWITCH}=1 takes it"
    interleave = window.activation.glu_interleave_size or 1
    if not reference and _BLOCK % interleave:
        return f"its activation is {name} with glu_interleave_size={interleave}, which does not divide {_BLOCK}"
    columns, block = window.fc1.out_features, 2 * interleave
    if columns % block:
        return f"FC1 gives {columns} columns, which are not a multiple of {block} (2 x glu_interleave_size)"
    return None
