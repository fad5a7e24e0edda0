"""`recompute_act_input` on a Hopper GPU: bits, memory, and CUDA graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload import Fate, OffloadSession
from te_offload.fused import hopper
from te_offload.fused.calls import calls_of
from te_offload.fused.kernels.interface import Activation, Gate, Gated, SquaredReLU
from te_offload.graphs import capture_layers
from tests.gpu.paths import came_back_or_never_left
from tests.gpu.test_fp8_on_gpu import on_hopper as on_hopper
from tests.support import layer_stack
from tests.support.act_input_again import make_again
from tests.support.captured_steps import assert_captured_steps_have_the_bits_of_eager_ones
from tests.support.layer_stack import LAYERS, TOKENS, Model, batches, captured, train, weights
from tests.support.mlp import ACTIVATIONS, assert_same_bits, gradients, make_inputs, make_mlp, run, seeded

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, FFN = 4, 272, 448
SPLITS = (128, 0, 331, 61)
FUNCTIONS = (SquaredReLU(), SquaredReLU(2.0), Gated(Gate.SWIGLU), Gated(Gate.CLAMPED_QGEGLU, (7.0, 1.702, 1.0), 32))


def mlp(*, again: bool, **options: Any) -> te.ops.Sequential:
    sizes: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN, "device": "cuda"}
    return make_again(again=again, **(sizes | {"dtype": torch.bfloat16} | options))


@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bits_are_those_of_a_saved_input_also_with_offloading(activation: str, dtype: torch.dtype, bias: bool) -> None:
    options: dict[str, Any] = {"activation": activation, "dtype": dtype, "bias": bias, "fc2": {"scale_bias": bias}}
    saved, again = mlp(again=False, **options), mlp(again=True, **options)
    arguments: dict[str, Any] = {"hidden": HIDDEN, "extra": 4 if bias else 3}
    expected = run(saved, SPLITS, **arguments)
    poison = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 16, 1 << 18, 1 << 20) * 6]
    del poison
    assert_same_bits(expected, run(again, SPLITS, **arguments))
    last = make_mlp(experts=2, hidden=64, ffn=64, device="cuda", dtype=dtype)
    with OffloadSession([again, last], min_bytes=0, max_in_flight=0, verify=True) as session:
        for _ in range(2):
            with session.step():
                assert_same_bits(expected, run(again, SPLITS, **arguments))
        record = session.records[-1]
    assert record.bytes_out == sum(SPLITS) * HIDDEN * 2 and came_back_or_never_left(record)
    assert {row.slot.value: row.fate for row in record.slots}["act_input"] is Fate.RECOMPUTED
    assert calls_of(again[0]).fused == 3


@pytest.mark.parametrize("quick_memory", [False, True], ids=["H100's tiles", "H200's"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS, ids=str)
def test_each_of_fc1_s_results_has_the_same_bits_alone(
    activation: Activation, dtype: torch.dtype, bias: bool, quick_memory: bool
) -> None:
    """Made by other kernels, or in other tiles, than both together; few tokens an expert, and many."""
    from te_offload.fused.kernels.sm90 import Sm90Kernels
    from te_offload.fused.kernels.sm90_glu import Sm90GluKernels
    from te_offload.fused.kernels.sm90_tiles import Regime, tiles_of

    gated = isinstance(activation, Gated)
    kernels = (Sm90GluKernels if gated else Sm90Kernels)(activation, tiles_of(quick_memory=quick_memory))
    columns, given = 2 * FFN if gated else FFN, dict[str, Any](device="cuda", dtype=dtype)
    weights = kernels.prepare("FC1's weights", seeded((EXPERTS, columns, HIDDEN), 1, **given))
    biases = seeded((EXPERTS, columns), 2, **given) if bias else None
    regimes = set()
    for each in (80, 300, 500, 1000, 2100):
        sizes = [each - 7, 0, each + 7, each]
        x, scales = seeded((sum(sizes) + 3, HIDDEN), 3, **given), seeded((sum(sizes) + 3,), 4, device="cuda")
        regimes.add(Regime.of(x.shape[0], EXPERTS))
        offsets, counts = zip(
            *[kernels.offsets(torch.tensor(sizes, device="cuda"), x.clone()) for _ in range(3)], strict=True
        )
        poison = [torch.full((x.shape[0], columns), float("nan"), **given) for _ in range(4)]
        del poison
        both = kernels.fc1(x, weights, biases, scales, offsets[0], counts[0].fc1)
        linear = kernels.fc1_linear(x, weights, biases, offsets[1], counts[1].fc1)
        activated = kernels.fc1_activated(x, weights, biases, scales, offsets[2], counts[2].fc1)
        for one, alone in zip(both, (linear, activated), strict=True):
            assert bool(one[: sum(sizes)].isfinite().all())
            assert torch.equal(one[: sum(sizes)].view(torch.int16), alone[: sum(sizes)].view(torch.int16))
    assert len(regimes) >= 3


def test_split_sizes_of_each_linear_s_own_that_leave_rows_out_have_the_same_bits() -> None:
    """Rows of memory that nobody wrote would differ from run to run."""
    found = []
    for again in (False, True):
        module = mlp(again=again)
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        del poison
        module(x, sizes - torch.tensor([9, 0, 0, 7], device="cuda"), scales, sizes).float().sum().backward()
        found.append(gradients(module, x, scales))
    assert_same_bits(*found)


def test_less_is_held_between_forward_and_backward_and_no_more_at_the_peak() -> None:
    held, peaks = [], []
    rows, ffn = (2048, 0, 4096, 2048), 4096
    for again in (False, True):
        module = mlp(again=again, ffn=ffn)
        for _ in range(2):
            gc.collect()
            x, sizes, scales = make_inputs(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
            module.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = module(x, sizes, scales, sizes)
            between = torch.cuda.memory_allocated() - before
            y.sum().backward()
            del y
        held.append(between)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    act_input = sum(rows) * ffn * 2
    assert held[0] - held[1] == pytest.approx(act_input, abs=1 << 20), held
    assert peaks[1] <= peaks[0] + (1 << 20), peaks


def test_captured_steps_have_the_bits_of_eager_ones_with_a_saved_input() -> None:
    eager, module = mlp(again=False), mlp(again=True)
    assert_captured_steps_have_the_bits_of_eager_ones(eager, module, None, SPLITS, HIDDEN)


@pytest.mark.parametrize("offloads", [False, True], ids=["no offload", "offload"])
def test_layers_as_graphs_have_the_bits_of_eager_ones_with_a_saved_input(offloads: bool) -> None:
    eager, model = Model(), Model()
    layers: list[Any] = list(model.layers)
    for layer in layers:
        layer.experts[1].recompute_act_input = True
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0) if offloads else None
    with capture_layers(model.layers, session=session, warmup=2) as graphs:
        for number, batch in enumerate(batches(12)):
            assert torch.equal(train(eager, batch), train(model, batch, session)), number
        captured(graphs)
        assert_same_bits(weights(eager), weights(model))
        if session is not None:
            record = session.records[-1]
            rows = {row.slot.value: row for row in record.slots}
            assert rows["act_input"].fate is Fate.RECOMPUTED
            assert record.bytes_out >= LAYERS * TOKENS * layer_stack.HIDDEN * 2 and record.bytes_back > 0
    if session is not None:
        session.close()


def test_an_op_s_own_switch_leaves_it_op_by_op_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "0")
    expected = run(mlp(again=False), SPLITS, hidden=HIDDEN)
    with pytest.warns(UserWarning, match="recompute_act_input=True, but this call runs op by op"):
        found = run(mlp(again=True), SPLITS, hidden=HIDDEN)
    assert_same_bits(expected, found)
