"""When memory is let go of by a host that is ahead of the device, as it is wherever the device is the slower one: such a
host does not see that a copy out is over, and all that it let go of only where it sees that would stay until it is read.
"""

from __future__ import annotations

import dataclasses

import pytest

from te_offload import OffloadSession, Plan, StepRecord
from te_offload.offload.engine import TIMED_FIRST
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import ONE, Order, Training, engine_on

LAYERS = 8
SLOTS = (12_800, 8_800, 8_800)  # bytes: of 30.4 ms on the link each way
LAYER = sum(SLOTS)
ORDERS: dict[str, Order] = {
    "one micro-batch": ONE,
    "1F1B": tuple((name[0], int(name[1])) for name in ("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3")),
    "accumulation": tuple((kind, number) for number in range(3) for kind in "FB"),
}


def _run(
    going: int,
    times: tuple[float, float],
    *,
    departs: bool,
    steps: int = 6,
    varies: float = 0.0,
    order: Order = ONE,
) -> tuple[list[float], StepRecord, SimulatedDevice]:
    """Milliseconds of steps, the record of the last one, and the device; of so many layers, from the first on, all goes."""
    device = SimulatedDevice()
    with engine_on(device, departs=departs):
        training = Training(device, LAYERS, SLOTS, *times, varies=varies)
        with training.session(plan=training.plan(going, order)) as session:
            found = [training.step(session, order) for _ in range(steps)]
            return found, session.records[-1], device


@pytest.mark.parametrize("steps", [6, TIMED_FIRST + 3], ids=["timed", "with layers that are left alone"])
def test_memory_of_what_has_left_is_free_where_the_host_has_not_seen_it(steps: int) -> None:
    (before, held, _), (after, record, device) = (
        _run(1, (40.0, 80.0), departs=departs, steps=steps) for departs in (False, True)
    )
    assert before == after == [pytest.approx(LAYERS * 120.0)] * steps and device.waited == 0
    assert held.bytes_out == record.bytes_out == LAYER
    assert (held.bytes_back, held.peak_resident) == (0, LAYERS * LAYER if held.timed else LAYER)
    assert record.bytes_back == LAYER
    assert record.peak_resident == ((LAYERS - 1) * LAYER if record.timed else LAYER)
    assert record.unseen == (0 if record.timed else LAYERS - 1)
    labels = [moment.label for moment in record.residency]
    assert labels.count("copied out") == len(SLOTS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("varies", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("times", [(11.0, 22.0), (40.0, 80.0)], ids=["copies are the longer", "work is the longer"])
def test_steps_take_no_longer_for_it_and_hold_no_more(times: tuple[float, float], varies: float, order: str) -> None:
    """Whether the next steps are quicker or slower than the last timed ones were."""
    (before, held, _), (after, record, _) = (
        _run(4, times, departs=departs, steps=TIMED_FIRST, varies=varies, order=ORDERS[order])
        for departs in (False, True)
    )
    assert sum(after) <= sum(before) * (1 + 1e-9)
    assert record.peak_resident <= held.peak_resident
    assert record.bytes_back >= held.bytes_back
    if times == (40.0, 80.0) and not varies:
        assert record.peak_resident < held.peak_resident


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("loss_ms", [60.0, 240.0])
def test_nobody_waits_before_a_loss_for_copies_that_end_in_it(loss_ms: float, *, lockstep: bool) -> None:
    device = SimulatedDevice(lockstep=lockstep)
    with engine_on(device):
        training = Training(device, LAYERS, SLOTS, 25.0, 50.0, loss_ms=loss_ms)
        with training.session(max_in_flight=3 * LAYER) as session:
            found = [training.step(session) for _ in range(TIMED_FIRST)]
            record = session.records[-1]
    assert found[-1] == pytest.approx(LAYERS * 75.0 + loss_ms) and record.throttled_ms == record.exposed_ms == 0.0
    assert record.bytes_out == LAYERS * LAYER and record.bytes_back >= (LAYERS - 4) * LAYER


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 0.4, 0.5, 0.7])
def test_plans_predict_what_such_steps_hold(fraction: float) -> None:
    device = SimulatedDevice()
    with engine_on(device):
        training = Training(device, LAYERS, SLOTS, 40.0, 80.0)
        with training.session(fraction=fraction) as session:
            for _ in range(TIMED_FIRST):
                ms = training.step(session)
            plan, record = session.plan, session.records[-1]
    assert plan is not None and plan.forecast is not None
    assert record.peak_resident == plan.forecast.peak_bytes < LAYERS * LAYER
    assert ms == pytest.approx(plan.forecast.step_ms) == pytest.approx(LAYERS * 120.0)


