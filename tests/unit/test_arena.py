"""The arena against a model, and the pool that lives on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from te_offload.errors import StateError
from te_offload.offload import host_pool
from te_offload.offload.arena import Arena, Block
from te_offload.offload.extents import aligned
from te_offload.offload.host_pool import HostPool, Lease


class Copy:
    """A copy that ends when told."""

    def __init__(self) -> None:
        self.over = False

    def is_over(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


class ArenaModel(RuleBasedStateMachine):
    """Random takes and gives in two ranges; a byte belongs to one block, and remembers the copies that may use it."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena()
        self.ranges = [(0, 40 * 512), (40 * 512, 64 * 512)]  # side by side, and yet two
        for begin, end in self.ranges:
            self.arena.add(begin, end - begin)
        self.out: list[list[Block]] = []
        self.copies: list[Copy] = []
        self.used: dict[int, set[Copy]] = {}

    @rule(nbytes=st.integers(1, 20 * 512))
    def take(self, nbytes: int) -> None:
        free = self.arena.free_bytes
        longest = self.longest_gap()
        blocks = self.arena.take(nbytes)
        if blocks is None:
            assert free < aligned(nbytes)
            return
        assert sum(block.nbytes for block in blocks) == aligned(nbytes) <= free
        assert len(blocks) == 1 or longest < aligned(nbytes)
        for block in blocks:
            assert block.begin % 512 == 0 and block.nbytes % 512 == 0
            assert any(begin <= block.begin and block.end <= end for begin, end in self.ranges)
            others = [other for group in [*self.out, blocks] for other in group if other is not block]
            assert all(block.end <= other.begin or other.end <= block.begin for other in others)
            owed = {copy for unit in range(block.begin, block.end, 512) for copy in self.used.pop(unit, set())}
            assert {copy for copy in owed if not copy.over} <= set(block.pending)
        self.out.append(blocks)

    @rule(data=st.data(), busy=st.booleans())
    def give(self, data: st.DataObject, busy: bool) -> None:
        if self.out:
            blocks = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            uses = [Copy()] if busy else []
            self.copies += uses
            for block in blocks:
                for unit in range(block.begin, block.end, 512):
                    self.used[unit] = set(uses)
            self.arena.give(blocks, uses)
            with pytest.raises(StateError, match="is not out"):
                self.arena.give(blocks)

    @rule(data=st.data())
    def finish_copy(self, data: st.DataObject) -> None:
        if self.copies:
            self.copies[data.draw(st.integers(0, len(self.copies) - 1))].over = True

    def longest_gap(self) -> int:
        longest = 0
        for begin, end in self.ranges:
            taken = sorted((b.begin, b.end) for group in self.out for b in group if begin <= b.begin < end)
            ends = [begin, *(each for _, each in taken)]
            starts = [*(each for each, _ in taken), end]
            longest = max(longest, *(start - last for start, last in zip(starts, ends, strict=True)))
        return longest

    @invariant()
    def every_byte_is_counted_once(self) -> None:
        taken = sum(block.nbytes for blocks in self.out for block in blocks)
        assert self.arena.free_bytes + taken == self.arena.nbytes == 64 * 512


ArenaModel.TestCase.settings = settings(max_examples=60, deadline=None, stateful_step_count=40)
TestArenaAgainstModel = ArenaModel.TestCase


def lease_of(pool: HostPool, nbytes: int) -> Lease:
    lease = pool.acquire(nbytes)
    assert lease is not None
    return lease


class PoolModel(RuleBasedStateMachine):
    """Random leases and releases, also twice and while a copy uses them: the cap holds, and every byte is accounted for."""

    LIMIT = 64 * 512

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(self.LIMIT, pinned=False)
        self.out: list[Lease] = []
        self.copies: list[Copy] = []
        self.grown = 0

    @rule(nbytes=st.integers(1, 30 * 512))
    def acquire(self, nbytes: int) -> None:
        live = sum(lease.nbytes for lease in self.out)
        lease = self.pool.acquire(nbytes)
        room = self.LIMIT if self.pool.may_grow else self.pool.held_bytes
        assert (lease is not None) == (live + aligned(nbytes) <= room)
        if lease is not None:
            assert sum(length for _, length in lease.pieces) == lease.nbytes == aligned(nbytes)
            self.out.append(lease)

    @rule(data=st.data(), in_flight=st.booleans())
    def release(self, data: st.DataObject, in_flight: bool) -> None:
        if self.out:
            lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            copies = [Copy()] if in_flight else []
            self.copies += copies
            lease.release(copies)
            with pytest.raises(StateError, match="was released before"):
                lease.release()

    @rule()
    def settle(self) -> None:
        held = self.pool.held_bytes
        self.pool.settle()
        assert self.pool.held_bytes == held

    @rule()
    def stop_growing(self) -> None:
        self.pool.may_grow = False
        self.grown = self.pool.allocations

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        assert self.pool.live_bytes == sum(lease.nbytes for lease in self.out)
        assert self.pool.live_bytes + self.pool.free_bytes == self.pool.held_bytes <= self.LIMIT
        assert self.pool.may_grow or self.pool.allocations == self.grown

    def teardown(self) -> None:
        for lease in self.out:
            lease.release()
        self.pool.close()
        assert self.pool.held_bytes == 0


