"""The fused grouped MLP in FP8, with its kernels' arithmetic in torch, beside Transformer Engine's own unfused code."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from te_offload import Fate, OffloadSession, SlotName
from te_offload.errors import ArgumentError
from te_offload.fused import find_windows, hopper, hopper_choice
from te_offload.fused.calls import calls_of
from te_offload.fused.hopper import HopperGroupedMLP
from te_offload.fused.kernels.fp8_interface import QuantizedWeights
from te_offload.fused.kernels.reference_fp8 import ReferenceFp8Kernels
from te_offload.ops import te_adapter
from tests.fused.test_stand_ins import inputs_of, inputs_of_one
from tests.layouts.test_delayed_scaling import state
from tests.support import te_on_cpu
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run
from tests.support.reference import activate, grouped_linear

pytestmark = pytest.mark.usefixtures("fp8_in_torch_arithmetic")
EXPERTS, HIDDEN, FFN, SPLITS = 3, 64, 128, (128, 0, 384)
TOKENS = sum(SPLITS)


def with_powers_of_two() -> Any:
    """The scales; where Transformer Engine's ops look for them (the recipe's own argument is not asked)."""
    recipe: Any = te_recipe.Float8CurrentScaling()
    for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, operand, te_recipe.QParams(power_2_scale=True, amax_epsilon=0.0))
    return recipe


RECIPES: dict[str, Any] = {
    "current": te_recipe.Float8CurrentScaling(),
    "current, E4M3": te_recipe.Float8CurrentScaling(fp8_format=te_recipe.Format.E4M3),
    "current, powers of two": with_powers_of_two(),
    "delayed": te_recipe.DelayedScaling(amax_history_len=4),
}
EVERY = pytest.mark.parametrize("recipe", RECIPES)


def mlp(**options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, **({"dtype": torch.bfloat16} | options))


def step(module: te.ops.Sequential, recipe: str, seed: int = 1, *, extra: int = 3) -> dict[str, torch.Tensor]:
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        return run(module, SPLITS, hidden=HIDDEN, seed=seed, extra=extra)


def fused_op(module: te.ops.Sequential) -> HopperGroupedMLP:
    found = next(op for op, _ in module._module_groups[0]._forward_ops)
    assert isinstance(found, HopperGroupedMLP)
    return found


def assert_all_fused(module: te.ops.Sequential) -> None:
    calls = calls_of(module[0])
    assert calls.fused and not calls.handed_over, calls


def assert_ran_fused(module: te.ops.Sequential) -> None:
    assert fused_op(module)
    assert_all_fused(module)


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float = 0.03) -> None:
    """But for what rounding in bf16 or FP8 at another place makes of it, in the mean of many numbers."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        reference = expected[name].float()
        assert (value.float() - reference).norm() <= most * reference.norm(), name


