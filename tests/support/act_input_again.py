"""Grouped MLPs whose backward may compute FC1 again, and steps of them under checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from tests.support.mlp import gradients, make_inputs, make_mlp

NEAR = 0.15  # of a gradient's norm: what two scales of delayed scaling, and two roundings to FP8, make


def make_again(*, again: bool, **options: Any) -> te.ops.Sequential:
    """Of the same weights each time, with biases that are not zero. No state of recipes is left. ``options``: as
    `make_mlp`.
    """
    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    module = make_mlp(**options)
    module[1].recompute_act_input = again
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
    return module


def checkpointed_step(
    module: te.ops.Sequential, recipe: Any, splits: tuple[int, ...], seed: int, *, by_checkpoint: bool = True
) -> dict[str, torch.Tensor]:
    """Gradients of a step whose scales, under delayed scaling, are the next step's before the backward begins."""
    weight = next(module.parameters())
    hidden = module[0].in_features
    x, sizes, scales = make_inputs(splits, hidden, device=str(weight.device), dtype=weight.dtype, seed=seed)
    module.zero_grad()

    def layer(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            y: torch.Tensor = module(x, sizes, scales, sizes)
        return y

    y: torch.Tensor = checkpoint(layer, x, scales, use_reentrant=False) if by_checkpoint else layer(x, scales)
    y.float().sum().backward()
    return gradients(module, x, scales)


def assert_checkpoints_are_near(recipe: Any, splits: tuple[int, ...], **options: Any) -> None:
    """Three steps of a module by checkpoints beside those of its twin without, which have other scales."""
    found = []
    for by_checkpoint in (False, True):
        module = make_again(**options)
        found.append(
            [checkpointed_step(module, recipe, splits, seed, by_checkpoint=by_checkpoint) for seed in range(3)]
        )
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name, grad in one.items():
            off = (grad.float() - other[name].float()).norm()
            assert off <= NEAR * grad.float().norm(), f"{name}: off by {off} of {grad.float().norm()}"
