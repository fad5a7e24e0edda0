"""The main loop of Hopper's FP8 products whose sums are of float32; see `sm90_device`.

In: nothing when imported. Out: `SplitSums`, a mixin before QuACK's GEMM. Keeps true: what the tensor cores add up over a
tile's K (128) is added in float32 to what the tiles before it gave, in their order, as cuBLAS does with
``use_split_accumulator``. Does not: know of scales; `sm90_block_device` does.

QuACK's own loop begins with one tile of K outside of it. Where K is a number of tokens, which may be none, ptxas then waits
for the tensor cores after each of their instructions. Here all tiles are in the loop, two at a time: they go into two sets
of registers, so that one is added up while the tensor cores fill the other. No instruction is in flight when a turn of the
loop ends: ptxas would wait after each one again. A tile of more than 128 columns leaves no room for a second set: its tiles
of K come one at a time, and while one warp group adds the other one's products run (`sm90_apart`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup


def lane_of() -> tuple[Any, Any]:
    """Which of two tiles of K, and which of a fragment's two rows, a lane loads scales of: four neighbours among a warp's
    lanes have the same rows.
    """
    lane = cute.arch.lane_idx()
    return lane % 2, lane // 2 % 2


def of_rows(values: list[Any]) -> list[Any]:
    """Of each of two tiles of K: each value that lanes have of their row, of both rows; as (2, values)."""
    return _asked(values, (0, 2))


def of_tiles(values: list[Any]) -> list[Any]:
    """Of each of two tiles of K: what lanes have of it, whichever their row; as (2, values / 2)."""
    return _asked(values, (0,))


def _asked(values: list[Any], rows: tuple[int, ...]) -> list[Any]:
    both = [cute.make_rmem_tensor((2, len(values) * len(rows) // 2), Float32) for _ in range(2)]
    for one, found in enumerate(both):
        asked = ((value, one + row) for value in values for row in rows)
        for i, (value, lane) in enumerate(asked):
            found[i] = cute.arch.shuffle_sync(value, lane, mask_and_clamp=_FOUR_LANES)
    return both


_FOUR_LANES = (32 - 4) << 8 | 31
_REGISTERS = 64  # of a sum: three sets of so many fit into a thread's


class SplitSums:
    """Mixin before QuACK's GEMM. Subclasses may scale what is added: the scales of two tiles of K are loaded while those
    before them are worked on, since a load takes longer than the tensor cores take for a tile. Of four neighbours among
    a warp's lanes, which have the same two rows, each loads what belongs to one row and one tile; they ask each other.
    """

    cta_tile_shape_mnk: Any
    pingpong: bool
    begin_turn: Any
    end_turn: Any

    def count(self, acc: Any) -> int:
        """Scales that a thread loads for two tiles of K."""
        return 0

    def places(self, acc: Any, coords: Any) -> Any:
        """What `load` needs of a tile of the result, for its first two tiles of K. ``coords``: of the fragment in it."""
        return None

    def advance(self, places: Any, step: Any) -> None:
        """Of tiles of K so many further on."""

    def load(self, found: Any, acc: Any, places: Any) -> None:
        """Begin to load the scales of a tile of K and of the next one."""

    def prepare(self, acc: Any, found: Any) -> Any:
        """What `publish` and `factors` take, of scales that were loaded, before the tensor cores begin."""
        return None

    def publish(self, prepared: Any, places: Any) -> None:
        """Scales that threads share, while the tensor cores are busy."""

    def factors(self, acc: Any, prepared: Any, one: int, places: Any) -> Any:
        """Of one of the two tiles of K, for `add`."""
        return None

    @cute.jit
    def add(self, acc, acc_slow, factors):
        """A tile of K to those before it."""
        acc_slow.store(acc_slow.load() + acc.load())

    @cute.jit
    def one_tile(self, ab_pipeline, mma_fn, acc, acc_slow, warp_group_idx, places, read, prepared, one):
        """A tile of K, the first or second of the two that `prepared` is of, with nothing in flight around it."""
        ab_pipeline.consumer_wait(read)
        self.begin_turn(warp_group_idx)
        mma_fn(A_idx=read.index, B_idx=read.index, zero_init=True)
        self.end_turn(warp_group_idx)  # the other group's products stand in line behind these
        used = read.clone()
        read.advance()
        if const_expr(one == 0):
            self.publish(prepared, places)
        warpgroup.wait_group(0)
        ab_pipeline.consumer_release(used)
        self.add(acc, acc_slow, self.factors(acc, prepared, one, places))
        return read

    @cute.jit
    def mma(
        self,
        ab_pipeline,
        ab_read_state,
        mma_fn: cutlass.Constexpr,
        acc,
        acc_slow,
        k_tile_cnt: Int32,
        warp_group_idx: Int32,
    ):
        """In place of QuACK's."""
        thread, _, _ = cute.arch.thread_idx()
        whole = cute.make_identity_tensor(self.cta_tile_shape_mnk[:2])
        coords = mma_fn.args[0].get_slice(thread).partition_C(whole)
        places = self.places(acc, coords)
        ahead = cute.make_rmem_tensor((max(self.count(acc), 1),), Float32)
        self.load(ahead, acc, places)
        acc_slow.fill(0.0)
        one_tile = partial(self.one_tile, ab_pipeline, mma_fn, acc, acc_slow, warp_group_idx, places)
        alone = k_tile_cnt % 2
        for _ in cutlass.range(0, alone, unroll=1):
            prepared = self.prepare(acc, ahead)
            self.advance(places, Int32(cutlass.select_(k_tile_cnt > 1, 1, 0)))
            self.load(ahead, acc, places)
            ab_read_state = one_tile(ab_read_state, prepared, 0)
        if const_expr(cute.size(acc.shape) > _REGISTERS):
            for at in cutlass.range(alone, k_tile_cnt, 2, unroll=1):
                prepared = self.prepare(acc, ahead)
                self.advance(places, Int32(cutlass.select_(at + 2 < k_tile_cnt, 2, 0)))
                self.load(ahead, acc, places)
                for one in cutlass.range_constexpr(2):
                    ab_read_state = one_tile(ab_read_state, prepared, one)
        else:
            other = cute.make_rmem_tensor(acc.shape, Float32)
            sums = [acc, other]
            products = [mma_fn, partial(mma_fn.func, mma_fn.args[0], other, *mma_fn.args[2:])]
            for at in cutlass.range(alone, k_tile_cnt, 2, unroll=1):
                prepared = self.prepare(acc, ahead)
                self.advance(places, Int32(cutlass.select_(at + 2 < k_tile_cnt, 2, 0)))
                self.load(ahead, acc, places)
                used = []
                for one in cutlass.range_constexpr(2):
                    ab_pipeline.consumer_wait(ab_read_state)
                    if const_expr(one == 0):
                        self.begin_turn(warp_group_idx)
                    products[one](A_idx=ab_read_state.index, B_idx=ab_read_state.index, zero_init=True)
                    used.append(ab_read_state.clone())
                    ab_read_state.advance()
                self.publish(prepared, places)
                for one in cutlass.range_constexpr(2):
                    warpgroup.wait_group(1 - one)
                    ab_pipeline.consumer_release(used[one])
                    self.add(sums[one], acc_slow, self.factors(acc, prepared, one, places))
                    if const_expr(one == 0):
                        self.end_turn(warp_group_idx)
        if const_expr(self.pingpong):
            self.pingpong_barrier_arrive(1 - warp_group_idx, stage="mma")  # the other warp group may begin
        acc.store(acc_slow.load())
        return ab_read_state
