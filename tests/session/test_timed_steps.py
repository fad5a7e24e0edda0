"""Times are taken in some steps; what the other steps' records leave out, and what is done without times."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest

from te_offload import OffloadSession, Outcome, StepRecord
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.engine import HISTORY, TIMED_EVERY, TIMED_FIRST
from te_offload.offload.measure import FinishedStep, resolve
from te_offload.offload.transfer import Copy, CpuTransfer, Mark
from te_offload.offload.visit import LayerVisit
from te_offload.ops import arithmetic
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.late_copies import LateTransfer
from tests.support.mlp import assert_same_bits, run


def test_steps_after_the_first_ones_are_timed_one_in_so_many() -> None:
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0) as session:
        timed = []
        for _ in range(TIMED_FIRST + 2 * TIMED_EVERY):
            with session.step():
                run(model, SPLITS)
            timed.append(session.records[-1].timed)
    assert timed == [number < TIMED_FIRST or number % TIMED_EVERY == 0 for number in range(len(timed))]


def test_record_without_times_has_bytes_and_outcomes_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: LateTransfer())
    monkeypatch.setattr(engine_module, "TIMED_FIRST", 0)
    model = Stack(4)
    expected = run(Stack(4), SPLITS)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session:
        for _ in range(2):
            model.zero_grad()
            with session.step():
                found = run(model, SPLITS)
        first, record = session.records
        assert first.timed and first.step_ms > 0 and first.windows
        assert not record.timed and record.step_ms == record.out_ms == record.exposed_ms == 0 and record.windows == ()
        assert record.bytes_out == first.bytes_out > 0 and record.bytes_back == first.bytes_back > 0
        outcomes = {row.outcome for row in record.slots if row.op}
        assert Outcome.BACK in outcomes and outcomes <= {Outcome.BACK, Outcome.RECALLED}
        assert all(row.out_ms is None and row.back_ms is None for row in record.slots)
        assert "Slots of step 0" in session.report()  # which has times
    assert_same_bits(expected, found)


def test_last_timed_step_is_reported_when_it_is_no_longer_among_the_last_steps() -> None:
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0) as session:
        for _ in range(TIMED_FIRST + TIMED_EVERY - 1):
            with session.step():
                run(model, SPLITS)
        assert not any(record.timed for record in session.records)
        assert f"Slots of step {TIMED_EVERY}" in session.report()


def test_drift_in_a_step_without_times_has_the_next_one_timed_and_planned_from() -> None:
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0, fraction=0.5) as session:
        for _ in range(TIMED_FIRST + 2):
            with session.step():
                run(model, SPLITS)
        plan = session.plan
        timed = []
        for number in range(8):  # drift is seen after the first one, times are taken in the second one
            with session.step():
                run(model, tuple(3 * size for size in SPLITS))
            timed.append(session.records[-1].timed)
            assert (session.plan is plan) == (number < 2)
        # and in four of the new plan, and in the seventeenth step of all
        assert timed == [False, True, *[True] * 4, (TIMED_FIRST + 2 + 6) % TIMED_EVERY == 0, False]


def test_no_record_is_written_of_steps_that_save_what_the_plan_was_seen_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the host milliseconds, of each step."""
    written: list[int] = []

    def noted(step: FinishedStep, transfer: Any) -> StepRecord:
        written.append(step.index)
        return resolve(step, transfer)

    monkeypatch.setattr(engine_module, "resolve", noted)
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0, fraction=0.5) as session:
        for _ in range(TIMED_FIRST + TIMED_EVERY):
            with session.step():
                run(model, SPLITS)
        assert session.plan is not None
        assert [index for index in written if index >= TIMED_FIRST and index % TIMED_EVERY] == []
        for _ in range(4):
            with session.step():
                run(model, tuple(3 * size for size in SPLITS))
        assert max(written) >= TIMED_FIRST + TIMED_EVERY


@pytest.mark.parametrize("catches_up", [False, True])
def test_drift_is_seen_also_where_the_device_is_a_step_behind(
    monkeypatch: pytest.MonkeyPatch, catches_up: bool
) -> None:
    """The host begins a step while the one before still runs. In the step after the drift not all is looked at."""
    model, behind = Stack(), 1
    ops: list[Any] = [*model.layers[2].children()]
    for op in ops:
        op.no_offload_activation = True
    with OffloadSession(model.layers, min_bytes=0, fraction=0.5) as session:
        for _ in range(TIMED_FIRST - 1):
            with session.step():
                run(model, tuple(3 * size for size in SPLITS))
        engine, plan = session._engine, session.plan
        assert engine is not None and plan is not None
        monkeypatch.setattr(FinishedStep, "is_over", lambda step: step.index < engine.steps - behind)
        for number in range(4):
            with session.step():
                run(model, SPLITS)
            if number == 1:
                unseen = engine._finished[-1].unseen
                behind = 0 if catches_up else 1
        assert unseen
        assert session.plan is not plan


def test_steps_whose_records_nobody_reads_leave_nothing_for_the_garbage_collector() -> None:
    model = Stack()
    forwards: list[weakref.ref[LayerVisit]] = []
    with OffloadSession(model.layers, min_bytes=0) as session:
        gc.collect()
        gc.disable()
        try:
            for _ in range(TIMED_FIRST + 2 * HISTORY):
                with session.step():
                    run(model, SPLITS)
                assert session._engine is not None
                forwards += [weakref.ref(visit) for visit in session._engine.visits]
            alive = [forward for forward in forwards if forward() is not None]
        finally:
            gc.enable()
    assert len(alive) <= (HISTORY + 1) * len(model.layers)


@pytest.mark.parametrize("together", [0, 8 << 20], ids=["alone", "together"])
def test_copy_out_comes_after_a_mark_made_when_its_slot_was_there(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    computed = 0
    seen: list[tuple[int, int]] = []

    class Clock(CpuTransfer):
        def mark(self) -> Mark:
            made = super().mark()
            marks[id(made)] = (computed, made)
            return made

        def copy_out(self, pieces: Any, after: Any) -> Copy:
            seen.append((marks[id(after[0])][0], computed))
            return super().copy_out(pieces, after)

    def count(*arguments: Any, **rest: Any) -> Any:
        nonlocal computed
        computed += 1
        return forward(*arguments, **rest)

    marks: dict[int, tuple[int, Mark]] = {}
    forward = arithmetic.grouped_forward
    monkeypatch.setattr(arithmetic, "grouped_forward", count)
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: Clock())
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=together))
    model = Stack(1)
    with OffloadSession(model.layers, min_bytes=0) as session, session.step():
        run(model, SPLITS)
    made = [when for when, _ in seen]
    assert made == ([2] if together else [1, 1, 2])  # after FC1, after the activation, after FC2
