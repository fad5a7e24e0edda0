"""Captured training steps of a grouped MLP, in a recipe or in none, beside eager ones, with routing that changes."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload.graphs import CaptureState, capture
from tests.support.mlp import make_inputs, seeded

STEPS = 20


def assert_captured_steps_have_the_bits_of_eager_ones(
    eager: te.ops.Sequential, module: te.ops.Sequential, recipe: Any, splits: tuple[int, ...], hidden: int
) -> None:
    """``eager``, ``module``: two of the same weights, on a GPU. ``splits``: of the sample; others have their sum."""
    tokens = sum(splits)

    def make(model: te.ops.Sequential) -> Any:
        def train(x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            model.zero_grad(set_to_none=False)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x, sizes, scales, sizes)
            y.float().square().sum().backward()
            found: torch.Tensor = y.detach()
            return found

        return train

    for model in (eager, module):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    step_of = make(eager)
    random = torch.Generator().manual_seed(0)
    x, sizes, scales = (one.detach() for one in make_inputs(splits, hidden, device="cuda", dtype=torch.bfloat16))
    with capture(make(module), [x, sizes, scales], modules=[module]) as replay:
        for number in range(STEPS):
            cuts = torch.randint(0, tokens + 1, (len(splits) - 1,), generator=random).sort().values
            sizes = torch.diff(cuts, prepend=torch.zeros(1), append=torch.full((1,), tokens)).long().cuda()
            x = seeded((tokens, hidden), number, dtype=torch.bfloat16).cuda()
            assert torch.equal(step_of(x, sizes, scales), replay(x, sizes, scales) + 0), number
            for one, other in zip(eager.parameters(), module.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), number
        assert replay.state is CaptureState.CAPTURED, replay.reason
