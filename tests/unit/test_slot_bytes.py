"""Bytes of slots that share memory, on records made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from te_offload import Fate, Reason, SharedMemory, SlotName, SlotRecord, StepRecord
from te_offload.offload.planner import merge_records
from te_offload.offload.slot_bytes import SlotBytes, bytes_by_slot
from te_offload.offload.timeline import Parcel
from te_offload.slots import slot_title
from tests.unit.test_plan import record

LAYER = "layer0"


def name(op: str, slot: SlotName = SlotName.REGION) -> str:
    return slot_title(LAYER, op, slot)


def row(op: str, nbytes: int, shared: int, slot: SlotName = SlotName.REGION, **other: Any) -> SlotRecord:
    fate = Fate.KEPT if other.get("reason") else Fate.OFFLOADED
    values: dict[str, Any] = {"fate": fate, "reason": Reason.NONE, "bytes_out": 0, "shared": shared, **other}
    return SlotRecord(LAYER, op, slot, 0, nbytes, 1, **values)


def step(rows: list[SlotRecord], *shared: tuple[tuple[str, ...], int]) -> StepRecord:
    pieces = tuple(SharedMemory(LAYER, 0, names, nbytes) for names, nbytes in shared)
    return dataclasses.replace(record(1), slots=tuple(rows), shared_memory=pieces)


def keys(*ops: str) -> list[tuple[str, int]]:
    return [(name(op), 0) for op in ops]


def test_what_three_slots_share_leaves_with_the_last_of_them() -> None:
    names = tuple(name(op) for op in "abc")
    found = SlotBytes(step([row("a", 10, 4), row("b", 7, 4), row("c", 4, 4)], (names, 4)))
    assert found.moved(keys("a")) == 6 and found.moved(keys("a", "b")) == 9
    assert found.moved(keys("a", "b", "c")) == 13
    assert found.freed_by(keys("c")[0], keys("a", "b", "c")) == 4
    assert found.largest == 6
    assert found.parcels(keys("a", "b")) == {(LAYER, 0): [Parcel(6, True), Parcel(4, False), Parcel(3, True)]}


def test_slot_of_an_op_stays_whole_with_what_it_shares_and_a_third_one_with_it() -> None:
    rows = [row("a", 10, 4), row("b", 12, 9, SlotName.FC1_INPUT), row("c", 6, 5)]
    b = name("b", SlotName.FC1_INPUT)
    found = SlotBytes(step(rows, ((name("a"), b), 4), ((b, name("c")), 5)))
    assert found.moved([(b, 0), *keys("c")]) == 1  # what the third one has by itself
    assert found.moved([*keys("a"), (b, 0), *keys("c")]) == 6 + 4 + 3 + 5 + 1
    assert found.stuck == {}


def test_what_stayed_for_the_sake_of_a_slot_that_may_go_may_go_too() -> None:
    names = name("core"), name("projection")
    rows = [
        row("core", 6, 0),
        row("projection", 4, 4, reason=Reason.PLAN),
        row("", 4, 4, SlotName.OTHER, reason=Reason.ALIAS, part_of=name("core")),
    ]
    stayed = step(rows, (names, 4))
    assert bytes_by_slot(stayed) == {(name("core"), 0): 10, (name("projection"), 0): 4}
    assert SlotBytes(stayed).moved(keys("core")) == 6 and SlotBytes(stayed).moved(keys("core", "projection")) == 10
    asked = dataclasses.replace(stayed, slots=(rows[0], dataclasses.replace(rows[1], reason=Reason.ASKED), rows[2]))
    assert bytes_by_slot(asked) == {(name("core"), 0): 6}
    assert SlotBytes(asked).stuck == {(LAYER, 0): 4}


def test_ranks_share_the_most_that_one_of_them_does() -> None:
    names = name("a"), name("b")
    one = step([row("a", 10, 4), row("b", 7, 4)], (names, 4))
    other = step([row("a", 12, 5), row("b", 6, 5)], (names, 5))
    merged = merge_records([one, other])
    assert [(row.nbytes, row.shared) for row in merged.slots] == [(12, 5), (7, 4)]
    assert merged.shared_memory == (SharedMemory(LAYER, 0, names, 5),)