def assert_as_near(
    found: dict[str, torch.Tensor], unfused: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> None:
    """As what is not quantized as the unfused path's, whose own distance is 3 to 8%; but for 5% of that."""
    for name, value in exact.items():
        ours, theirs = ((one[name].float() - value.float()).norm() for one in (found, unfused))
        assert ours <= 1.05 * theirs, name


@EVERY
@pytest.mark.parametrize("activation", ["srelu", "tanh-srelu"])
def test_output_and_gradients_are_those_of_the_unfused_path(
    monkeypatch: pytest.MonkeyPatch, recipe: str, activation: str
) -> None:
    found = []
    for switch in ("reference", "0"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp(activation=activation)
        found.append([step(module, recipe, seed) for seed in range(3)])
        if switch == "reference":
            assert_ran_fused(module)
    module = mlp(activation=activation)
    exact = [run(module, SPLITS, hidden=HIDDEN, seed=seed, extra=3) for seed in range(3)]
    for one, other, without in zip(*found, exact, strict=True):
        assert_near(one, other, most=0.05)  # where an amax is rounded elsewhere, all of a tensor's numbers are
        assert_as_near(one, other, without)


@EVERY
@pytest.mark.parametrize("activation", ["swiglu", "swiglu-interleaved", "swiglu-pairs", "clamped-qgeglu", "situ-glu"])
def test_output_and_gradients_of_gated_activations_are_near_fp64(recipe: str, activation: str) -> None:
    """The kernels of Transformer Engine's gated ops are not replaced here."""
    module = mlp(activation=activation)
    found = [step(module, recipe, seed) for seed in range(3)][-1]
    assert_ran_fused(module)
    x, _, scales = (tensor.detach() for tensor in make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16, seed=2))
    x, scales = x.double().requires_grad_(), scales.double().requires_grad_()
    weights = [p.detach().double().requires_grad_() for p in module.parameters()]
    act_input = grouped_linear(x, SPLITS, weights[:EXPERTS])
    output = grouped_linear(activate(activation, act_input, scales), SPLITS, weights[EXPERTS:])
    output.square().sum().backward()
    grads = {name: weight.grad for (name, _), weight in zip(module.named_parameters(), weights, strict=True)}
    expected = {"output": output.detach(), "input0": x.grad, "input1": scales.grad} | grads
    assert_near(found, {name: value for name, value in expected.items() if value is not None}, 0.12)


def test_two_linears_may_have_split_sizes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for switch in ("reference", "0"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=RECIPES["current"]):
            y = module(x, sizes, scales, sizes.flip(0))
        y.float().square().sum().backward()
        assert x.grad is not None and scales.grad is not None
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        found.append({"y": y.detach(), "x": x.grad, "scales": scales.grad} | grads)
        if switch == "reference":
            assert_ran_fused(module)
    assert_near(found[0], found[1])


@pytest.mark.parametrize("scaled", [False, True], ids=["biases", "scaled biases"])
def test_biases_and_their_gradients_are_those_without_quantization(scaled: bool) -> None:
    module = mlp(bias=True, fc2={"scale_bias": scaled})
    extra = 4 if scaled else 3
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.normal_()
    found = step(module, "current", extra=extra)
    assert_ran_fused(module)
    assert_near(found, run(module, SPLITS, hidden=HIDDEN, extra=extra), 0.1)


def test_delayed_scaling_keeps_the_scales_and_magnitudes_of_the_unfused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for switch in ("reference", "0"):
        FP8GlobalStateManager.reset()
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp()
        steps = []
        for seed in range(8):
            step(module, "delayed", seed)
            steps.append(state(module))
        found.append(steps)
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.allclose(value, other[name], rtol=0.07, atol=0), (number, name)
            exact = name.startswith("0 forward")  # of FC1's input and weights, before anything is rounded elsewhere
            assert not exact or torch.equal(value, other[name]), (number, name)
    assert sum(bool(value != 1) for name, value in found[0][-1].items() if name.endswith("scale")) > EXPERTS


@EVERY
def test_offloading_changes_no_bit_and_moves_fp8_rows_and_the_activations_input(recipe: str) -> None:
    module = mlp()
    expected = [step(module, recipe, seed) for seed in range(4)]
    FP8GlobalStateManager.reset()
    module = mlp()
    with OffloadSession(module, min_bytes=0, verify=True) as session:
        for seed in range(4):
            with session.step():
                assert_same_bits(expected[seed], step(module, recipe, seed))
    record = session.records[-1]
    rows = {row.slot: (row.fate, row.format, row.nbytes) for row in record.slots}
    assert rows[SlotName.FC1_INPUT] == (Fate.OFFLOADED, "FP8 by row", TOKENS * HIDDEN)
    assert rows[SlotName.ACT_INPUT] == (Fate.OFFLOADED, "bf16", TOKENS * FFN * 2)
    assert rows[SlotName.FC2_INPUT][0] is Fate.RECOMPUTED
    assert record.bytes_out == record.bytes_back == TOKENS * (HIDDEN + 2 * FFN)


@EVERY
def test_weights_in_fp8_are_let_go_of_in_the_backward(recipe: str) -> None:
    """Each kept until its last use, and no copy of one after that, whoever keeps the loss."""
    module = mlp()
    step(module, recipe)
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    made: list[weakref.ref[torch.Tensor]] = []
    quantize = ReferenceFp8Kernels.quantize_weights

    def noted(self: ReferenceFp8Kernels, weights: Any, scaling: Any, *, by_column: bool) -> QuantizedWeights:
        found = quantize(self, weights, scaling, by_column=by_column)
        made.extend(weakref.ref(one) for one in found.columns)
        return found

    with pytest.MonkeyPatch.context() as patch, te.autocast(enabled=True, recipe=RECIPES[recipe]):
        patch.setattr(ReferenceFp8Kernels, "quantize_weights", noted)
        loss = module(x, sizes, scales, sizes).float().sum()
    assert len(made) == 2 * EXPERTS and all(one() is not None for one in made)
    alive: list[list[bool]] = []
    multiply = ReferenceFp8Kernels.wgrad_fp8

    def looked_at(self: ReferenceFp8Kernels, *args: Any, **kwargs: Any) -> None:
        alive.append([one() is not None for one in made])
        multiply(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceFp8Kernels, "wgrad_fp8", looked_at)
        loss.backward()
    assert alive == [[True] * EXPERTS + [False] * EXPERTS, [False] * 2 * EXPERTS]  # at FC2's wgrad, and at FC1's


def test_scaling_of_each_operand_is_what_the_recipe_says() -> None:
    found = {}
    for name, recipe in RECIPES.items():
        FP8GlobalStateManager.reset()
        module = mlp()
        with te.autocast(enabled=True, recipe=recipe):
            run(module, SPLITS, hidden=HIDDEN)
            scaling = te_adapter.fp8_scaling(module[2])
        assert not isinstance(scaling, str)
        found[name] = [scaling.input, scaling.weight, scaling.grad_output]
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for name, kinds in found.items():
        assert [one.dtype for one in kinds] == [e4m3, e4m3, e4m3 if "E4M3" in name else e5m2], name
        assert {one.power_of_two for one in kinds} == {"powers" in name}, name
        assert all((one.given is not None) == (one.kept is not None) == (name == "delayed") for one in kinds), name
    for place, (one, mode) in enumerate(zip(found["delayed"], ("forward", "forward", "backward"), strict=True)):
        step_of, first = (1, 0) if mode == "backward" else (2, place)
        quantizers = [module[2].get_quantizer(mode, first + step_of * expert) for expert in range(EXPERTS)]
        assert one.given is not None and one.kept is not None
        assert [scale.data_ptr() for scale in one.given] == [quantizer.scale.data_ptr() for quantizer in quantizers]
        assert [amax.data_ptr() for amax in one.kept] == [quantizer.amax.data_ptr() for quantizer in quantizers]


def test_without_a_backward_weights_are_quantized_one_way_round() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    ways: list[bool] = []
    quantize = ReferenceFp8Kernels.quantize_weights

    def noted(self: ReferenceFp8Kernels, weights: Any, scaling: Any, *, by_column: bool) -> QuantizedWeights:
        ways.append(by_column)
        return quantize(self, weights, scaling, by_column=by_column)

    with pytest.MonkeyPatch.context() as patch, te.autocast(enabled=True, recipe=RECIPES["current"]):
        patch.setattr(ReferenceFp8Kernels, "quantize_weights", noted)
        expected = module(x, sizes, scales, sizes)
        with torch.no_grad():
            assert torch.equal(module(x, sizes, scales, sizes), expected)
    assert ways == [True, True, False, False]


def fp8_parameter(weight: torch.Tensor) -> torch.nn.Parameter:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cpu"))
    storage = te_on_cpu.quantize(quantizer, weight)
    return torch.nn.Parameter(
        Float8Tensor(
            shape=weight.shape,
            dtype=weight.dtype,
            data=storage._data,
            fp8_scale_inv=storage._scale_inv,
            fp8_dtype=DType.kFloat8E4M3,
            data_transpose=storage._transpose,
            quantizer=quantizer,
            device=weight.device,
        )
    )


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # by Transformer Engine, for all weights that are FP8
@pytest.mark.parametrize("places", [(0, 2), (0,), (2,)], ids=["both", "FC1", "FC2"])
def test_weights_that_are_fp8_are_taken_as_they_are(places: tuple[int, ...]) -> None:
    found = []
    for primary in (True, False):
        module = mlp()
        for place in places if primary else ():
            for name, weight in list(module[place].named_parameters()):
                setattr(module[place], name, fp8_parameter(weight))
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=RECIPES["current"]):
            y = module(x, sizes, scales, sizes)
        assert inputs_of(y) == inputs_of_one(bias=False)  # one tensor for all weights of an op
        y.float().square().sum().backward()
        assert_ran_fused(module)
        assert x.grad is not None and scales.grad is not None
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        found.append({"y": y.detach(), "x": x.grad, "scales": scales.grad} | grads)
    assert_same_bits(*found)


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")
@EVERY
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "op by op"])
def test_quantizers_are_set_up_where_they_are_used_and_are_not_as_transformer_engine_does(
    monkeypatch: pytest.MonkeyPatch, recipe: str, fused: bool
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference" if fused else "0")
    asked: list[Any] = []
    set_up = te.ops.GroupedLinear.pre_fuser_forward

    def asked_for(self: Any, *, requires_grad: bool) -> None:
        asked.append(self)
        set_up(self, requires_grad=requires_grad)

    monkeypatch.setattr(te.ops.GroupedLinear, "pre_fuser_forward", asked_for)
    module = mlp()

    def usages(requires_grad: bool) -> list[tuple[bool, bool]]:
        with torch.set_grad_enabled(requires_grad), te.autocast(enabled=True, recipe=RECIPES[recipe]):
            module(*make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16), make_inputs(SPLITS)[1])
        quantizers = [*module[0]._quantizers["forward"], *module[0]._quantizers["backward"]]
        return [(quantizer.rowwise_usage, quantizer.columnwise_usage) for quantizer in quantizers]

    evaluates = usages(False)
    assert len(asked) == 2
    trains = usages(True)
    assert len(asked) == 4 and evaluates != trains
    if fused:  # the fused op does not use them, and leaves them alone
        assert usages(True) == trains and len(asked) == 4
        module[0]._quantizers["forward"][-1].set_usage(columnwise=False)
        assert usages(True) != trains and len(asked) == 4
        assert usages(False) == evaluates
        return
    for weight in module[0].parameters():
        weight.requires_grad_(False)
    asked.clear()
    frozen = usages(True)
    assert module[0] in asked and frozen != trains
    monkeypatch.setattr(te_adapter, "usages_are_set", lambda *_, **__: False)
    assert usages(True) == frozen and usages(False) == evaluates


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # by Transformer Engine, for all weights that are FP8
def test_fp8_weights_in_two_formats_are_an_error() -> None:
    module = mlp()
    for name, weight in list(module[0].named_parameters()):
        setattr(module[0], name, fp8_parameter(weight))
    module[0].weight2._fp8_dtype = DType.kFloat8E5M2
    with (
        te.autocast(enabled=True, recipe=RECIPES["current"]),
        pytest.raises(ArgumentError, match="expert 2's are kFloat8E5M2, expert 0's kFloat8E4M3"),
    ):
        module(*make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16), make_inputs(SPLITS)[1])


