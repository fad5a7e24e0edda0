"""Forwards that Python's garbage collector finds, in the middle of anything and on any thread, or another thread drops."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from te_offload import OffloadSession
from te_offload.offload.host_pool import HostPool
from te_offload.offload.mover import Mover
from tests.session.test_lifetime import SPLITS, Stack
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
