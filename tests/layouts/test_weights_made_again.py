"""`keep_quantized_weight=False` on Transformer Engine's own unfused code, split and grouped, with only kernels replaced."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import OffloadSession
from te_offload.errors import SavedTensorModifiedError, UnknownLayoutError
from te_offload.fused.blackwell import BlackwellGLUGroupedMLP, BlackwellUnaryGroupedMLP
from te_offload.ops import te_adapter
from te_offload.ops.te_adapter import weights as adapters_weights
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


def forward(module: te.ops.Sequential, recipe: str, splits: tuple[int, ...] = SPLITS) -> torch.Tensor:
    x, sizes, scales = make_inputs(splits, HIDDEN, dtype=torch.bfloat16)
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
            other = te_recipe.Float8CurrentScaling(backward_override="dequantized")
            monkeypatch.setattr(adapters_weights, "active_recipe", lambda: other)
        else:
            monkeypatch.setattr(ctx.weight_quantizers[0], change, True, raising=False)
        return let_go(op, ctx)

    monkeypatch.setattr(te_adapter, "let_go_of_weights", changed)
    with pytest.warns(UserWarning, match=f"keep_quantized_weight=False, but {why}: quantized copies of 3 x"):
        forward(module, "fp8-current")


# Transformer Engine's fused op for Blackwell


def blackwell_mlp(monkeypatch: pytest.MonkeyPatch, *, keep: tuple[bool, bool], **arguments: Any) -> te.ops.Sequential:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    torch.manual_seed(0)
    one, other = ({"keep_quantized_weight": each} for each in keep)
    sizes: dict[str, Any] = {"experts": 2, "hidden": HIDDEN, "ffn": FFN, "dtype": torch.bfloat16}
    return make_mlp(**(sizes | arguments), fc1=one, fc2=other)


def blackwell_step(module: te.ops.Sequential, recipe: str) -> None:
    with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
        run(module, (128, 256), hidden=HIDDEN)
    kinds = BlackwellUnaryGroupedMLP, BlackwellGLUGroupedMLP
    assert [type(op) in kinds for op, _ in module._module_groups[0]._forward_ops] == [True]


BLACKWELL = pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])


@pytest.mark.parametrize(
    ("recipe", "single"),
    [("mxfp8", False), ("mxfp8", True), ("nvfp4", False)],  # of one grouped weight in NVFP4 te_on_cpu has no scales
    ids=["mxfp8", "mxfp8, one grouped weight", "nvfp4"],
)
@pytest.mark.parametrize("activation", ["srelu", "swiglu-interleaved"])
@pytest.mark.parametrize("keep", [(False, False), (True, False), (False, True)])
def test_blackwells_backward_finds_what_the_forward_saved(
    monkeypatch: pytest.MonkeyPatch, recipe: str, activation: str, single: bool, keep: tuple[bool, bool]
) -> None:
    """Its kernels compute nothing here: so every buffer that Transformer Engine's own backward finds is compared."""
    te_on_cpu.fused(monkeypatch)
    kind: Any = te_adapter.fused_unary_class() if activation == "srelu" else te_adapter.fused_glu_class()
    backward, found, swizzled = kind.fuser_backward, [], []

    def noted(self: Any, ctxs: Any, *args: Any, **kwargs: Any) -> Any:
        swizzled.append([getattr(one, "_with_gemm_swizzled_scales", None) for one in ctxs[0].saved_tensors])
        buffers = te_adapter.buffers_of(*ctxs[0].saved_tensors)
        found.append([None if one is None else one.detach().clone() for one in buffers])
        return backward(self, ctxs, *args, **kwargs)

    monkeypatch.setattr(kind, "fuser_backward", noted)
    for which in ((True, True), keep):
        module = blackwell_mlp(monkeypatch, keep=which, activation=activation, single_grouped_weight=single)
        with OffloadSession(module, min_bytes=0) as session, session.step():
            blackwell_step(module, recipe)
        assert session.records[-1].bytes_back > 0
    assert swizzled[0] == swizzled[1]
    expected, again = found
    assert len(expected) == len(again) > 7
    for one, other in zip(expected, again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@BLACKWELL
@pytest.mark.parametrize("keep", [True, False])
def test_blackwells_quantized_weights_are_there_after_the_forward_if_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, recipe: str, keep: bool
) -> None:
    te_on_cpu.fused(monkeypatch)
    made: list[weakref.ref[Any]] = []
    let_go = te_adapter.let_go_of_fused_weights

    def noted(basic_ops: Any, ctx: Any) -> Any:
        made.extend(weakref.ref(one) for one in (*ctx.to_save[8:10], *ctx.to_save[-2:]))
        return let_go(basic_ops, ctx)

    monkeypatch.setattr(te_adapter, "let_go_of_fused_weights", noted)
    module = blackwell_mlp(monkeypatch, keep=(keep, keep))
    y = forward(module, recipe, (128, 256))
    assert [one() is not None for one in made] == [keep] * 4
    used: list[Any] = []
    quantize = te.ops.GroupedLinear._get_discrete_weights_for_gemm

    def quantize_spied(self: Any, parameters: Any, quantizers: Any, **options: Any) -> Any:
        used.extend(quantizers)
        return quantize(self, parameters, quantizers, **options)

    monkeypatch.setattr(te.ops.GroupedLinear, "_get_discrete_weights_for_gemm", quantize_spied)
    y.float().sum().backward()
    theirs = [module[place].get_quantizer("forward", number) for place in (0, 2) for number in (1, 3)]
    assert used == ([] if keep else theirs)


def test_blackwells_one_grouped_weight_of_one_expert_is_kept_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    module = blackwell_mlp(monkeypatch, keep=(True, False), experts=1, single_grouped_weight=True)
    x, sizes, scales = make_inputs((128,), HIDDEN, dtype=torch.bfloat16)
    why = r"keep_quantized_weight=False, but one grouped weight of one expert.*1 x 128 x 256 weights stay"
    with pytest.warns(UserWarning, match=why), te.autocast(enabled=True, recipe=RECIPES["mxfp8"]()):
        module(x, sizes, scales, sizes)


def test_blackwells_weights_that_changed_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    module = blackwell_mlp(monkeypatch, keep=(True, False))
    y = forward(module, "mxfp8", (128, 256))
    with torch.no_grad():
        module[2].weight1.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="a weight was written to in place"):
        y.float().sum().backward()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_layout_of_too_few_entries_has_its_own_error(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    (te_on_cpu.fused if fused else functools.partial(te_on_cpu.unfused, grouped=True))(monkeypatch)
    name = "let_go_of_fused_weights" if fused else "let_go_of_weights"
    let_go = getattr(te_adapter, name)

    def cut(ops: Any, ctx: Any) -> Any:
        ctx.to_save = ctx.to_save[-2:]
        return let_go(ops, ctx)

    monkeypatch.setattr(te_adapter, name, cut)
    module = blackwell_mlp(monkeypatch, keep=(False, False))
    listen(module)
    with pytest.raises(UnknownLayoutError):
        forward(module, "mxfp8", (128, 256))
