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
from te_offload.graphs import capture_layers
from tests.gpu.paths import came_back_or_never_left
from tests.gpu.test_fp8_on_gpu import on_hopper as on_hopper
from tests.support import layer_stack
from tests.support.act_input_again import make_again
from tests.support.captured_steps import assert_captured_steps_have_the_bits_of_eager_ones
from tests.support.layer_stack import LAYERS, TOKENS, Model, batches, captured, train, weights
from tests.support.mlp import ACTIVATIONS, assert_same_bits, gradients, make_inputs, make_mlp, run

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, FFN = 4, 272, 448
SPLITS = (128, 0, 331, 61)


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
