"""How long steps take by the engine's own decisions, on a simulated device: beside the timeline's prediction."""

from __future__ import annotations

import functools

import pytest
import torch

from te_offload import OffloadSession, StepRecord
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.forecast import work_of
from tests.support.simulated_device import RATE, SimulatedDevice, predicted, stack

LAYERS = 8
SLOTS = (12_800, 8_800, 8_800)  # bytes: of 30.4 ms on the link each way
SHAPES = {"copies are the longer": (6.0, 12.0), "work is the longer": (40.0, 80.0), "they are as long": (30.0, 31.0)}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    found = SimulatedDevice()
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: found)
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=0))
    return found


def _step(device: SimulatedDevice, forward_ms: float, backward_ms: float, bound: int) -> tuple[float, StepRecord]:
    """Milliseconds of a step, its waits at the end included, and its record."""
    model = stack(device, LAYERS, SLOTS, forward_ms, backward_ms)
    with OffloadSession(list(model), min_bytes=0, max_in_flight=bound) as session:
        for _ in range(3):
            began = device.compute
            with session.step():
                model(torch.zeros(1, requires_grad=True)).backward()
        return device.compute - began, session.records[-1]


@pytest.mark.parametrize("bound", [0, 3_200, 25_600, 40_000, 60_800, 120_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_step_is_no_longer_than_predicted_and_no_shorter_than_its_work(
    device: SimulatedDevice, shape: str, bound: int
) -> None:
    forward_ms, backward_ms = SHAPES[shape]
    found, record = _step(device, forward_ms, backward_ms, bound)
    work = LAYERS * (forward_ms + backward_ms)
    assert max(work, record.bytes_back / RATE) - 1e-6 <= found
    assert found <= predicted(LAYERS, SLOTS, forward_ms, backward_ms, bound).step_ms + 1e-6
    assert record.bytes_out == LAYERS * sum(SLOTS)


@pytest.mark.parametrize("bound", [0, 3_200, 25_600, 40_000, 60_800, 120_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_record_tells_work_from_every_wait(device: SimulatedDevice, shape: str, bound: int) -> None:
    forward_ms, backward_ms = SHAPES[shape]
    _, record = _step(device, forward_ms, backward_ms, bound)
    waits = record.throttled_ms + record.exposed_ms
    assert record.step_ms == pytest.approx(LAYERS * (forward_ms + backward_ms) + waits)
    assert [window.backward_ms for window in record.windows] == [pytest.approx(backward_ms)] * LAYERS
    wanted = [pytest.approx(ms) for ms in (forward_ms, backward_ms)]
    assert [work.ms for work in work_of(record)] == LAYERS * wanted[:1] + LAYERS * wanted[1:]


def test_record_tells_the_wait_before_the_next_forward_of_a_graph_whose_memory_is_still_read(
    device: SimulatedDevice,
) -> None:
    model = stack(device, LAYERS, SLOTS, 6.0, 1.0)
    with OffloadSession(list(model), min_bytes=0, max_in_flight=1 << 30) as session:
        for _ in range(2):
            with session.step():
                assert session._engine is not None
                session._engine.mover.homes = [_Home()]
                for _ in range(2):
                    model(torch.zeros(1, requires_grad=True)).backward()
        record = session.records[-1]
    assert [window.layer for window in record.windows if window.throttled_before_ms > 0] == ["layer0"]
    assert record.step_ms == pytest.approx(2 * LAYERS * (6.0 + 1.0) + record.throttled_ms + record.exposed_ms)
    assert [work.ms for work in work_of(record)] == 2 * (LAYERS * [pytest.approx(6.0)] + LAYERS * [pytest.approx(1.0)])


class _Home:
    """A layer is a graph, which writes where it pleases."""

    def place_of(self, begin: int, nbytes: int) -> None:
        return None


@pytest.mark.parametrize("shape", SHAPES)
def test_where_there_is_room_for_all_nothing_waits_but_the_end(device: SimulatedDevice, shape: str) -> None:
    forward_ms, backward_ms = SHAPES[shape]
    found, record = _step(device, forward_ms, backward_ms, 1 << 30)
    copies = LAYERS * sum(SLOTS) / RATE
    assert found == pytest.approx(max(LAYERS * (forward_ms + backward_ms), copies))
    assert record.bytes_out == LAYERS * sum(SLOTS)
    assert record.step_ms == pytest.approx(found)
    assert [window.backward_ms for window in record.windows] == [pytest.approx(backward_ms)] * LAYERS
    assert (
        record.throttled_ms
        == record.throttled_at_end_ms
        == pytest.approx(found - LAYERS * (forward_ms + backward_ms), abs=1e-6)
    )
