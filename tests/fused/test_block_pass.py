"""The fused grouped MLP in block-scaled formats, in torch arithmetic, beside Transformer Engine's own code.

Of the unfused code only kernels are replaced (`tests.support.block_formats`); formats there are written down a second time,
with MXFP8's scales rounded the other way and without NVFP4's Hadamard transform.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
from transformer_engine.pytorch.ops.op import OperationContext
from transformer_engine.pytorch.tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.storage import float8_blockwise_tensor_storage as te_blockwise_storage

from te_offload import Fate, OffloadSession, SlotName
from te_offload.fused import find_windows, hopper, hopper_choice, machine, quantized
from te_offload.fused.calls import calls_of
from te_offload.fused.hopper import HopperGroupedMLP
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.fused.kernels.reference_formats import make_format
from te_offload.fused.stand_ins import stand_ins_of
from te_offload.ops import te_adapter
from te_offload.ops.scaling import BlockFormat, BlockScaling, LinearBlockScaling
from tests.fused.test_fp8_pass import fp8_parameter
from tests.support import block_formats, te_on_cpu
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp, run

EXPERTS, HIDDEN, FFN, SPLITS = 3, 128, 256, (130, 0, 384)
TOKENS = sum(SPLITS)


def with_any_scales() -> Any:
    """FP8 by blocks with scales that are no powers of two, as `block_formats` has them."""
    recipe: Any = te_recipe.Float8BlockScaling()
    for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, operand, te_recipe.QParams(power_2_scale=False))  # as arguments they are not heard
    return recipe


RECIPES: dict[str, Any] = {
    "fp8-block, any scales": with_any_scales(),
    "fp8-block": te_recipe.Float8BlockScaling(),
    "mxfp8": te_recipe.MXFP8BlockScaling(),
    "nvfp4": te_recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
FORMATS = ("fp8-block", "mxfp8", "nvfp4")
EVERY = pytest.mark.parametrize("recipe", FORMATS)
NEAR = {"fp8-block": 0.03, "mxfp8": 0.12, "nvfp4": 0.3}  # of what rounding in a format makes of sums of many numbers


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    te_on_cpu.unfused(monkeypatch, grouped=False)


def mlp(**options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, **({"dtype": torch.bfloat16} | options))


def step(module: te.ops.Sequential, recipe: str, splits: tuple[int, ...] = SPLITS, **options: Any) -> Any:
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        return run(module, splits, hidden=HIDDEN, **options)


def assert_all_fused(module: te.ops.Sequential) -> None:
    calls = calls_of(module[0])
    assert calls.fused and not calls.handed_over, calls


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        reference = expected[name].float()
        assert (value.float() - reference).norm() <= most * reference.norm(), name


@pytest.mark.parametrize("recipe", ["fp8-block, any scales", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("activation", ["srelu", "tanh-srelu"])
def test_output_and_gradients_are_those_of_the_unfused_path(
    monkeypatch: pytest.MonkeyPatch, recipe: str, activation: str
) -> None:
    splits = (128, 0, 384)  # the unfused path takes no others
    module = mlp(activation=activation)
    found = step(module, recipe, splits)
    assert_all_fused(module)
    monkeypatch.setenv(hopper.SWITCH, "0")
    assert_near(found, step(mlp(activation=activation), recipe, splits), NEAR[recipe.split(",")[0]])


@EVERY
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"bias": True, "fc2": {"scale_bias": True}}], ids=str)
def test_output_and_gradients_are_near_those_without_quantization(
    monkeypatch: pytest.MonkeyPatch, recipe: str, options: dict[str, Any]
) -> None:
    """With token counts that are no multiple of a block, and biases."""
    module, extra = mlp(**options), 4 if "fc2" in options else 3
    found = step(module, recipe, extra=extra)
    assert_all_fused(module)
    expected = run(mlp(**options), SPLITS, hidden=HIDDEN, extra=extra)
    assert_near(found, expected, max(NEAR[recipe], 0.1))


@EVERY
@pytest.mark.parametrize("activation", ["swiglu", "swiglu-interleaved", "swiglu-pairs", "clamped-qgeglu", "situ-glu"])
def test_gated_activations_are_near_those_without_quantization_too(recipe: str, activation: str) -> None:
    """Both factors of a product are off."""
    module = mlp(activation=activation, bias=True)
    found = step(module, recipe)
    assert_all_fused(module)
    expected = run(mlp(activation=activation, bias=True), SPLITS, hidden=HIDDEN)
    assert_near(found, expected, 1.25 * max(NEAR[recipe], 0.1))


@EVERY
def test_two_linears_may_have_split_sizes_of_their_own(recipe: str) -> None:
    found = []
    for quantizes in (True, False):
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
        with torch.no_grad():
            x[: SPLITS[0]] *= 8  # an expert's amax is not another's
        with te.autocast(enabled=quantizes, recipe=RECIPES[recipe]):
            y = module(x, sizes, scales, sizes.flip(0))
        y.float().square().sum().backward()
        found.append({"y": y.detach()} | gradients(module, x, scales))
    assert_near(found[0], found[1], max(NEAR[recipe], 0.1))


def bytes_by_column(recipe: str, columns: int) -> int:
    """Numbers and scales of FC1's input for its wgrad alone, of each expert."""
    total = 0
    for tokens in SPLITS:
        blocks = -(-tokens // {"fp8-block": 128, "mxfp8": 32, "nvfp4": 16}[recipe])
        numbers = blocks * 16 * columns // 2 if recipe == "nvfp4" else tokens * columns
        total += numbers + blocks * columns * (4 if recipe == "fp8-block" else 1)
    return total


@EVERY
def test_bytes_of_each_slot_are_those_that_the_backward_reads_and_bits_stay(recipe: str) -> None:
    expected = step(mlp(), recipe)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = step(module, recipe)
    assert_all_fused(module)
    assert_same_bits(expected, found)
    record = session.records[-1]
    assert [(row.slot, row.nbytes, row.fate) for row in record.slots] == [
        (SlotName.FC1_INPUT, bytes_by_column(recipe, HIDDEN), Fate.OFFLOADED),
        (SlotName.ACT_INPUT, TOKENS * FFN * 2, Fate.OFFLOADED),
        (SlotName.FC2_INPUT, 0, Fate.RECOMPUTED),
    ]
    name = {"fp8-block": "FP8 by blocks", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}[recipe] + " by column"
    assert [row.format for row in record.slots][:2] == [name, "bf16"]
    assert record.bytes_out == record.bytes_back > sum(row.nbytes for row in record.slots) - 1


@EVERY
@pytest.mark.parametrize("keep", ["fc1_input", "act_input"])
def test_slot_that_is_kept_stays_and_the_other_goes(recipe: str, keep: str) -> None:
    expected = step(mlp(), recipe)
    module = mlp(keep=[keep])
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = step(module, recipe)
    assert_same_bits(expected, found)
    fates = {row.slot: row.fate for row in session.records[-1].slots}
    assert fates.pop(SlotName(keep)) is Fate.KEPT
    assert fates.pop(SlotName.FC2_INPUT) is Fate.RECOMPUTED
    assert set(fates.values()) == {Fate.OFFLOADED}


class Checkpointed(torch.nn.Module):
    """Keeps results of some of torch's operators, and makes the others again."""

    def __init__(self, module: torch.nn.Module, kept: list[Any]) -> None:
        super().__init__()
        self.module, self._contexts = module, functools.partial(create_selective_checkpoint_contexts, kept)

    def forward(self, *given: torch.Tensor) -> Any:
        return checkpoint(self.module, *given, use_reentrant=False, context_fn=self._contexts)


@pytest.mark.parametrize("recipe", [*FORMATS, "current"])
def test_a_selective_checkpoint_may_keep_products_of_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setitem(RECIPES, "current", te_recipe.Float8CurrentScaling())
    kept = [torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor]
    modules = [Checkpointed(mlp(bias=True, fc2={"scale_bias": True}), ops) for ops in ([], kept)]
    assert_same_bits(*(step(module, recipe, extra=4) for module in modules))
    for module in modules:
        assert_all_fused(module.module)


@EVERY
def test_nothing_of_the_input_is_saved_where_its_weights_are_frozen(recipe: str) -> None:
    module = mlp()
    for name, parameter in module[0].named_parameters():
        parameter.requires_grad_("weight" not in name)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, recipe)
    assert_all_fused(module)
    assert SlotName.FC1_INPUT not in {row.slot for row in session.records[-1].slots if row.nbytes}


