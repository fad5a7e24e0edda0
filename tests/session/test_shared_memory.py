"""Slots of one layer that share memory, where some of them stay on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import OffloadSession, Reason
from te_offload.offload import engine as engine_module
from te_offload.offload.engine import TIMED_FIRST
from te_offload.offload.transfer import Copy, CpuTransfer, Mark
from te_offload.slots import SlotName
from tests.session.test_order import Op
from tests.session.test_regions import Layer

pytestmark = pytest.mark.usefixtures("alone_and_together")


@pytest.mark.parametrize("kept_first", [True, False])
def test_slot_that_shares_memory_with_one_that_stays_stays_whichever_was_saved_first(kept_first: bool) -> None:
    memory = torch.arange(1000.0)
    going, kept = (Op(lambda part=part: [part]) for part in (memory[:600], memory[400:]))
    kept.no_offload_activation = True
    layer = torch.nn.Sequential(*((kept, going) if kept_first else (going, kept)))
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(torch.ones(1, requires_grad=True)).sum().backward()
    assert {row.reason for row in session.records[-1].slots} == {Reason.ASKED, Reason.ALIAS}
    assert session.records[-1].bytes_out == 0
    assert going.seen[0].data_ptr() == memory.data_ptr()


def test_no_bytes_of_slots_that_found_no_room_or_share_memory_with_one_are_in_the_record() -> None:
    memory = torch.arange(20.0)
    saved = iter([[torch.ones(100)], [torch.ones(2000), memory[:10]], [memory[5:], torch.ones(50)]])
    layer = Layer(lambda: next(saved), ("goes", "large", "shares"))
    with OffloadSession(layer, min_bytes=0, host_limit=4096) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    rows = {row.op: row for row in session.records[-1].slots if row.slot is SlotName.REGION}
    assert (rows["goes"].reason, rows["goes"].bytes_out) == (Reason.NONE, 400)
    large, shares = rows["large"], rows["shares"]
    (shared,) = [row for row in session.records[-1].slots if row.slot is SlotName.OTHER]
    assert (large.reason, large.bytes_out, shared.reason, shared.bytes_out) == (Reason.NO_ROOM, 0, Reason.ALIAS, 0)
    # Of those that go as one the last one is refused; alone it goes but for what it shares.
    assert (shares.reason, shares.bytes_out) in [(Reason.NO_ROOM, 0), (Reason.NONE, 200)]
    assert session.records[-1].bytes_out == 400 + shares.bytes_out


def test_of_a_region_only_what_shares_memory_with_one_that_stays_stays() -> None:
    """As of an attention core the output, which a projection keeps; all else of the core goes."""
    output, query, weight = torch.arange(600.0), torch.arange(300.0), torch.nn.Parameter(torch.ones(5, 5))
    core = [query, output.view(20, 30), query[100:], weight.data]
    expected = [tensor.clone() for tensor in core]
    parts = iter([core, [output]])
    layer = Layer(lambda: next(parts), ("core", "projection"), ("projection",))
    layer.weight = weight
    with OffloadSession(layer, min_bytes=0, verify=True) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    assert all(map(torch.equal, layer.seen[1], expected))
    assert layer.seen[1][1].data_ptr() == output.data_ptr() == layer.seen[0][0].data_ptr()
    assert layer.seen[1][0].data_ptr() != query.data_ptr()
    record = session.records[-1]
    assert [(row.op, row.nbytes, row.tensors, row.reason) for row in record.slots] == [
        ("core", 1200, 2, Reason.NONE),
        ("projection", 2400, 1, Reason.ASKED),
        ("", 100, 1, Reason.PARAMETER),
        ("", 2400, 1, Reason.ALIAS),
    ]
    assert record.bytes_out == record.bytes_back == 1200


def test_plan_that_keeps_one_of_two_regions_that_share_memory_frees_what_the_other_has_by_itself() -> None:
    layer = Layer(lambda: next(parts), ("core", "projection"))
    with OffloadSession(layer, min_bytes=0, budget_per_layer=3000) as session:
        layer.session = session
        for _ in range(6):
            output, query = torch.arange(600.0), torch.arange(500.0)
            parts = iter([[query, output], [output]])
            with session.step():
                layer(torch.ones(1, requires_grad=True)).sum().backward()
        record = session.records[-1]
    assert session.plan is not None and not all(slot.goes for slot in session.plan.slots)
    assert record.bytes_out == record.bytes_back == 2000
    kept = sum(row.nbytes for row in record.slots if row.reason is Reason.PLAN)
    assert kept == 2400


def test_slots_that_share_memory_move_it_once_with_the_first_of_them() -> None:
    """As a projection saves what an attention core has saved, and a norm's output is what three GEMMs take."""
    memory, other = torch.arange(600.0), torch.arange(50.0)
    saved = [[memory[:400].view(20, 20).t(), other], [memory[200:]], [other.view(5, 10), torch.ones(30)]]
    expected = [[tensor.clone() for tensor in tensors] for tensors in saved]
    parts = iter(saved)
    layer = Layer(lambda: next(parts), ("core", "projection", "router"))
    with OffloadSession(layer, min_bytes=0, verify=True) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    for found, wanted in zip(reversed(layer.seen), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    core, projection, router = reversed(layer.seen)
    assert core[0].untyped_storage()._cdata == projection[0].untyped_storage()._cdata
    assert core[0].storage_offset() + 200 == projection[0].storage_offset()
    assert core[1].data_ptr() == router[0].data_ptr()
    rows = {row.op: row for row in session.records[-1].slots if row.slot is SlotName.REGION}
    assert [rows[name].nbytes for name in ("core", "projection", "router")] == [1800, 1600, 320]
    assert [rows[name].bytes_out for name in ("core", "projection", "router")] == [2600, 0, 120]
    record = session.records[-1]
    assert record.bytes_out == record.bytes_back == 2720


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_slot_with_memory_of_two_others_goes_with_the_first_of_them(order: tuple[int, int]) -> None:
    memory = [torch.arange(200.0), torch.arange(300.0)]
    parts = [memory[number][10:60] for number in order]
    ops = [Op(lambda one=one: [one]) for one in memory] + [Op(lambda: parts)]
    expected = [tensor.clone() for tensor in (*memory, *parts)]
    with OffloadSession(layer := torch.nn.Sequential(*ops), min_bytes=0, verify=True) as session, session.step():
        layer(torch.ones(1, requires_grad=True)).sum().backward()
    found = [tensor for op in ops for tensor in op.seen]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    first = found[2 + order.index(0)]
    assert first.untyped_storage()._cdata == found[0].untyped_storage()._cdata
    rows = session.records[-1].slots
    assert [row.nbytes for row in rows] == [800, 1200, 400]
    assert rows[2].bytes_out == 0 and session.records[-1].bytes_back >= 2000


def test_bytes_of_a_later_slot_leave_after_its_own_mark_also_with_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a step without times the forward's end has no mark where all slots have theirs."""
    seen: list[Mark] = []

    class Noting(CpuTransfer):
        def copy_out(self, pieces: Any, after: tuple[Mark, ...]) -> Copy:
            seen.append(after[0])
            return super().copy_out(pieces, after)

    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: Noting())
    memory, others = torch.arange(200.0), [torch.ones(n) for n in (5, 6, 7, 8)]
    slots = [memory, others[0]], others[1:3], [memory[5:50], others[3]]
    layer = torch.nn.Sequential(*[Op(lambda slot=slot: slot) for slot in slots])
    with OffloadSession(layer, min_bytes=0) as session:
        for _ in range(TIMED_FIRST + 1):
            with session.step():
                layer(torch.ones(1, requires_grad=True)).sum().backward()
        assert session._engine is not None
        (visit,) = session._engine.visits
        assert visit.ended is None
        assert seen[-1] is visit.entries[2].ready is not None
    assert session.records[-1].bytes_back > 0
