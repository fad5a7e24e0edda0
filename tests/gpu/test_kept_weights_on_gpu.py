"""Quantized weights that the dgrad makes again, on a Hopper GPU: bits, bytes, and CUDA graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import OffloadSession
from te_offload.fused import hopper
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.ops.scaling import BlockFormat, BlockScaling, Scaling
from tests.fused import test_fp8_pass
from tests.fused.test_fp8_pass import assert_all_fused
from tests.gpu.paths import PATHS, choose_path
from tests.gpu.test_fp8_on_gpu import on_hopper as on_hopper
from tests.support.captured_steps import assert_captured_steps_have_the_bits_of_eager_ones
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run, seeded

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, FFN = 4, 272, 448  # no multiples of a block
SPLITS = (128, 0, 331, 61)
RECIPES: dict[str, Any] = test_fp8_pass.RECIPES | {"by blocks": te_recipe.Float8BlockScaling()}
EVERY = pytest.mark.parametrize("recipe", RECIPES)
WEIGHTS = ("usual", "zero", "infinite", "not a number", "tiny", "huge")


def mlp(*, keep: bool, **options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "experts": EXPERTS,
        "hidden": HIDDEN,
        "ffn": FFN,
        "device": "cuda",
        "keep_quantized_weight": keep,
    }
    return make_mlp(**(sizes | {"dtype": torch.bfloat16} | options))


def step(module: te.ops.Sequential, recipe: str, seed: int) -> dict[str, torch.Tensor]:
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        found = run(module, SPLITS, hidden=HIDDEN, seed=seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.25)  # as an optimizer's step would
    return found


@EVERY
@pytest.mark.parametrize("activation", ["srelu", "tanh-srelu", "swiglu", "swiglu-interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_have_the_same_bits_whether_quantized_weights_are_kept_or_made_again(
    recipe: str, activation: str, dtype: torch.dtype
) -> None:
    found = []
    for keep in (True, False):
        FP8GlobalStateManager.reset()
        module = mlp(keep=keep, activation=activation, dtype=dtype)
        found.append([step(module, recipe, seed) for seed in range(4)])
        assert_all_fused(module)
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


def numbers(what: str, dtype: torch.dtype) -> torch.Tensor:
    """Weights (N, rows, columns), the second one's of a kind."""
    found = seeded((3, 272, 400), 0, dtype=dtype).cuda()
    if what == "zero":
        found[1].zero_()
    elif what in ("tiny", "huge"):
        found[1] *= (
            {"tiny": 1e-38, "huge": 1e38}[what] if dtype is torch.bfloat16 else {"tiny": 1e-7, "huge": 1e4}[what]
        )
    elif what != "usual":
        found[1, 3, 5] = float("inf" if what == "infinite" else "nan")
    return found


@pytest.mark.parametrize("what", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_turned_later_are_those_turned_when_they_were_quantized(what: str, dtype: torch.dtype) -> None:
    from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels
    from te_offload.fused.kernels.sm90_fp8 import Sm90Fp8Kernels

    kernels, by_blocks = Sm90Fp8Kernels(SquaredReLU()), Sm90BlockKernels(SquaredReLU())
    weights = kernels.prepare("weights", numbers(what, dtype))
    given = torch.tensor([3.0, 0.25, 100.0], device="cuda")
    for scaling in (
        Scaling(torch.float8_e4m3fn),
        Scaling(torch.float8_e5m2, power_of_two=True),
        Scaling(torch.float8_e4m3fn, epsilon=5.0),
        Scaling(torch.float8_e4m3fn, given=given, kept=torch.zeros(3, device="cuda")),
    ):
        both = kernels.quantize_weights(weights, scaling)
        later = kernels.weight_columns(weights, kernels.quantize_weights(weights, scaling, by_column=False), scaling)
        assert later.rows is None
        assert_same_bits({"columns": both.columns.view}, {"columns": later.columns.view})
        assert_same_bits({"inverses": both.inverses}, {"inverses": later.inverses})
    for power in (True, False):
        block_scaling = BlockScaling(BlockFormat.FP8, square=True, power_of_two=power)
        at_once = by_blocks.block_weights(weights, block_scaling, by_column=True).columns
        alone = by_blocks.block_weight_columns(weights, block_scaling).columns
        for name in ("numbers", "inverses"):
            assert_same_bits({name: getattr(at_once, name).view}, {name: getattr(alone, name).view})


def asked_for() -> int:
    """Bytes of the allocator's blocks, less what it rounds them up by, which depends on what was free."""
    found: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return found


@EVERY
def test_after_the_forward_as_many_bytes_less_are_held_as_the_weights_have_numbers(recipe: str) -> None:
    held = []
    for keep in (True, False):
        FP8GlobalStateManager.reset()
        module = mlp(keep=keep, hidden=1024, ffn=2048)
        x, sizes, scales = make_inputs(SPLITS, 1024, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            gc.collect()
            before = asked_for()
            with te.autocast(enabled=True, recipe=RECIPES[recipe]):
                y = module(x, sizes, scales, sizes)
            after = asked_for()
            y.sum().backward()
            module.zero_grad()
            del y
        held.append(after - before)
    kept = 2 * EXPERTS * 1024 * 2048
    assert kept <= held[0] - held[1] <= kept + (1 << 16), held  # and scales of blocks


@pytest.mark.parametrize("recipe", ["current", "by blocks"])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_captured_steps_give_the_bits_of_eager_ones(recipe: str, activation: str) -> None:
    module, eager = (mlp(keep=keep, activation=activation) for keep in (False, True))
    assert_captured_steps_have_the_bits_of_eager_ones(eager, module, RECIPES[recipe], SPLITS, HIDDEN)
    assert_all_fused(module)


@pytest.mark.usefixtures("copies_out_end")
@EVERY
def test_offloading_beside_it_changes_no_bit(recipe: str) -> None:
    module = mlp(keep=True)
    expected = [step(module, recipe, seed) for seed in range(3)]
    FP8GlobalStateManager.reset()
    module = mlp(keep=False)
    with OffloadSession(module, min_bytes=0, verify=True) as session:
        for seed in range(3):
            with session.step():
                assert_same_bits(expected[seed], step(module, recipe, seed))
    assert session.records[-1].bytes_back > 0


@PATHS
def test_unfused_calls_make_them_again_with_the_same_bits_and_hold_less(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "0")
    choose_path(monkeypatch, path, fp8=True)
    sizes, held, found = (128, 0, 320, 64), [], []
    for keep in (True, False):
        module = mlp(keep=keep, hidden=1024, ffn=2048)
        for _ in range(2):
            x, splits, scales = make_inputs(sizes, 1024, device="cuda", dtype=torch.bfloat16)
            gc.collect()
            before = asked_for()
            with te.autocast(enabled=True, recipe=RECIPES["current"]):
                y = module(x, splits, scales, splits)
            after = asked_for()
            y.float().square().sum().backward()
            grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            results = {"y": y.detach().clone(), "x": x.grad, "scales": scales.grad} | grads
            module.zero_grad()
            del y
        held.append(after - before)
        found.append({name: one for name, one in results.items() if one is not None})
    assert_same_bits(*found)
    assert held[0] - held[1] >= 2 * EXPERTS * 1024 * 2048, held
