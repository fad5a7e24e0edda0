"""How the tensors of a grouped linear get their FP8 scales.

In: nothing. Out: `Scaling`, `LinearScaling`. Keeps true: scales and magnitudes are Transformer Engine's own tensors, so its
recipes update them. Does not: compute a scale.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class LinearScaling:
    """Of a grouped linear's inputs, weights, and gradients of outputs."""

    input: Scaling
    weight: Scaling
    grad_output: Scaling