PoolModel.TestCase.settings = settings(max_examples=60, deadline=None, stateful_step_count=40)
TestPoolAgainstModel = PoolModel.TestCase


def test_pool_takes_from_the_system_once_for_steps_of_any_smaller_sizes() -> None:
    pool = HostPool(limit=None, pinned=False)
    generator = torch.Generator().manual_seed(0)
    largest = [100_000, 200_000, 200_000] * 4
    for step in range(50):
        share = 1.0 if step == 0 else float(torch.rand(1, generator=generator))
        leases = [lease_of(pool, max(int(size * share), 1)) for size in largest]
        for lease in reversed(leases):
            lease.release()
        pool.settle()
    assert pool.allocations == len(largest) + 1  # one each in the first step, then one slab of their size
    assert pool.held_bytes == pool.peak_bytes


def test_pool_takes_only_what_is_missing_and_is_one_slab_again_after_the_step() -> None:
    pool = HostPool(limit=None, pinned=False)
    for size in (1000, 3000, 2000):
        lease_of(pool, size).release()
        pool.settle()
    assert pool.held_bytes == 3072
    one, two = lease_of(pool, 3000), lease_of(pool, 1000)
    assert pool.held_bytes == 4096
    assert [sum(length for _, length in lease.pieces) for lease in (one, two)] == [3072, 1024]
    one.release()
    two.release()
    pool.settle()
    assert len(lease_of(pool, 4096).pieces) == 1


def test_lease_fills_scattered_gaps_where_no_gap_is_long_enough() -> None:
    pool = HostPool(limit=None, pinned=False)
    pool.reserve(8 * 512)
    leases = [lease_of(pool, 512) for _ in range(8)]
    for lease in leases[::2]:
        lease.release()
    scattered = lease_of(pool, 2000)
    assert [length for _, length in scattered.pieces] == [512] * 4
    assert pool.acquire(1) is not None  # grows: everything is on loan
    assert pool.allocations == 2


def test_pool_that_may_not_grow_refuses_and_says_nothing_else() -> None:
    pool = HostPool(limit=None, pinned=False)
    pool.reserve(1024)
    pool.may_grow = False
    assert pool.acquire(2000) is None
    assert lease_of(pool, 1000).nbytes == 1024
    assert pool.allocations == 1 and pool.failure is None


def test_system_that_refuses_memory_is_remembered_and_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def refuse(nbytes: int, **_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise OSError("CUDA error 2 while page-locking")

    pool = HostPool(limit=None, pinned=False)
    held = lease_of(pool, 1000)
    monkeypatch.setattr(host_pool, "_Slab", refuse)
    assert pool.acquire(1000) is None and pool.acquire(1000) is None
    assert asked == 1
    assert pool.failure == "CUDA error 2 while page-locking; 1.0 KiB are held already"
    held.release()
    assert pool.acquire(1000) is not None


@pytest.mark.parametrize("slabs", [1, 2])
def test_pool_that_the_system_refuses_more_between_steps_has_as_much_as_before(
    monkeypatch: pytest.MonkeyPatch, slabs: int
) -> None:
    make = host_pool._Slab

    def make_small_ones(nbytes: int, **options: Any) -> Any:
        if nbytes > slabs * 4096:
            raise OSError("no such memory")
        return make(nbytes, **options)

    pool = HostPool(limit=None, pinned=False)
    for _ in range(slabs):
        assert pool.reserve(4096)
    monkeypatch.setattr(host_pool, "_Slab", make_small_ones)
    pool.settle(at_least=1 << 20)
    assert pool.held_bytes == pool.free_bytes == slabs * 4096
    assert pool.failure is not None and pool.failure.startswith("no such memory")
    assert len(lease_of(pool, slabs * 4096).pieces) == 1
    assert pool.acquire(1) is None


def test_memory_given_back_while_a_copy_uses_it_says_so_to_the_next_holder() -> None:
    pool = HostPool(limit=None, pinned=False)
    copy = Copy()
    lease_of(pool, 5000).release([copy])
    assert lease_of(pool, 100).pending == (copy,)
    copy.over = True
    assert lease_of(pool, 100).pending == ()


def test_pool_waits_for_copies_before_it_gives_memory_up_and_refuses_while_some_is_on_loan() -> None:
    pool = HostPool(limit=None, pinned=False)
    lease, copy = lease_of(pool, 100), Copy()
    with pytest.raises(StateError, match="512 B are on loan"):
        pool.close()
    lease.release([copy])
    pool.last_read = last = Copy()
    pool.close()
    assert copy.over and last.over and pool.held_bytes == 0
