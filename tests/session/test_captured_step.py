"""A step while a CUDA graph is captured, on the CPU: marks of the graph and marks of before never meet."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from te_offload import OffloadSession
from te_offload.errors import UnsupportedError, WarmUpError
from te_offload.offload import engine
from te_offload.offload.transfer import Copy, CpuTransfer, Mark, Piece
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run

SPLITS = (5, 0, 7, 4)


class Two(torch.nn.Module):
    """Two grouped MLPs, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(make_mlp(experts=len(SPLITS)) for _ in range(2))

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


class _Mark:
    """A mark that knows whether it was made in a graph, and fails where CUDA would."""

    def __init__(self, spy: CheckedTransfer) -> None:
        self.spy, self.captured = spy, spy.capturing

    def is_over(self) -> bool:
        assert not self.spy.capturing or self.captured, "an event of before the capture was asked in it"
        assert not self.captured or self.spy.capturing, "an event of the graph was asked outside of it"
        return False

    def wait(self) -> None:
        assert not self.spy.capturing, "the host waited in a capture"


class CheckedTransfer(CpuTransfer):
    """Copies at once, says that nothing is over yet, and looks at who waits for whom.

    Attributes:
        capturing: whether the stream is being captured now; the test says so.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.copies: list[bool] = []
        self.told: list[bool] = []

    def capture(self, *, on: bool) -> None:
        assert self.capturing
        self.told.append(on)
        if on:
            self.timed = False

    def mark(self) -> Mark:
        return _Mark(self)

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        for mark in after:
            self.block_compute(mark)
        self.copies.append(self.capturing)
        super().copy_out(pieces, after)
        return Copy(self.mark() if self.timed else None, self.mark())

    copy_back = copy_out

    def block_compute(self, mark: Mark) -> None:
        assert isinstance(mark, _Mark) and mark.captured == self.capturing, "a wait across the graph's border"

    def milliseconds(self, first: Mark, second: Mark) -> float:
        return 0.0


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> CheckedTransfer:
    found = CheckedTransfer()
    monkeypatch.setattr(engine, "make_transfer", lambda *_: found)
    monkeypatch.setattr(OffloadSession, "_is_capturing", lambda self: found.capturing)
    return found


@pytest.mark.parametrize("in_flight", [0, "1MiB"])
def test_steps_before_in_and_after_a_capture_share_no_event_and_give_the_same_bits(
    transfer: CheckedTransfer, in_flight: int | str
) -> None:
    module = Two()
    expected = run(copy.deepcopy(module), SPLITS)
    with OffloadSession(module.layers, min_bytes=0, max_in_flight=in_flight) as session:
        for number in range(8):
            transfer.capturing = number in (4, 6)
            with session.step():
                assert_same_bits(expected, run(module, SPLITS))
            transfer.capturing = False
            record = session.records[-1]
            assert record.bytes_out > 0 and (record.bytes_back == 0) == (in_flight != 0)
            assert session.host_bytes == 0
        assert transfer.told == [True, False] * 2
        # as many in each: what has not left is read where it is, and in a graph nobody sees that it has
        assert transfer.copies.count(True) * 3 == transfer.copies.count(False)


def test_captured_step_has_the_rules_of_the_step_before_it(
    monkeypatch: pytest.MonkeyPatch, transfer: CheckedTransfer
) -> None:
    module = Two()
    with OffloadSession(module.layers, min_bytes=0, max_in_flight=0) as session:
        for number in range(5):
            transfer.capturing = number == 4
            if transfer.capturing:
                monkeypatch.setattr(session._planner, "rules_for_next_step", None)  # which asks events
            with session.step():
                run(module, SPLITS)
            transfer.capturing = False
        assert session.records[-1].bytes_out == session.records[-2].bytes_out > 0


def test_exception_in_a_captured_step_leaves_the_next_one_right(transfer: CheckedTransfer) -> None:
    module = Two()
    expected = run(copy.deepcopy(module), SPLITS)
    with OffloadSession(module.layers, min_bytes=0, max_in_flight=0) as session:
        for number in range(6):
            transfer.capturing = number == 4
            try:
                with session.step():
                    found = run(module, SPLITS)
                    if number == 4:
                        raise KeyError("in a capture")
            except KeyError:
                assert number == 4
            assert_same_bits(expected, found)


def test_capture_before_the_host_memory_is_there_says_how_many_steps_are_missing(transfer: CheckedTransfer) -> None:
    module = Two()
    with OffloadSession(module.layers, min_bytes=0) as session:
        with session.step(), torch.no_grad():  # an evaluation, which is none of them
            x, sizes, scales = make_inputs(SPLITS)
            module(x, sizes, scales, sizes)
        for number in range(3):
            transfer.capturing = True
            with (
                pytest.raises(
                    WarmUpError, match=f"first 3 steps that offload, which cannot be captured; {number} were"
                ),
                session.step(),
            ):
                pass
            transfer.capturing = False
            with session.step():
                run(module, SPLITS)


def test_step_can_be_captured_after_a_plan_that_keeps_everything(transfer: CheckedTransfer) -> None:
    module = Two()
    with OffloadSession(module.layers, min_bytes=0, budget_per_layer="1GiB") as session:
        for _ in range(3):
            with session.step():
                run(module, SPLITS)
        assert session.records[-1].bytes_out == 0 < session.records[0].bytes_out
        transfer.capturing = True
        with session.step():
            pass
        transfer.capturing = False


def test_verify_cannot_be_captured(transfer: CheckedTransfer) -> None:
    module = Two()
    with OffloadSession(module.layers, verify=True) as session:
        transfer.capturing = True
        with pytest.raises(UnsupportedError, match="verify=True compares on the host"), session.step():
            pass


def test_host_memory_that_a_graph_uses_outlives_close(transfer: CheckedTransfer) -> None:
    module = Two()
    held = []
    for captures in (False, True):
        session = OffloadSession(module.layers, min_bytes=0)
        for number in range(4):
            transfer.capturing = captures and number == 3
            with session.step():
                run(module, SPLITS)
        transfer.capturing = False
        session.close()
        assert session._engine is not None
        held.append(session._engine.pool.held_bytes)
    assert held[0] == 0 < held[1]
