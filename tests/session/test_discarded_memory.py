"""Saved tensors whose memory somebody gives up until the backward, as Megatron-core does with what it computes again
(`CheckpointWithoutOutput`: norms, activations): a session leaves them alone, and no bit changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from te_offload import OffloadSession, get_cpu_offload_context
from te_offload.fused import hopper
from te_offload.offload import dropin
from te_offload.offload import engine as engine_module
from te_offload.offload.transfer import Copy, CpuTransfer, Mark, Piece
from te_offload.slots import Fate, Reason, SlotName
from tests.support.discarded import Again
from tests.support.mlp import make_mlp

TOKENS, WIDTH, LAYERS = 96, 64, 3
SPLITS = torch.tensor([40, 0, 56])


class Layer(torch.nn.Module):
    """A norm that is computed again, before a linear or experts; ``region``: where they save.

    Attributes:
        discards: when the norm's output goes: in the forward, or by `late`, when it is over; or never.
    """

    def __init__(self, discards: str, *, experts: bool, region: Any = None) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner: torch.nn.Module = make_mlp(hidden=WIDTH, ffn=48) if experts else torch.nn.Linear(WIDTH, WIDTH)
        self.extra = (SPLITS, torch.linspace(0.5, 1.5, TOKENS), SPLITS) if experts else ()
        self.discards = discards
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.again = Again(self.norm)
        y = self.norm(x) if self.discards == "never" else norm(x)
        if self.region is None:
            y = self.inner(y, *self.extra)
        else:
            with self.region("inner"):
                y = torch.tanh(self.inner(y, *self.extra))
        self.last = y
        if self.discards == "inside":
            norm.discard(y)
        return x + torch.tanh(y)

    def late(self) -> None:
        if self.discards == "late":
            self.again.discard(self.last)


def gradients(layers: Any) -> list[Any]:
    """Of a step."""
    for layer in layers:
        layer.zero_grad()
    y = torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH).requires_grad_()
    for layer in layers:
        y = layer(y)
        layer.late()
    y.square().sum().backward()
    return [parameter.grad for layer in layers for parameter in layer.parameters()]


def make(discards: str, *, experts: bool = False, region: Any = None) -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleList(Layer(discards, experts=experts, region=region) for _ in range(LAYERS))


def check(layers: Any, session: OffloadSession, expected: list[Any]) -> None:
    for _ in range(4):
        with session.step():
            found = gradients(layers)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
        assert session.records[-1].bytes_back == session.records[-1].bytes_out > 0


@pytest.mark.parametrize("switch", ["0", "reference"], ids=["op by op", "fused"])
@pytest.mark.parametrize("experts", [False, True], ids=["a linear's input", "a slot of experts"])
def test_a_tensor_whose_memory_was_given_up_stays_and_the_others_go(
    monkeypatch: pytest.MonkeyPatch, experts: bool, switch: str
) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    expected, layers = gradients(make("never", experts=experts)), make("inside", experts=experts)
    with OffloadSession(layers, min_bytes=0) as session:
        check(layers, session, expected)
        rows = [row for row in session.records[-1].slots if row.reason is Reason.DISCARDED]
    assert [row.layer for row in rows] == [f"layer{number}" for number in range(LAYERS)]
    assert all(row.fate is Fate.KEPT and row.nbytes == 0 and row.tensors == 1 for row in rows)
    assert {row.slot for row in rows} == {SlotName.FC1_INPUT if experts else SlotName.OTHER}


def test_of_a_region_only_the_tensor_whose_memory_was_given_up_stays() -> None:
    expected = gradients(make("never", region=lambda _: torch.enable_grad()))
    layers = make("inside")
    with OffloadSession(layers, min_bytes=0) as session:
        for layer in layers:
            layer.region = session.region
        check(layers, session, expected)
        rows = session.records[-1].slots
    (inner,) = [row for row in rows if row.slot is SlotName.REGION and row.layer == "layer1"]
    assert inner.fate is Fate.OFFLOADED and inner.bytes_out == TOKENS * WIDTH * 4  # what tanh saves
    (rest,) = [row for row in rows if row.reason is Reason.DISCARDED and row.layer == "layer1"]
    assert rest.slot is SlotName.OTHER and rest.nbytes == 0


def test_the_context_leaves_a_tensor_alone_whose_memory_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropin, "MIN_BYTES", 0)
    expected, layers = gradients(make("never")), make("inside")
    context, sync = get_cpu_offload_context(True, LAYERS - 1, LAYERS)
    for layer in layers:
        forward = layer.forward

        def in_the_context(x: torch.Tensor, forward: Any = forward) -> torch.Tensor:
            with context:
                y = forward(x)
            return sync(y)  # type: ignore[no-any-return]

        layer.forward = in_the_context
    for _ in range(3):
        found = gradients(layers)
        assert all(map(torch.equal, found, expected))
    assert context.records[-1].bytes_out > 0
    context.close()


class Slow(CpuTransfer):
    """Copies out whose end comes later, of which some have read what came into their memory next.

    Attributes:
        torn: addresses of that memory. over: whether copies out are. tears: how many there were.
    """

    def __init__(self) -> None:
        self.torn: set[int] = set()
        self.over = False
        self.tears = 0

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        copy = super().copy_out(pieces, after)
        for source, target, nbytes in pieces:
            if source in self.torn:
                ctypes.memset(target, 1, nbytes)
                self.tears += 1
        return Copy(copy.began, End(self, copy.ended))

    def copy_back(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        return CpuTransfer.copy_out(self, pieces, after)

    def milliseconds(self, first: Mark, second: Mark) -> float:
        one, other = (getattr(mark, "mark", mark) for mark in (first, second))
        return super().milliseconds(one, other)


class End:
    def __init__(self, owner: Slow, mark: Mark) -> None:
        self.owner = owner
        self.mark = mark

    def is_over(self) -> bool:
        return self.owner.over

    def wait(self) -> None:
        self.owner.over = True


def test_memory_that_is_given_up_while_a_copy_reads_it_is_read_from_where_it_is_filled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow()
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: slow)
    expected, layers = gradients(make("never")), make("late")

    def before_layer(number: int) -> None:
        slow.torn.clear()
        slow.over = number == LAYERS - 1

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: before_layer(number))
        if number < LAYERS - 1:  # the last one's copies are over before its memory is given up
            layer.inner.register_forward_pre_hook(lambda _, inputs: slow.torn.add(inputs[0].data_ptr()))
    with OffloadSession(layers, min_bytes=0, max_in_flight="1GiB") as session:
        for _ in range(3):
            with session.step():
                found = gradients(layers)
            assert all(map(torch.equal, found, expected))
            assert session.records[-1].bytes_out > 0
    assert slow.tears >= LAYERS - 1
