"""`te_offload.torchtitan`: torchtitan's experts by the fused grouped MLP, in torchtitan's own MoE layer."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from te_offload import OffloadSession, Reason, ops
from te_offload.errors import ArgumentError, NotInstalledError, UnsupportedError
from te_offload.fused import fusions_in, hopper
from te_offload.fused.given import GivenGroupedLinear
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.ops import inside
from te_offload.slots import Fate
from tests.support.mlp import assert_same_bits
from tests.support.process_groups import on_two_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan", reason="torchtitan is not installed here")
    from tests.support.titan_moe import BACKENDS, inputs, make, step, traced_as_by_torchtitan

pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast"),  # of torchtitan's router
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # TorchDynamo's own
]

NAMES = {"w1_EFD", "w2_EDF", "w3_EFD"}


@pytest.fixture(autouse=True)
def _fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")


def experts_of(moe: Any) -> Any:
    return moe.routed_experts.inner_experts


@pytest.fixture
def _silu_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torchtitan is a kernel in Triton."""
    name = "torchtitan.overrides.fused_swiglu.silu_and_mul_op"
    monkeypatch.setattr(name, lambda gate, up, _: torch.nn.functional.silu(gate) * up)


@pytest.mark.usefixtures("_silu_on_the_cpu")
@pytest.mark.parametrize("theirs", ["stock", "fused"])
def test_it_computes_what_torchtitans_experts_do_from_the_same_numbers_at_the_start(theirs: str) -> None:
    x, grad = inputs()
    expected, found = (step(make(kind), x, grad) for kind in (theirs, "ours"))
    assert expected.keys() == found.keys()
    for name, tensor in found.items():
        assert float((tensor - expected[name]).norm() / expected[name].norm()) < 1e-2, name  # in bf16, both


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_counts_of_tokens_may_be_of_any_dtype(dtype: torch.dtype) -> None:
    experts = experts_of(make("ours"))
    x, counts = torch.randn(35, 32), torch.tensor([10, 0, 20, 5])
    assert torch.equal(experts(x, counts.to(dtype)), experts(x, counts))


def test_checkpoints_serve_both_in_either_direction() -> None:
    ours, stock = make("ours"), make("stock")
    assert ours.state_dict().keys() == stock.state_dict().keys()
    x, grad = inputs()
    expected = step(ours, x, grad)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(1)
    stock.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    ours.load_state_dict(stock.state_dict())
    assert_same_bits(expected, step(ours, x, grad))


def test_only_torchtitans_own_experts_are_replaced() -> None:
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.overrides.fused_swiglu import fused_grouped_experts

    from te_offload.torchtitan import grouped_experts

    config = fused_grouped_experts(GroupedExperts.Config(dim=32, hidden_dim=48, num_experts=2))
    assert grouped_experts(config) is config


def test_no_module_in_it_is_unknown_to_torchtitan_and_it_has_no_other_state() -> None:
    from torchtitan.protocols.module import Module

    experts = experts_of(make("ours"))
    assert all(isinstance(part, Module) for part in experts.modules())
    assert {name for name, _ in experts.named_parameters()} == {"w13", "w2_EDF"}
    assert set(experts.state_dict()) == NAMES


def test_a_session_moves_its_slots_and_changes_no_bit() -> None:
    x, grad = inputs()
    expected, moe = step(make("ours"), x, grad), make("ours")
    with OffloadSession(moe, min_bytes=0) as session:
        for _ in range(3):
            with session.step():
                found = step(moe, x, grad)
            assert_same_bits(expected, found)
            rows = {row.op: row for row in session.records[-1].slots if "mlp" in row.op}
            inner = "routed_experts.inner_experts.mlp"
            assert {op: row.fate for op, row in rows.items()} == {
                f"{inner}.0": Fate.OFFLOADED,
                f"{inner}.1": Fate.OFFLOADED,
                f"{inner}.2": Fate.RECOMPUTED,
            }
            assert all(row.bytes_out > 0 for row in rows.values() if row.fate is Fate.OFFLOADED)
        assert "Grouped MLPs that ran fused: 1 of 1" in session.report()


@pytest.fixture
def _traced_as_torchtitan_has_it() -> Iterator[None]:
    with traced_as_by_torchtitan():
        yield


@pytest.mark.usefixtures("_traced_as_torchtitan_has_it")
@pytest.mark.parametrize("again", ["", "FC1", "layer"])
def test_compiled_as_a_whole_it_has_the_bits_of_eager_steps_and_a_session_changes_none(again: str) -> None:
    x, grad = inputs()
    moe = make("ours", recompute_act_input=again == "FC1", no_offload_activation=["fc1_input"])
    expected = step(moe, x, grad)
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


@pytest.mark.usefixtures("_traced_as_torchtitan_has_it")
@pytest.mark.parametrize("keeps", [False, True], ids=["its own ops", "and FC1's results"])
def test_compiled_under_torchtitans_selective_checkpoint_fc1_is_computed_again_unless_its_op_is_to_be_saved(
    monkeypatch: pytest.MonkeyPatch, *, keeps: bool
) -> None:
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    class Policy(SelectiveAC):
        def get_save_ops(self) -> set[Any]:
            mine = {torch.ops.te_offload.grouped_mlp_fc1.default} if keeps else set()
            return set(super().get_save_ops()) | mine

    x, grad = inputs()
    moe = make("ours")
    expected, calls = step(moe, x, grad), []
    original = ReferenceKernels.fc1_linear

    def counted(self: ReferenceKernels, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ReferenceKernels, "fc1_linear", counted)
    wrapped = Policy(Policy.Config())._wrap_block(moe)
    wrapped.compile(backend="aot_eager", fullgraph=True)
    found = {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in step(wrapped, x, grad).items()}
    assert_same_bits(expected, found)
    assert len(calls) == (1 if keeps else 2)


