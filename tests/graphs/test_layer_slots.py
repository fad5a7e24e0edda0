"""Slots of ops in layers that are graphs, without a GPU: told of at each replay, and back where the graph reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason, SlotName
from te_offload.graphs import capture_layers
from te_offload.offload.attachment import Attachment
from te_offload.slots import SavedSlot, SlotHandle
from tests.graphs.test_layer_graphs import ROWS, WIDTH, batches, layers, run, same
from tests.support.toy_layer import Machine, install

SLOT_BYTES = ROWS * WIDTH * 4


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def rows_after(stack: Any, eager: Any, session: OffloadSession, *, virtual: bool = True) -> Any:
    """Of the last of some steps, all of which have the bits of eager ones."""
    with capture_layers(stack, session=session, warmup=2, virtual=virtual) as graphs:
        for x in batches(6):
            expected = run(eager, x)
            with session.step():
                assert torch.equal(expected, run(stack, x))
            assert same(eager, stack)
        assert graphs.captured
        return session.records[-1]


def test_slot_of_an_op_goes_between_the_graphs_under_its_name(machine: Machine) -> None:
    eager, stack = (layers(machine, kind="slot") for _ in range(2))
    with OffloadSession(stack, min_bytes=0) as session:
        record = rows_after(stack, eager, session)
    rows = [row for row in record.slots if row.slot is SlotName.ACT_INPUT]
    assert [(row.fate, row.bytes_out) for row in rows] == [(Fate.OFFLOADED, SLOT_BYTES)] * 3
    assert record.bytes_out == record.bytes_back == 3 * SLOT_BYTES


@pytest.mark.parametrize(
    ("kind", "virtual", "reason", "nbytes"),
    [
        ("slot with the input", True, Reason.CROSSES_BORDER, 2 * SLOT_BYTES),
        ("slot", False, Reason.NO_VIRTUAL_MEMORY, SLOT_BYTES),
    ],
)
def test_slot_that_a_graph_cannot_give_up_stays_with_its_bytes_and_the_reason(
    machine: Machine, kind: str, virtual: bool, reason: Reason, nbytes: int
) -> None:
    eager, stack = (layers(machine, kind=kind) for _ in range(2))
    with OffloadSession(stack, min_bytes=0) as session:
        record = rows_after(stack, eager, session, virtual=virtual)
    rows = [row for row in record.slots if row.slot is SlotName.ACT_INPUT]
    assert [(row.fate, row.reason, row.nbytes, row.bytes_out) for row in rows] == [(Fate.KEPT, reason, nbytes, 0)] * 3
    assert record.bytes_out == 0


def test_slot_that_nobody_follows_stays_where_the_graph_has_it(machine: Machine) -> None:
    eager, stack = (layers(machine, kind="slot") for _ in range(2))
    with capture_layers(stack, warmup=2) as graphs:
        for x in batches(5):
            assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        assert graphs.captured


def test_session_is_told_since_when_a_replayed_slot_is_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    slot_saved = Attachment.slot_saved

    def note(self: Attachment, op: torch.nn.Module, saved: SavedSlot, *, take: bool) -> SlotHandle | None:
        told.append(saved.ready is not None)
        return slot_saved(self, op, saved, take=take)

    monkeypatch.setattr(Attachment, "slot_saved", note)
    eager, stack = (layers(machine, kind="slot") for _ in range(2))
    with OffloadSession(stack, min_bytes=0) as session:
        rows_after(stack, eager, session)
    assert told == [False] * 3 * 2 + [True] * 3 * 4  # now, while layers are warmed up


@pytest.mark.parametrize("kind", ["", "slot"])
def test_what_went_to_the_host_has_no_memory_until_it_is_back(machine: Machine, kind: str) -> None:
    used = []
    for min_bytes in (1 << 30, 0):
        stack = layers(machine, kind=kind)
        with OffloadSession(stack, min_bytes=min_bytes) as session, capture_layers(stack, session=session) as graphs:
            for x in batches(5):
                with session.step():
                    run(stack, x)
            with session.step():
                x = batches(1)[0]
                for layer in stack:
                    x = x + layer(x)
                graphs.settle()
                used.append(graphs.used_bytes)
                x.sum().backward()
    assert used[0] - used[1] == 3 * (2 << 20)  # `inner` of each layer, in pages
