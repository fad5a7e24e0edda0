"""Sessions within a limit of the device's memory, on a simulated device whose allocator counts what slots hold."""

from __future__ import annotations

import dataclasses
import random
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from te_offload import OffloadSession, Phase, Plan
from te_offload.errors import ArgumentError, BudgetError, UnsupportedError
from te_offload.offload import device_budget
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.device_memory import Watermarks
from te_offload.offload.engine import TIMED_EVERY
from tests.session.test_lifetime import Stack
from tests.support.process_groups import alone
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import ONE, Training, engine_on

WEIGHTS = 50_000  # bytes that are there anyhow
SLOTS = (3000, 2000)
LAYERS = 8
EACH = sum(SLOTS)
LAST = (
    1 + 2 * LAYERS
)  # the window after the last forward: there is one before the first, and each forward is followed by one


class Allocator:
    """Counts a session's saved tensors, and what else there is.

    Attributes:
        others: bytes. losses: how many more there are in a window of a step, by its number. session: whose. gave_back: the
            steps as which began the device got what nobody used. filled: steps, bytes that might be filled then, and the
            window in which they were.
    """

    def __init__(self) -> None:
        self.others = WEIGHTS
        self.losses: dict[int, int] = {}
        self.gave_back: list[int] = []
        self.filled: list[tuple[int, int, int]] = []
        self._filling: weakref.ref[torch.Tensor] | None = None
        self.session: OffloadSession | None = None
        self._before: list[tuple[str, int]] = []
        self._seen = self._reads = 0

    def read(self) -> int:
        assert self.session is not None and self.session._engine is not None
        moments = self.session._engine.mover.counts.residency
        if moments is not self._before:
            self._before, self._seen, self._reads = moments, 0, 0
        found = max(nbytes for _, nbytes in moments[max(0, self._seen - 1) :])  # the last one lasts
        self._seen = len(moments)
        self._reads += 1  # as the step begins, and as each window ends
        filling = None if self._filling is None else self._filling()
        return self.others + found + self.losses.get(self._reads - 1, 0) + (0 if filling is None else filling.nbytes)

    def give_back(self) -> None:
        assert self.session is not None and self.session._engine is not None
        self.gave_back.append(self.session._engine.steps)

    def fill(self, most: int) -> list[torch.Tensor]:
        assert self.session is not None and self.session._engine is not None
        self.filled.append((self.session._engine.steps, most, self._reads))
        filling = torch.empty(most, dtype=torch.uint8)
        self._filling = weakref.ref(filling)
        return [filling]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(session_module, "watermarks_of", lambda _: Watermarks(made.read))
    monkeypatch.setattr(engine_module, "give_back_unused", lambda _: made.give_back())
    monkeypatch.setattr(engine_module, "fill_unused", lambda _, most: made.fill(most))
    return made


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice(lockstep=True)
    with engine_on(made):
        yield made


def session_of(training: Training, allocator: Allocator, limit: int) -> OffloadSession:
    allocator.session = training.session(device_limit=limit, max_in_flight=EACH)
    return allocator.session


@pytest.mark.parametrize("room", [40_000, 35_000, 25_000, 17_000])
def test_after_the_plan_no_step_takes_more_than_the_limit_and_no_more_goes_than_must(
    room: int, allocator: Allocator, device: SimulatedDevice
) -> None:
    training = Training(device, LAYERS, SLOTS, 10.0, 20.0)
    with session_of(training, allocator, WEIGHTS + room) as session:
        peaks, out = [], []
        for _ in range(3 * TIMED_EVERY):
            training.step(session)
            record = session.timed_record
            assert record is not None and record.device_peak is not None
            peaks.append(record.device_peak.nbytes)
            out.append(session.records[-1].bytes_out if session.records else 0)
        assert session.plan is not None and session.plan.forecast is not None
        assert max(peaks[4:]) <= WEIGHTS + room
        assert session.plan.forecast.device_bytes == peaks[-1] > WEIGHTS + room - 2 * EACH
        assert allocator.gave_back == [1, 2]  # after the first step, and where slots began to stay
        spare = WEIGHTS + room - session.plan.forecast.device_bytes
        assert allocator.filled == [(2, spare, LAST)]  # in the loss of the plan's first step, and not counted as its
        least = LAYERS * EACH - room
        assert least <= session.plan.bytes_going <= max(0, least + 2 * EACH) and out[0] == LAYERS * EACH
        assert "within device_limit" in session.report()