@pytest.mark.usefixtures("_traced_as_torchtitan_has_it")
def test_compiled_where_it_does_not_run_fused_torchtitans_code_is_traced_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "0")
    monkeypatch.setattr("torchtitan.overrides.fused_swiglu.silu_and_mul_op", lambda gate, up, _: F.silu(gate) * up)
    x, grad = inputs()
    expected, moe = step(make("stock"), x, grad), make("ours")
    moe.compile(backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"torchtitan's own code computes the experts: .*TE_OFFLOAD_FUSED_MLP is 0"):
        found = step(moe, x, grad)
    assert all(float((found[name] - other).norm() / other.norm()) < 1e-2 for name, other in expected.items())


@pytest.mark.usefixtures("_traced_as_torchtitan_has_it")
def test_compiled_under_a_recipe_that_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "0")
    moe = make("ours", recipe="fp8")
    moe.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(
        Exception, match=r"under Float8CurrentScaling, as was asked for, .*: .*TE_OFFLOAD_FUSED_MLP is 0"
    ):
        step(moe, *inputs())


def test_settings_of_the_override_reach_the_ops() -> None:
    x, grad = inputs()
    expected, moe = (
        step(make("ours"), x, grad),
        make("ours", no_offload_activation=["fc1_input"], recompute_act_input=True),
    )
    with OffloadSession(moe, min_bytes=0) as session, session.step():
        found = step(moe, x, grad)
    assert_same_bits(expected, found)
    rows = {row.op[-1]: (row.fate, row.reason) for row in session.records[-1].slots if "mlp" in row.op}
    assert rows["0"] == (Fate.KEPT, Reason.ASKED) and rows["1"] == (Fate.RECOMPUTED, Reason.REBUILT)


def test_a_slot_of_another_name_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="has fc3_input, but slots are fc1_input, act_input, fc2_input"):
        make("ours", no_offload_activation=["fc3_input"])


@pytest.mark.usefixtures("_silu_on_the_cpu")
def test_what_does_not_run_fused_torchtitan_computes_and_a_warning_says_why_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "0")
    x, grad = inputs()
    moe = make("ours")
    calls = []

    def grouped_mm(*, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        calls.append(A)
        return torch._grouped_mm(A, B_t, offs=offs)

    monkeypatch.setattr(experts_of(moe), "_grouped_mm", grouped_mm)
    with pytest.warns(UserWarning, match="torchtitan's own code computes the experts: .*TE_OFFLOAD_FUSED_MLP is 0"):
        found = step(moe, x, grad)
    step(moe, x, grad)  # warnings are errors
    with OffloadSession(moe) as session, session.step():
        step(moe, x, grad)
    assert "TE_OFFLOAD_FUSED_MLP is 0" in " ".join(session.report().split())
    assert len(calls) == 6
    expected = step(make("stock"), x, grad)
    assert all(float((found[name] - other).norm() / other.norm()) < 1e-2 for name, other in expected.items())


def test_without_torchtitan_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    monkeypatch.delitem(sys.modules, "te_offload.torchtitan")
    with pytest.raises(
        NotInstalledError, match=r"is for torchtitan 0\.3\.0, which cannot be imported here: .*torchtitan"
    ):
        importlib.import_module("te_offload.torchtitan")


def test_nothing_is_held_between_steps_but_parameters() -> None:
    moe = make("ours")
    step(moe, *inputs())
    pipeline: Any = inside.held(experts_of(moe), "mlp")
    assert not list(pipeline.parameters())
    (fuser,) = pipeline._module_groups
    assert not fuser._flat_basic_op_params and not any(fuser._basic_op_params)


def test_a_copy_computes_with_weights_of_its_own() -> None:
    x, grad = inputs()
    moe = make("ours")
    expected = step(moe, x, grad)
    other = copy.deepcopy(moe)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    assert_same_bits(expected, step(other, x, grad))
    assert fusions_in(other)[0].fused > 0


def test_weights_that_nobody_gave_and_calls_that_do_not_run_fused_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    op = GivenGroupedLinear()
    with pytest.raises(ArgumentError, match="no weight was given"):
        op.given  # noqa: B018
    with pytest.raises(ArgumentError, match=r"contiguous \(experts, out_features, in_features\)"):
        op.give(torch.ones(2, 8, 8).mT)
    op.give(torch.ones(2, 8, 8))
    pipeline = te.ops.Sequential(op, ops.ScaledSReLU(), ops.GroupedLinear(2, 8, 8, bias=False, device="cpu"))
    monkeypatch.setenv(hopper.SWITCH, "0")
    sizes = torch.tensor([1, 2])
    with pytest.raises(UnsupportedError, match=r"did not take this call: .*TE_OFFLOAD_FUSED_MLP is 0"):
        pipeline(torch.ones(3, 8), sizes, torch.ones(3), sizes)


def test_two_ranks_that_share_the_experts_compute_what_one_does_and_a_session_changes_no_bit(tmp_path: Path) -> None:
    program = (
        "import os, sys, warnings; warnings.simplefilter('ignore')\n"
        "from tests.support.titan_moe import main\n"
        "main(int(sys.argv[1]), 'cpu', sys.argv[2]); sys.stdout.flush(); os._exit(0)"
    )
    outputs = on_two_ranks(program, str(tmp_path / "meeting"))
    said = [f"{what} under {backend}" for backend in BACKENDS["cpu"] for what in ("same", "same, compiled,")]
    assert all(line in output for output in outputs for line in said), outputs
    assert all(f"same, {how}sharded" in output for output in outputs for how in ("", "compiled and ")), outputs
