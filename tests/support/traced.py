"""`te_offload.functional.grouped_mlp` for tests: arguments, steps of it and of te_offload's ops with the same weights.

In: names of activations. Out: tensors by name. Keeps true: the same seed, the same numbers. Does not: compile.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload.functional import grouped_mlp
from tests.support.mlp import make_mlp, seeded

EXPERTS, HIDDEN, FFN = 3, 16, 64
SPLITS = (11, 0, 20)
# By the names of `tests.support.mlp`: gate, numbers, interleave.
HOW: dict[str, tuple[str, tuple[float, ...], int]] = {
    "srelu": ("", (), 0),
    "tanh-srelu": ("", (2.0,), 0),
    "swiglu": ("SwiGLU", (), 0),
    "swiglu-interleaved": ("SwiGLU", (), 32),
    "swiglu-pairs": ("SwiGLU", (), 1),
    "clamped-qgeglu": ("ClampedQGeGLU", (7.0, 1.702, 1.0), 0),
    "situ-glu": ("SiTUGLU", (4.0, 25.0), 0),
}


def tensors(activation: str, splits: tuple[int, ...] = SPLITS, more: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Arguments that take gradients, and split sizes; ``more``: rows of no expert."""
    wide, tokens = FFN * (1 if "srelu" in activation else 2), sum(splits) + more
    found = {
        "x": seeded((tokens, HIDDEN), 1, dtype=torch.bfloat16, device=device),
        "w1": seeded((EXPERTS, wide, HIDDEN), 2, dtype=torch.bfloat16, device=device),
        "w2": seeded((EXPERTS, HIDDEN, FFN), 3, dtype=torch.bfloat16, device=device) / 8,
        "scales": seeded((tokens,), 4, device=device).abs(),
    }
    found = {name: tensor.requires_grad_() for name, tensor in found.items()}
    return found | {"split_sizes": torch.tensor(splits, device=device)}


def step(function: Any, given: dict[str, torch.Tensor], activation: str, **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients, by the names of what they are of."""
    gate, numbers, interleave = HOW[activation]
    y = function(**given, gate=gate, numbers=numbers, interleave=interleave, **options)
    y.backward(seeded(tuple(y.shape), 5, dtype=y.dtype, device=y.device.type))
    return {"y": y.detach()} | {name: one.grad for name, one in given.items() if one.grad is not None}


def by_ops(activation: str, given: dict[str, torch.Tensor], recipe: Any = None) -> dict[str, torch.Tensor]:
    """The same by a Sequential of te_offload's. ``recipe``: of Transformer Engine's."""
    device = given["x"].device.type
    mlp = make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, activation=activation, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for number in range(EXPERTS):
            mlp[0].get_parameter(f"weight{number}").copy_(given["w1"][number])
            mlp[2].get_parameter(f"weight{number}").copy_(given["w2"][number])
    x, scales = (given[name].detach().requires_grad_() for name in ("x", "scales"))
    with contextlib.nullcontext() if recipe is None else te.autocast(enabled=True, recipe=recipe):
        y = mlp(x, given["split_sizes"], scales, given["split_sizes"])
    y.backward(seeded(tuple(y.shape), 5, dtype=y.dtype, device=y.device.type))
    assert x.grad is not None and scales.grad is not None
    found = {"y": y.detach(), "x": x.grad, "scales": scales.grad}
    for name, linear in (("w1", mlp[0]), ("w2", mlp[2])):
        grads = [linear.get_parameter(f"weight{number}").grad for number in range(EXPERTS)]
        found[name] = torch.stack([grad for grad in grads if grad is not None])
    return found


class Layer(torch.nn.Module):
    """Weights, and something before them; ``options``: of `grouped_mlp`."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        super().__init__()
        self.options = options
        given = tensors("swiglu", device=device)
        self.w1, self.w2 = (torch.nn.Parameter(given[name].detach().clone()) for name in ("w1", "w2"))

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor) -> torch.Tensor:
        return x + grouped_mlp(torch.nn.functional.silu(x), self.w1, self.w2, split_sizes, **self.options)


def run_layers(layers: torch.nn.ModuleList) -> dict[str, torch.Tensor]:
    """A forward and a backward: output and gradients."""
    layers.zero_grad()
    device = next(layers.parameters()).device.type
    x = y = seeded((sum(SPLITS), HIDDEN), 1, dtype=torch.bfloat16, device=device).requires_grad_()
    for layer in layers:
        y = layer(y, torch.tensor(SPLITS, device=device))
    y.backward(seeded((sum(SPLITS), HIDDEN), 2, dtype=torch.bfloat16, device=device))
    assert x.grad is not None
    grads = {name: one.grad.clone() for name, one in layers.named_parameters() if one.grad is not None}
    return {"y": y.detach(), "x": x.grad} | grads
