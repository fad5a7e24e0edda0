"""How much host memory a session takes, when, and where."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.errors import ArgumentError, ArgumentTypeError, BudgetError
from te_offload.offload import numa
from te_offload.offload.engine import GROWTH_STEPS
from te_offload.offload.session import _rows
from tests.session.test_lifetime import Stack
from tests.support.mlp import make_inputs, run

COUNTS = [(90, 0, 210), (300, 100, 0), (0, 205, 200), (2000, 900, 1100), (1, 0, 33), (4000, 0, 0), (0, 1, 3999)]


def test_declared_maximum_of_tokens_makes_room_for_every_later_count_and_no_more() -> None:
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0, max_tokens=4000) as session:
        allocations = peak = 0
        for number, splits in enumerate(COUNTS):
            with session.step():
                run(model, splits)
            record = session.records[-1]
            assert all(row.fate is Fate.OFFLOADED for row in record.slots if row.op and row.nbytes)
            if number >= GROWTH_STEPS:
                assert record.host_allocations == allocations
            allocations, peak = record.host_allocations, max(peak, record.host_peak)
        assert max(sum(splits) for splits in COUNTS) == 4000
        assert peak <= record.host_held <= 1.05 * peak


def test_without_a_maximum_what_the_first_steps_did_not_need_stays_on_the_device_and_says_so() -> None:
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0) as session:
        for splits in COUNTS:
            with session.step():
                run(model, splits)
            if sum(splits) == 4000:
                assert Reason.NO_ROOM in {row.reason for row in session.records[-1].slots}
        assert session.records[-1].host_held < 4000 * 4 * 80 * 3


@pytest.mark.parametrize("first", ["evaluation", "errors", "errors in the backward"])
def test_host_memory_is_taken_by_training_steps_whatever_came_before_them(first: str) -> None:
    model = Stack()
    x, sizes, scales = make_inputs((3, 0, 5), seed=0)
    with OffloadSession(model.layers, min_bytes=0) as session:
        for _ in range(GROWTH_STEPS + 1):
            with contextlib.suppress(ZeroDivisionError), session.step(), torch.set_grad_enabled(first != "evaluation"):
                y = model.layers[0](x, sizes, scales, sizes)
                if "backward" in first:
                    y.register_hook(lambda _: 1 / 0)
                    y.sum().backward()
                elif first == "errors":
                    raise ZeroDivisionError
        for number, splits in enumerate([(4, 0, 6), (40, 0, 6), (40, 0, 60), (400, 0, 6)]):
            with session.step():
                run(model, splits)
            record = session.records[-1]
            reasons = {row.reason for row in record.slots if row.nbytes}
            assert (Reason.NO_ROOM in reasons) == (number >= GROWTH_STEPS)
            assert (record.bytes_out == record.bytes_back > 0) or number >= GROWTH_STEPS


def test_host_limit_below_every_slot_is_an_error_also_after_an_evaluation() -> None:
    model = Stack()
    x, sizes, scales = make_inputs((3, 0, 5), seed=0)
    with OffloadSession(model.layers, min_bytes=0, host_limit=512) as session:
        for _ in range(3):
            with session.step(), torch.no_grad():
                model(x, sizes, scales, sizes)
        with session.step():
            run(model, (4, 0, 6))
        with pytest.raises(BudgetError, match="too little for anything to go"), session.step():
            raise AssertionError


def test_host_limit_holds_against_a_declared_maximum() -> None:
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0, max_tokens=1 << 20, host_limit="1MiB") as session:
        for splits in COUNTS:
            with session.step():
                run(model, splits)
            assert session.records[-1].host_held <= 1 << 20
        assert session.records[-1].host_held == 1 << 20


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (0, ArgumentError, "max_tokens must be positive, but is 0"),
        ("4096", ArgumentTypeError, "max_tokens must be an int, but is '4096'"),
        (True, ArgumentTypeError, "max_tokens must be an int"),
    ],
)
def test_maximum_of_tokens_that_cannot_be_is_a_named_error(value: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        OffloadSession(Stack().layers, max_tokens=value)


@pytest.mark.parametrize(("found", "advice"), [({1}, False), ({0, 1}, True)])
def test_node_of_host_memory_is_looked_up_and_reported(
    monkeypatch: pytest.MonkeyPatch, found: set[int], advice: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(numa, "node_of_gpu", lambda device: 1)
    monkeypatch.setattr(numa, "bind", lambda address, nbytes, node: asked.append(node))
    monkeypatch.setattr(numa, "nodes_of", lambda address, nbytes: found)
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0) as session:
        with session.step():
            run(model, COUNTS[0])
        record = session.records[-1]
        assert set(asked) == {1} and record.host_node == 1 and set(record.host_nodes) == found
        assert "the GPU's is 1" in session.report()
        assert ("numactl" in session.report()) == advice


def test_tokens_are_the_rows_of_the_first_activation_and_not_of_a_mask() -> None:
    splits, x, mask = torch.ones(3, dtype=torch.int64), torch.zeros(2, 5, 16), torch.zeros(2, 4, 5, 5)
    assert _rows((splits, x, mask)) == 10
    assert _rows((splits, "no tensor")) == 0
