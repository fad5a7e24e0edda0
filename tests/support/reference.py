"""Grouped MLPs in FP64 through torch's own autograd: formulas written a second time, to judge the ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

_INTERLEAVE = {"swiglu-interleaved": 32, "swiglu-pairs": 1}  # columns of a block of each half


def activate(name: str, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scaled activation ``name`` of `tests.support.mlp`."""
    if name == "srelu":
        y = functional.relu(x) ** 2
    elif name == "tanh-srelu":
        y = (2.0 * torch.tanh(functional.relu(x) / 2.0)) ** 2
    else:
        if name in _INTERLEAVE:
            columns = torch.arange(x.shape[-1]).view(-1, 2, _INTERLEAVE[name])
            a, b = x[:, columns[:, 0].flatten()], x[:, columns[:, 1].flatten()]
        else:
            a, b = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        if name.startswith("swiglu"):
            y = functional.silu(a) * b
        elif name.endswith("clamped-qgeglu"):
            limit = 0.75 if name.startswith("tight") else 7.0
            a = torch.minimum(a, torch.full_like(a, limit))
            y = a * torch.sigmoid(1.702 * a) * (b.clamp(-limit, limit) + 1.0)
        else:
            y = 4.0 * torch.tanh(a / 4.0) * torch.sigmoid(a) * 25.0 * torch.tanh(b / 25.0)
    return y * scales[:, None]


def grouped_linear(
    x: torch.Tensor,
    splits: Sequence[int],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """One linear layer an expert."""
    out = []
    start = 0
    for index, size in enumerate(splits):
        y = x[start : start + size] @ weights[index].T
        if biases is not None:
            y = y + (biases[index] if scales is None else scales[start : start + size, None] * biases[index])
        out.append(y)
        start += size
    return torch.cat(out)
