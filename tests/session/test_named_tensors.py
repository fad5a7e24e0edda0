"""Slots whose tensors pass autograd's hooks: each is known again by the op's name for it, and what is exempt stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.offload import engine as engine_module
from te_offload.offload.mover import Mover
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState, SlotName

Named = tuple[torch.Tensor, ...]


class _Declares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Op, slot: Named, exempt: Named, rest: Named) -> torch.Tensor:
        observer, _ = op.follower()
        op.declare_slot(SavedSlot(None, SaveState.SAVED, slot, exempt), observer)
        op.after()
        ctx.save_for_backward(*slot, *exempt, *rest)
        ctx.op = op
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.op.found.append(ctx.saved_tensors)
        return grad, None, None, None, None


class Op(SlotOwner, torch.nn.Module):
    """Declares one slot, and saves its tensors, exempt ones and others."""

    def __init__(
        self, slot: Named, exempt: Named = (), rest: Named = (), after: Callable[[], Any] = lambda: None
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.tensors = slot, exempt, rest
        self.after = after
        self.found: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Declares.apply(x, self, *self.tensors)  # type: ignore[no-untyped-call]
        return y


def _step(*ops: Op) -> OffloadSession:
    layer = torch.nn.Sequential(*ops)
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(torch.ones(1, requires_grad=True)).sum().backward()
    return session


def test_exempt_tensors_stay_where_they_are_and_are_counted() -> None:
    op = Op((torch.ones(100),), exempt=(torch.ones(7), torch.ones(8)))
    session = _step(op)
    ((slot, *exempt),) = op.found
    assert torch.equal(slot, torch.ones(100)) and slot.data_ptr() != op.tensors[0][0].data_ptr()
    assert [tensor.data_ptr() for tensor in exempt] == [tensor.data_ptr() for tensor in op.tensors[1]]
    record = session.records[-1]
    assert (record.bytes_out, record.bytes_back, record.exempt_bytes) == (400, 400, 60)
    assert [(row.slot, row.tensors) for row in record.slots] == [(SlotName.GROUPED_LINEAR_INPUT, 1)]


def test_memory_that_an_exempt_tensor_shares_stays() -> None:
    whole = torch.ones(100)
    op = Op((whole[:50],), exempt=(whole[50:],))
    session = _step(op)
    (row,) = session.records[-1].slots
    assert (row.fate, row.reason, session.records[-1].bytes_out) == (Fate.KEPT, Reason.ALIAS, 0)


def test_tensor_that_two_ops_declare_is_in_the_slots_of_both_and_goes_once() -> None:
    tensor = torch.ones(100)
    ops = Op((tensor,)), Op((tensor,))
    session = _step(*ops)
    record = session.records[-1]
    assert [(row.op, row.slot, row.tensors) for row in record.slots] == [
        ("0", SlotName.GROUPED_LINEAR_INPUT, 1),
        ("1", SlotName.GROUPED_LINEAR_INPUT, 1),
    ]
    assert all(torch.equal(op.found[0][0], tensor) for op in ops)
    assert record.bytes_out == 400


@pytest.mark.parametrize("declared", [False, True])
def test_tensor_is_not_taken_for_a_dead_one_whose_place_it_has(declared: bool) -> None:
    class Drops(Op):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            observer, _ = self.follower()
            exempt = torch.ones(3)
            place = id(exempt)
            self.declare_slot(SavedSlot(None, SaveState.SAVED, (torch.ones(2),), (exempt,)), observer)
            del exempt
            others = [torch.ones(50)]
            while id(others[-1]) != place and len(others) < 10_000:
                others.append(torch.ones(50))
            assert id(others[-1]) == place
            slot, rest = ((others[-1],), ()) if declared else ((), (others[-1],))
            y: torch.Tensor = _Declares.apply(x, self, slot, (), rest)  # type: ignore[no-untyped-call]
            return y

    op = Drops(())
    session = _step(op)
    assert torch.equal(op.found[0][0], torch.ones(50))
    went = [row.slot for row in session.records[-1].slots if row.bytes_out == 200]
    assert went == [SlotName.GROUPED_LINEAR_INPUT if declared else SlotName.OTHER]
    assert session.records[-1].bytes_out == 200
    assert session.records[-1].exempt_bytes == 0


@pytest.mark.parametrize("written", [False, True])
def test_slot_written_to_after_it_was_declared_leaves_when_the_forward_is_over(
    monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    ready: list[float] = []
    moments: list[float] = []

    class Watched(Mover):
        def send_out(self, cargo: Any, sources: Any) -> None:
            ready.append(cargo.ready.seconds)
            super().send_out(cargo, sources)

    monkeypatch.setattr(engine_module, "Mover", Watched)
    parts = list(torch.zeros(100).split(50))

    def after() -> None:
        if written:
            for part in parts:
                part.fill_(3.0)
        moments.append(time.perf_counter())

    op = Op(tuple(parts), after=after)
    session = _step(op)
    assert [float(part.sum()) for part in op.found[0]] == [150.0 * written] * 2
    assert session.records[-1].bytes_back == 400
    assert (ready[0] > moments[0]) is written


class _InRegion(torch.nn.Module):
    """Ops in one region."""

    session: OffloadSession

    def __init__(self, *ops: Op) -> None:
        super().__init__()
        self.ops = torch.nn.ModuleList(ops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.session.region("attention"):
            for op in self.ops:
                x = op(x)
        return x


def test_tensor_that_an_op_names_in_a_region_is_its_slots_and_what_nobody_names_the_regions() -> None:
    named, others = torch.ones(100), (torch.ones(20), torch.ones(30))
    layer = _InRegion(Op((), rest=others), Op((named,)))
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    rows = [(row.op, row.slot, row.tensors, row.bytes_out) for row in session.records[-1].slots if row.tensors]
    assert sorted(rows) == [
        ("attention", SlotName.REGION, 2, 200),
        ("ops.1", SlotName.GROUPED_LINEAR_INPUT, 1, 400),
    ]


def test_slot_that_a_hook_of_someone_else_takes_has_its_bytes_in_the_record() -> None:
    op = Op((torch.ones(100), torch.ones(7)))
    taken: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        taken.append(tensor)
        return tensor

    class Hooked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op = op

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return self.op(x)

    layer = Hooked()
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(torch.ones(1, requires_grad=True)).sum().backward()
    (row,) = [row for row in session.records[-1].slots if row.op]
    assert (row.reason, row.nbytes, row.tensors, len(taken)) == (Reason.FOREIGN_HOOK, 428, 2, 2)


def test_tensors_that_are_marked_to_stay_are_one_row_with_their_bytes_and_what_shares_their_memory_stays() -> None:
    whole, other = torch.ones(100), torch.ones(5)
    marked = whole[:50]
    for tensor in (marked, other):
        tensor._TE_do_not_offload = True  # type: ignore[attr-defined]
    session = _step(Op((), rest=(marked, other, whole[50:], torch.ones(20))))
    rows = {row.reason: (row.nbytes, row.tensors) for row in session.records[-1].slots if row.tensors}
    assert rows == {Reason.MARKED: (220, 2), Reason.ALIAS: (200, 1), Reason.NONE: (80, 1)}
    assert session.records[-1].bytes_out == 80
