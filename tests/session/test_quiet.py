"""A session that has nothing to offload stops looking, and looks again when something may have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.offload.host_pool import HostPool
from te_offload.offload.quiet import AFTER, EVERY
from te_offload.ops.slot_owner import SlotOwner
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.mlp import assert_same_bits, run


def step(session: OffloadSession, model: Any, splits: tuple[int, ...] = SPLITS) -> dict[str, torch.Tensor]:
    with session.step():
        return run(model, splits)


def quiet(model: Any, **arguments: Any) -> OffloadSession:
    """A session in whose steps nothing went until it stopped looking."""
    session = OffloadSession(model.layers, **arguments)
    for _ in range(AFTER):
        step(session, model)
    assert session.records[-1].index == AFTER - 1
    step(session, model)
    assert session.records[-1].index == AFTER - 1  # of the step after it there is no record
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
        assert record.index == AFTER + 1 and record.unseen == 0
        assert {row.reason for row in record.slots if row.op} == {Reason.TOO_SMALL}


def test_slot_that_has_become_large_goes_at_once() -> None:
    model = Stack(2)
    with quiet(model, min_bytes=2048, host_reserve="64KiB") as session:
        step(session, model, tuple(10 * size for size in SPLITS))
        assert any(row.fate is Fate.OFFLOADED for row in session.records[-1].slots)
        assert session.records[-1].bytes_out > 0


def test_changed_argument_of_an_op_counts_at_once() -> None:
    model = Stack(2)
    owners = [op for op in model.modules() if isinstance(op, SlotOwner)]
    for op in owners:
        op.no_offload_activation = True
    with quiet(model, min_bytes=0, host_reserve="64KiB") as session:
        owners[3].no_offload_activation = False
        step(session, model)
        record = session.records[-1]
        assert record.index == AFTER + 1 and record.unseen == 1  # the layer before it had not changed
        assert [row.name for row in record.slots if row.fate is Fate.OFFLOADED] == ["layer1/0.fc1_input"]
        assert "1 forwards were not looked at" in session.report()


def test_one_step_in_eight_is_looked_at_all_the_same() -> None:
    model = Stack(1)
    with quiet(model, min_bytes="1GiB") as session:
        for _ in range(2 * EVERY):
            step(session, model)
        assert session.records[-1].index == 2 * EVERY


def test_slots_that_the_host_had_no_room_for_are_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPool, "reserve", lambda self, nbytes: False)
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0) as session:
        for number in range(AFTER + 2):
            step(session, model)
            assert session.records[-1].index == number
            assert {row.reason for row in session.records[-1].slots if row.op} == {Reason.NO_ROOM}