def test_steps_hold_the_same_whether_the_host_sees_that_copies_are_over_or_not(allocator: Allocator) -> None:
    """Else a later one would need what the allocator has given back in the loss of an earlier one."""
    held = []
    for lockstep in (False, True):
        with engine_on(device := SimulatedDevice(lockstep=lockstep)):
            training = Training(device, LAYERS, SLOTS, 3.0, 6.0)
            with session_of(training, allocator, WEIGHTS + 30_000) as session:
                for _ in range(5):
                    training.step(session)
                record = session.records[-1]
        assert record.bytes_out > 0
        held.append([(peak.name, peak.held) for peak in record.device_peaks])
    assert held[0] == held[1]


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(("forward_ms", "room"), [(2.0, 65_000), (2.0, 75_000), (3.0, 65_000), (5.0, 50_000)])
def test_a_loss_hides_what_leaves_meanwhile_and_not_what_must_have_left_before(
    forward_ms: float, room: int, allocator: Allocator, device: SimulatedDevice, *, lockstep: bool
) -> None:
    device.lockstep = lockstep
    training = Training(device, LAYERS, (6000, 4000), forward_ms, 2 * forward_ms, loss_ms=60.0)
    allocator.session = training.session(device_limit=WEIGHTS + room)
    with allocator.session as session:
        took = [training.step(session) for _ in range(TIMED_EVERY)]
        plan, record = session.plan, session.timed_record
    assert plan is not None and plan.forecast is not None and record is not None and record.device_peak is not None
    assert 0.95 * plan.forecast.step_ms <= took[-1] <= plan.forecast.step_ms
    assert record.bytes_out > 0 and record.device_peak.nbytes <= WEIGHTS + room


@pytest.mark.parametrize(
    ("times", "room", "going", "took"),
    [
        ((5.0, 10.0, 60.0), 75_000, 12_000, 180.0),  # in no plan is anything waited for: of the fewest bytes
        ((5.0, 10.0, 60.0), 70_000, 16_000, 180.0),
        ((5.0, 10.0, 10.0), 60_000, 38_000, 130.0),
        ((5.0, 10.0, 10.0), 55_000, 42_000, 131.0),  # 52,000 would take 130.0, which is no hundredth less
        ((2.0, 6.0, 10.0), 50_000, 48_000, 100.0),  # 44,000 bytes would do, but take longer
        ((2.0, 6.0, 10.0), 75_000, 12_000, 75.0),  # and these have left before the last forward saves its own
        ((2.0, 6.0, 60.0), 70_000, 56_000, 126.0),  # where 16,000 would be waited for, and 56,000 are not
    ],
)
def test_of_the_quickest_plans_the_one_that_sends_least_is_taken(
    times: tuple[float, float, float], room: int, going: int, took: float, allocator: Allocator, device: SimulatedDevice
) -> None:
    device.lockstep = False
    training = Training(device, LAYERS, (6000, 4000), *times[:2], loss_ms=times[2])
    allocator.session = training.session(device_limit=WEIGHTS + room)
    with allocator.session as session:
        found = [training.step(session) for _ in range(TIMED_EVERY)]
        assert session.plan is not None and session.plan.bytes_going == going == session.records[-1].bytes_out
    assert found[-1] == pytest.approx(took)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("room", [70_000, 60_000, 50_000, 40_000])
def test_before_a_loss_no_more_is_saved_than_in_it(
    room: int, allocator: Allocator, device: SimulatedDevice, *, lockstep: bool
) -> None:
    """Else what leaves in between leaves holes, in which nothing of a loss lies."""
    device.lockstep = lockstep
    allocator.losses[LAST] = loss = 200_000
    training = Training(device, LAYERS, (6000, 4000), 5.0, 10.0, loss_ms=20.0)
    allocator.session = training.session(device_limit=WEIGHTS + loss + room)
    with allocator.session as session:
        looked_at = 0
        for step in range(TIMED_EVERY):
            training.step(session)
            record = session.records[-1]
            in_loss = record.device_peak
            if step < 2 or in_loss is None:  # no plan yet; or not timed
                continue
            looked_at += 1
            before = record.device_peaks[: record.device_peaks.index(in_loss)]
            assert in_loss.phase is Phase.AFTER and in_loss.layer == f"layer{LAYERS - 1}"
            assert max(peak.nbytes for peak in before) <= in_loss.nbytes - loss <= WEIGHTS + room
        assert session.plan is not None and 0 < session.plan.bytes_going == record.bytes_out < LAYERS * 10_000
        assert looked_at >= 4


@pytest.mark.parametrize("short_in", [0, 1])
def test_of_two_micro_batches_that_one_sends_in_which_memory_is_short(
    short_in: int, allocator: Allocator, device: SimulatedDevice
) -> None:
    device.lockstep = False
    allocator.losses[LAST + short_in * 3 * LAYERS] = loss = 200_000
    training = Training(device, LAYERS, (6000, 4000), 5.0, 10.0, loss_ms=20.0)
    allocator.session = training.session(device_limit=WEIGHTS + loss + 50_000)
    with allocator.session as session:
        for _ in range(TIMED_EVERY):
            training.step(session, (("F", 0), ("B", 0), ("F", 1), ("B", 1)))
        assert session.plan is not None and session.timed_record is not None
        assert {slot.forward for slot in session.plan.slots if slot.goes} == {short_in}
        peak = session.timed_record.device_peak
        assert peak is not None and peak.nbytes <= WEIGHTS + loss + 50_000 and session.timed_record.bytes_out > 0


