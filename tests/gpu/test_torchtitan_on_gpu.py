"""Experts of torchtitan by the fused grouped MLP on Hopper GPUs, in torchtitan's own MoE layer, on one rank and on two."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo

from te_offload import OffloadSession
from te_offload.fused import fusions_in, hopper
from te_offload.slots import Fate
from tests.support.mlp import assert_same_bits
from tests.support.process_groups import on_two_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan", reason="torchtitan is not installed here")
    from te_offload.torchtitan import RECIPES
    from tests.support.titan_moe import BACKENDS, DIM, beside_linears, inputs, make, step, traced_as_by_torchtitan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")


_PROGRAM = (
    "import os, sys, warnings; warnings.simplefilter('ignore')\n"
    "from tests.support import titan_moe\n"
    "titan_moe.main(int(sys.argv[1]), 'cuda', sys.argv[2]); sys.stdout.flush(); os._exit(0)"
)


@pytest.mark.parametrize("theirs", ["stock", "fused"])
def test_it_computes_what_torchtitans_experts_do(theirs: str) -> None:
    x, grad = inputs(device="cuda")
    ours = make("ours", "cuda")
    expected, found = step(make(theirs, "cuda"), x, grad), step(ours, x, grad)
    assert expected.keys() == found.keys()
    for name, tensor in found.items():
        assert float((tensor - expected[name]).norm() / expected[name].norm()) < 1e-2, name  # in bf16, both
    (fusion,) = fusions_in(ours)
    assert (fusion.fused, fusion.reason) == (1, "")


def test_rows_that_are_no_experts_are_zero_and_take_no_gradient() -> None:
    experts = make("ours", "cuda").routed_experts.inner_experts
    x = torch.randn(50, DIM, device="cuda", requires_grad=True)
    y = experts(x, torch.tensor([10, 0, 20, 5], device="cuda"))
    y.sum().backward()
    assert x.grad is not None
    assert not y[35:].any() and not x.grad[35:].any() and x.grad[:35].any(1).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
@pytest.mark.parametrize("keeps", [False, True], ids=["weights made again", "weights kept"])
def test_in_fp8_they_have_the_bits_of_linears_with_these_weights(recipe: str, *, again: bool, keeps: bool) -> None:
    moe = make("ours", "cuda", recipe=recipe, recompute_act_input=again, keep_quantized_weight=keeps)
    experts = moe.routed_experts.inner_experts.bfloat16()
    assert_same_bits(*beside_linears(experts, RECIPES[recipe]()))
    (fusion,) = fusions_in(experts)
    assert fusion.fused == 1 and (fusion.kept_weight_bytes > 0) == keeps


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_fp8_they_compute_what_they_do_in_bf16(recipe: str) -> None:
    x, grad = inputs(device="cuda")
    expected, found = step(make("ours", "cuda"), x, grad), step(make("ours", "cuda", recipe=recipe), x, grad)
    errors = {name: float((tensor - expected[name]).norm() / expected[name].norm()) for name, tensor in found.items()}
    assert errors["y"] > 1e-3 and max(errors.values()) < 0.1, errors


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
def test_a_session_changes_no_bit(again: bool, recipe: str | None) -> None:
    x, grad = inputs(device="cuda")
    settings = {"recipe": recipe, "recompute_act_input": again}
    expected, moe = step(make("ours", "cuda", recipe=recipe), x, grad), make("ours", "cuda", **settings)
    with OffloadSession(moe, min_bytes=0) as session:
        for _ in range(3):
            torch.full((64, 1024, 1024), float("nan"), device="cuda")  # what is free holds no number
            with session.step():
                found = step(moe, x, grad)
            assert_same_bits(expected, found)
            fates = {row.op[-1]: row.fate for row in session.records[-1].slots if "mlp" in row.op}
            act_input = Fate.RECOMPUTED if again else Fate.OFFLOADED
            assert fates == {"0": Fate.OFFLOADED, "1": act_input, "2": Fate.RECOMPUTED}
            assert session.records[-1].bytes_out > 0


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
def test_compiled_by_inductor_it_computes_what_it_does_and_a_session_changes_no_bit(
    again: bool, recipe: str | None
) -> None:
    x, grad = inputs(device="cuda")
    settings = {"recompute_act_input": again, "recipe": recipe}
    moe = make("ours", "cuda", no_offload_activation=["fc1_input"], **settings)
    eager = step(moe, x, grad)
    torch._dynamo.reset()
    with traced_as_by_torchtitan():
        moe.compile(fullgraph=True)
        expected = step(moe, x, grad)
        errors = {name: float((one - eager[name]).norm() / eager[name].norm()) for name, one in expected.items()}
        # What inductor rounds otherwise may be another number in 8 bits.
        assert max(errors.values()) < (1e-2 if recipe is None else 5e-2), errors
        with OffloadSession(moe, min_bytes=0) as session:
            for _ in range(3):
                torch.full((64, 1024, 1024), float("nan"), device="cuda")
                with session.step():
                    found = step(moe, x, grad)
                assert_same_bits(expected, found)
                rows = {row.name: row.fate for row in session.records[-1].slots}
                assert rows["layer0/grouped_mlp.fc1_input"] is Fate.KEPT
                assert ("layer0/grouped_mlp.act_input" in rows) is not again
                assert session.records[-1].bytes_back > 0
    torch._dynamo.reset()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_that_share_the_experts_compute_what_one_does(tmp_path: Path) -> None:
    outputs = on_two_ranks(_PROGRAM, str(tmp_path / "meeting"))
    said = [f"{what} under {backend}" for backend in BACKENDS["cuda"] for what in ("same", "same, compiled,")]
    assert all(line in output for output in outputs for line in said), outputs
    assert all(f"same, {how}sharded" in output for output in outputs for how in ("", "compiled and ")), outputs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_that_shard_them_by_fsdp2_compute_what_one_does_in_fp8(tmp_path: Path) -> None:
    outputs = on_two_ranks(_PROGRAM.replace("titan_moe.main(", "titan_moe.main_quantized("), str(tmp_path / "meeting"))
    said = [f"same, {how}sharded, in {recipe}" for recipe in RECIPES for how in ("", "compiled and ")]
    assert all(line in output for output in outputs for line in said), outputs
