"""The fused grouped MLP in FP8 on a Hopper GPU, beside Transformer Engine's unfused path with the same recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ops.basic.grouped_linear as te_grouped_linear
import transformer_engine_torch as tex
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

from te_offload import Fate, OffloadSession, SlotName, ops
from te_offload.fused import hopper
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.fused.kernels.reference_fp8 import ReferenceFp8Kernels
from te_offload.ops.scaling import Scaling
from tests.fused.test_fp8_pass import EVERY, RECIPES, assert_all_fused
from tests.gpu.test_hopper_on_gpu import errors, fp64_run, of_whole_ops
from tests.layouts.test_delayed_scaling import state
from tests.support.captured_steps import assert_captured_steps_have_the_bits_of_eager_ones
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run, seeded
from tests.support.together import all_together

pytestmark = pytest.mark.gpu
HIDDEN, FFN = 256, 384
SPLITS = (128, 0, 320, 64)  # Transformer Engine's own path takes multiples of 16
TOKENS = sum(SPLITS)
RAGGED = {"ragged": (16, 301, 47, 148), "empty and one-token": (0, 355, 1, 0), "no tokens": (0, 0, 0, 0)}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")
    monkeypatch.setenv(hopper.SWITCH, "1")
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


def mlp(**options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=4, hidden=HIDDEN, ffn=FFN, device="cuda", **({"dtype": torch.bfloat16} | options))


def step(module: te.ops.Sequential, recipe: str, seed: int = 1, splits: Any = SPLITS) -> dict[str, torch.Tensor]:
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        return run(module, splits, hidden=HIDDEN, seed=seed)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["srelu", "tanh-srelu"])
def test_errors_against_fp64_are_no_larger_than_those_of_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, recipe: str, activation: str, dtype: torch.dtype
) -> None:
    assert_as_near_to_fp64_as_transformer_engine(monkeypatch, recipe, activation, dtype)


@pytest.mark.parametrize("splits", [(1301, 0, 1, 298), (400, 400, 400, 400)], ids=["ragged", "even"])
def test_warp_groups_that_store_apart_give_the_bits_of_those_that_store_together(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, ...]
) -> None:
    from te_offload.fused.kernels import sm90_tiles

    regime = sm90_tiles.Regime.of(sum(splits), len(splits))
    assert sm90_tiles.tile_for("fp8 split wgrad", regime, HIDDEN, FFN).apart
    first = step(mlp(activation="srelu"), "current", splits=splits)
    FP8GlobalStateManager.reset()
    with all_together(monkeypatch):
        assert_same_bits(first, step(mlp(activation="srelu"), "current", splits=splits))


@EVERY
@pytest.mark.parametrize("activation", ["swiglu", "swiglu-interleaved", "swiglu-pairs", "clamped-qgeglu", "situ-glu"])
def test_errors_of_gated_activations_are_no_larger_either(
    monkeypatch: pytest.MonkeyPatch, recipe: str, activation: str
) -> None:
    assert_as_near_to_fp64_as_transformer_engine(monkeypatch, recipe, activation, torch.bfloat16)


def assert_as_near_to_fp64_as_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, recipe: str, activation: str, dtype: torch.dtype
) -> None:
    dy = seeded((TOKENS, HIDDEN), 9, dtype=dtype)
    found = []
    by_pairs = activation == "swiglu-pairs"  # which Transformer Engine's kernel does not take: it gets halves
    for switch in ("1", "0"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        monkeypatch.setattr(te_grouped_linear, "is_op_fuser_grouped_tensor_path_supported", lambda recipe, dtype: False)
        FP8GlobalStateManager.reset()
        module = mlp(activation="swiglu" if by_pairs and switch == "0" else activation, dtype=dtype)
        if by_pairs and switch == "0":
            with torch.no_grad():
                for parameter in module[0].parameters():
                    parameter.copy_(parameter.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1))
        for _ in range(4):  # until delayed scaling has scales
            module.zero_grad()
            x, sizes, scales = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=dtype)
            with te.autocast(enabled=True, recipe=RECIPES[recipe]):
                y = module(x, sizes, scales, sizes)
            y.backward(dy.cuda())
        results = {"output": y.detach(), "input0": x.grad, "input1": scales.grad}
        for name, parameter in module.named_parameters():
            results[name] = parameter.grad
            if by_pairs and switch == "0" and name.startswith("0."):
                results[name] = parameter.grad.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        found.append(of_whole_ops({name: tensor for name, tensor in results.items() if tensor is not None}))
        if switch == "1":
            assert_all_fused(module)
    exact = of_whole_ops(fp64_run(mlp(activation=activation, dtype=dtype), SPLITS, activation, dy))
    for name, expected in exact.items():
        (rms, most), (their_rms, their_most) = (errors(one[name], expected) for one in found)
        assert rms <= 1.05 * their_rms and most <= 1.5 * their_most, (name, rms / their_rms, most / their_most)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("splits", [SPLITS, *RAGGED.values()], ids=["even", *RAGGED])
@pytest.mark.parametrize("fast", [False, True], ids=["sums in float32", "sums in the tensor cores"])
@pytest.mark.parametrize("clamp", [None, 2.0], ids=["srelu", "tanh-srelu"])
def test_kernels_agree_with_torch_arithmetic(
    dtype: torch.dtype, splits: tuple[int, ...], fast: bool, clamp: float | None
) -> None:
    from te_offload.fused.kernels.sm90_fp8 import Sm90Fp8Kernels

    tokens = sum(splits) + 20  # rows of no expert
    activation = SquaredReLU(clamp)
    weights = seeded((4, FFN, HIDDEN), 1, dtype=torch.bfloat16) / HIDDEN**0.5
    other = seeded((4, HIDDEN, FFN), 2, dtype=torch.bfloat16) / FFN**0.5
    x, dy = (seeded((tokens, HIDDEN), seed, dtype=torch.bfloat16) for seed in (3, 4))
    x[sum(splits) :] = dy[sum(splits) :] = float("nan")
    router = torch.rand(tokens, generator=torch.Generator().manual_seed(5))
    bias = seeded((4, FFN), 6, dtype=torch.bfloat16)
    exact, scaling = Scaling(torch.float8_e4m3fn), Scaling(dtype)
    results: list[dict[str, torch.Tensor]] = []
    both: list[tuple[str, Any]] = [("cpu", ReferenceFp8Kernels(activation)), ("cuda", Sm90Fp8Kernels(activation))]
    for device, kernels in both:
        at = [one.to(device) for one in (x, dy, router, bias)]
        w1 = kernels.quantize_weights(kernels.prepare("w1", weights.to(device)), exact)
        w2 = kernels.quantize_weights(kernels.prepare("w2", other.to(device)), exact)
        y, dx = (torch.full((tokens, HIDDEN), 7.0, dtype=torch.bfloat16, device=device) for _ in range(2))
        offsets, _ = kernels.offsets(torch.tensor(splits, device=device), y)
        rows = kernels.quantize(at[0], offsets, exact, weights=w1.inverses)
        act_input, magnitudes = kernels.fc1_fp8(rows, w1, at[3], at[2], offsets, torch.bfloat16, fast=fast)
        found = {"act_input": act_input[: sum(splits)].clone()}
        act_input[: sum(splits)] = (results or [found])[0]["act_input"]  # what comes then has the same input
        act_input[sum(splits) :] = 0
        hidden = kernels.quantize(act_input, offsets, exact, weights=w2.inverses, magnitudes=magnitudes, router=at[2])
        kernels.linear_fp8(hidden, w2.rows, y, offsets, fast=fast)
        grads = kernels.quantize(at[1], offsets, scaling, weights=w2.inverses, by_column=True)
        dact, _, dscales, orders = kernels.fc2_dgrad_fp8(grads, w2, act_input, at[2], offsets, fast=fast)
        rebuilt = kernels.rebuild(act_input, at[2], hidden, offsets, torch.float8_e4m3fn)
        found |= {"y": y, "dact": dact[: sum(splits)], "dscales": dscales}
        for out_dtype in (torch.bfloat16, torch.float32):
            out = torch.ones(4, HIDDEN, FFN, dtype=out_dtype, device=device)
            for accumulate, order in ((False, orders.fc2_wgrad), (True, orders.fc1_wgrad)):
                ways: dict[str, Any] = {"accumulate": accumulate, "fast": fast}
                if out_dtype is torch.bfloat16:
                    ways["order"] = order
                kernels.wgrad_fp8(grads, rebuilt, offsets, kernels.prepare("out", out), **ways)
            found[f"dw2 {out_dtype}"] = out
        kernels.linear_fp8(
            kernels.quantize(dact, offsets, scaling, weights=w1.inverses), w1.columns, dx, offsets, fast=fast
        )
        kernels.clear(offsets, dx)
        turned = kernels.turn(rows, offsets)
        out = torch.empty(4, HIDDEN, HIDDEN, dtype=torch.float32, device=device)
        kernels.wgrad_fp8(grads, turned, offsets, kernels.prepare("square", out), accumulate=False, fast=fast)
        found |= {"dx": dx, "turned": out}
        if sum(splits):
            found["rows"] = rows.rows[: sum(splits)].float()
        results.append({name: tensor.cpu().float() for name, tensor in found.items()})
    for name, expected in results[0].items():
        off = (results[1][name] - expected).norm() / expected.norm().clamp(min=1e-6)
        assert off <= (0.03 if fast or name in ("y", "dx") else 5e-3), (name, float(off))
    assert torch.equal(results[0].get("rows", torch.zeros(0)), results[1].get("rows", torch.zeros(0)))
    assert not results[1]["dx"][sum(splits) :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("clamp", [None, 2.0], ids=["srelu", "tanh-srelu"])
def test_fc1_with_given_scales_stores_the_numbers_that_the_quantizer_makes(
    clamp: float | None, bias: bool, dtype: torch.dtype
) -> None:
    from te_offload.fused.kernels.sm90_fp8 import Sm90Fp8Kernels

    splits = RAGGED["ragged"]
    tokens = sum(splits) + 20  # rows of no expert
    kernels = Sm90Fp8Kernels(SquaredReLU(clamp))
    x = seeded((tokens, HIDDEN), 1, dtype=dtype).cuda()
    weights = (seeded((4, FFN, HIDDEN), 2) / HIDDEN**0.5).to(dtype).cuda()
    biases = seeded((4, FFN), 3, dtype=dtype).cuda() if bias else None
    router = torch.rand(tokens, generator=torch.Generator().manual_seed(4)).cuda()
    offsets, _ = kernels.offsets(torch.tensor(splits, device="cuda"), torch.empty_like(x))
    w1 = kernels.quantize_weights(kernels.prepare("w1", weights), Scaling(torch.float8_e4m3fn))
    rows = kernels.quantize(x, offsets, Scaling(torch.float8_e4m3fn), weights=w1.inverses)
    given = torch.tensor([20.0, 300.0, 7.5, 33.0], device="cuda")  # the second one saturates
    one, other, another = (
        Scaling(torch.float8_e4m3fn, given=given, kept=torch.zeros(4, device="cuda")) for _ in range(3)
    )
    of_given = rows, w1, biases, router, offsets, dtype
    act_input, hidden = kernels.fc1_given(*of_given, one, w1.inverses, stores=True, fast=True)
    nothing, same = kernels.fc1_given(*of_given, another, w1.inverses, stores=False, fast=True)
    expected, magnitudes = kernels.fc1_fp8(rows, w1, biases, router, offsets, dtype, fast=True)
    quantized = kernels.quantize(expected, offsets, other, weights=w1.inverses, magnitudes=magnitudes, router=router)
    used = slice(sum(splits))
    assert act_input is not None and torch.equal(act_input[used], expected[used]) and nothing is None
    assert quantized.rows is not None
    for found in (hidden.rows, same.rows):
        assert found is not None and torch.equal(found[used].view(torch.uint8), quantized.rows[used].view(torch.uint8))
    assert hidden.factors is not None and quantized.factors is not None
    assert torch.equal(hidden.factors[used], quantized.factors[used])
    assert one.kept is not None and other.kept is not None and another.kept is not None
    assert torch.equal(one.kept, other.kept) and torch.equal(one.kept, another.kept) and bool((one.kept > 0).all())


@pytest.mark.parametrize("what", ["zero", "infinite", "not a number", "tiny", "huge", "usual"])
def test_scales_and_numbers_are_those_of_transformer_engine(what: str) -> None:
    from te_offload.fused.kernels import fp8

    x = seeded((64, 256), 0, dtype=torch.bfloat16).cuda()
    if what == "zero":
        x.zero_()
    elif what in ("tiny", "huge"):
        x *= {"tiny": 1e-38, "huge": 1e38}[what]
    elif what != "usual":
        x[3, 5] = float("inf" if what == "infinite" else "nan")
    offsets = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    for dtype, code in ((torch.float8_e4m3fn, tex.DType.kFloat8E4M3), (torch.float8_e5m2, tex.DType.kFloat8E5M2)):
        for power in (False, True):
            expected = Float8CurrentScalingQuantizer(code, device=x.device, force_pow_2_scales=power)(x)
            found = fp8.quantize(x, offsets, Scaling(dtype, power_of_two=power), by_column=True)
            assert found.rows is not None and found.columns is not None
            assert torch.equal(found.inverses, expected._scale_inv)
            numbers = expected._data.view(torch.uint8)
            assert torch.equal(found.rows.view(torch.uint8), numbers)
            assert torch.equal(found.columns.view(torch.uint8)[:, :64], numbers.t())
            assert not found.columns.view(torch.uint8)[:, 64:128].any()


@EVERY
@pytest.mark.parametrize(("activation", "columns"), [("srelu", FFN), ("swiglu", 2 * FFN)])
@pytest.mark.usefixtures("copies_out_end")
def test_offloading_changes_no_bit_and_two_runs_give_the_same(recipe: str, activation: str, columns: int) -> None:
    runs = []
    for _ in range(2):
        FP8GlobalStateManager.reset()
        module = mlp(activation=activation)
        runs.append([step(module, recipe, seed) for seed in range(4)])
        assert_all_fused(module)
    FP8GlobalStateManager.reset()
    module = mlp(activation=activation)
    with OffloadSession(module, min_bytes=0, max_in_flight=0, verify=True) as session:
        for seed, (one, two) in enumerate(zip(*runs, strict=True)):
            assert_same_bits(one, two)
            with session.step():
                assert_same_bits(one, step(module, recipe, seed))
    record = session.records[-1]
    rows = {row.slot: (row.fate, row.nbytes) for row in record.slots}
    assert rows[SlotName.FC1_INPUT] == (Fate.OFFLOADED, TOKENS * HIDDEN)
    assert rows[SlotName.ACT_INPUT] == (Fate.OFFLOADED, TOKENS * columns * 2)
    assert rows[SlotName.FC2_INPUT][0] is Fate.RECOMPUTED
    assert record.bytes_out == record.bytes_back > 0


def test_delayed_scaling_has_the_scales_of_transformer_engine_after_fifty_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(te_grouped_linear, "is_op_fuser_grouped_tensor_path_supported", lambda recipe, dtype: False)
    found = []
    for switch in ("1", "0"):
        FP8GlobalStateManager.reset()
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp()
        for seed in range(50):
            step(module, "delayed", seed)
        found.append(state(module))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        if name.startswith("0 forward"):  # FC1's input and weights: nothing comes before them
            assert torch.equal(value, found[1][name]), name
        assert torch.allclose(value, found[1][name], rtol=0.07), (name, value, found[1][name])


def test_split_sizes_that_sum_to_fewer_rows_give_zeros_beyond_them() -> None:
    module = mlp()
    results = []
    for splits, counts in (((128, 0, 320), SPLITS[:3]), (SPLITS, SPLITS)):
        x, _, scales = make_inputs(splits if len(splits) == 4 else SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        sizes = torch.tensor([*counts, 0][:4], device="cuda")
        with te.autocast(enabled=True, recipe=RECIPES["current"]):
            y = module(x, sizes, scales, sizes)
        y.float().square().sum().backward()
        assert x.grad is not None and scales.grad is not None
        results.append((y.detach(), x.grad, scales.grad))
    rows = sum(SPLITS[:3])
    for fewer, every in zip(*results, strict=True):
        assert torch.equal(fewer[:rows], every[:rows]) and not fewer[rows:].any()


@EVERY
def test_captured_steps_with_changing_routing_give_the_bits_of_eager_ones(recipe: str) -> None:
    if recipe == "delayed":
        pytest.skip("its scales are updated by Transformer Engine when autocast ends, outside of a graph")
    module = mlp()
    assert_captured_steps_have_the_bits_of_eager_ones(mlp(), module, RECIPES[recipe], SPLITS, HIDDEN)
    assert_all_fused(module)


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # by Transformer Engine, for all weights that are FP8
def test_weights_that_are_fp8_are_taken_as_they_are() -> None:
    size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    with te.quantized_model_init(recipe=RECIPES["current"]):
        module = te.ops.Sequential(
            ops.GroupedLinear(4, HIDDEN, FFN, **size), ops.ScaledSReLU(), ops.GroupedLinear(4, FFN, HIDDEN, **size)
        )
    dense = mlp()
    with torch.no_grad():
        for one, other in zip(dense.parameters(), module.parameters(), strict=True):
            one.copy_(other.dequantize())
    found, expected = step(module, "current"), step(dense, "current")
    assert_all_fused(module)
    for name, value in found.items():
        off = (value.float() - expected[name].float()).norm() / expected[name].float().norm().clamp(min=1e-6)
        assert off <= 0.03, (name, float(off))
