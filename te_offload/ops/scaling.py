"""How the tensors of a grouped linear get their scales.

In: nothing. Out: `Scaling`, `BlockScaling`, and both of a linear. Keeps true: scales and magnitudes of delayed scaling are
Transformer Engine's own tensors, so its recipes update them. Does not: compute a scale.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scaling:
    """One tensor an expert, each with a scale of its own.

    Attributes:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        epsilon, power_of_two: of scales that are made from the numbers at hand (current scaling).
        given, kept: (N,) float32, of delayed scaling: the scales, and where magnitudes are kept for the next ones.
    """

    dtype: torch.dtype
    epsilon: float = 0.0
    power_of_two: bool = False
    given: torch.Tensor | None = None
    kept: torch.Tensor | None = None


class BlockFormat(enum.Enum):
    """Formats in which numbers of a block share a scale.

    ``FP8``: E4M3, 1 x 128 or 128 x 128 numbers, scales in float32. ``MXFP8``: E4M3, 1 x 32, E8M0 (OCP Microscaling Formats
    1.0). ``NVFP4``: E2M1, 1 x 16 or 16 x 16, E4M3, and one amax a tensor.
    """

    FP8 = "FP8 by blocks"
    MXFP8 = "MXFP8"
    NVFP4 = "NVFP4"


@dataclass(frozen=True)
class BlockScaling:
    """One tensor an expert, scaled by blocks.

    Attributes:
        format: which. square: blocks are squares, so that both directions have the same numbers.
        epsilon, power_of_two: of scales in float32. hadamard: columns are transformed first (NVFP4).
    """

    format: BlockFormat
    square: bool = False
    epsilon: float = 0.0
    power_of_two: bool = False
    hadamard: bool = False


@dataclass(frozen=True)
class LinearScaling:
    """Of a grouped linear's inputs, weights, and gradients of outputs."""

    input: Scaling
    weight: Scaling
    grad_output: Scaling


@dataclass(frozen=True)
class LinearBlockScaling:
    """The same by blocks, all in one format."""

    input: BlockScaling
    weight: BlockScaling
    grad_output: BlockScaling
