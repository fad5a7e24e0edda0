"""`keep_quantized_weight=False` on Transformer Engine's own unfused code, split and grouped, with only kernels replaced."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import OffloadSession
from te_offload.errors import SavedTensorModifiedError
from te_offload.ops import te_adapter
from tests.fused.test_fp8_pass import fp8_parameter
from tests.layouts.test_unfused_layouts import PATHS, RECIPES, listen
from tests.support import te_on_cpu
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run

EXPERTS, HIDDEN, FFN, SPLITS = 3, 128, 256, (128, 0, 384)
QUANTIZED = [name for name in RECIPES if name != "bf16"]
FORMATS = pytest.mark.parametrize("recipe", QUANTIZED)


@pytest.fixture(autouse=True)
def no_state() -> None:
    FP8GlobalStateManager.reset()


def mlp(*, keep: bool, **arguments: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN, "dtype": torch.bfloat16}
    return make_mlp(**sizes, **arguments, keep_quantized_weight=keep)


def step(module: te.ops.Sequential, recipe: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """One step; in the next one weights are larger, as after an optimizer's."""
    with te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe]()):
        found = run(module, SPLITS, hidden=HIDDEN, seed=seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    return found


def forward(module: te.ops.Sequential, recipe: str) -> torch.Tensor:
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
        y: torch.Tensor = module(x, sizes, scales, sizes)
    return y


@PATHS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("offloads", [False, True], ids=["no session", "offloaded"])
def test_gradients_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str, offloads: bool
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp(keep=True)
    expected = [step(module, recipe, seed) for seed in range(3)]
    module = mlp(keep=False)
    with OffloadSession(module, min_bytes=0, verify=True, enabled=offloads) as session:
        for seed in range(3):
            with session.step():
                assert_same_bits(expected[seed], step(module, recipe, seed))
    assert (session.records[-1].bytes_back > 0) is offloads


@PATHS
@FORMATS
def test_no_quantized_weight_is_there_between_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    made: list[weakref.ref[Any]] = []
    quantize = te.ops.GroupedLinear._get_discrete_weights_for_gemm

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        found = quantize(self, *args, **options)
        made.extend(weakref.ref(one) for one in found)
        return found

    monkeypatch.setattr(te.ops.GroupedLinear, "_get_discrete_weights_for_gemm", noted)
    kept = forward(mlp(keep=True), recipe)
    assert len(made) == 2 * EXPERTS and all(one() is not None for one in made)  # what else the count would miss
    made.clear()
    y = forward(mlp(keep=False), recipe)
    assert len(made) == 2 * EXPERTS and not any(one() is not None for one in made)
    y.float().sum().backward()
    assert len(made) == 4 * EXPERTS and not any(one() is not None for one in made)
    del kept


@PATHS
@FORMATS
def test_slots_and_what_is_exempt_are_those_without_weights(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    found = {}
    for keep in (True, False):
        module = mlp(keep=keep)
        listener = listen(module)
        step(module, recipe)
        found[keep] = listener.saved
    for with_weights, without in zip(found[True], found[False], strict=True):
        assert (with_weights.name, with_weights.state, with_weights.format) == (
            without.name,
            without.state,
            without.format,
        )
        assert [one.nbytes for one in with_weights.buffers] == [one.nbytes for one in without.buffers]


@PATHS
def test_a_weight_that_changed_before_it_is_quantized_again_is_an_error(
    monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp(keep=False)
    y = forward(module, "fp8-current")
    with torch.no_grad():
        module[2].weight1.mul_(2)
    with pytest.raises(
        SavedTensorModifiedError, match=r"GroupedLinear: a weight was written to in place.*optimizer.step"
    ):
        y.float().sum().backward()


@FORMATS
def test_one_grouped_weight_is_made_again_too(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    te_on_cpu.unfused(monkeypatch, grouped=True)
    made: list[weakref.ref[Any]] = []
    quantize = te.ops.GroupedLinear._get_grouped_weight_for_gemm

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        found = quantize(self, *args, **options)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(te.ops.GroupedLinear, "_get_grouped_weight_for_gemm", noted)
    found = []
    for keep in (True, False):
        made.clear()
        module = mlp(keep=keep, single_grouped_weight=True)
        y = forward(module, recipe)
        assert [one() is not None for one in made] == [keep, keep]
        y.float().sum().backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        assert len(grads) == 2
        found.append({"y": y.detach()} | grads)
        del y
    assert_same_bits(*found)


def test_frozen_weights_are_made_again_for_the_gradient_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    found = []
    for keep in (True, False):
        module = mlp(keep=keep)
        module.requires_grad_(False)
        with te.autocast(enabled=True, recipe=RECIPES["fp8-current"]()):
            found.append(run(module, SPLITS, hidden=HIDDEN))
    assert "input0" in found[0]
    assert_same_bits(*found)


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")
def test_weights_that_are_quantized_themselves_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    found = []
    for keep in (True, False):
        module = mlp(keep=keep)
        for place in (0, 2):
            for name, weight in list(module[place].named_parameters()):
                setattr(module[place], name, fp8_parameter(weight))
        y = forward(module, "fp8-current")
        y.float().sum().backward()
        assert all(getattr(weight, "_data", None) is not None for weight in module.parameters())  # and the optimizer's
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        assert len(grads) == 2 * EXPERTS
        found.append({"y": y.detach()} | grads)
    assert_same_bits(*found)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("with_amax_reduction", "Float8CurrentScalingQuantizer reduces largest magnitudes over ranks"),
        ("stochastic_rounding", "Float8CurrentScalingQuantizer rounds at random"),
        ("backward_override", "the recipe has backward_override=dequantized"),
    ],
)
def test_what_could_give_other_bits_is_kept_and_said(monkeypatch: pytest.MonkeyPatch, change: str, why: str) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    module = mlp(keep=False)
    step(module, "fp8-current")
    let_go = te_adapter.let_go_of_weights

    def changed(op: Any, ctx: Any) -> Any:
        if change == "backward_override":
            ctx.te_offload_recipe = te_recipe.Float8CurrentScaling(backward_override="dequantized")
        else:
            monkeypatch.setattr(ctx.weight_quantizers[0], change, True, raising=False)
        return let_go(op, ctx)

    monkeypatch.setattr(te_adapter, "let_go_of_weights", changed)
    with pytest.warns(UserWarning, match=f"keep_quantized_weight=False, but {why}: quantized copies of 3 x"):
        forward(module, "fp8-current")
