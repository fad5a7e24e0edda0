"""A copy that CUDA refuses: the error reaches the caller as it is, nothing stays on loan, and the next step is sound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.errors import CopyError
from te_offload.offload import engine as engine_module
from te_offload.offload.transfer import Copy, CpuTransfer, Mark, Piece
from te_offload.slots import SlotName
from tests.session.test_lifetime import SPLITS, Stack
from tests.session.test_regions import Layer
from tests.support.mlp import assert_same_bits, run

pytestmark = pytest.mark.usefixtures("alone_and_together")


class Refusing(CpuTransfer):
    """Refuses one copy, counted from 0 in each direction; none if there is no such number."""

    def __init__(self, *, out: int = -1, back: int = -1) -> None:
        self.left = {"out": out, "back": back}

    def _start(self, way: str, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        self.left[way] -= 1
        if self.left[way] == -1:
            raise CopyError("CUDA refused 1 copies of 1 bytes together: out of luck (error 1).")
        return CpuTransfer.copy_out(self, pieces, after)

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        return self._start("out", pieces, after)

    def copy_back(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        return self._start("back", pieces, after)


@pytest.mark.parametrize("way", ["out", "back"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_refused_copy_is_the_error_that_the_caller_sees_and_leaves_nothing_on_loan(
    monkeypatch: pytest.MonkeyPatch, way: str, number: int
) -> None:
    refusing = Refusing(**{way: number})
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: refusing)
    expected, model = Stack(4), Stack(4)
    with OffloadSession(model.layers, min_bytes=0) as session:
        with pytest.raises(CopyError, match="out of luck"), session.step():
            run(model, SPLITS)
        assert session.host_bytes == 0
        refused = [row for row in session.records[-1].slots if row.reason is Reason.REFUSED]
        assert [row.fate for row in refused] == [Fate.KEPT] * len(refused)
        assert bool(refused) == (way == "out")
        model.zero_grad()
        with session.step():
            found: Any = run(model, SPLITS)
        assert_same_bits(run(expected, SPLITS), found)
        assert session.records[-1].bytes_out == session.records[-1].bytes_back > 0


def test_session_closes_after_a_refused_copy_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Refusing(out=1)
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: refusing)
    model = Stack(4)
    with (
        pytest.raises(CopyError, match="out of luck"),
        OffloadSession(model.layers, min_bytes=0) as session,
        session.step(),
    ):
        run(model, SPLITS)


@pytest.mark.parametrize("number", [0, 1])
def test_slots_of_one_memory_stay_together_when_its_copy_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: int, request: pytest.FixtureRequest
) -> None:
    if number == 1 and "together" in request.node.callspec.id:
        pytest.skip("all three are one copy")
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: Refusing(out=number))
    memory = torch.arange(4096.0)
    parts = [memory[:1024], memory[1024:], torch.ones(7)]
    layer = Layer(lambda: [parts.pop(0)], ("first", "second", "third"))
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with pytest.raises(CopyError, match="out of luck"), session.step():
            layer(torch.zeros(4, requires_grad=True)).sum().backward()
    rows = {row.op: row for row in session.records[-1].slots if row.slot is SlotName.REGION}
    refused = {name for name, row in rows.items() if row.fate is Fate.KEPT and row.reason is Reason.REFUSED}
    assert refused == set(rows) if number == 0 else refused in ({"first", "second"}, {"third"})
    assert {name for name, row in rows.items() if row.fate is Fate.OFFLOADED} == set(rows) - refused
