"""Plans, budgets and regions in sessions: what is asked for happens, and what cannot be is an error before it begins."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Plan, PlannedSlot, Reason
from te_offload.errors import ArgumentError, BudgetError, PlanError
from te_offload.offload import engine
from te_offload.units import format_bytes
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.mlp import assert_same_bits, make_inputs, run

LAYER = 10 * (16 + 32 + 32) * 4  # bytes that a layer saves
FC1, ACT, FC2 = 10 * 16 * 4, 10 * 32 * 4, 10 * 32 * 4


def steps(session: OffloadSession, model: torch.nn.Module, count: int = 4, splits: tuple[int, ...] = SPLITS) -> None:
    expected = Stack(len(model.layers))  # type: ignore[arg-type]
    for seed in range(count):
        with session.step():
            found = run(model, splits, seed=seed)
        assert_same_bits(run(expected, splits, seed=seed), found)


def test_plan_given_by_hand_is_followed_from_the_first_step() -> None:
    model = Stack(2)
    plan = Plan((PlannedSlot("layer0/1.act_input", 0, 0, False), PlannedSlot("layer1/0.fc1_input", 0, 0, False)))
    with OffloadSession(model.layers, min_bytes=0, plan=plan) as session:
        steps(session, model, 1)
        kept = {row.name: row.reason for row in session.records[-1].slots if row.fate is Fate.KEPT}
        assert kept == {"layer0/1.act_input": Reason.PLAN, "layer1/0.fc1_input": Reason.PLAN}
        assert session.records[-1].planned
        assert session.records[-1].bytes_out == session.records[-1].bytes_back == 2 * LAYER - ACT - FC1


def test_plan_of_a_file_is_followed_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0, fraction=0.5) as session:
        steps(session, model)
        assert session.plan is not None
        session.plan.save(tmp_path / "plan.json")
        wanted = {slot.name for slot in session.plan.slots if slot.goes}
    with OffloadSession(model.layers, min_bytes=0, plan=tmp_path / "plan.json") as session:
        steps(session, model, 1)
        assert {row.name for row in session.records[-1].slots if row.fate is Fate.OFFLOADED} == wanted
    with pytest.raises(PlanError, match="names layer1"):
        OffloadSession(model.layers[0], plan=tmp_path / "plan.json")
    with OffloadSession(model.layers, min_bytes=0) as session:  # the refused session left nothing on the layers
        steps(session, model, 1)


def test_fraction_is_met_and_predicted_before_the_third_step() -> None:
    model = Stack(4)
    with OffloadSession(model.layers, min_bytes=0, fraction=0.3) as session:
        steps(session, model, 4)
        assert session.plan is not None and session.plan.forecast is not None
        first, last = session.records[0], session.records[-1]
        assert first.bytes_out == 4 * LAYER and not first.planned
        assert last.planned and 0.3 * 4 * LAYER <= last.bytes_out <= 0.3 * 4 * LAYER + ACT
        assert last.bytes_back == last.bytes_out > 0


def test_as_slots_begin_to_stay_what_the_allocator_holds_unused_is_given_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[int] = []
    model = Stack(4)
    with OffloadSession(model.layers, min_bytes=0, fraction=0.3) as session:
        monkeypatch.setattr(engine, "give_back_unused", lambda device: given_back.append(session.records[-1].index))
        steps(session, model, 6)
        planned = [record.index for record in session.records if record.planned]
        assert given_back == [1] and planned == [2, 3, 4, 5]
    with OffloadSession(model.layers, min_bytes=0, fraction=1.0) as session:
        steps(session, model, 6)
        assert session.plan is not None and session.records[-1].bytes_out == 4 * LAYER
    assert len(given_back) == 1  # the same slots go as before the plan


def test_budget_per_layer_leaves_no_more_than_that_of_each_forward() -> None:
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, budget_per_layer=FC1) as session:
        steps(session, model, 4)
        for layer in range(3):
            rows = [row for row in session.records[-1].slots if row.layer == f"layer{layer}"]
            assert sum(row.nbytes for row in rows if row.fate is Fate.KEPT) <= FC1
        assert session.records[-1].bytes_out == 3 * (ACT + FC2)


def test_budget_that_cannot_be_met_raises_before_the_step_and_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    for layer in model.layers:
        layer[1].no_offload_activation = True  # type: ignore[index]
    with OffloadSession(model.layers, min_bytes=0, budget_per_layer=100) as session:
        steps(session, model, 2)
        before = [parameter.clone() for parameter in model.parameters()]
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        with pytest.raises(BudgetError, match=r"1.2 KiB of layer0 must stay, 1.2 KiB too much.*layer0/1.act_input"):
            steps(session, model, 1)
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True) if p.grad is not None)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    run(model, SPLITS)


def test_host_limit_below_every_slot_is_an_error_before_the_second_step() -> None:
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0, host_limit=512) as session:
        steps(session, model, 1)
        assert all(row.reason is Reason.NO_ROOM for row in session.records[-1].slots)
        with pytest.raises(BudgetError, match="host_limit is 512 B, but the smallest slot that may go"):
            steps(session, model, 1)


def test_host_limit_is_never_passed_and_what_does_not_fit_stays_and_says_so() -> None:
    model = Stack(4)
    with OffloadSession(model.layers, min_bytes=0, host_limit=2 * LAYER) as session:
        steps(session, model, 4)
        for record in session.records:
            assert record.host_held <= 2 * LAYER
            fates = {row.fate for row in record.slots}
            assert fates == {Fate.OFFLOADED, Fate.KEPT}
            assert all(row.reason is Reason.NO_ROOM for row in record.slots if row.fate is Fate.KEPT)
            assert record.bytes_out == record.bytes_back > 0


@pytest.mark.parametrize("number", [0, 1, 2, 4])
@pytest.mark.parametrize("where", ["forward", "backward", "a forward, and the step goes on"])
def test_step_that_raised_is_no_ground_for_a_plan(where: str, number: int) -> None:
    model = Stack(4)
    with OffloadSession(model.layers, min_bytes=0, fraction=0.5) as session:
        steps(session, model, number)
        before = session.plan
        x, sizes, scales = make_inputs(SPLITS, seed=0)
        with contextlib.suppress(ZeroDivisionError), session.step():
            y = model.layers[1](model.layers[0](x, sizes, scales, sizes), sizes, scales, sizes)
            if where == "backward":
                y.register_hook(lambda _: 1 / 0)
                y.sum().backward()
            failing = model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError) if "goes on" in where else contextlib.nullcontext():
                model.layers[2](y, sizes, scales, sizes)
        if where != "backward":
            failing.remove()
        assert session.records[-1].raised and "raised" in session.report()
        model.zero_grad()
        with session.step():
            run(model, SPLITS)
        assert before is None or session.plan is before
        steps(session, model, 2)
        assert session.plan is not None and len(session.plan.slots) == 4 * 3
        assert before is None or session.plan is before
        assert 0 < session.records[-1].bytes_out < 4 * LAYER and not session.records[-1].raised


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize(
    "budget", [{"fraction": 0.5}, {"budget_per_layer": LAYER // 2}, {"policy": "planned"}], ids=str
)
def test_step_of_which_a_hook_takes_all_is_no_ground_for_a_plan(budget: dict[str, Any], number: int) -> None:
    model = Stack(4)
    with OffloadSession(model.layers, min_bytes=0, **budget) as session:
        steps(session, model, number)
        before = session.plan
        for _ in range(4):
            with session.step(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                run(model, (8, 1, 9))
            assert {row.reason for row in session.records[-1].slots} == {Reason.FOREIGN_HOOK}
            assert session.plan is before
        steps(session, model, 4)
        assert session.plan is not None and len(session.plan.slots) == 4 * 3
        assert session.records[-1].bytes_out > 0


def test_plan_is_made_anew_when_shapes_drift_past_the_bound() -> None:
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, fraction=0.5, replan_drift=0.3) as session:
        steps(session, model, 4)
        first = session.plan
        steps(session, model, 2, splits=(4, 1, 6))  # a tenth more: within the bound
        assert session.plan is first
        steps(session, model, 3, splits=(8, 0, 12))
        assert session.plan is not first and session.plan is not None
        assert sum(slot.nbytes for slot in session.plan.slots) == 3 * 2 * LAYER


def test_after_three_steps_no_host_memory_is_taken_and_what_does_not_fit_stays() -> None:
    model = Stack(3)
    generator = torch.Generator().manual_seed(0)
    with OffloadSession(model.layers, min_bytes=0) as session:
        for seed in range(12):
            counts = torch.randint(0, 20 if seed < 3 else 60, (3,), generator=generator).tolist()
            steps_once(session, model, tuple(counts), seed)
            record = session.records[-1]
            if seed == 2:
                taken = record.host_allocations
            if seed >= 3:
                assert record.host_allocations == taken
                assert all(row.reason in (Reason.NONE, Reason.NO_ROOM, Reason.GRAPH_GONE) for row in record.slots)
                assert record.host_peak <= record.host_held
        assert any(row.reason is Reason.NO_ROOM for record in session.records for row in record.slots)


def steps_once(session: OffloadSession, model: torch.nn.Module, splits: tuple[int, ...], seed: int) -> None:
    with session.step():
        found = run(model, splits, seed=seed)
    assert_same_bits(run(Stack(len(model.layers)), splits, seed=seed), found)  # type: ignore[arg-type]


def test_reserved_host_memory_is_taken_once() -> None:
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, host_reserve="64KiB") as session:
        steps(session, model, 4)
        assert [record.host_allocations for record in session.records] == [1, 1, 1, 1]
        assert session.records[-1].host_held == 65536
    with pytest.raises(ArgumentError, match="host_reserve is 2048 bytes, more than host_limit allows"):
        OffloadSession(model.layers, host_reserve=2048, host_limit=1024)


# Regions -------------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A layer with attention-like parts beside a grouped MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        from tests.support.mlp import make_mlp

        self.norm = torch.nn.LayerNorm(16)
        self.qkv = torch.nn.Linear(16, 48)
        self.mlp = make_mlp()
        self.region: Any = lambda name, **_: contextlib.nullcontext()
        self.keep = False

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        with self.region("norm"):
            h = self.norm(x)
        with self.region("core_attn", no_offload_activation=self.keep):
            q, k, v = self.qkv(h).chunk(3, -1)
            h = torch.softmax(q @ k.t(), -1) @ v
        y: torch.Tensor = self.mlp(x + h, *rest)
        return y


def test_region_is_one_slot_with_its_name_and_changes_no_bit() -> None:
    expected = run(Block(), SPLITS)
    block = Block()
    with OffloadSession(block, min_bytes=0) as session:
        block.region = session.region
        with session.step():
            assert_same_bits(expected, run(block, SPLITS))
        rows = {row.name: row for row in session.records[-1].slots}
        assert rows["layer0/core_attn.region"].tensors > 3
        assert rows["layer0/core_attn.region"].fate is rows["layer0/norm.region"].fate is Fate.OFFLOADED
        assert "layer0/mlp.0.fc1_input" in rows
        assert session.records[-1].bytes_back == session.records[-1].bytes_out > 0


def test_region_can_stay_by_argument_or_by_plan() -> None:
    block = Block()
    block.keep = True
    plan = Plan((PlannedSlot("layer0/norm.region", 0, 0, False),))
    with OffloadSession(block, min_bytes=0, plan=plan) as session:
        block.region = session.region
        with session.step():
            run(block, SPLITS)
        rows = {row.name: row for row in session.records[-1].slots}
        assert rows["layer0/core_attn.region"].reason is Reason.ASKED
        assert rows["layer0/norm.region"].reason is Reason.PLAN


def test_region_is_left_when_its_forward_raises() -> None:
    block = Block()
    with OffloadSession(block, min_bytes=0) as session:
        block.region = session.region
        with session.step():
            with pytest.raises(RuntimeError):
                block(torch.zeros(3, 7))
            assert_same_bits(run(Block(), SPLITS), run(block, SPLITS))
        assert {row.name for row in session.records[-1].slots} >= {"layer0/norm.region", "layer0/core_attn.region"}


def test_region_outside_of_a_step_does_nothing_and_needs_a_name() -> None:
    block = Block()
    session = OffloadSession(block)
    block.region = session.region
    assert_same_bits(run(Block(), SPLITS), run(block, SPLITS))
    for name in ("", "a/b", "a.b", "a[0]", None):
        with pytest.raises(ArgumentError, match="A region needs a name"):
            session.region(name)  # type: ignore[arg-type]
    session.close()


def test_what_is_wrong_with_an_argument_is_said_before_anything_is_attached() -> None:
    model = Stack(2)
    for arguments in ({"policy": "best"}, {"fraction": 2.0}, {"budget_per_layer": "1 furlong"}, {"verify": 1}):
        with pytest.raises(ArgumentError):
            OffloadSession(model.layers, **arguments)
    OffloadSession(model.layers).close()


def test_report_says_which_forward_kept_more_than_its_budget_and_with_what() -> None:
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, budget_per_layer=LAYER // 2, replan_drift=10.0) as session:
        steps(session, model, 4)
        assert 0 < session.records[-1].bytes_out < 3 * LAYER and "budget" not in session.report()
        steps(session, model, 1, splits=(16, 2, 18))  # twice the tokens, to which the plan is not to be adapted
        report = session.report()
    kept = [row for row in session.records[-1].slots if row.layer == "layer1" and row.fate is Fate.KEPT]
    more = sum(row.nbytes for row in kept) - LAYER // 2
    assert more > 0
    (line,) = [line for line in report.splitlines() if line.startswith("  layer1, forward 0:")]
    assert f"{format_bytes(more)} more than budget_per_layer, {format_bytes(LAYER // 2)}: {kept[0].name} (" in line
    assert "The budget was not met:" in report and kept[0].reason.value in line


@pytest.mark.parametrize("options", [{"enabled": False}, {"pp_rank": 1, "pp_rank_delta": "1MiB"}], ids=str)
def test_report_speaks_of_no_budget_that_does_not_hold(options: dict[str, Any]) -> None:
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0, budget_per_layer=1, **options) as session:
        steps(session, model, 3)
        assert any(row.fate is Fate.KEPT for row in session.records[-1].slots)
        assert "budget" not in session.report()
