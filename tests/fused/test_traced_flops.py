"""What torch's counter of floating-point operations says of `te_offload.functional.grouped_mlp`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from te_offload.functional import RECIPES, grouped_mlp
from tests.support.traced import FFN, HIDDEN, SPLITS, tensors

FC1, FC2 = (2 * sum(SPLITS) * HIDDEN * columns for columns in (2 * FFN, FFN))
pytestmark = pytest.mark.usefixtures("fp8_in_torch_arithmetic")
EVERY = pytest.mark.parametrize("recipe", [None, *RECIPES])


def flops_of_step(function: Any, given: dict[str, Any], **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        y = function(**given, **options)
        if y.requires_grad:
            y.sum().backward()
    total: int = counter.get_total_flops()
    return total


@EVERY
@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
def test_a_step_counts_as_its_products_do(recipe: str | None, *, again: bool) -> None:
    found = flops_of_step(grouped_mlp, tensors("swiglu"), recipe=recipe, recompute_act_input=again)
    assert found == 3 * (FC1 + FC2) + again * FC1


@EVERY
def test_frozen_weights_take_no_products(recipe: str | None) -> None:
    given = tensors("swiglu")
    for name in ("w1", "w2"):
        given[name].requires_grad_(False)
    assert flops_of_step(grouped_mlp, given, recipe=recipe) == 2 * (FC1 + FC2)


@EVERY
def test_a_forward_alone_counts_once(recipe: str | None) -> None:
    with torch.no_grad():
        assert flops_of_step(grouped_mlp, tensors("swiglu"), recipe=recipe) == FC1 + FC2


def test_within_a_checkpoint_the_forward_counts_twice() -> None:
    def function(**given: Any) -> torch.Tensor:
        y: torch.Tensor = checkpoint(functools.partial(grouped_mlp, **given), use_reentrant=False)
        return y

    assert flops_of_step(function, tensors("swiglu")) == 4 * (FC1 + FC2)