def test_nvfp4_saves_what_transformer_engines_quantizer_makes_of_each_experts_transpose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the Hadamard transform, tokens padded to a multiple of 16."""
    saved: list[Any] = []
    make = te_adapter.grouped_columns

    def spy(*arguments: Any) -> Any:
        saved.append(arguments[-1])
        return make(*arguments)

    monkeypatch.setattr(te_adapter, "grouped_columns", spy)
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES["nvfp4"]):
        module(x, sizes, scales, sizes)
    ((found, scales_found, amaxes),) = saved
    assert amaxes is not None
    begin, place, at_scale = 0, 0, 0
    for expert, tokens in enumerate(SPLITS):
        part, begin = x.detach()[begin : begin + tokens].float(), begin + tokens
        if not tokens:
            continue
        part = torch.nn.functional.pad(part, (0, 0, 0, -tokens % 16))
        quantizer = NVFP4QuantizerRef(Fp4Formats.E2M1, rowwise=False, with_rht=True)
        expected = quantizer.quantize(part)
        numbers, inverses = expected.data_t.flatten(), expected.scale_t.view(torch.uint8).flatten()
        assert torch.equal(found[place : place + numbers.numel()], numbers)
        assert torch.equal(scales_found[at_scale : at_scale + inverses.numel()], inverses)
        assert torch.equal(amaxes[expert : expert + 1], expected.global_amax_col)
        place, at_scale = place + numbers.numel(), at_scale + inverses.numel()
    assert place == found.numel()


@EVERY
def test_recipes_may_change_from_step_to_step(recipe: str) -> None:
    order = [recipe, *(name for name in FORMATS if name != recipe), recipe]
    module = mlp()
    for name in order:
        for parameter in module.parameters():
            parameter.grad = None
        assert_same_bits(step(mlp(), name), step(module, name))
    assert_all_fused(module)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_hopper_has_no_kernels_for_formats_of_blackwell(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")
    monkeypatch.setattr(machine, "reason_against", lambda *_, **__: None)
    monkeypatch.setattr(machine, "broken_package", lambda **_: None)
    (window,) = find_windows(list(mlp()))
    support = hopper_choice.explain(window, RECIPES[recipe])
    assert not support.ok and "Hopper has no tensor cores for" in str(support.reason)
    assert hopper_choice.explain(window, RECIPES["fp8-block"]).ok


@EVERY
def test_a_recipe_that_comes_after_the_window_was_fused_is_looked_at_in_each_call(recipe: str) -> None:
    module = mlp()
    step(module, recipe)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        way = quantized.way_of_call()
        found, on_hopper = (quantized.scaling_of(way, module[0], reference=reference) for reference in (True, False))
    assert isinstance(found, LinearBlockScaling)
    assert on_hopper == found if recipe == "fp8-block" else "Hopper has no tensor cores for" in str(on_hopper)


@pytest.mark.parametrize("other", ["mxfp8", "nvfp4", "current"])
@pytest.mark.parametrize("place", [0, 2], ids=["FC1", "FC2"])
def test_linears_whose_quantizers_are_of_two_recipes_run_op_by_op_with_the_reason(place: int, other: str) -> None:
    module, others = mlp(), mlp()
    step(module, "fp8-block")
    recipe = te_recipe.Float8CurrentScaling() if other == "current" else RECIPES[other]
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=recipe):
        others(x, sizes, scales, sizes)
    module[place]._quantizers = others[place]._quantizers
    op = next(op for op, _ in module._module_groups[0]._forward_ops)
    assert isinstance(op, HopperGroupedMLP)
    with te.autocast(enabled=True, recipe=RECIPES["fp8-block"]):
        support = op.support([OperationContext() for _ in range(3)], x, [(sizes,), (scales,), (sizes,)])
    assert not support.ok
    expected = "Float8CurrentScalingQuantizer" if other == "current" else "under a recipe of FP8 by blocks"
    assert "quantizers of" in str(support.reason) and expected in str(support.reason)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (te_recipe.Float8BlockScaling(fp8_format=te_recipe.Format.HYBRID), "another format than E4M3"),
        (te_recipe.NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True), "4 over 6"),
    ],
    ids=["hybrid", "4 over 6"],
)
def test_variants_that_are_not_computed_here_go_to_the_unfused_path_with_the_reason(recipe: Any, reason: str) -> None:
    module = mlp()
    x, sizes, scales = make_inputs((128, 0, 384), HIDDEN, dtype=torch.bfloat16)
    ctxs = [OperationContext() for _ in range(3)]
    with te.autocast(enabled=True, recipe=recipe):
        module(x, sizes, scales, sizes)
        op = next(op for op, _ in module._module_groups[0]._forward_ops)
        assert isinstance(op, HopperGroupedMLP)
        for ctx in ctxs:
            ctx.requires_grad = True
        support = op.support(ctxs, x, [(sizes,), (scales,), (sizes,)])
    assert reason in str(support.reason)
    assert calls_of(module[0]).handed_over == 1


def block_parameter(weight: torch.Tensor, *, columns: bool) -> torch.nn.Parameter:
    """In square blocks, in the wrapper and the layout of Transformer Engine's."""
    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=columns, block_scaling_dim=2)
    found = block_formats.quantize(quantizer, weight.detach())
    numbers, inverses, _ = make_format(BlockScaling(BlockFormat.FP8, square=True, power_of_two=True)).quantize(
        weight.detach(), by_column=False
    )
    parts = tuple(-(-size // 128) for size in weight.shape)
    found._rowwise_data.copy_(numbers.view(weight.shape))
    found._rowwise_scale_inv[:, : parts[1]] = inverses.view(parts)
    if columns:
        found._columnwise_data.copy_(numbers.view(weight.shape).t())
        found._columnwise_scale_inv[:, : parts[0]] = inverses.view(parts).t()
    return torch.nn.Parameter(found)


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # by Transformer Engine, for all weights that are FP8
@pytest.mark.parametrize("places", [(0, 2), (0,), (2,)], ids=["both", "FC1", "FC2"])
@pytest.mark.parametrize("columns", [True, False], ids=["both ways", "as they lie"])
def test_weights_that_are_fp8_by_blocks_are_taken_as_they_are(
    monkeypatch: pytest.MonkeyPatch, places: tuple[int, ...], columns: bool
) -> None:
    """What the forward alone needs may be all that is there: the other way round is made once."""
    turned = []

    def fp8_transpose(numbers: torch.Tensor, _: Any, *, out: torch.Tensor | None) -> torch.Tensor:
        turned.append(numbers)
        return numbers.t().contiguous()

    monkeypatch.setattr(te_blockwise_storage, "tex", te_on_cpu.Tex(fp8_transpose=fp8_transpose))
    found = []
    for primary in (True, False):
        module = mlp()
        for place in places if primary else ():
            for name, weight in list(module[place].named_parameters()):
                setattr(module[place], name, block_parameter(weight, columns=columns))
        for _ in range(2):
            module.zero_grad()
            found.append(step(module, "fp8-block"))
        assert_all_fused(module)
        assert all(stand_ins_of(module[place])._found for place in (0, 2))  # one tensor for all weights of an op
    for one in found[1:]:
        assert_same_bits(found[0], one)
    assert len(turned) == (0 if columns else EXPERTS * len(places))


@pytest.mark.parametrize("place", [0, 2], ids=["FC1", "FC2"])
def test_weights_of_another_format_are_a_reason(place: int) -> None:
    """One linear's weights are FP8 with one scale, as another recipe made them."""
    module = mlp()
    step(module, "fp8-block")
    for name, weight in list(module[place].named_parameters()):
        setattr(module[place], name, fp8_parameter(weight))
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    op = next(op for op, _ in module._module_groups[0]._forward_ops)
    assert isinstance(op, HopperGroupedMLP)
    with te.autocast(enabled=True, recipe=RECIPES["fp8-block"]):
        support = op.support([OperationContext() for _ in range(3)], x, [(sizes,), (scales,), (sizes,)])
    assert support.reason == "weights that are quantized, or no plain tensors"


def test_columns_that_a_format_cannot_hold_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (window,) = find_windows(list(make_mlp(experts=EXPERTS, hidden=48, ffn=FFN)))
    assert hopper_choice.explain(window, RECIPES["fp8-block"]).ok
    assert "FC1 is 48 x 256; MXFP8 takes multiples of 32" in str(hopper_choice.explain(window, RECIPES["mxfp8"]).reason)


def test_quantized_weights_are_let_go_of_as_soon_as_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows after the forward; columns after the dgrad, before the wgrad."""
    rows: list[Any] = []
    columns: list[Any] = []
    alive: list[int] = []
    make, multiply = ReferenceBlockKernels.block_weights, ReferenceBlockKernels.wgrad_blocks

    def make_spied(self: Any, *args: Any, **options: Any) -> Any:
        found = make(self, *args, **options)
        rows.extend(weakref.ref(one) for one in found.rows)
        columns.extend(weakref.ref(one) for one in found.columns)
        return found

    def multiply_spied(self: Any, *args: Any, **options: Any) -> None:
        alive.append(sum(one() is not None for one in columns))
        multiply(self, *args, **options)

    monkeypatch.setattr(ReferenceBlockKernels, "block_weights", make_spied)
    monkeypatch.setattr(ReferenceBlockKernels, "wgrad_blocks", multiply_spied)
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES["fp8-block"]):
        y = module(x, sizes, scales, sizes)
    assert len(rows) == 2 * EXPERTS and not any(one() is not None for one in rows)
    assert all(one() is not None for one in columns)
    y.float().sum().backward()
    assert alive == [EXPERTS, 0]  # of FC2's wgrad, and of FC1's


def test_columns_are_made_for_a_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    make = ReferenceBlockKernels.block_rows

    def spied(self: Any, *args: Any, by_column: bool, **options: Any) -> Any:
        asked.append(by_column)
        return make(self, *args, by_column=by_column, **options)

    monkeypatch.setattr(ReferenceBlockKernels, "block_rows", spied)
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    for with_grad in (False, True):
        with torch.set_grad_enabled(with_grad), te.autocast(enabled=True, recipe=RECIPES["fp8-block"]):
            module(x, sizes, scales, sizes)
    assert asked == [False, True]
