"""Small slots of a forward go together: one lease, one copy each way; each keeps its row of the record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Outcome, Reason
from te_offload.errors import SavedTensorModifiedError
from te_offload.offload import decide as decide_module
from te_offload.offload import engine as engine_module
from te_offload.offload.cargo import Cargo
from te_offload.offload.decide import Rules
from te_offload.offload.mover import Mover
from te_offload.offload.states import SlotState
from tests.session.test_lifetime import SPLITS, Stack
from tests.session.test_order import Op
from tests.support.late_copies import LateTransfer
from tests.support.mlp import assert_same_bits, run


class Counting(LateTransfer):
    """Counts copies."""

    calls = 0

    def _start(self, *arguments: object) -> object:  # type: ignore[override]
        Counting.calls += 1
        return super()._start(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("together", "most", "copies"), [(8 << 20, 8 << 20, 1), (8 << 20, 2000, 2), (0, 8 << 20, 3)])
def test_slots_below_the_bound_share_copies_of_so_many_bytes_and_large_ones_have_their_own(
    monkeypatch: pytest.MonkeyPatch, together: int, most: int, copies: int
) -> None:
    from te_offload.offload import session as session_module

    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: Counting(seed=0))
    monkeypatch.setattr(session_module, "Rules", lambda **rest: Rules(together=together, most_together=most, **rest))
    Counting.calls = 0
    model = Stack(4)
    expected = run(Stack(4), SPLITS)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=1 << 30) as session, session.step():
        x_out = Counting.calls
        found = run(model, SPLITS)
    assert_same_bits(expected, found)
    record = session.records[-1]
    back = {row.layer for row in record.slots if row.outcome in (Outcome.HIT, Outcome.LATE)}
    assert x_out == 0 and Counting.calls == copies * (4 + len(back))
    rows = [row for row in record.slots if row.op]
    assert len(rows) == 12 and all(row.fate is Fate.OFFLOADED for row in rows)
    assert sum(row.bytes_out for row in rows) == record.bytes_out
    assert all(row.bytes_out >= row.nbytes for row in rows)


@pytest.mark.parametrize(("bound", "few", "copies"), [(2000, 1000, 2), (1 << 20, 1000, 1), (0, 2000, 2), (0, 100, 3)])
def test_slots_that_go_together_are_no_more_bytes_than_may_be_in_flight_unless_they_are_few(
    monkeypatch: pytest.MonkeyPatch, bound: int, few: int, copies: int
) -> None:
    sent: list[Cargo] = []
    real = Mover.send_out

    def send_out(mover: Mover, cargo: Cargo, sources: Any) -> None:
        sent.append(cargo)
        real(mover, cargo, sources)

    monkeypatch.setattr(Mover, "send_out", send_out)
    monkeypatch.setattr(decide_module, "_FEW", few)
    model = Stack(1)
    expected = run(Stack(1), SPLITS)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=bound) as session, session.step():
        found = run(model, SPLITS)
    assert_same_bits(expected, found)
    assert session.records[-1].bytes_out == sum(cargo.copied for cargo in sent) > 3000
    assert len(sent) == copies


def test_slots_with_a_mark_of_their_own_leave_first_and_all_come_back_in_the_order_in_which_they_were_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from te_offload.offload import session as session_module

    copied: dict[str, list[str]] = {"send_out": [], "start_back": []}

    def noting(name: str) -> Callable[..., None]:
        real = getattr(Mover, name)

        def note(mover: Mover, cargo: Cargo, *others: Any) -> None:
            if cargo.state in (SlotState.SAVED, SlotState.ON_HOST):
                copied[name].append(cargo.name.rpartition(".")[2])
            real(mover, cargo, *others)

        return note

    for name in copied:
        monkeypatch.setattr(Mover, name, noting(name))
    monkeypatch.setattr(session_module, "Rules", lambda **rest: Rules(together=1000, most_together=1300, **rest))
    model = Stack(1)
    expected = run(Stack(1), SPLITS)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session, session.step():
        found = run(model, SPLITS)
    assert_same_bits(expected, found)
    assert session.records[-1].bytes_back == session.records[-1].bytes_out > 0
    assert copied["send_out"] == ["act_input", "fc2_input", "fc1_input"]  # one small tensor has no mark of its own
    assert copied["start_back"] == ["fc2_input", "act_input", "fc1_input"]


def test_slot_that_split_sizes_cut_leaves_as_one_tensor() -> None:
    model = Stack(1)
    expected = run(Stack(1), SPLITS)
    with OffloadSession(model.layers, min_bytes=0) as session, session.step():
        found = run(model, SPLITS)
    assert_same_bits(expected, found)
    assert session.records[-1].bytes_back == session.records[-1].bytes_out > 0
    assert {row.slot.value: row.tensors for row in session.records[-1].slots if row.op} == dict.fromkeys(
        ("fc1_input", "act_input", "fc2_input"), 1
    )


def test_slot_that_finds_no_room_leaves_the_others_of_its_forward_theirs() -> None:
    model = Stack(1)
    expected = run(Stack(1), SPLITS)
    with OffloadSession(model.layers, min_bytes=0, host_limit=2048) as session, session.step():
        found = run(model, SPLITS)
    assert_same_bits(expected, found)
    rows = {row.slot.value: row for row in session.records[-1].slots if row.op}  # 640, 1280 and 1280 bytes
    assert rows["fc1_input"].fate is rows["act_input"].fate is Fate.OFFLOADED
    assert (rows["fc2_input"].fate, rows["fc2_input"].reason) == (Fate.KEPT, Reason.NO_ROOM)
    assert rows["fc2_input"].bytes_out == 0
    assert session.records[-1].bytes_out == sum(row.bytes_out for row in rows.values()) > 0


def test_times_of_slots_that_go_together_add_up_to_those_of_their_copy() -> None:
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session, session.step():
        run(model, SPLITS)
    record = session.records[-1]
    assert sum(row.out_ms or 0 for row in record.slots) == pytest.approx(record.out_ms)
    assert sum(row.back_ms or 0 for row in record.slots) == pytest.approx(record.back_ms)
    assert record.out_ms > 0 and record.back_ms > 0


class _Beside(torch.nn.Module):
    """Ops beside one another."""

    def __init__(self, ops: list[Op]) -> None:
        super().__init__()
        self.ops = torch.nn.ModuleList(ops)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [op(x) for op in self.ops]


@pytest.mark.parametrize("verify", [False, True])
def test_of_slots_in_one_copy_only_the_one_that_was_written_to_meanwhile_is_an_error(
    monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: LateTransfer())
    tensors = [torch.arange(float(100 + place)) for place in range(3)]
    ops = [Op(lambda tensor=tensor: [tensor]) for tensor in tensors]
    layer = _Beside(ops)
    with OffloadSession(layer, min_bytes=0, verify=verify) as session:
        with session.step():
            parts = layer(torch.ones(1, requires_grad=True))
            tensors[1].add_(1)
            session._engine.mover.drain()  # type: ignore[union-attr]
            parts[0].backward()
            with pytest.raises(SavedTensorModifiedError, match=r"layer0/ops\.1\.grouped_linear_input"):
                parts[1].backward()
            parts[2].backward()
        record = session.records[-1]
    assert torch.equal(ops[0].seen[0], torch.arange(100.0)) and torch.equal(ops[2].seen[0], torch.arange(102.0))
    assert record.bytes_back >= 4 * (100 + 101 + 102)
