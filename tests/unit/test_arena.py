"""The arena against a model, and the pool that lives on it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from te_offload.errors import StateError
from te_offload.offload.arena import Arena, Block, aligned
from te_offload.offload.host_pool import HostPool


class Copy:
    """A copy that ends when told."""

    def __init__(self) -> None:
        self.over = False

    def block_compute(self) -> None: ...

    def is_over(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


class ArenaModel(RuleBasedStateMachine):
    """Random takes and gives; a byte belongs to one block, and remembers the copies that may still use it."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 64 * 512
        self.arena = Arena(self.size)
        self.out: list[Block] = []
        self.copies: list[Copy] = []
        self.used: dict[int, set[Copy]] = {}

    @rule(nbytes=st.integers(1, 20 * 512))
    def take(self, nbytes: int) -> None:
        block = self.arena.take(nbytes)
        longest = self.longest_free_run()
        if block is None:
            assert longest < aligned(nbytes)
            return
        assert block.offset % 512 == 0 and block.nbytes == aligned(nbytes) and block.end <= self.size
        assert all(block.end <= other.offset or other.end <= block.offset for other in self.out)
        owed = {copy for unit in range(block.offset, block.end, 512) for copy in self.used.pop(unit, set())}
        assert {copy for copy in owed if not copy.over} <= set(block.pending)
        self.out.append(block)

    @rule(data=st.data(), busy=st.booleans())
    def give(self, data: st.DataObject, busy: bool) -> None:
        if self.out:
            block = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            uses = [Copy()] if busy else []
            self.copies += uses
            for unit in range(block.offset, block.end, 512):
                self.used[unit] = set(uses)
            self.arena.give(block, uses)
            with pytest.raises(StateError, match="is not out"):
                self.arena.give(block)

    @rule(data=st.data())
    def finish_copy(self, data: st.DataObject) -> None:
        if self.copies:
            self.copies[data.draw(st.integers(0, len(self.copies) - 1))].over = True

    def longest_free_run(self) -> int:
        taken = sorted((block.offset, block.end) for block in self.out)
        ends = [0, *(end for _, end in taken)]
        starts = [*(start for start, _ in taken), self.size]
        return max(start - end for start, end in zip(starts, ends, strict=True))

    @invariant()
    def every_byte_is_counted_once(self) -> None:
        assert self.arena.free_bytes + sum(block.nbytes for block in self.out) == self.size


ArenaModel.TestCase.settings = settings(max_examples=60, deadline=None, stateful_step_count=40)
TestArenaAgainstModel = ArenaModel.TestCase


def test_pool_takes_from_the_system_once_for_steps_of_any_smaller_sizes() -> None:
    pool = HostPool(limit=None, pinned=False)
    generator = torch.Generator().manual_seed(0)
    largest = [100_000, 200_000, 200_000] * 4
    for step in range(50):
        share = 1.0 if step == 0 else float(torch.rand(1, generator=generator))
        leases = [pool.acquire(max(int(size * share), 1)) for size in largest]
        for lease in reversed(leases):
            lease.release()
        pool.settle()
    assert pool.allocations == len(largest) + 1  # one each in the first step, then one slab of their size
    assert pool.held_bytes <= 1.05 * pool.peak_bytes


def test_pool_grows_when_a_step_needs_more_and_is_one_slab_again_after_it() -> None:
    pool = HostPool(limit=None, pinned=False)
    for size in (1000, 3000, 2000):
        pool.acquire(size).release()
        pool.settle()
    assert pool.held_bytes == 1024 + 3072
    one, two = pool.acquire(3000), pool.acquire(1000)
    assert pool.held_bytes == 4096
    assert {one.memory.numel(), two.memory.numel()} == {3000, 1000}


def test_memory_given_back_while_a_copy_uses_it_says_so_to_the_next_holder() -> None:
    pool = HostPool(limit=None, pinned=False)
    copy = Copy()
    pool.acquire(5000).release([copy])
    assert pool.acquire(100).pending == (copy,)
    copy.over = True
    assert pool.acquire(100).pending == ()


def test_pool_waits_for_copies_before_it_gives_memory_up_and_refuses_while_some_is_on_loan() -> None:
    pool = HostPool(limit=None, pinned=False)
    lease, copy = pool.acquire(100), Copy()
    with pytest.raises(StateError, match="100 B are on loan"):
        pool.close()
    lease.release([copy])
    pool.close()
    assert copy.over and pool.held_bytes == 0
