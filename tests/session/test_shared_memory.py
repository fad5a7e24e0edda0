"""Slots of one layer that share memory, where some of them stay on the device."""

from __future__ import annotations

import pytest
import torch

from te_offload import OffloadSession, Reason
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
    rows = {row.op: (row.reason, row.bytes_out) for row in session.records[-1].slots if row.slot is SlotName.REGION}
    assert rows == {"goes": (Reason.NONE, 400), "large": (Reason.NO_ROOM, 0), "shares": (Reason.ALIAS, 0)}
    assert session.records[-1].bytes_out == 400