def test_fp8_weights_without_a_recipe_go_op_by_op() -> None:
    module = mlp()
    for name, weight in list(module[0].named_parameters()):
        setattr(module[0], name, fp8_parameter(weight))
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    y = module(x, sizes, scales, sizes)  # Transformer Engine dequantizes them
    assert y.shape == (TOKENS, HIDDEN)
    calls = calls_of(module[0])
    assert calls.handed_over == 1 and calls.reason == "weights that are quantized, or no plain tensors"


def test_no_tokens_give_zero_gradients_of_weights() -> None:
    module = mlp()
    with te.autocast(enabled=True, recipe=RECIPES["current"]):
        found = run(module, (0, 0, 0), hidden=HIDDEN)
    assert_ran_fused(module)
    assert found["output"].shape == (0, HIDDEN)
    assert all(not found[name].any() for name in found if "weight" in name)


@pytest.mark.parametrize(
    ("recipe", "sizes", "reason"),
    [
        (RECIPES["current"], {"hidden": 72}, "FC1 is 72 x 128; FP8 takes multiples of 16"),
        (te_recipe.Float8CurrentScaling(backward_override="dequantized"), {}, "backward_override=dequantized"),
    ],
    ids=["72 columns", "override"],
)
def test_what_it_does_not_take_is_said(recipe: Any, sizes: dict[str, int], reason: str) -> None:
    module = make_mlp(**({"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN, "dtype": torch.bfloat16} | sizes))  # type: ignore[arg-type]
    (window,) = find_windows(list(module))
    support = hopper_choice.explain(window, recipe)
    assert not support.ok and reason in support.reason


def test_recipe_may_change_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module, alone = mlp(), mlp()
    for recipe in ("current", "delayed", "current"):  # of two kinds: options of one are not looked at again
        FP8GlobalStateManager.reset()
        found = step(module, recipe)
        assert_ran_fused(module)
        if recipe != "delayed":
            assert_same_bits(found, step(alone, recipe))
    with te.autocast(enabled=False):
        dense = run(module, SPLITS, hidden=HIDDEN)
    assert_same_bits(dense, run(mlp(), SPLITS, hidden=HIDDEN))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("apart", [False, True], ids=["one split", "two splits"])
def test_only_delayed_scaling_quantizes_fc2s_input_in_fc1s_pass(
    monkeypatch: pytest.MonkeyPatch, recipe: str, apart: bool
) -> None:
    """It knows the scale beforehand; with split sizes of its own, FC2 reads rows that FC1 does not write."""
    calls: list[str] = []
    given = ReferenceFp8Kernels.fc1_given

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append("one pass")
        return given(self, *args, **options)

    monkeypatch.setattr(ReferenceFp8Kernels, "fc1_given", counted)
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        module(x, sizes, scales, sizes.clone() if apart else sizes)
    assert_all_fused(module)
    assert calls == (["one pass"] if recipe == "delayed" and not apart else [])


@pytest.mark.parametrize(("way", "stores"), [("training", True), ("FC1 again", False), ("evaluation", False)])
def test_delayed_scalings_fc1_stores_its_output_only_for_a_backward_that_reads_it(
    monkeypatch: pytest.MonkeyPatch, way: str, stores: bool
) -> None:
    found: list[bool] = []
    given = ReferenceFp8Kernels.fc1_given

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        act_input, rows = given(self, *args, **options)
        found.append(act_input is not None)
        return act_input, rows

    monkeypatch.setattr(ReferenceFp8Kernels, "fc1_given", noted)
    module = mlp()
    module[1].recompute_act_input = way == "FC1 again"
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]), torch.set_grad_enabled(way != "evaluation"):
        module(x, sizes, scales, sizes)
    assert_all_fused(module)
    assert found == [stores]
