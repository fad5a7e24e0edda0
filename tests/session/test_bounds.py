"""Bytes on the device that wait for a copy out, or are back before they are needed, stay within their bound."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from te_offload import OffloadSession
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.cargo import Cargo
from te_offload.offload.decide import Rules
from te_offload.offload.engine import FIRST_BOUND, TIMED_EVERY, TIMED_FIRST
from te_offload.offload.mover import Mover
from te_offload.offload.record import StepRecord
from te_offload.offload.returns import Returns
from te_offload.offload.states import ON_HOST, RELEASED, RETURNED, RETURNING
from te_offload.offload.timeline import Bounds, Key
from te_offload.offload.visit import LayerVisit
from tests.session.test_captured_step import CheckedTransfer
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.late_copies import LateTransfer
from tests.support.mlp import assert_same_bits, run

SLOTS = [10 * width * 4 for width in (16, 32, 32)]  # bytes of a layer's, in the order in which they are saved
LAYER = sum(SLOTS)


@pytest.fixture(autouse=True)
def _each_slot_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=0))


def _within(nbytes: int, bound: int, cargos: list[Cargo]) -> bool:
    return nbytes <= bound or len(cargos) == 1


@pytest.mark.parametrize("bound", [0, SLOTS[0], SLOTS[1] + SLOTS[2], LAYER, 2 * LAYER + SLOTS[1], 1 << 20])
def test_no_more_than_the_bound_comes_back_ahead_of_the_backward_but_one_slot(
    monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """As early as there is room: without a pace, which has it later."""
    monkeypatch.setattr(engine_module, "pace_for", lambda _: None)
    ahead: list[int] = []
    visits: list[LayerVisit] = []

    class Watched(Mover):
        def start_back(self, cargo: Cargo, free: Any) -> None:
            super().start_back(cargo, free)
            back = [
                one for visit in visits if not visit.read for one in visit.cargos if one.state in (RETURNING, RETURNED)
            ]
            ahead.append(sum(one.nbytes for one in back))
            assert _within(ahead[-1], bound, back)

    class Looking(Returns):
        def begin_step(self, of_step: list[LayerVisit]) -> None:
            nonlocal visits
            visits = of_step
            super().begin_step(of_step)

        def read(self, visit: LayerVisit) -> None:
            super().read(visit)
            assert all(cargo.state is not ON_HOST for cargo in visit.cargos)
            unread = [cargo for other in visits if not other.read for cargo in other.cargos]
            back = sum(cargo.nbytes for cargo in unread if cargo.state in (RETURNING, RETURNED))
            on_host = [cargo for cargo in unread if cargo.state is ON_HOST]
            # the last slot saved is the first one back, and comes as soon as there is room
            assert not on_host or (back and back + on_host[-1].nbytes > bound)

    monkeypatch.setattr(engine_module, "Returns", Looking)
    monkeypatch.setattr(engine_module, "Mover", Watched)
    expected, model = run(Stack(4), SPLITS), Stack(4)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=bound) as session:
        for _ in range(3):
            with session.step():
                found = run(model, SPLITS)
            assert_same_bits(expected, found)
        record = session.records[-1]
    assert record.bytes_back == record.bytes_out == 4 * LAYER
    assert record.copies_back == record.copies_out == 4 * len(SLOTS)
    assert record.peak_ahead == max(ahead)


@pytest.mark.parametrize("bound", [0, SLOTS[0], SLOTS[1] + SLOTS[2], LAYER, 2 * LAYER + SLOTS[1], 1 << 20])
def test_no_more_than_the_bound_waits_for_its_copy_out_but_one_slot(
    monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: LateTransfer())
    settled: list[int] = []

    class Watched(Mover):
        def settle(self, after: Key | None = None) -> None:
            super().settle(after)
            assert self.in_flight == sum(cargo.copied for cargo in self._leaving)
            assert _within(self.in_flight, bound, list(self._leaving))
            settled.append(self.in_flight)

    monkeypatch.setattr(engine_module, "Mover", Watched)
    expected, model = run(Stack(4), SPLITS), Stack(4)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=bound) as session:
        with session.step():
            found = run(model, SPLITS)
        record = session.records[-1]
    assert_same_bits(expected, found)
    assert record.bytes_out == 4 * LAYER
    assert record.peak_in_flight >= max(settled)
    assert record.peak_in_flight <= max(settled) + LAYER  # those of the forward that has just ended
    if bound >= 4 * LAYER:
        assert record.bytes_back == 0 and settled[-1] == 4 * LAYER  # nothing has left when it is read
    else:
        assert record.bytes_back >= 4 * LAYER - max(bound, max(SLOTS))


def test_nothing_waits_for_copies_out_of_what_was_read_before_it_had_left_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = LateTransfer()
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: transfer)
    expected, model = run(Stack(3), SPLITS), Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight="1GiB") as session:
        with session.step():
            assert_same_bits(expected, run(model, SPLITS))
            assert session._engine is not None
            mover = session._engine.mover
            assert len(transfer.out) == len(mover._leaving) == 3 * len(SLOTS)
            assert not any(copy.done for copy in transfer.out)
        assert all(copy.done for copy in transfer.out) and not mover._leaving and mover.in_flight == 0
    assert session.records[-1].bytes_out == 3 * LAYER and session.records[-1].bytes_back == 0


@pytest.mark.parametrize("bound", [0, SLOTS[1] + SLOTS[2], LAYER, LAYER + SLOTS[2], 2 * LAYER, 3 * LAYER])
def test_what_was_read_before_it_had_left_and_what_has_come_back_next_stay_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: LateTransfer())
    waited: list[bool] = []

    class Looking(Returns):
        def read(self, visit: LayerVisit) -> None:
            coming = sum(cargo.copied for cargo in visit.cargos if cargo.state in (ON_HOST, RETURNING))
            before = self._held()
            super().read(visit)
            assert self._held() == 0 or self._held() + coming <= bound
            assert self._held() == before or before + coming > bound  # else nothing had to wait
            waited.append(self._held() < before)

        def _held(self) -> int:
            return sum(cargo.copied for cargo in self._mover._leaving if cargo.state is RELEASED)

    monkeypatch.setattr(engine_module, "Returns", Looking)
    expected, model = run(Stack(5), SPLITS), Stack(5)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=bound) as session, session.step():
        assert_same_bits(expected, run(model, SPLITS))
    record = session.records[-1]
    assert record.bytes_out == 5 * LAYER and 0 < record.bytes_back < 5 * LAYER
    assert len(waited) == 5 and any(waited)


def test_in_a_graph_s_capture_all_that_was_read_is_waited_for_before_the_next_forward_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = CheckedTransfer()
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: transfer)
    monkeypatch.setattr(OffloadSession, "_is_capturing", lambda self: transfer.capturing)
    held: list[int] = []

    class Looking(Returns):
        def read(self, visit: LayerVisit) -> None:
            super().read(visit)
            held.append(sum(cargo.copied for cargo in self._mover._leaving if cargo.state is RELEASED))

    monkeypatch.setattr(engine_module, "Returns", Looking)
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight="1GiB") as session:
        for number in range(6):
            held.clear()
            transfer.capturing = number == 4
            with session.step():
                run(model, SPLITS)
            transfer.capturing = False
            assert held == ([0, 0, 0] if number == 4 else [0, LAYER, 2 * LAYER])
        assert session.records[-1].bytes_out == 3 * LAYER


class _Home:
    """Of no tensors."""

    def place_of(self, begin: int, nbytes: int) -> None:
        return None


@pytest.mark.parametrize("homes", [False, True])
def test_where_layers_are_graphs_all_that_was_read_is_waited_for_before_the_next_forward(
    monkeypatch: pytest.MonkeyPatch, homes: bool
) -> None:
    transfer = LateTransfer()
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: transfer)
    expected, model = run(Stack(3), SPLITS), Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight="1GiB") as session:
        if homes:
            session.add_home(_Home())
        with session.step():
            for _ in range(2):
                assert_same_bits(expected, run(model, SPLITS))
            first, second = transfer.out[: 3 * len(SLOTS)], transfer.out[3 * len(SLOTS) :]
            assert [copy.done for copy in first] == [homes] * len(first)
            assert not any(copy.done for copy in second) and len(second) == len(first)
    assert session.records[-1].bytes_out == 2 * 3 * LAYER and session.records[-1].bytes_back == 0


@pytest.mark.parametrize(("given", "expected"), [(None, (1234, 5678)), (4096, (4096, 4096))])
def test_bounds_that_nobody_gave_are_what_the_last_timed_step_shows(
    monkeypatch: pytest.MonkeyPatch, given: int | None, expected: tuple[int, int]
) -> None:
    asked: list[int] = []

    def bounds(record: StepRecord) -> Bounds:
        asked.append(record.index)
        return Bounds(1234.0, 5678.0)

    monkeypatch.setattr(engine_module, "bounds_for", bounds)
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=given) as session:
        for _ in range(18):
            with session.step():
                run(model, SPLITS)
            if session._engine is not None and not asked and given is None:
                assert session._engine.mover.max_in_flight == session._engine.returns.max_ahead == FIRST_BOUND
        assert session._engine is not None
        assert (session._engine.mover.max_in_flight, session._engine.returns.max_ahead) == expected
        assert session.records[-1].bytes_out > 0
    assert asked == ([] if given else [*range(TIMED_FIRST), TIMED_EVERY])  # each timed step, once
