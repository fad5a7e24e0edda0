"""Forwards that Python's garbage collector finds, in the middle of anything and on any thread, or another thread drops."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.host_pool import HostPool
from te_offload.offload.mover import Mover
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.late_copies import LateTransfer
from tests.support.mlp import assert_same_bits, make_inputs, run


@pytest.fixture(autouse=True)
def collected_when_asked_for() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """On which cargos were released."""
    release, found = Mover.release, set[int]()

    def note(self: Mover, cargo: Any) -> None:
        found.add(threading.get_ident())
        release(self, cargo)

    monkeypatch.setattr(Mover, "release", note)
    return found


def abandon_in_a_cycle(model: Stack) -> None:
    """Run a forward whose output only a cycle of references holds."""
    x, sizes, scales = make_inputs(SPLITS)
    cycle: list[Any] = [model(x, sizes, scales, sizes)]
    cycle.append(cycle)


def test_forward_found_while_host_memory_is_handed_out_is_released_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = run(Stack(2), SPLITS), Stack(2)
    acquire, release = HostPool.acquire, Mover.release
    inside: list[bool] = []
    released: list[bool] = []

    def acquire_and_collect(self: HostPool, *args: Any) -> Any:
        inside.append(True)
        gc.collect()
        try:
            return acquire(self, *args)
        finally:
            inside.pop()

    def note(self: Mover, cargo: Any) -> None:
        released.append(bool(inside))
        release(self, cargo)

    with OffloadSession(model.layers, min_bytes=0) as session, session.step():
        abandon_in_a_cycle(model)
        assert session.host_bytes > 0
        monkeypatch.setattr(HostPool, "acquire", acquire_and_collect)
        monkeypatch.setattr(Mover, "release", note)
        found = run(model, SPLITS)
        assert len(released) >= 4 and not any(released)  # two layers' of before, and two of now
    assert_same_bits(expected, found)
    assert session.host_bytes == 0


def test_forward_found_on_another_thread_is_released_on_that_of_the_step(threads: set[int]) -> None:
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0) as session, session.step():
        abandon_in_a_cycle(model)
        with ThreadPoolExecutor(1) as other:
            other.submit(gc.collect).result()
        assert not threads and session.host_bytes > 0
        run(model, SPLITS)
        assert threads == {threading.get_ident()} and session.host_bytes == 0


def test_forward_that_another_thread_drops_last_is_released_on_that_of_the_step(threads: set[int]) -> None:
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0) as session, session.step():
        x, sizes, scales = make_inputs(SPLITS)
        losses = [model(x, sizes, scales, sizes)]
        with ThreadPoolExecutor(1) as other:
            other.submit(losses.clear).result()
        assert not threads and session.host_bytes > 0
        run(model, SPLITS)
        assert threads == {threading.get_ident()} and session.host_bytes == 0


def test_forward_dropped_by_its_step_is_released_at_once_whichever_thread_that_is() -> None:
    model = Stack(2)

    def abandon() -> tuple[int, int]:
        x, sizes, scales = make_inputs(SPLITS)
        with session.step():
            losses = [model(x, sizes, scales, sizes)]
            held = session.host_bytes
            losses.clear()
            return held, session.host_bytes

    with OffloadSession(model.layers, min_bytes=0) as session, ThreadPoolExecutor(1) as other:
        for held, left in (abandon(), other.submit(abandon).result(), abandon()):
            assert held > 0 and left == 0


def test_backward_on_another_thread_releases_each_slot_as_it_is_used(threads: set[int]) -> None:
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0) as session, session.step():
        x, sizes, scales = make_inputs(SPLITS)
        loss = model(x, sizes, scales, sizes).float().square().sum()
        with ThreadPoolExecutor(1) as other:
            other.submit(loss.backward).result()
            here = threading.get_ident()
        assert threads and here not in threads and session.host_bytes == 0


def test_forward_that_a_collection_found_makes_room_for_the_next_one() -> None:
    model = Stack(1)
    with OffloadSession(model.layers, min_bytes=0) as session:
        with session.step():
            run(model, SPLITS)
        limit = session.records[-1].host_peak
    with OffloadSession(model.layers, min_bytes=0, host_limit=limit) as session:
        with session.step():
            abandon_in_a_cycle(model)
            gc.collect()
            run(model, SPLITS)
        assert session.records[-1].bytes_out == 2 * session.records[-1].bytes_back > 0


def test_session_that_is_gone_follows_collections_no_more() -> None:
    before = len(gc.callbacks)
    model = Stack(1)
    with OffloadSession(model.layers, min_bytes=0) as session:
        with session.step():
            run(model, SPLITS)
        assert len(gc.callbacks) == before + 1
    del session
    gc.collect()
    assert len(gc.callbacks) == before


class _SavesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Any) -> torch.Tensor:
        ctx.handle = op.hand_over(SavedSlot(None, SaveState.SAVED, (x,), ()), op.follower()[0])
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.handle.take()
        return grad * 2, None


class _Op(SlotOwner, torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _SavesItsInput.apply(x, self)  # type: ignore[no-untyped-call]
        return y


class _Sine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.op = _Op()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.op((x + self.weight).sin())
        return y


def test_copy_that_held_the_last_graph_of_another_forward_ends_and_lets_both_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = LateTransfer()
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: transfer)
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=0))
    layer = _Sine()
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    with OffloadSession(layer, min_bytes=0) as session:
        with session.step():
            forwards = [layer(x) for _ in range(3)]
            mover = session._engine.mover  # type: ignore[union-attr]
            assert len(mover._leaving) == 6
            del forwards
            for copy in transfer.out:
                copy.wait()
            layer(x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, 2 * (x + 1).cos())
        assert mover.in_flight == 0 and session.host_bytes == 0 and session.records[-1].bytes_out == 4 * 512
