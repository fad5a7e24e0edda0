"""Linears that delay their wgrad (``delay_wgrad_compute=True``) are fused like others; ``backward_dw`` does the rest."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

from te_offload import OffloadSession
from te_offload.fused import fuse, fusions_in
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp

pytestmark = [
    pytest.mark.usefixtures("fp8_in_torch_arithmetic"),
    pytest.mark.filterwarnings("ignore:GroupedLinear"),
]
SPLITS, HIDDEN, FFN = (128, 0, 256), 128, 256
LINEARS = {"FC1": (0,), "FC2": (2,), "both": (0, 2)}
RECIPES = {
    "bf16": None,
    "FP8": Float8CurrentScaling(),
    "delayed scaling": DelayedScaling(amax_history_len=2),
    "blocks": Float8BlockScaling(),
}


def mlp(which: str = "both", activation: str = "srelu", *, delays: bool = True, **options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    own: dict[str, Any] = {
        f"fc{1 + index // 2}": {"delay_wgrad_compute": delays and index in LINEARS[which]} for index in (0, 2)
    }
    size: dict[str, Any] = {"experts": len(SPLITS), "hidden": HIDDEN, "ffn": FFN, "dtype": torch.bfloat16}
    return make_mlp(activation=activation, **size, **own, **options)


def train(module: te.ops.Sequential, recipe: Any, seed: int = 1, splits: tuple[int, ...] = SPLITS) -> Any:
    x, sizes, scales = make_inputs(splits, HIDDEN, seed=seed, dtype=torch.bfloat16)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, sizes, scales, sizes)
    y.float().square().sum().backward()
    return {"output": y.detach()} | gradients(module, x, scales)


def finish(module: te.ops.Sequential) -> dict[str, torch.Tensor]:
    """The weights' gradients, once all that waits is computed."""
    for index in (2, 0):
        module[index].backward_dw()
    return {name: weight.grad for name, weight in module.named_parameters() if "weight" in name}


@pytest.mark.parametrize("single", [False, True], ids=["weights", "one-grouped-weight"])
@pytest.mark.parametrize("which", LINEARS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gradients_have_the_bits_of_those_at_once(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, which: str, single: bool
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    once, later = (mlp(which, delays=delays, single_grouped_weight=single, bias=not single) for delays in (False, True))
    for seed in (1, 2):  # a second step finds what the first one kept
        expected, found = train(once, recipe, seed), train(later, recipe, seed)
        waiting = {name for name in expected if name not in found}
        assert {int(name[0]) for name in waiting} == set(LINEARS[which])
        assert_same_bits({name: value for name, value in expected.items() if name not in waiting}, found)
        assert_same_bits({name: value for name, value in expected.items() if "weight" in name}, finish(later))
        for module in (once, later):
            module.zero_grad()
    assert [fusion.fused for fusion in fusions_in(later)] == [2]


@pytest.mark.parametrize("activation", ["swiglu", "swiglu-interleaved", "tanh-srelu"])
def test_other_activations_have_the_bits_of_those_at_once(activation: str) -> None:
    once, later = (mlp(activation=activation, delays=delays) for delays in (False, True))
    expected, found = train(once, None), train(later, None)
    assert_same_bits(expected, found | finish(later))
    assert [fusion.fused for fusion in fusions_in(later)] == [1]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_micro_batches_add_to_main_grad_one_after_the_other(recipe: Any) -> None:
    once, later = (mlp(delays=delays, accumulate_into_main_grad=True) for delays in (False, True))
    reduced: list[int] = []
    for module in (once, later):
        for parameter in module.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.5)
            parameter.grad_added_to_main_grad = False
    for index in (0, 2):
        later[index].register_wgrad_accumulation_and_reduce_hooks(lambda index=index: reduced.append(index))
    for seed in (1, 2):
        train(once, recipe, seed)
        train(later, recipe, seed)
    assert all(torch.equal(parameter.main_grad, torch.full(parameter.shape, 0.5)) for parameter in later.parameters())
    for _ in range(3):  # the third one finds nothing left
        finish(later)
    assert reduced == [2, 0, 2, 0]
    expected = {name: parameter.main_grad for name, parameter in once.named_parameters()}
    assert_same_bits(expected, {name: parameter.main_grad for name, parameter in later.named_parameters()})


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_came_back_from_the_host_is_there_for_what_waits(recipe: Any) -> None:
    once, later = mlp(delays=False), mlp()
    with OffloadSession(later, min_bytes=0) as session:
        for _ in range(4):  # as many as a plan takes to be in use
            expected = train(once, recipe)
            with session.step():
                found = train(later, recipe)
                train(mlp(), recipe, 7)  # which may get memory that is given up
                found |= finish(later)
            assert_same_bits(expected, found)
            assert session.records[-1].bytes_back > 0
            for module in (once, later):
                module.zero_grad()


def test_step_without_tokens_has_gradients_of_zero() -> None:
    module = mlp()
    train(module, None, splits=(0, 0, 0))
    assert all(grad is not None and not grad.any() for grad in finish(module).values())


@pytest.mark.parametrize("which", LINEARS)
def test_what_waits_is_kept_until_it_is_computed_and_no_longer(which: str) -> None:
    module = mlp(which)
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    y = module(x, sizes, scales, sizes)
    grad = torch.ones_like(y)
    kept = weakref.ref(grad)
    y.backward(grad)
    del y, grad
    gc.collect()
    assert (kept() is not None) is (2 in LINEARS[which])
    finish(module)
    assert kept() is None


def test_plain_ops_of_transformer_engine_that_are_fused_delay_theirs_too() -> None:
    once = mlp(delays=False)
    linear: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.bfloat16, "delay_wgrad_compute": True}
    plain = te.ops.Sequential(
        te.ops.GroupedLinear(len(SPLITS), HIDDEN, FFN, **linear),
        te.ops.ScaledSReLU(),
        te.ops.GroupedLinear(len(SPLITS), FFN, HIDDEN, **linear),
    )
    plain.load_state_dict(once.state_dict())
    fuse(plain)
    expected, found = train(once, None), train(plain, None)
    assert_same_bits(expected, found | finish(plain))
    assert [fusion.fused for fusion in fusions_in(plain)] == [1]
