"""The fused grouped MLP in FP8 by blocks on a Hopper GPU, beside Transformer Engine's quantizers and torch arithmetic.

Transformer Engine's own ops may fail with this recipe, by the version of cuBLAS. Where they do, its quantizers and FP64
arithmetic stand for its results.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.tensor import Float8BlockQuantizer

from te_offload import Fate, OffloadSession, SlotName
from te_offload.fused import hopper
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.ops.scaling import BlockFormat, BlockScaling
from tests.fused.test_fp8_pass import assert_all_fused
from tests.gpu.test_hopper_on_gpu import errors, fp64_run, of_whole_ops
from tests.support.captured_steps import assert_captured_steps_have_the_bits_of_eager_ones
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run, seeded
from tests.support.together import all_together

pytestmark = pytest.mark.gpu
HIDDEN, FFN = 272, 400  # no multiples of a block
SPLITS = (128, 0, 331, 61)
TOKENS = sum(SPLITS)
# And columns that it takes.
GATED = {"swiglu": 448, "swiglu-interleaved": 416, "swiglu-pairs": 400, "clamped-qgeglu": 448, "situ-glu": 448}
ACTIVATIONS = {"srelu": FFN, "tanh-srelu": FFN} | GATED
RECIPE = te_recipe.Float8BlockScaling()
EVERY_SPLIT = {"ragged": SPLITS, "many": (700, 0, 931, 403), "one token": (0, 519, 1, 0), "no tokens": (0, 0, 0, 0)}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quack", reason="quack-kernels, which clears and sums rows, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")
    monkeypatch.setenv(hopper.SWITCH, "1")


def mlp(**options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    ffn = ACTIVATIONS[options.get("activation", "srelu")]
    return make_mlp(experts=4, hidden=HIDDEN, ffn=ffn, device="cuda", **({"dtype": torch.bfloat16} | options))


def step(module: te.ops.Sequential, seed: int = 1, splits: Any = SPLITS, **options: Any) -> dict[str, torch.Tensor]:
    with te.autocast(enabled=True, recipe=RECIPE):
        return run(module, splits, hidden=HIDDEN, seed=seed, **options)


@pytest.mark.parametrize("power", [True, False], ids=["powers of two", "any scales"])
@pytest.mark.parametrize("what", ["usual", "zero", "infinite", "not a number", "tiny", "huge"])
def test_numbers_and_scales_are_those_of_transformer_engine(what: str, power: bool) -> None:
    from te_offload.fused.kernels import blocks
    from te_offload.fused.kernels.experts import Experts

    x = seeded((256, 384), 0, dtype=torch.bfloat16).cuda()
    if what == "zero":
        x.zero_()
    elif what in ("tiny", "huge"):
        x *= {"tiny": 1e-38, "huge": 1e38}[what]
    elif what != "usual":
        x[3, 5] = float("inf" if what == "infinite" else "nan")
    offsets = torch.tensor([0, 256], dtype=torch.int32, device="cuda")
    scaling = BlockScaling(BlockFormat.FP8, power_of_two=power)
    code: Any = tex.DType.kFloat8E4M3
    quantizer = Float8BlockQuantizer(code, rowwise=True, columnwise=True, force_pow_2_scales=power, block_scaling_dim=1)
    expected = quantizer(x)
    quantizers = blocks.Quantizers()
    rows, columns = quantizers.rows(x, offsets, scaling, columns=blocks.TURNED)
    assert rows is not None and columns is not None
    assert torch.equal(rows.numbers, expected._rowwise_data)
    assert torch.equal(columns.numbers[:, :256], expected._columnwise_data)
    assert torch.equal(rows.scales, expected._rowwise_scale_inv[:, :256])
    assert torch.equal(columns.scales[:2], expected._columnwise_scale_inv[:, :384])
    square = Float8BlockQuantizer(code, rowwise=True, columnwise=True, force_pow_2_scales=power, block_scaling_dim=2)
    of_weight = square(x)
    table = torch.zeros(1, dtype=torch.int32, device="cuda")
    found = quantizers.weights(Experts(x[None], table), scaling, by_column=True)
    assert torch.equal(found.rows.numbers.view[0], of_weight._rowwise_data)
    assert torch.equal(found.columns.numbers.view[0], of_weight._columnwise_data)
    assert torch.equal(found.rows.inverses.view[0], of_weight._rowwise_scale_inv[:, :3])


@pytest.mark.parametrize("splits", EVERY_SPLIT.values(), ids=EVERY_SPLIT)
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_warp_groups_that_store_apart_give_the_bits_of_those_that_store_together(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, ...], activation: str
) -> None:
    first = step(mlp(activation=activation, bias=True), splits=splits)
    with all_together(monkeypatch):
        assert_same_bits(first, step(mlp(activation=activation, bias=True), splits=splits))


def test_gradients_into_main_grad_have_the_same_bits_stored_apart_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def main_grads() -> dict[str, torch.Tensor]:
        module = mlp(accumulate_into_main_grad=True)
        for parameter in module.parameters():
            parameter.main_grad = torch.ones(parameter.shape, device="cuda")
        step(module)
        assert_all_fused(module)
        return {name: parameter.main_grad for name, parameter in module.named_parameters()}

    first = main_grads()
    with all_together(monkeypatch):
        assert_same_bits(first, main_grads())


@pytest.mark.parametrize("splits", EVERY_SPLIT.values(), ids=EVERY_SPLIT)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_are_those_of_torch_arithmetic(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, ...], activation: str
) -> None:
    """`ReferenceBlockKernels`, with biases whose scales are the router's."""
    found = []
    for switch in ("1", "reference"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp(activation=activation, bias=True, fc2={"scale_bias": True})
        found.append(step(module, splits=splits, extra=4))
        assert_all_fused(module)
        op: Any = next(op for op, _ in module._module_groups[0]._forward_ops)
        kernels = op._kernels[True, BlockFormat.FP8]
        assert isinstance(kernels, ReferenceBlockKernels) == (switch == "reference")
    found = [of_whole_ops(results) for results in found]
    for name, value in found[0].items():
        expected = found[1][name].float()
        off = (value.float() - expected).norm() / expected.norm().clamp(min=1e-6)
        assert off <= 0.02, (name, float(off))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_against_fp64_are_those_of_rounding_alone(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    """No larger than those of arithmetic that rounds as Transformer Engine does, and adds up in float32."""
    dy = seeded((TOKENS, HIDDEN), 9, dtype=torch.bfloat16)
    found = []
    for switch in ("1", "reference"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp(activation=activation)
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=RECIPE):
            y = module(x, sizes, scales, sizes)
        y.backward(dy.cuda())
        results = {"output": y.detach(), "input0": x.grad, "input1": scales.grad}
        results |= {name: parameter.grad for name, parameter in module.named_parameters()}
        found.append(of_whole_ops({name: tensor for name, tensor in results.items() if tensor is not None}))
    exact = of_whole_ops(fp64_run(mlp(activation=activation), SPLITS, activation, dy, HIDDEN))
    for name, expected in exact.items():
        (rms, most), (their_rms, their_most) = (errors(one[name], expected) for one in found)
        assert rms <= 1.05 * their_rms and most <= 1.5 * their_most, (name, rms / their_rms, most / their_most)


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # by Transformer Engine, for all weights that are FP8
@pytest.mark.parametrize("columns", [True, False], ids=["both ways", "as they lie"])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_weights_that_are_fp8_already_give_the_bits_of_those_quantized_now(columns: bool, activation: str) -> None:
    code: Any = tex.DType.kFloat8E4M3
    quantizer = Float8BlockQuantizer(code, rowwise=True, columnwise=columns, block_scaling_dim=2)
    dense, module = mlp(activation=activation), mlp(activation=activation)
    for place in (0, 2):
        for name, weight in list(module[place].named_parameters()):
            setattr(module[place], name, torch.nn.Parameter(quantizer(weight.detach())))
    expected = step(dense)
    for _ in range(2):
        module.zero_grad()
        assert_same_bits(step(module), expected)
    assert_all_fused(module)


@pytest.mark.usefixtures("copies_out_end")
@pytest.mark.parametrize(("activation", "columns"), [("srelu", FFN), ("swiglu", 2 * GATED["swiglu"])])
def test_offloading_changes_no_bit_and_two_runs_give_the_same(activation: str, columns: int) -> None:
    runs = []
    for _ in range(2):
        module = mlp(activation=activation)
        runs.append([step(module, seed) for seed in range(3)])
        assert_all_fused(module)
    module = mlp(activation=activation)
    with OffloadSession(module, min_bytes=0, max_in_flight=0, verify=True) as session:
        for seed, (one, two) in enumerate(zip(*runs, strict=True)):
            assert_same_bits(one, two)
            with session.step():
                assert_same_bits(one, step(module, seed))
    record = session.records[-1]
    rows = {row.slot: (row.fate, row.nbytes, row.format) for row in record.slots}
    scales = (TOKENS // 128 + len(SPLITS)) * HIDDEN * 4  # room for any split sizes
    assert rows[SlotName.FC1_INPUT] == (Fate.OFFLOADED, TOKENS * HIDDEN + scales, "FP8 by blocks by column")
    assert rows[SlotName.ACT_INPUT] == (Fate.OFFLOADED, TOKENS * columns * 2, "bf16")
    assert rows[SlotName.FC2_INPUT][0] is Fate.RECOMPUTED
    assert record.bytes_out == record.bytes_back > 0


def test_rows_of_no_expert_are_zero_and_change_nothing() -> None:
    module = mlp()
    results = []
    for counts in ((128, 0, 331, 0), SPLITS):
        x, _, scales = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        sizes = torch.tensor(counts, device="cuda")
        with te.autocast(enabled=True, recipe=RECIPE):
            y = module(x, sizes, scales, sizes)
        y.float().square().sum().backward()
        assert x.grad is not None and scales.grad is not None
        results.append((y.detach(), x.grad, scales.grad))
    rows = 128 + 331
    for fewer, every in zip(*results, strict=True):
        assert torch.equal(fewer[:rows], every[:rows]) and not fewer[rows:].any()


@pytest.mark.parametrize("others", [(61, 331, 0, 128), (61, 200, 0, 128)], ids=["all rows", "fewer rows"])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_two_linears_may_have_split_sizes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, others: tuple[int, ...], activation: str
) -> None:
    results = []
    for switch in ("1", "reference"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp(activation=activation)
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=RECIPE):
            y = module(x, sizes, scales, torch.tensor(others, device="cuda"))
        y.float().square().sum().backward()
        assert_all_fused(module)
        assert x.grad is not None and scales.grad is not None
        results.append((y.detach().float(), x.grad.float(), scales.grad.float()))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_weights_of_fp16_and_gradients_into_main_grad(activation: str) -> None:
    module = mlp(dtype=torch.float16, accumulate_into_main_grad=True, activation=activation)
    plain = mlp(dtype=torch.float16, activation=activation)
    for parameter in module.parameters():
        parameter.main_grad = torch.ones(parameter.shape, device="cuda")
    step(module)
    expected = step(plain)
    assert_all_fused(module)
    for name, parameter in module.named_parameters():
        added = parameter.main_grad - 1
        assert (added - expected[name].float()).norm() <= 2e-3 * expected[name].float().norm(), name


@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_captured_steps_with_changing_routing_give_the_bits_of_eager_ones(activation: str) -> None:
    module, eager = mlp(activation=activation), mlp(activation=activation)
    assert_captured_steps_have_the_bits_of_eager_ones(eager, module, RECIPE, SPLITS, HIDDEN)
    assert_all_fused(module)


def test_columns_saved_as_wgrads_read_them_have_the_bits_of_those_turned_in_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from te_offload.fused.kernels import fp8, sm90_blocks

    splits, found = (0, 33_000, 1, 0), []
    turn = mock.Mock(wraps=fp8.turn)
    monkeypatch.setattr(fp8, "turn", turn)
    for least in (64, 1_000):  # padding is 407 rows
        monkeypatch.setattr(sm90_blocks, "_TURNED_FROM", least)
        module = mlp()
        with OffloadSession(module, min_bytes=0, max_in_flight=0, verify=True) as session, session.step():
            found.append(step(module, splits=splits))
        record = session.records[-1]
        assert {row.fate for row in record.slots if row.slot == SlotName.FC1_INPUT} == {Fate.OFFLOADED}
        assert record.bytes_out > 0
    assert_same_bits(*found)
    assert turn.call_count == 1