@pytest.mark.parametrize("room", [40_000, 60_000])
def test_a_captured_step_holds_what_was_foreseen_too(
    room: int, allocator: Allocator, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its plan lets go of leaves in a graph as it does in a step, though nobody sees the end of a copy there."""
    device.lockstep = False
    training = Training(device, LAYERS, (6000, 4000), 5.0, 10.0, loss_ms=60.0)
    allocator.session = training.session(device_limit=WEIGHTS + room)
    with allocator.session as session:
        for _ in range(TIMED_EVERY):
            training.step(session)
        eager = session.records[-1]
        monkeypatch.setattr(OffloadSession, "_is_capturing", lambda _: True)
        training.step(session)
        captured = session.records[-1]
    assert captured.index > eager.index and captured.bytes_out == eager.bytes_out > 0
    assert 0 < captured.peak_resident <= room


def test_where_something_else_takes_more_than_before_more_goes(allocator: Allocator, device: SimulatedDevice) -> None:
    training = Training(device, LAYERS, SLOTS, 10.0, 20.0)
    with session_of(training, allocator, WEIGHTS + 30_000) as session:
        for _ in range(TIMED_EVERY - 2):
            training.step(session)
        assert session.plan is not None
        before = session.plan.bytes_going
        assert 0 < before <= LAYERS * EACH - 30_000 + 2 * EACH
        allocator.others += 8_000
        for _ in range(TIMED_EVERY + 2):
            training.step(session)
        assert session.plan.bytes_going >= LAYERS * EACH - 22_000 > before
        assert len(allocator.gave_back) == 3
        record = session.timed_record
        assert record is not None and record.device_peak is not None and record.device_peak.nbytes <= WEIGHTS + 30_000


def test_where_all_goes_and_still_too_much_is_taken_training_goes_on_and_the_report_says_so(
    allocator: Allocator, device: SimulatedDevice
) -> None:
    training = Training(device, LAYERS, SLOTS, 10.0, 20.0)
    with session_of(training, allocator, WEIGHTS + 30_000) as session:
        for _ in range(4):
            training.step(session)
        allocator.others += 60_000
        for _ in range(2 * TIMED_EVERY):
            training.step(session)
        assert session.plan is not None and all(slot.goes for slot in session.plan.slots)
        assert "more than device_limit" in session.report()


@pytest.mark.parametrize("in_flight", [EACH, 0])
def test_where_all_goes_and_too_much_is_taken_fewer_bytes_may_be_in_flight(
    in_flight: int, allocator: Allocator, device: SimulatedDevice
) -> None:
    training = Training(device, LAYERS, SLOTS, 10.0, 20.0)
    allocator.session = training.session(device_limit=WEIGHTS + 30_000)
    with allocator.session as session:
        for _ in range(4):
            training.step(session)
        plan = session.plan
        assert plan is not None and plan.foreseen is not None
        everything = tuple(dataclasses.replace(slot, goes=True) for slot in plan.slots)
        bounds = dataclasses.replace(plan.foreseen.bounds, out=in_flight)
        all_goes = Plan(everything, plan.forecast, dataclasses.replace(plan.foreseen, bounds=bounds))
        session._planner.plan = all_goes
        allocator.others += 60_000
        for _ in range(2):
            training.step(session)
        assert session.records[-1].bytes_out == LAYERS * EACH
        assert session.plan is not None and session.plan.foreseen is not None
        assert (session.plan is all_goes) == (in_flight == 0) and session.plan.foreseen.bounds.out == 0


def test_limit_below_what_the_first_steps_took_is_an_error_before_the_third(
    allocator: Allocator, device: SimulatedDevice
) -> None:
    training = Training(device, LAYERS, SLOTS, 10.0, 20.0)
    with session_of(training, allocator, WEIGHTS) as session:
        training.step(session)
        training.step(session)
        with pytest.raises(BudgetError, match=r"device_limit is 48\.8 KiB, but torch has"):
            training.step(session)


def test_phases_of_a_step_are_recorded_in_order(allocator: Allocator, device: SimulatedDevice) -> None:
    training = Training(device, 2, SLOTS, 10.0, 20.0)
    with session_of(training, allocator, WEIGHTS + 10 * EACH) as session:
        training.step(session)
        record = session.timed_record
    assert record is not None
    names = [(peak.layer, peak.phase) for peak in record.device_peaks]
    forwards = [(f"layer{number}", phase) for number in (0, 1) for phase in (Phase.FORWARD, Phase.AFTER)]
    assert names == [("", Phase.BEFORE), *forwards, ("layer1", Phase.BACKWARD), ("layer0", Phase.BACKWARD)]


class _SavesOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(*(torch.full((nbytes,), nbytes % 251, dtype=torch.uint8) for nbytes in sizes))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        assert all(bool(tensor.eq(tensor.numel() % 251).all()) for tensor in ctx.saved_tensors)
        return grad, None


class Others(torch.nn.Module):
    """Saves tensors that nobody names."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _SavesOthers.apply(x, self.sizes)  # type: ignore[no-untyped-call]
        return y


def orders(count: int) -> dict[str, list[tuple[str, int]]]:
    """Of micro-batches, at the most so many and two at once."""
    one_by_one = [one for number in range(2, count) for one in (("B", number - 2), ("F", number))]
    return {
        "all forwards first": [(kind, number) for kind in "FB" for number in range(count)],
        "1F1B": [("F", 0), ("F", 1), *one_by_one, ("B", count - 2), ("B", count - 1)],
    }


@pytest.mark.parametrize("seed", [*range(24), 73])  # of 300 the last one that ever failed
def test_random_stacks_are_within_random_limits_from_the_first_step_of_the_plan_on_and_take_the_time_foreseen(
    seed: int, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_budget, "Rules", Rules(enabled=True, min_bytes=0, together=0))  # as `engine_on` has it
    draw = random.Random(seed)
    device = SimulatedDevice(lockstep=draw.random() < 0.5)
    named = [draw.randrange(300, 1500) for _ in range(draw.randrange(1, 3))]
    others = [draw.randrange(200, 1200) for _ in range(draw.randrange(9))]
    layers, each = draw.randrange(4, 12), sum(named) + sum(others)
    with engine_on(device):
        forward_ms, backward_ms = draw.uniform(1, 12), draw.uniform(2, 24)
        varies, loss_ms = draw.choice([0, 0.05]), draw.choice([0, 1]) * draw.uniform(0, layers * forward_ms)
        training = Training(device, layers, named, forward_ms, backward_ms, loss_ms=loss_ms, varies=varies, seed=seed)
        for layer in training.model:
            layer.insert(0, Others(others))  # type: ignore[operator]
        micro_batches = draw.choice([1, 1, 2, 3, 4])
        schedule = draw.choice(["all forwards first", "1F1B"])
        order = ONE if micro_batches == 1 else orders(micro_batches)[schedule]
        live = (
            micro_batches * layers * each if schedule == "all forwards first" else min(micro_batches, 2) * layers * each
        )
        room = int(draw.uniform(0.3, 1.0) * live)
        allocator.session = training.session(device_limit=WEIGHTS + room)
        with allocator.session as session:
            for number in range(TIMED_EVERY + 2):
                took = training.step(session, order)
                record = session.records[-1]
                assert record.bytes_out > 0
                if number > 1 and record.index == number and record.device_peak is not None:
                    assert record.device_peak.nbytes <= WEIGHTS + room
            plan = session.plan
            assert plan is not None and plan.forecast is not None and live - room <= plan.bytes_going
            assert took <= 1.15 * plan.forecast.step_ms


def test_ranks_that_plan_together_look_again_after_their_first_plan(
    allocator: Allocator, device: SimulatedDevice
) -> None:
    with alone("gloo"):
        training = Training(device, LAYERS, SLOTS, 10.0, 20.0)
        together: Any = torch.distributed.group.WORLD
        allocator.session = training.session(
            device_limit=WEIGHTS + 30_000, max_in_flight=EACH, same_on_every_rank=together
        )
        with allocator.session as session:
            for number in range(8):
                allocator.others += 6_000 if number == 3 else 0
                training.step(session)
                record = session.records[-1]
                assert record.bytes_out > 0 and record.device_peak is not None
                assert number < 2 or (record.device_peak.nbytes > WEIGHTS + 30_000) == (number in (3, 4, 5))


def test_limit_of_a_cpu_is_a_named_error() -> None:
    with pytest.raises(ArgumentError, match="device_limit is of a GPU's memory, but the layers are on cpu"):
        OffloadSession(Stack(2).layers, device_limit="1GiB")
    with OffloadSession(Stack(2).layers):  # the refused session left nothing on layers
        pass


def test_graphs_of_layers_refuse_a_session_with_a_limit(allocator: Allocator) -> None:
    with (
        OffloadSession(Stack(2).layers, device_limit="1GiB") as session,
        pytest.raises(UnsupportedError, match="capture the whole step"),
    ):
        session.add_home(None)  # type: ignore[arg-type]
