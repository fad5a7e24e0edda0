"""Kernels in CuTe DSL for FP8 by blocks on Hopper: quantizers. Their products are those of `sm90_block_device`.

In: nothing when imported. Out: kernel classes, which `sm90_compile` compiles. Keeps true: no number reaches the host; two
runs give the same bits; an expert's blocks of tokens begin with its first one; rows of no expert are not read; a tile is
read once (`tile_device`). Does not: launch. Needs quack-kernels.

Rows (T, columns) have a scale for each 128 columns, stored as (columns / 128, T); columns one for each 128 tokens of an
expert, stored as (blocks, columns); weights one for 128 x 128 numbers. What is stored is one over the scale; an infinite
scale becomes ``most``, the largest number of the dtype that is quantized.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from te_offload.fused.kernels.sm90_device import relu, squared_relu
from te_offload.fused.kernels.tile_device import (
    ABS,
    BLOCK,
    RESIDENT_WEIGHTS,
    THREADS,
    WARPS,
    TileQuantizer,
    in_fp8,
    pick_bytes,
    shared_words,
    sums_up_to,
)

NOT, SAVED, TURNED = range(3)
"""Columns that are written: none; as their rows lie, (T, columns); with tokens side by side, (columns, P)."""

# Tiles of rows that an SM works on at a time, by what was quickest on an H200 (docs/results/): a thread has 64 registers.
_RESIDENT_ROWS = 4


@cute.jit
def _place_of(block, offsets, thread, lane):
    """The first row of a block of tokens, and the end of its expert; twice 0 for a block that no expert has. Each thread
    looks at some experts.
    """
    shared, totals = shared_words(2), shared_words(WARPS)
    if thread < 2:
        shared[thread] = 0
    before, experts = Int32(0), Int32(offsets.shape[0]) - 1
    for begin in cutlass.range(0, experts, THREADS):
        start = offsets[cutlass.min(begin + thread, experts)]
        stop = offsets[cutlass.min(begin + thread + 1, experts)]
        blocks = (stop - start + BLOCK - 1) // BLOCK
        upto, before = sums_up_to(blocks, before, totals, thread, lane)
        if (upto > block) & (upto - blocks <= block):  # one thread at most
            shared[0] = start + (block - upto + blocks) * BLOCK
            shared[1] = stop
    cute.arch.sync_threads()
    return shared[0], shared[1]


class RowQuantizer(TileQuantizer):
    """FP8 of rows (T, C), in either direction or both.

    Args:
        by_row: whether rows are written. columns: `NOT`, `SAVED` or `TURNED`. activated: numbers are the scaled squared
            ReLU of x. clamps: whether that has a clamp. others: of `TileQuantizer`.
    """

    def __init__(self, *, by_row: bool, columns: int, activated: bool, clamps: bool, **others: Any) -> None:
        super().__init__(**others)
        self.by_row = by_row
        self.columns = columns
        self.activated = activated
        self.clamps = clamps

    @cute.jit
    def __call__(
        self, x, router, offsets, rows, row_scales, columns, column_scales, clamp, epsilon, most, stream: cuda.CUstream
    ):
        """Launch. x (T, C / 2) words; router (T,); offsets (N + 1,); rows (T, C / 4), row_scales (C / 128, T); columns as
        `SAVED` (T, C / 4) or `TURNED` (C, P / 4), column_scales (P / 128, C).
        """
        grid = [x.shape[0] // BLOCK + offsets.shape[0] - 1, cute.ceil_div(self.width(x), BLOCK), 1]
        kernel = self.kernel(x, router, offsets, rows, row_scales, columns, column_scales, clamp, epsilon, most)
        self.launch(kernel, grid, stream, resident=_RESIDENT_ROWS)

    @cute.kernel
    def kernel(self, x, router, offsets, rows, row_scales, columns, column_scales, clamp, epsilon, most):
        """A block of threads for each tile."""
        thread, _, _ = cute.arch.thread_idx()
        block, part, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        first, end = _place_of(block, offsets, thread, lane)
        if first < end:
            self.tile(
                x, router, rows, row_scales, columns, column_scales, clamp, epsilon, most, thread, lane, block, part, first,
                end,
            )  # fmt: skip

    @cute.jit
    def tile(
        self,
        x,
        router,
        rows,
        row_scales,
        columns,
        column_scales,
        clamp,
        epsilon,
        most,
        thread,
        lane,
        block,
        part,
        first,
        end,
    ):
        """One tile: rows from ``first`` on, up to ``end``."""
        group, four = thread % 16, thread // 16
        part = self.part_of(part, x)
        place = part * 16 + group  # among groups of 8 columns
        there = 8 * place < self.width(x)
        value = self.values(x, router, clamp, first, end, four, place, there)
        numbers = cute.make_rmem_tensor((2, 4, 2), Int32)
        if const_expr(self.by_row):
            scale, inverse = self.row_scale(value, group, epsilon, most)
            row = first + 64 * ((group % 8) // 4) + 4 * four + group % 4
            if (group < 8) & (row < end):
                row_scales[part, row] = inverse
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    mine = cute.arch.shuffle_sync(scale, lane // 16 * 16 + 4 * half + i)
                    for word in cutlass.range_constexpr(2):
                        low, high = self.wide(value[2 * word, i, half]), self.wide(value[2 * word + 1, i, half])
                        numbers[word, i, half] = in_fp8(low[0] * mine, low[1] * mine, high[0] * mine, high[1] * mine)
            self.write(rows, numbers, first, end, four, place, there)
        if const_expr(self.columns != NOT):
            scales = self.column_scale(value, thread, lane, group, block, part, column_scales, epsilon, most)
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    for word in cutlass.range_constexpr(2):
                        low, high = [self.wide(value[2 * word + one, i, half], again=True) for one in range(2)]
                        one, two, three, last = [scales[4 * word + column] for column in range(4)]
                        numbers[word, i, half] = in_fp8(low[0] * one, low[1] * two, high[0] * three, high[1] * last)
            if const_expr(self.columns == SAVED):
                self.write(columns, numbers, first, end, four, place, there)
            else:
                turned, last = self.turned(numbers, group, four), Int32(columns.shape[1])
                self.write_turned(turned, columns, thread, part * BLOCK, columns.shape[0], block * 32, last)

    def width(self, x: Any) -> Any:
        """Columns that are quantized."""
        return 2 * x.shape[1]

    def part_of(self, part: Any, x: Any) -> Any:
        """Which 128 columns the blocks of threads with this place work on."""
        return part

    @cute.jit
    def values(self, x, router, clamp, first, end, four, place, there):
        """What is quantized, as `read` has it."""
        value = self.read(x, first, end, four, place, there)
        if const_expr(self.activated):
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    factor = Float32(0.0)
                    row = first + 64 * half + 4 * four + i
                    if row < end:
                        factor = router[row]
                    for word in cutlass.range_constexpr(4):
                        low, high = [self.activation(one, clamp) for one in self.wide(value[word, i, half])]
                        value[word, i, half] = self.narrow(low * factor, high * factor)
        return value

    def activation(self, x: Any, clamp: Any) -> Any:
        """Of a number."""
        square, _ = squared_relu(relu(x), clamp, 1.0 / clamp) if self.clamps else squared_relu(relu(x), None, None)
        return square

    @cute.jit
    def row_scale(self, value, group, epsilon, most):
        """Of the row that this lane looks after: the ``group % 8``-th of the 8 that it has with 15 others."""
        packed = cute.make_rmem_tensor((4,), Int32)
        for half in cutlass.range_constexpr(2):
            for pair in cutlass.range_constexpr(2):
                both = cute.make_rmem_tensor((2,), Int32)
                for one in cutlass.range_constexpr(2):
                    largest = value[0, 2 * pair + one, half] & ABS
                    largest = self.larger(largest, Int32(0))
                    for word in cutlass.range_constexpr(1, 4):
                        largest = self.larger(largest, value[word, 2 * pair + one, half] & ABS)
                    both[one] = self.larger(largest, pick_bytes(largest, largest, 0x1032))
                packed[2 * half + pair] = pick_bytes(both[0], both[1], 0x5410)
        for power in cutlass.range_constexpr(4):
            for index in cutlass.range_constexpr(4):
                packed[index] = self.larger(packed[index], cute.arch.shuffle_sync_bfly(packed[index], 1 << power))
        mine = packed[0]
        for index in cutlass.range_constexpr(1, 4):
            if (group % 8) // 2 == index:
                mine = packed[index]
        if group % 2 == 1:
            mine = pick_bytes(mine, mine, 0x3232)
        return self.scale_of(mine, epsilon, most)

    @cute.jit
    def column_scale(self, value, thread, lane, group, block, part, column_scales, epsilon, most):
        """Of the 8 columns of this thread."""
        maxima = cute.make_tensor(
            cute.arch.alloc_smem(Int32, WARPS * 64, alignment=16), cute.make_layout((WARPS, 64), stride=(64, 1))
        )
        scales = cute.make_tensor(cute.arch.alloc_smem(Float32, BLOCK, alignment=16), cute.make_layout((BLOCK,)))
        for word in cutlass.range_constexpr(4):
            largest = Int32(0)
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    largest = self.larger(largest, value[word, i, half] & ABS)
            largest = self.larger(largest, cute.arch.shuffle_sync_bfly(largest, 16))
            if lane < 16:
                maxima[thread // 32, 4 * group + word] = largest
        cute.arch.sync_threads()
        if thread < BLOCK:
            largest = maxima[0, thread // 2]
            for warp in cutlass.range_constexpr(1, WARPS):
                largest = self.larger(largest, maxima[warp, thread // 2])
            if thread % 2 == 1:
                largest = pick_bytes(largest, largest, 0x3232)
            scale, inverse = self.scale_of(largest, epsilon, most)
            scales[thread] = scale
            if part * BLOCK + thread < column_scales.shape[1]:
                column_scales[block, part * BLOCK + thread] = inverse
        cute.arch.sync_threads()
        found = cute.make_rmem_tensor((8,), Float32)
        cute.autovec_copy(cute.local_tile(scales, (8,), (group,)), found)
        return found


class WeightQuantizer(TileQuantizer):
    """FP8 of N weights (rows, columns) in blocks of 128 x 128, as they lie, and the other way round if ``both``."""

    def __init__(self, *, both: bool, **others: Any) -> None:
        super().__init__(**others)
        self.both = both

    @cute.jit
    def __call__(self, weights, table, rows, inverses, columns, others, epsilon, most, stream: cuda.CUstream):
        """Launch. weights (J, rows, columns / 2) words; table (N,): J of each expert; rows (N, rows, columns / 4), inverses
        (N, rows / 128, columns / 128); columns (N, columns, rows / 4), others (N, columns / 128, rows / 128).
        """
        grid = [inverses.shape[2], inverses.shape[1], inverses.shape[0]]
        kernel = self.kernel(weights, table, rows, inverses, columns, others, epsilon, most)
        self.launch(kernel, grid, stream, resident=RESIDENT_WEIGHTS)

    @cute.kernel
    def kernel(self, weights, table, rows, inverses, columns, others, epsilon, most):
        """A block of threads for each tile."""
        thread, _, _ = cute.arch.thread_idx()
        other, part, expert = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        group, four = thread % 16, thread // 16
        place = other * 16 + group
        there = 4 * place < weights.shape[2]
        first, end = part * BLOCK, weights.shape[1]
        value = self.read(weights[table[expert], None, None], first, end, four, place, there)
        largest = self.largest_of(value)
        maxima = shared_words(WARPS)
        if lane == 0:
            maxima[thread // 32] = largest
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            largest = self.larger(largest, maxima[warp])
        scale, inverse = self.scale_of(largest, epsilon, most)
        if thread == 0:
            inverses[expert, part, other] = inverse
            if const_expr(self.both):
                others[expert, other, part] = inverse
        numbers = self.numbers_of(value, scale)
        self.write(rows[expert, None, None], numbers, first, end, four, place, there)
        if const_expr(self.both):
            turned = self.turned(numbers, group, four)
            out = columns[expert, None, None]
            first_column, last_word = other * BLOCK, Int32(columns.shape[2])
            self.write_turned(turned, out, thread, first_column, columns.shape[1], part * 32, last_word)
