"""The times of a record, on a clock that moves by one millisecond with each mark."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from te_offload import OffloadSession, Outcome, SlotName, StepRecord
from te_offload.offload import engine as engine_module
from te_offload.offload.transfer import Copy, CpuTransfer, Mark, Piece
from te_offload.ops.te_adapter import carry
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.mlp import run

COPY_MS = 7.0


class Tick:
    """A moment of a `Clock`."""

    def __init__(self, clock: Clock, ms: float) -> None:
        self.clock = clock
        self.ms = ms

    def is_over(self) -> bool:
        return min(self.clock.now, self.clock.seen) >= self.ms

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.ms)
        self.clock.seen = max(self.clock.seen, self.ms)


class Clock(CpuTransfer):
    """Copies at once, and says that each copy takes seven milliseconds from when it was queued.

    Attributes:
        now: of the device. seen: of the host, which may be far behind until it waits.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.seen = math.inf

    def mark(self) -> Mark:
        self.now += 1
        return Tick(self, self.now)

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        super().copy_out(pieces, after)
        return Copy(Tick(self, self.now), Tick(self, self.now + COPY_MS))

    copy_back = copy_out

    def block_compute(self, mark: Mark) -> None:
        assert isinstance(mark, Tick)
        self.now = max(self.now, mark.ms)

    def milliseconds(self, first: Mark, second: Mark) -> float:
        assert isinstance(first, Tick) and isinstance(second, Tick)
        assert first.is_over() and second.is_over(), "CUDA has no time between events that are not over"
        return second.ms - first.ms


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> StepRecord:
    """Of a step of four layers, whose copies the backward waits for; slots of many tensors have marks of their own."""
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: Clock())
    monkeypatch.setattr(carry, "_cut_from", lambda parts: None)
    model = Stack(4)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session:
        for _ in range(2):
            with session.step():
                run(model, SPLITS)
        return session.records[-1]


def test_window_of_a_backward_and_its_waits_reach_to_the_next_one(record: StepRecord) -> None:
    windows = sorted(record.windows, key=lambda window: window.read or 0)
    assert [window.layer for window in windows] == ["layer3", "layer2", "layer1", "layer0"]
    needed = [window.needed_ms for window in windows if window.needed_ms is not None]
    throttled = [window.throttled_before_backward_ms for window in windows]
    assert throttled[0] == 0 and any(throttled)
    ends = [moment - waited for moment, waited in zip((*needed[1:], record.step_ms), (*throttled[1:], 0), strict=True)]
    for window, begin, end in zip(windows, needed, ends, strict=True):
        exposed = sum(row.exposed_ms for row in record.slots if row.layer == window.layer)
        assert window.backward_ms is not None
        assert window.backward_ms + exposed == pytest.approx(end - begin)
    assert record.exposed_ms == pytest.approx(sum(row.exposed_ms for row in record.slots)) and record.exposed_ms > 0


def test_forwards_follow_one_another(record: StepRecord) -> None:
    begins = [window.begin_ms for window in record.windows]
    assert begins == sorted(begins) and begins[0] > 0
    for window, following in zip(record.windows, begins[1:], strict=False):
        assert 0 < window.forward_ms <= following - window.begin_ms


def test_slot_is_late_exactly_where_it_was_waited_for(record: StepRecord) -> None:
    came = [row for row in record.slots if row.back_ms is not None]
    assert {row.outcome for row in came} == {Outcome.HIT, Outcome.LATE}
    assert all((row.outcome is Outcome.LATE) == (row.exposed_ms > 0) for row in came)
    others = [row for row in record.slots if row.bytes_out and row not in came]
    assert {row.outcome for row in others} == {Outcome.RECALLED} and {row.exposed_ms for row in others} == {0.0}


def test_time_of_a_copy_is_shared_by_its_slots_in_proportion_to_their_bytes(record: StepRecord) -> None:
    for layer in range(4):
        rows = [row for row in record.slots if row.layer == f"layer{layer}" and row.bytes_out]
        assert [row.slot for row in rows] == [SlotName.FC1_INPUT, SlotName.ACT_INPUT, SlotName.FC2_INPUT]
        whole = sum(row.bytes_out for row in rows)
        for row in rows:
            assert row.out_ms == pytest.approx(COPY_MS * row.bytes_out / whole)
            assert row.back_ms == (None if row.outcome is Outcome.RECALLED else pytest.approx(row.out_ms))
    assert (record.out_ms, record.back_ms) == pytest.approx((4 * COPY_MS, 3 * COPY_MS))


def test_unnamed_slots_of_one_fate_are_one_row_with_the_sum_of_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: Clock())
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh())
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        y = layer(torch.ones(3, 8, requires_grad=True)).sum()
        assert session._engine is not None
        session._engine.mover.let_go(session._engine.visits[0].cargos[0])  # as if its copy were over
        y.backward()
    record = session.records[-1]
    (row,) = [row for row in record.slots if row.bytes_out]
    assert row.tensors > 1 and row.bytes_out == record.bytes_out == record.bytes_back
    assert row.sizes == (3 * 8 * 4,) * 2  # two modules saved the first Tanh's output
    assert row.out_ms == pytest.approx(record.out_ms) and row.back_ms == pytest.approx(record.back_ms)
    assert row.exposed_ms == pytest.approx(record.exposed_ms) and row.exposed_ms > 0


def test_record_waits_for_a_device_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.seen = 0
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: clock)
    layer = Tanhs(torch.float32)
    with OffloadSession(layer, min_bytes=0) as session:
        with session.step():
            layer(torch.ones(3, 8, requires_grad=True)).sum().backward()
        assert clock.seen < clock.now
        record = session.records[-1]
    assert clock.seen >= clock.now and record.out_ms == COPY_MS and record.step_ms > 0


class Tanhs(torch.nn.Module):
    """Two of them, the second one in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.anchor = torch.nn.Parameter(torch.zeros(1))  # which says where the layer is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().to(self.dtype).tanh()


@pytest.mark.parametrize(("dtype", "format"), [(torch.float32, "fp32"), (torch.bfloat16, "several")], ids=str)
def test_row_of_unnamed_slots_has_their_format_or_says_that_there_are_several(dtype: torch.dtype, format: str) -> None:
    layer = Tanhs(dtype)
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(torch.ones(3, 8, requires_grad=True)).sum().backward()
    (row,) = session.records[-1].slots
    assert (row.tensors, row.bytes_out > 0, row.format) == (2, True, format)
