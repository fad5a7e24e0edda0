"""`recompute_act_input` under recipes: FC1 is computed again of the numbers that the forward multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.multiprocessing.reductions import StorageWeakRef

from te_offload import Fate, OffloadSession, Reason
from te_offload.errors import SavedTensorModifiedError
from te_offload.fused.calls import calls_of
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.fused.kernels.reference_fp8 import ReferenceFp8Kernels
from tests.fused import test_block_pass, test_fp8_pass
from tests.support.act_input_again import assert_checkpoints_are_near, checkpointed_step, make_again
from tests.support.mlp import assert_same_bits, gradients, make_inputs

pytestmark = pytest.mark.usefixtures("fp8_in_torch_arithmetic")
EXPERTS, HIDDEN, FFN, SPLITS = 3, 128, 256, (130, 0, 384)
RECIPES: dict[str, Any] = test_fp8_pass.RECIPES | test_block_pass.RECIPES
EVERY = pytest.mark.parametrize("recipe", RECIPES)
ONE_EACH = pytest.mark.parametrize("recipe", ["current", "delayed", "fp8-block"])


def mlp(*, again: bool, **options: Any) -> te.ops.Sequential:
    return make_again(again=again, experts=EXPERTS, hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16, **options)


def step(
    module: te.ops.Sequential, recipe: str, seed: int = 1, *, grows: float = 1.0, flips: bool = False
) -> dict[str, torch.Tensor]:
    """One step, whose backward runs when delayed scaling has the scales of the next one; then weights grow by a factor.
    ``flips``: FC2 has split sizes of its own.
    """
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16, seed=seed)
    module.zero_grad()
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        y = module(x, sizes, scales, sizes.flip(0) if flips else sizes)
    y.float().square().sum().backward()
    found = {"output": y.detach()} | gradients(module, x, scales)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(grows)
    return found


def assert_all_fused(module: te.ops.Sequential) -> None:
    calls = calls_of(module[0])
    assert calls.fused and not calls.handed_over, calls


@EVERY
@pytest.mark.parametrize("keep", [True, False], ids=["weights kept", "weights made again"])
@pytest.mark.parametrize("activation", ["srelu", "tanh-srelu", "swiglu", "swiglu-interleaved"])
def test_bits_are_those_of_a_saved_input_while_weights_grow(recipe: str, activation: str, keep: bool) -> None:
    found = []
    for again in (False, True):
        module = mlp(again=again, activation=activation, bias=True, fc1={"keep_quantized_weight": keep})
        found.append([step(module, recipe, seed, grows=1.5) for seed in range(4)])
        assert_all_fused(module)
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


@EVERY
def test_linears_with_split_sizes_of_their_own_have_the_same_bits(recipe: str) -> None:
    assert_same_bits(*(step(mlp(again=again), recipe, flips=True) for again in (False, True)))


@EVERY
@pytest.mark.parametrize("frozen", ["0.", "2.", ""], ids=["FC1", "FC2", "both"])
def test_frozen_linears_change_no_bit_of_the_others(recipe: str, frozen: str) -> None:
    found = []
    for again in (False, True):
        module = mlp(again=again)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        found.append(step(module, recipe))
        assert_all_fused(module)
    assert_same_bits(*found)
    assert "input0" in found[0] and not (frozen and any(name.startswith(frozen) for name in found[0]))


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # by Transformer Engine, for all weights that are FP8
def test_weights_that_are_fp8_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a weight was quantized")

    monkeypatch.setattr(ReferenceFp8Kernels, "quantize_weights", never)
    found = []
    for again in (False, True):
        module = mlp(again=again)
        for place in (0, 2):
            for number in range(EXPERTS):
                weight = getattr(module[place], f"weight{number}").detach()
                setattr(module[place], f"weight{number}", test_fp8_pass.fp8_parameter(weight))
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=RECIPES["current"]):
            module(x, sizes, scales, sizes).float().sum().backward()
        assert_all_fused(module)
        assert x.grad is not None and scales.grad is not None
        found.append({"x": x.grad, "scales": scales.grad})
    assert_same_bits(*found)


def test_magnitudes_of_delayed_scaling_are_kept_once() -> None:
    """Not again by the backward's FC1, whose step may have begun another history."""
    module = mlp(again=True)
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
        loss = module(x, sizes, scales, sizes).float().sum()
    forward = [
        module[place].get_quantizer("forward", number) for place in (0, 2) for number in range(2 * EXPERTS)
    ]  # inputs and weights
    for quantizer in forward:
        quantizer.amax.fill_(-1.0)
    loss.backward()
    assert all(quantizer.amax.item() == -1.0 for quantizer in forward)


