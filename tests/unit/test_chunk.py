"""Residence of a chunk: every legal edge, and every other one refused; leases."""

from __future__ import annotations

import itertools

import pytest

from te_offload.errors import StateError
from te_offload.offload.chunk import TRANSITIONS, Chunk, Residence
from te_offload.offload.extents import Interval
from te_offload.offload.host_pool import HostPool

EDGES = list(itertools.product(Residence, Residence))


def at(residence: Residence) -> Chunk:
    chunk = Chunk(Interval(0, 100))
    chunk.residence = residence
    return chunk


def test_table_names_every_residence() -> None:
    assert set(TRANSITIONS) == set(Residence)


@pytest.mark.parametrize(("start", "end"), EDGES, ids=lambda residence: residence.name.lower())
def test_edge_is_taken_or_refused_as_the_table_says(start: Residence, end: Residence) -> None:
    chunk = at(start)
    if end in TRANSITIONS[start]:
        chunk.move(end)
        assert chunk.residence is end
    else:
        with pytest.raises(StateError, match=f"is {start.value} and cannot become {end.value}"):
            chunk.move(end)
        assert chunk.residence is start


def test_released_is_reached_from_everywhere_but_never_left() -> None:
    reaches = {Residence.RELEASED}
    while True:
        more = {start for start, ends in TRANSITIONS.items() if ends & reaches} | reaches
        if more == reaches:
            break
        reaches = more
    assert reaches == set(Residence)
    assert TRANSITIONS[Residence.RELEASED] == frozenset()


def test_pool_counts_live_and_peak_bytes_exactly() -> None:
    pool = HostPool(limit=None, pinned=False)
    first, second = pool.acquire(1001), pool.acquire(7)
    assert first.memory.numel() == 1001
    assert (pool.live_bytes, pool.peak_bytes) == (1008, 1008)
    first.release()
    pool.acquire(5)
    assert (pool.live_bytes, pool.peak_bytes) == (12, 1008)
    second.release()
    assert pool.live_bytes == 5


def test_lease_released_twice_is_an_error_and_counts_once() -> None:
    pool = HostPool(limit=None, pinned=False)
    lease = pool.acquire(10)
    lease.release()
    with pytest.raises(StateError, match="was released"):
        lease.release()
    with pytest.raises(StateError, match="may belong to another slot"):
        _ = lease.memory
    assert pool.live_bytes == 0


def test_pool_keeps_its_limit() -> None:
    pool = HostPool(limit=100, pinned=False)
    lease = pool.acquire(60)
    assert not pool.has_room(41) and pool.has_room(40)
    with pytest.raises(StateError, match=r"41 B asked for, but 60 B of a limit of 100 B are in use\. Raise host_limit"):
        pool.acquire(41)
    lease.release()
    pool.acquire(100)
