"""`te_offload.torchtitan` in FP8: experts of torchtitan that quantize, beside linears of te_offload's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformer_engine.common import recipe as te_recipe

from te_offload import OffloadSession
from te_offload.errors import ArgumentError, UnsupportedError
from te_offload.fused import fusions_in, hopper
from te_offload.slots import Fate
from tests.support.mlp import assert_same_bits
from tests.support.process_groups import on_two_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan", reason="torchtitan is not installed here")
    from te_offload.torchtitan import RECIPES
    from tests.support.titan_moe import (
        DIM,
        EXPERTS,
        HIDDEN,
        beside_linears,
        inputs,
        make,
        step,
        traced_as_by_torchtitan,
    )

pytestmark = [
    pytest.mark.usefixtures("fp8_in_torch_arithmetic"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),  # of torchtitan's router
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # asked for by TorchDynamo
]
EVERY = pytest.mark.parametrize("recipe", RECIPES)


def experts_of(moe: Any) -> Any:
    return moe.routed_experts.inner_experts


@EVERY
@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
@pytest.mark.parametrize("keeps", [False, True], ids=["weights made again", "weights kept"])
def test_they_have_the_bits_of_linears_with_these_weights_under_the_recipe(
    recipe: str, *, again: bool, keeps: bool
) -> None:
    settings: dict[str, Any] = {"recompute_act_input": again, "keep_quantized_weight": keeps}
    experts = experts_of(make("ours", recipe=recipe, **settings)).bfloat16()
    assert_same_bits(*beside_linears(experts, RECIPES[recipe]()))
    (fusion,) = fusions_in(experts)
    assert (fusion.fused, fusion.kept_weight_bytes) == (1, EXPERTS * 3 * DIM * HIDDEN if keeps else 0)


@EVERY
def test_a_recipe_around_the_model_is_that_of_its_experts(recipe: str) -> None:
    x, grad = inputs()
    expected = step(make("ours", recipe=recipe), x, grad)
    moe = make("ours")
    plain = step(moe, x, grad)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
        found = step(moe, x, grad)
    assert_same_bits(expected, found)
    error = float((found["y"] - plain["y"]).norm() / plain["y"].norm())
    assert 1e-3 < error < 0.1  # in FP8
    assert_same_bits(plain, step(moe, x, grad))


@EVERY
@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
def test_a_session_changes_no_bit(recipe: str, *, again: bool) -> None:
    x, grad = inputs()
    settings: dict[str, Any] = {"recipe": recipe, "recompute_act_input": again}
    expected, moe = step(make("ours", **settings), x, grad), make("ours", **settings)
    with OffloadSession(moe, min_bytes=0) as session:
        for _ in range(3):
            with session.step():
                found = step(moe, x, grad)
            assert_same_bits(expected, found)
            rows = {row.op[-1]: row for row in session.records[-1].slots if "mlp" in row.op}
            assert (rows["0"].fate, rows["2"].fate) == (Fate.OFFLOADED, Fate.RECOMPUTED) and rows["0"].bytes_out > 0
            assert rows["1"].fate is (Fate.RECOMPUTED if again else Fate.OFFLOADED)
        assert "Grouped MLPs that ran fused: 1 of 1" in session.report()


@EVERY
@pytest.mark.parametrize("again", ["", "FC1", "layer"])
def test_compiled_as_a_whole_they_have_the_bits_of_eager_steps_and_a_session_changes_none(
    recipe: str, again: str
) -> None:
    x, grad = inputs()
    moe = make("ours", recipe=recipe, recompute_act_input=again == "FC1", no_offload_activation=["fc1_input"])
    expected = step(moe, x, grad)
    with torch._dynamo.config.patch(disable=False), traced_as_by_torchtitan():
        if again == "layer":
            moe = checkpoint_wrapper(moe, preserve_rng_state=False)
        moe.compile(backend="aot_eager", fullgraph=True)
        assert_same_bits(expected, step(moe, x, grad))
        with OffloadSession(moe, min_bytes=0) as session:
            for _ in range(3):
                with session.step():
                    found = step(moe, x, grad)
                assert_same_bits(expected, found)
                assert session.records[-1].bytes_back > 0
                rows = {row.name: row.fate for row in session.records[-1].slots}
                if again != "layer":
                    assert rows["layer0/grouped_mlp.fc1_input"] is Fate.KEPT
                assert ("layer0/grouped_mlp.act_input" in rows) is (again == "")
        assert fusions_in(moe)[0].fused == 1  # the eager step


def test_layers_within_a_checkpoint_quantize_in_both_forwards() -> None:
    x, grad = inputs()
    expected, moe = step(make("ours", recipe="fp8"), x, grad), make("ours", recipe="fp8")
    original = moe.forward
    moe.forward = lambda x: torch.utils.checkpoint.checkpoint(original, x, use_reentrant=False)
    assert_same_bits(expected, step(moe, x, grad))
    assert fusions_in(moe)[0].fused == 2


def test_what_was_asked_for_and_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = make("ours", recipe="fp8")
    monkeypatch.setenv(hopper.SWITCH, "0")
    with pytest.raises(
        UnsupportedError,
        match=f"under Float8CurrentScaling, as was asked for, .* {EXPERTS} experts of {DIM} x {HIDDEN}: .*MLP is 0",
    ):
        step(moe, *inputs())


def test_a_recipe_of_another_name_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="recipe is 'fp8-delayed', but must be one of fp8, fp8-block, or None"):
        make("ours", recipe="fp8-delayed")


def test_under_delayed_scaling_torchtitans_code_computes_in_bf16_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchtitan.overrides.fused_swiglu.silu_and_mul_op", lambda gate, up, _: gate * up)
    moe, calls = make("ours"), []

    def grouped_mm(*, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        calls.append(A)
        return torch._grouped_mm(A, B_t, offs=offs)

    monkeypatch.setattr(experts_of(moe), "_grouped_mm", grouped_mm)
    with (
        te.autocast(enabled=True, recipe=te_recipe.DelayedScaling()),
        pytest.warns(UserWarning, match="code computes the experts: delayed scaling has state, of which"),
    ):
        step(moe, *inputs())
    assert len(calls) == 2


def test_two_ranks_that_shard_them_by_fsdp2_compute_what_one_does_in_fp8(tmp_path: Path) -> None:
    program = (
        "import os, sys, warnings; warnings.simplefilter('ignore')\n"
        "import pytest\n"
        "from tests.support import te_on_cpu, titan_moe\n"
        f"os.environ['{hopper.SWITCH}'] = 'reference'\n"
        "te_on_cpu.unfused(pytest.MonkeyPatch(), grouped=False)\n"
        "titan_moe.main_quantized(int(sys.argv[1]), 'cpu', sys.argv[2]); sys.stdout.flush(); os._exit(0)"
    )
    outputs = on_two_ranks(program, str(tmp_path / "meeting"))
    said = [f"same, {how}sharded, in {recipe}" for recipe in RECIPES for how in ("", "compiled and ")]
    assert all(line in output for output in outputs for line in said), outputs