def test_nothing_is_let_go_of_by_times_where_there_is_no_second_step_of_the_same_work() -> None:
    """In another order than the timed steps had, the bounds hold and the host's own eyes."""
    device = SimulatedDevice()
    with engine_on(device):
        training = Training(device, LAYERS, SLOTS, 40.0, 80.0)
        with training.session(plan=training.plan(1)) as session:
            for number in range(TIMED_FIRST):
                order = ONE if number % 2 else (("F", 0), ("F", 1), ("B", 1), ("B", 0))
                training.step(session, order)
                assert session._engine is not None and session._engine.mover.departures is None


def test_a_host_that_waits_for_the_device_after_many_steps_alone_knows_by_then() -> None:
    device = SimulatedDevice()
    with engine_on(device):
        training = Training(device, LAYERS, SLOTS, 40.0, 80.0)
        with training.session(plan=training.plan(1)) as session:
            for _ in range(TIMED_FIRST):
                training.step(session, waits=False)
            back = []
            for _ in range(2):
                training.step(session)
                back.append(session.records[-1].bytes_back)
    assert back == [LAYER, LAYER]


@pytest.mark.parametrize("lockstep", [False, True], ids=["a host that is ahead", "a host that is not"])
def test_nobody_waits_for_another_plan_by_the_times_of_the_one_before(lockstep: bool) -> None:
    """What did not go before was neither seen to leave nor to come back."""
    device = SimulatedDevice(lockstep=lockstep)
    with engine_on(device):
        training = Training(device, LAYERS, SLOTS, 40.0, 80.0)
        first = training.plan(2)
        slots = training.plan(4).slots
        goes = [one.goes and not before.goes for one, before in zip(slots, first.slots, strict=True)]
        second = Plan(tuple(dataclasses.replace(slot, goes=on) for slot, on in zip(slots, goes, strict=True)))
        with training.session(plan=first) as session:
            for _ in range(TIMED_FIRST + 2):
                training.step(session)
            assert not session.records[-1].timed
            waited = device.waited  # in the first steps
            session._planner.plan = second  # of the third and fourth layer, in the place of the first two
            found = [training.step(session)]
            assert session._engine is not None and session._engine.mover.departures is None
            found += [training.step(session) for _ in range(4)]
            timed = [record.timed for record in session.records]
            back = session.records[-1].bytes_back
    assert found == [pytest.approx(LAYERS * 120.0)] * 5 and device.waited == waited
    assert timed == [True, True, True, False]
    assert back == 2 * LAYER  # by its own times, let go of and brought back


def test_in_a_graph_nothing_is_let_go_of_by_the_times_of_steps_that_were_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may be quicker than those, and would wait for copies each time that it is replayed."""
    device = SimulatedDevice()
    with engine_on(device):
        training = Training(device, LAYERS, SLOTS, 40.0, 80.0)
        with training.session(plan=training.plan(1)) as session:
            back = []
            for captured in (False, False, False, True):
                monkeypatch.setattr(OffloadSession, "_is_capturing", lambda _, on=captured: on)
                training.step(session)
                back.append(session.records[-1].bytes_back)
            assert session._engine is not None and session._engine.mover.departures is not None
    assert back == [0, 0, LAYER, 0]
