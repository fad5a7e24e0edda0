"""When bytes come back: in time, and not so early that they are in the way where the backward begins."""

from __future__ import annotations

import pytest

from te_offload import StepRecord
from te_offload.offload import engine as engine_module
from te_offload.offload.engine import TIMED_FIRST
from te_offload.offload.record import BACKWARD_BEGINS
from te_offload.offload.returns import Returns
from te_offload.offload.transfer import Mark
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import Training, engine_on

LAYERS = 8
SLOTS = (12_800, 8_800, 8_800)  # bytes: of 30.4 ms on the link each way
LAYER = sum(SLOTS)


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(lockstep=True)


def _run(
    device: SimulatedDevice,
    going: int,
    times: tuple[float, float],
    *,
    paced: bool,
    steps: int = 5,
    varies: float = 0.0,
    bound: int = 1 << 20,
) -> tuple[float, StepRecord]:
    """Milliseconds of the last of some steps in which so many layers go, from the first on, and its record."""
    with engine_on(device, paced=paced):
        training = Training(device, LAYERS, SLOTS, *times, varies=varies)
        with training.session(max_in_flight=bound, plan=training.plan(going)) as session:
            for _ in range(steps):
                ms = training.step(session)
            record = session.records[-1]
    assert record.bytes_out == going * LAYER
    return ms, record


def _when_the_backward_begins(record: StepRecord) -> int:
    """Most bytes of saved tensors on the device until the second slot is taken."""
    labels = [moment.label for moment in record.residency]
    begins = labels.index(BACKWARD_BEGINS)
    second = [number for number, label in enumerate(labels) if label == "taken" and number > begins][1]
    return max(moment.nbytes for moment in record.residency[begins:second])


@pytest.mark.parametrize("steps", [5, TIMED_FIRST + 3], ids=["timed", "with layers that are left alone"])
def test_what_is_read_last_comes_back_last_and_in_time(device: SimulatedDevice, steps: int) -> None:
    times = 40.0, 80.0
    found = []
    for paced in (False, True):
        ms, record = _run(device, 1, times, paced=paced, steps=steps)
        assert ms == pytest.approx(LAYERS * sum(times))  # no wait
        assert record.bytes_back == LAYER
        assert record.unseen == (0 if steps == 5 else LAYERS - 1)
        found.append(device.compute - device.backs[-len(SLOTS)])
    early, paced_in_time = found
    assert early == pytest.approx(LAYERS * 80.0)  # with the first backward
    assert paced_in_time == pytest.approx(2 * 80.0)  # with the last backward by which half as long again is in time


def test_memory_of_what_comes_back_late_is_free_where_the_backward_begins(device: SimulatedDevice) -> None:
    (_, early), (_, paced) = (_run(device, 1, (40.0, 80.0), paced=paced) for paced in (False, True))
    assert _when_the_backward_begins(early) == LAYERS * LAYER  # as if nothing had gone
    assert _when_the_backward_begins(paced) == (LAYERS - 1) * LAYER
    assert (early.peak_resident, paced.peak_resident) == (LAYERS * LAYER, (LAYERS - 1) * LAYER)


def test_memory_is_let_go_in_the_forwards_of_layers_that_are_left_alone(device: SimulatedDevice) -> None:
    """The copies out of the only layer that goes take longer than its forward; those after it are not looked at."""
    _, record = _run(device, 1, (20.0, 80.0), paced=True, steps=TIMED_FIRST + 3)
    assert record.unseen == LAYERS - 1
    labels = [moment.label for moment in record.residency]
    assert labels[: labels.index(BACKWARD_BEGINS)].count("copied out") == len(SLOTS)
    assert record.bytes_back == LAYER


def test_what_has_not_left_where_the_backward_begins_stays_until_it_is_read(device: SimulatedDevice) -> None:
    """Its memory is bytes in flight, and to bring it back would take the link's time."""
    _, record = _run(device, 2, (1.0, 80.0), paced=True)
    assert record.bytes_out == 2 * LAYER and record.bytes_back == 0


@pytest.mark.parametrize("going", [1, 3, 6, 8])
@pytest.mark.parametrize("times", [(6.0, 12.0), (30.0, 31.0), (40.0, 80.0)], ids=str)
def test_steps_take_no_longer_for_it(device: SimulatedDevice, times: tuple[float, float], going: int) -> None:
    early_ms, early = _run(device, going, times, paced=False)
    paced_ms, paced = _run(device, going, times, paced=True)
    assert paced_ms <= early_ms + 1e-6
    assert paced.peak_resident <= early.peak_resident


@pytest.mark.parametrize("steps", [5, 6, 7, TIMED_FIRST + 2])
@pytest.mark.parametrize("going", [1, 5])
def test_steps_take_no_longer_for_it_where_no_two_are_alike(device: SimulatedDevice, going: int, steps: int) -> None:
    early_ms, paced_ms = (
        _run(device, going, (40.0, 80.0), paced=paced, steps=steps, varies=0.4)[0] for paced in (False, True)
    )
    assert paced_ms == pytest.approx(early_ms)


def test_backwards_of_layers_that_are_left_alone_record_nothing_where_there_is_no_room(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of eight layers go; their slots may only be back one by one."""
    found: list[tuple[int, int]] = []  # of each such backward, marks and copies
    marks: list[Mark] = []
    mark = device.mark

    def counted() -> Mark:
        marks.append(mark())
        return marks[-1]

    monkeypatch.setattr(device, "mark", counted)

    class Counted(Returns):
        def approach(self, key: tuple[str, int]) -> None:
            before = len(marks), len(device.backs)
            super().approach(key)
            found.append((len(marks) - before[0], len(device.backs) - before[1]))

    monkeypatch.setattr(engine_module, "Returns", Counted)
    _, record = _run(device, 2, (10.0, 10.0), paced=True, steps=TIMED_FIRST + 3, bound=0)
    assert record.unseen == LAYERS - 2 and record.bytes_back > 0
    assert len(found) == 3 * (LAYERS - 2)  # in steps that are not timed
    assert {copies for _, copies in found} == {0, 1}
    assert all((made > 0) == (copies > 0) for made, copies in found)