@ONE_EACH
def test_input_of_the_activation_is_gone_before_the_backward_and_fc1_runs_once_more(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    made: list[StorageWeakRef] = []
    for kernels, name, place in (
        (ReferenceFp8Kernels, "linear_fp8", 2),
        (ReferenceBlockKernels, "linear_blocks", 2),
    ):
        multiply: Callable[..., Any] = getattr(kernels, name)

        def noted(self: Any, *args: Any, multiply: Any = multiply, place: int = place, **options: Any) -> None:
            multiply(self, *args, **options)
            if args[place].shape[1] == FFN and args[place].dtype is torch.bfloat16:  # which FC1 alone makes
                made.append(StorageWeakRef(args[place].untyped_storage()))

        monkeypatch.setattr(kernels, name, noted)
    counts = []
    for again in (False, True):
        made.clear()
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
        module = mlp(again=again)
        with te.autocast(enabled=True, recipe=RECIPES[recipe]):
            loss = module(x, sizes, scales, sizes).float().sum()
        counts.append([one.expired() for one in made])
        loss.backward()
        counts.append([one.expired() for one in made])
    assert counts == [[False], [True], [True], [True, True]]


@EVERY
def test_a_session_offloads_what_fc1_is_computed_again_of_and_no_more(recipe: str) -> None:
    expected, module = step(mlp(again=False), recipe), mlp(again=True)
    with OffloadSession([module], min_bytes=0, verify=True) as session:
        with session.step():
            assert_same_bits(expected, step(module, recipe))
        record = session.records[-1]
    each = 2 if recipe in test_block_pass.RECIPES else 1  # by blocks rows and columns are other numbers: x goes itself
    assert record.bytes_out == record.bytes_back == sum(SPLITS) * HIDDEN * each
    assert {row.slot.value: (row.fate, row.reason) for row in record.slots} == {
        "fc1_input": (Fate.OFFLOADED, Reason.NONE),
        "act_input": (Fate.RECOMPUTED, Reason.REBUILT),
        "fc2_input": (Fate.RECOMPUTED, Reason.REBUILT),
    }


@ONE_EACH
def test_delayed_wgrads_and_gradients_in_main_grad_have_the_same_bits(recipe: str) -> None:
    found = []
    for again in (False, True):
        module = mlp(again=again, delay_wgrad_compute=True, accumulate_into_main_grad=True)
        for parameter in module.parameters():
            parameter.main_grad = torch.ones_like(parameter)
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=RECIPES[recipe]):
            loss = module(x, sizes, scales, sizes).float().square().sum()
        loss.backward()
        module[2].backward_dw()
        module[0].backward_dw()
        wgrads = {name: parameter.main_grad for name, parameter in module.named_parameters()}
        assert all((grad != 1).any() for name, grad in wgrads.items() if "weight1" not in name)
        assert x.grad is not None and scales.grad is not None
        found.append(wgrads | {"x": x.grad, "scales": scales.grad})
    assert_same_bits(*found)


@ONE_EACH
@pytest.mark.parametrize("hook", ["host", "checkpoint"])
def test_foreign_hooks_and_checkpoints_change_no_bit(recipe: str, hook: str) -> None:
    found = []
    for again in (False, True):
        module = mlp(again=again)
        x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=RECIPES[recipe]):
            if not again:
                y = module(x, sizes, scales, sizes)
            elif hook == "checkpoint":
                y = te.checkpoint(module, x, sizes, scales, sizes, use_reentrant=False)
            else:
                with torch.autograd.graph.save_on_cpu():
                    y = module(x, sizes, scales, sizes)
            y.float().square().sum().backward()
        found.append({"y": y.detach()} | gradients(module, x, scales))
    assert_same_bits(*found)


@ONE_EACH
def test_a_weight_that_changed_before_fc1_reads_it_again_is_an_error(recipe: str) -> None:
    module = mlp(again=True)
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        loss = module(x, sizes, scales, sizes).float().sum()
    with torch.no_grad():
        module[0].weight1.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="a weight or a bias was written to"):
        loss.backward()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_checkpoints_under_delayed_scaling_have_gradients_near_those_without(activation: str, again: bool) -> None:
    """Their second forward has other scales than the first: in the first step by a factor of a hundred."""
    size: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN, "dtype": torch.bfloat16}
    assert_checkpoints_are_near(RECIPES["delayed"], SPLITS, again=again, activation=activation, **size)


def test_checkpoints_under_delayed_scaling_have_the_bits_of_a_saved_input() -> None:
    found = []
    for again in (False, True):
        module = mlp(again=again)
        found.append([checkpointed_step(module, RECIPES["delayed"], SPLITS, seed) for seed in range(3)])
        assert_all_fused(module)
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
