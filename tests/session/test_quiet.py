"""A session that has nothing to offload stops looking, and looks again when something may have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Plan, PlannedSlot, Reason
from te_offload.offload import engine as engine_module
from te_offload.offload.engine import TIMED_EVERY, TIMED_FIRST
from te_offload.offload.host_pool import HostPool
from te_offload.ops import GroupedLinear
from te_offload.ops.slot_owner import SlotOwner
from te_offload.report.table import step_table
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.late_copies import LateTransfer
from tests.support.mlp import assert_same_bits, make_inputs, run

LAST_TIMED = -(-TIMED_FIRST // TIMED_EVERY) * TIMED_EVERY  # the first step after it is not timed


def step(session: OffloadSession, model: Any, splits: tuple[int, ...] = SPLITS) -> dict[str, torch.Tensor]:
    with session.step():
        return run(model, splits)


def quiet(model: Any, **arguments: Any) -> OffloadSession:
    """A session in whose steps nothing went until it stopped looking."""
    session = OffloadSession(model.layers, **arguments)
    for _ in range(LAST_TIMED + 1):
        step(session, model)
    assert session.records[-1].index == LAST_TIMED
    step(session, model)
    assert session.records[-1].index == LAST_TIMED  # of the step after it there is no record
    return session


def test_gradients_are_the_same_where_nothing_is_looked_at() -> None:
    expected = run(Stack(2), SPLITS)
    model = Stack(2)
    with quiet(model, min_bytes="1GiB") as session:
        model.zero_grad()
        assert_same_bits(expected, step(session, model))


def test_forward_with_another_shape_is_looked_at_and_so_is_all_after_it() -> None:
    model = Stack(2)
    with quiet(model, min_bytes="1GiB") as session:
        step(session, model, tuple(size + 1 for size in SPLITS))
        record = session.records[-1]
        assert record.index == LAST_TIMED + 2 and record.unseen == 0
        assert {row.reason for row in record.slots if row.op} == {Reason.TOO_SMALL}


def test_slot_that_has_become_large_goes_at_once() -> None:
    model = Stack(2)
    with quiet(model, min_bytes=2048, host_reserve="64KiB") as session:
        step(session, model, tuple(10 * size for size in SPLITS))
        assert any(row.fate is Fate.OFFLOADED for row in session.records[-1].slots)
        assert session.records[-1].bytes_out > 0


@pytest.mark.parametrize("saved", ["nothing", "what stays"])
def test_slots_go_at_once_when_weights_are_unfrozen(saved: str) -> None:
    model = Stack(2)
    for layer in model.layers:
        layer[1].no_offload_activation = True  # type: ignore[index]
    with OffloadSession(model.layers, min_bytes=0) as session:
        for _ in range(LAST_TIMED + 1):
            step(session, model)
        whole = session.records[-1].bytes_out
        model.requires_grad_(False)
        x, sizes, scales = make_inputs(SPLITS, seed=0)
        for _ in range(2):
            with session.step():
                model(x.detach(), sizes, scales.detach() if saved == "nothing" else scales, sizes)
        rows = [row for record in session.records for row in record.slots if row.reason is Reason.FROZEN]
        assert bool(rows) == (saved == "what stays")
        model.requires_grad_(True)
        step(session, model)
        assert session.records[-1].bytes_out == session.records[-1].bytes_back == whole > 0


def test_changed_argument_of_an_op_counts_at_once() -> None:
    model = Stack(2)
    owners = [op for op in model.modules() if isinstance(op, SlotOwner)]
    for op in owners:
        op.no_offload_activation = True
    with quiet(model, min_bytes=0, host_reserve="64KiB") as session:
        owners[3].no_offload_activation = False
        step(session, model)
        record = session.records[-1]
        assert record.index == LAST_TIMED + 2 and record.unseen == 1  # the layer before it had not changed
        assert [row.name for row in record.slots if row.fate is Fate.OFFLOADED] == ["layer1/0.fc1_input"]
        assert "1 forwards were not looked at" in step_table(record)


def test_one_step_in_eight_is_looked_at_all_the_same() -> None:
    model = Stack(1)
    with quiet(model, min_bytes="1GiB") as session:
        for _ in range(2 * TIMED_EVERY):
            step(session, model)
        assert session.records[-1].index == LAST_TIMED + 2 * TIMED_EVERY


def test_kept_layers_of_a_plan_are_not_looked_at_and_the_others_are() -> None:
    model = Stack(4)
    expected = run(Stack(4), SPLITS)
    names = ("0.fc1_input", "1.act_input", "2.fc2_input")
    plan = Plan(tuple(PlannedSlot(f"layer{n}/{name}", 0, 0, n != 2) for n in range(4) for name in names))
    with OffloadSession(model.layers, min_bytes=0, plan=plan) as session:
        for _ in range(LAST_TIMED + 2):
            model.zero_grad()
            found = step(session, model)
        assert_same_bits(expected, found)
        timed, record = session.timed_record, session.records[-1]
        assert timed is not None and timed.unseen == 0
        assert record.unseen == 1 and {row.layer for row in record.slots} == {"layer0", "layer1", "layer3"}
        assert record.bytes_out == timed.bytes_out > 0


@pytest.mark.parametrize(
    ("layers", "kept", "backward_op", "back"),
    [(3, 2, 0, 1), (4, 1, 1, 2)],
    ids=["the last layer's backward starts the first of two", "one between two holds up nothing"],
)
def test_layer_that_is_not_looked_at_holds_up_nothing_that_comes_back_after_it(
    monkeypatch: pytest.MonkeyPatch, layers: int, kept: int, backward_op: int, back: int
) -> None:
    expected, model = run(Stack(layers), SPLITS), Stack(layers)
    transfer = LateTransfer()
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: transfer)
    for name in ("pace_for", "departures_for"):  # by the times of this machine
        monkeypatch.setattr(engine_module, name, lambda _: None)
    begun: list[int] = []  # copies back when each GroupedLinear's backward begins
    backward = GroupedLinear.fuser_backward

    def note(*args: Any, **kwargs: Any) -> Any:
        begun.append(len(transfer.back))
        return backward(*args, **kwargs)

    monkeypatch.setattr(GroupedLinear, "fuser_backward", note)
    names = ("0.fc1_input", "1.act_input", "2.fc2_input")
    plan = Plan(tuple(PlannedSlot(f"layer{n}/{name}", 0, 0, n != kept) for n in range(layers) for name in names))
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0, plan=plan) as session:
        for _ in range(LAST_TIMED + 1):
            step(session, model)
        assert session._engine is not None
        session._engine.returns.max_ahead = 1 << 20
        transfer.back.clear()
        begun.clear()
        found = step(session, model)
        assert session.records[-1].unseen == 1
    assert_same_bits(expected, found)
    assert begun[backward_op] == back  # of the last layer that went nothing comes back: it never left


def test_slots_that_the_host_had_no_room_for_are_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPool, "reserve", lambda self, nbytes: False)
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0) as session:
        for number in range(LAST_TIMED + 3):
            step(session, model)
            assert session.records[-1].index == number
            assert {row.reason for row in session.records[-1].slots if row.op} == {Reason.NO_ROOM}
