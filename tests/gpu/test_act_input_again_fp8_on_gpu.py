"""`recompute_act_input` in FP8 on a Hopper GPU: bits, memory, and CUDA graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe

from te_offload import Fate, OffloadSession
from te_offload.fused.calls import calls_of
from te_offload.graphs import capture_layers
from tests.fused import test_fp8_pass
from tests.gpu.test_fp8_on_gpu import on_hopper as on_hopper
from tests.support import layer_stack
from tests.support.act_input_again import assert_checkpoints_are_near, make_again
from tests.support.captured_steps import assert_captured_steps_have_the_bits_of_eager_ones
from tests.support.layer_stack import LAYERS, TOKENS, Model, batches, captured, train, weights
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, FFN = 4, 272, 448
SPLITS = {"ragged": (128, 0, 331, 61), "many": (700, 0, 931, 403), "no tokens": (0, 0, 0, 0)}
BY_BLOCKS = "by blocks"
RECIPES: dict[str, Any] = test_fp8_pass.RECIPES | {BY_BLOCKS: te_recipe.Float8BlockScaling()}
EVERY = pytest.mark.parametrize("recipe", ["current", "delayed", BY_BLOCKS])


def mlp(*, again: bool, keep: bool = True, **options: Any) -> te.ops.Sequential:
    sizes: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN, "device": "cuda"}
    kept = {"keep_quantized_weight": keep}
    return make_again(again=again, **(sizes | {"dtype": torch.bfloat16, "fc1": kept, "fc2": kept} | options))


def step(
    module: te.ops.Sequential, recipe: str, splits: tuple[int, ...], seed: int, *, flips: bool = False
) -> dict[str, torch.Tensor]:
    """One step, whose backward runs when delayed scaling has the scales of the next one, in memory that holds NaN."""
    dtype = next(module.parameters()).dtype
    x, sizes, scales = make_inputs(splits, HIDDEN, device="cuda", dtype=dtype, seed=seed)
    module.zero_grad()
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        y = module(x, sizes, scales, sizes.flip(0) if flips else sizes)
    poison = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 16, 1 << 18, 1 << 20) * 6]
    del poison
    y.float().square().sum().backward()
    found = {"output": y.detach()} | gradients(module, x, scales)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.25)
    return found


@pytest.mark.usefixtures("copies_out_end")
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("keep", [True, False], ids=["weights kept", "weights made again"])
@EVERY
@pytest.mark.parametrize("activation", ["srelu", "tanh-srelu", "swiglu", "swiglu-interleaved"])
def test_bits_are_those_of_a_saved_input_also_with_offloading(
    activation: str, recipe: str, keep: bool, splits: str
) -> None:
    saved = mlp(again=False, activation=activation, bias=True)
    expected = [step(saved, recipe, SPLITS[splits], seed) for seed in range(3)]
    again = mlp(again=True, keep=keep, activation=activation, bias=True)
    assert_same_bits(expected[0], step(again, recipe, SPLITS[splits], 0))
    last = make_mlp(experts=2, hidden=64, ffn=64, device="cuda", dtype=torch.bfloat16)
    with OffloadSession([again, last], min_bytes=0, max_in_flight=0, verify=True) as session:
        for seed in (1, 2):
            with session.step():
                assert_same_bits(expected[seed], step(again, recipe, SPLITS[splits], seed))
        record = session.records[-1]
    each = 2 if recipe == BY_BLOCKS else 1
    assert record.bytes_out == record.bytes_back == sum(SPLITS[splits]) * HIDDEN * each
    assert {row.slot.value: row.fate for row in record.slots}["act_input"] is Fate.RECOMPUTED
    assert calls_of(again[0]).fused == 3


@EVERY
def test_fp16_has_the_same_bits(recipe: str) -> None:
    found = [step(mlp(again=again, dtype=torch.float16), recipe, SPLITS["ragged"], 0) for again in (False, True)]
    assert_same_bits(*found)


@EVERY
def test_split_sizes_of_each_linear_s_own_have_the_same_bits(recipe: str) -> None:
    found = [step(mlp(again=again), recipe, SPLITS["ragged"], 0, flips=True) for again in (False, True)]
    assert_same_bits(*found)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_checkpoints_under_delayed_scaling_have_gradients_near_those_without(activation: str, again: bool) -> None:
    size: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN, "device": "cuda", "dtype": torch.bfloat16}
    assert_checkpoints_are_near(RECIPES["delayed"], SPLITS["many"], again=again, activation=activation, **size)


@EVERY
def test_less_is_held_between_forward_and_backward_and_no_more_at_the_peak(recipe: str) -> None:
    held, peaks = [], []
    rows, ffn = (2048, 0, 4096, 2048), 4096
    for again in (False, True):
        module = mlp(again=again, keep=False, ffn=ffn)
        for _ in range(3):
            gc.collect()
            x, sizes, scales = make_inputs(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
            module.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with te.autocast(enabled=True, recipe=RECIPES[recipe]):
                y = module(x, sizes, scales, sizes)
            between = torch.cuda.memory_allocated() - before
            y.sum().backward()
            del y
        held.append(between)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    act_input = sum(rows) * ffn * 2
    spared = act_input + (sum(rows) * HIDDEN if recipe == BY_BLOCKS else 0)  # x is the caller's, as it is
    assert held[0] - held[1] == pytest.approx(spared, abs=1 << 20), held
    assert peaks[1] <= peaks[0] + (1 << 20), peaks


@EVERY
def test_captured_steps_have_the_bits_of_eager_ones_with_a_saved_input(recipe: str) -> None:
    eager, module = mlp(again=False), mlp(again=True)
    assert_captured_steps_have_the_bits_of_eager_ones(eager, module, RECIPES[recipe], SPLITS["ragged"], HIDDEN)


@pytest.mark.parametrize("recipe", ["current", BY_BLOCKS])
@pytest.mark.parametrize("offloads", [False, True], ids=["no offload", "offload"])
def test_layers_as_graphs_have_the_bits_of_eager_ones_with_a_saved_input(recipe: str, offloads: bool) -> None:
    eager, model = Model(), Model()
    layers: list[Any] = list(model.layers)
    for layer in layers:
        layer.experts[1].recompute_act_input = True
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0) if offloads else None
    with capture_layers(model.layers, session=session, warmup=2) as graphs:
        for number, batch in enumerate(batches(12)):
            with te.autocast(enabled=True, recipe=RECIPES[recipe]):
                assert torch.equal(train(eager, batch), train(model, batch, session)), number
        captured(graphs)
        assert_same_bits(weights(eager), weights(model))
        if session is not None:
            record = session.records[-1]
            fates = {row.slot.value: row.fate for row in record.slots}
            assert fates["act_input"] is Fate.RECOMPUTED and fates["fc1_input"] is Fate.OFFLOADED
            each = 2 if recipe == BY_BLOCKS else 1
            assert record.bytes_out >= LAYERS * TOKENS * layer_stack.HIDDEN * each and record.bytes_back > 0
    if session is not None:
        session.close()
