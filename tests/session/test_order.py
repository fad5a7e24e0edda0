"""The tensors of a slot come back in the order in which they were saved, wherever they lie in memory."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_offload import OffloadSession
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState
from tests.session.test_bits import round_trip

pytestmark = pytest.mark.usefixtures("alone_and_together")


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Op) -> torch.Tensor:
        observer, _ = op.follower()
        assert observer is not None
        ctx.op, ctx.handle = op, op.hand_over(SavedSlot(None, SaveState.SAVED, tuple(op.make()), ()), observer)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.op.seen = ctx.handle.take()
        return grads[0], None


class Op(SlotOwner, torch.nn.Module):
    """Hands over the tensors that ``make`` makes as its slot."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.make = make
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _HandOver.apply(x, self)  # type: ignore[no-untyped-call]
        return y


def slot_round_trip(make: Any) -> tuple[list[torch.Tensor], OffloadSession]:
    op = Op(make)
    layer = torch.nn.Sequential(op)
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(torch.ones(1, requires_grad=True)).sum().backward()
    return op.seen, session


@pytest.mark.parametrize("through", [slot_round_trip, round_trip], ids=["op", "hooks"])
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.sampled_from([0, 0, 64, 300]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_tensors_come_back_in_the_order_in_which_they_were_saved(
    through: Any, rows: list[int], gap: int, same: bool, random: Random
) -> None:
    rows = [max(rows)] * len(rows) if same else rows
    lengths = [4 * count for count in rows]

    def make() -> list[torch.Tensor]:
        base = torch.arange(sum(lengths) + gap * len(lengths), dtype=torch.float32)
        parts, begin = [], 0
        for length in lengths:
            parts.append(base[begin : begin + length].view(-1, 4))
            begin += length + gap // 4
        order = list(range(len(parts)))
        Random(seed).shuffle(order)
        return [parts[place] for place in order]

    seed = random.randrange(1 << 30)
    expected = make()
    found, session = through(make)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.shape == other.shape
    assert session.records[-1].bytes_back >= sum(tensor.nbytes for tensor in expected)


@pytest.mark.parametrize("through", [slot_round_trip, round_trip], ids=["op", "hooks"])
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("same", [True, False])
def test_strides_that_do_not_follow_from_the_size_come_back_beside_others(through: Any, same: bool, rows: int) -> None:
    def make() -> list[torch.Tensor]:
        memory = torch.arange(256.0)
        other = memory[8:] if same else torch.arange(8.0)
        found = [memory[:8].as_strided((rows, 8), (16, 1)), torch.arange(32.0).as_strided((rows, 16), (3, 1))]
        return [*found, other.as_strided((rows, 8), (16, 1)), torch.arange(24.0).view(3, 8)]

    found, session = through(make)
    assert [one.stride() for one in found] == [one.stride() for one in make()]
    assert all(map(torch.equal, found, make()))
    assert session.records[-1].bytes_back == 4 * (rows * 32 + 24)
