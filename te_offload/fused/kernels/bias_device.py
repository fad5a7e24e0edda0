"""Gradients of biases, and of the factors that the rows' biases had, in CuTe DSL: sums of each expert's rows.

In: nothing when imported. Out: kernel classes, which `sm90_compile` compiles. Keeps true: a matrix is read once; sums are
taken in float32 and in one order, so two runs give the same bits; no number reaches the host. Does not: need Hopper; or
launch. Needs quack-kernels.

A matrix is cut into tiles of `ROWS` rows, wherever experts begin. What tile t has of expert i's rows is summed into row
t + i of the parts, which no two have in common: another tile is a later one, and in one tile another expert is. The second
kernel adds an expert's parts. Matrices of 16-bit numbers come as int32 words of two.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from te_offload.fused.kernels.tile_device import THREADS, WARP, WARPS, Packed

ROWS = 64
"""Of a tile; a warp has each eighth one."""
COLUMNS = 8 * WARP
"""That a warp reads of a row at a time, eight a thread."""
_OWN = ROWS // WARPS
_BLOCKS = 528  # of threads, so that each of an H200's SMs has four


def blocks_beside(rows: int, columns: int) -> int:
    """Blocks of threads that should share a tile of a matrix of so many rows and columns."""
    return max(1, min(-(-columns // COLUMNS), _BLOCKS // -(-rows // ROWS)))


def parts_of(rows: int, experts: int) -> int:
    """Rows of the parts of a matrix of so many rows."""
    return -(-rows // ROWS) + experts


def _floats(*shape: int) -> Any:
    layout = cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))
    place = cute.arch.alloc_smem(Float32, cute.size(layout), alignment=16)
    return cute.make_tensor(place, layout)


class RowParts(Packed):
    """``parts[t + i]``: of tile t's rows of expert i the sum, each times its factor, if there are ``factors``; and then
    ``dots``, of each row with its expert's bias, zero in rows of no expert.

    dy (T, C / 2) words; offsets (N + 1,); factors (T,) and biases (N, C / 2) words, or ``None``; parts
    (`parts_of` (T, N), C) float32; dots (T,) float32, or ``None``.

    Args:
        half: whether numbers are fp16; else bf16. factors: whether there are any.
    """

    def __init__(self, *, half: bool, factors: bool) -> None:
        super().__init__(half=half)
        self.factors = factors

    @cute.jit
    def __call__(self, dy, offsets, factors, biases, parts, dots, beside, stream: cuda.CUstream):
        """Launch. beside: blocks of threads that share a tile, `COLUMNS` columns by turns; 1 if there are factors."""
        tiles = cute.ceil_div(dy.shape[0], ROWS)
        kernel = self.kernel(dy, offsets, factors, biases, parts, dots)
        self.launch(kernel, [tiles, beside, 1], stream, resident=3)

    @cute.jit
    def experts_with(self, offsets, upto, experts, lane):
        """How many experts end at a row or before it."""
        count = Int32(0)
        for begin in cutlass.range(0, experts, WARP):
            expert = begin + lane
            if expert < experts:
                count += Int32(offsets[expert + 1] <= upto)
        return cute.arch.warp_reduction_sum(count)

    @cute.kernel
    def kernel(self, dy, offsets, factors, biases, parts, dots):
        """A block of threads for a tile, or for some columns of one."""
        thread, _, _ = cute.arch.thread_idx()
        tile, beside, _ = cute.arch.block_idx()
        _, others, _ = cute.arch.grid_dim()
        lane, warp = cute.arch.lane_idx(), thread // WARP
        experts = Int32(offsets.shape[0]) - 1
        first = tile * ROWS
        last = cutlass.min(first + ROWS, Int32(dy.shape[0]))
        shared = _floats(WARPS, COLUMNS)
        products = cute.make_rmem_tensor((_OWN,), Float32)
        products.fill(0.0)
        begin = self.experts_with(offsets, first, experts, lane)
        # Those that end before the tile does, and the one after them; each of those that have none of its rows is left out.
        end = cutlass.min(self.experts_with(offsets, last - 1, experts, lane) + 1, experts)
        for expert in cutlass.range(begin, end):
            row, stop = cutlass.max(offsets[expert], first), cutlass.min(offsets[expert + 1], last)
            if row < stop:
                for column in cutlass.range(beside, cute.ceil_div(2 * dy.shape[1], COLUMNS), others):
                    self.add(
                        dy, factors, biases, expert, products, shared, first + warp, row, stop, column * WARP + lane
                    )
                    cute.arch.sync_threads()
                    place = column * COLUMNS + thread
                    total = Float32(0.0)
                    for other in cutlass.range_constexpr(WARPS):
                        total += shared[other, thread]
                    if place < parts.shape[1]:
                        parts[tile + expert, place] = total
                    cute.arch.sync_threads()
        if const_expr(self.factors):
            for own in cutlass.range_constexpr(_OWN):
                product = cute.arch.warp_reduction_sum(products[own])
                row = first + warp + WARPS * own
                if (lane == 0) & (row < last):
                    dots[row] = product

    @cute.jit
    def add(self, dy, factors, biases, expert, products, shared, first, begin, end, place):
        """A warp's rows from ``begin`` up to ``end``, eight columns a thread: their sum into shared memory, and what these
        columns add to their products with the bias.
        """
        warp = cute.arch.thread_idx()[0] // WARP
        there = 4 * place < dy.shape[1]
        words = cute.make_rmem_tensor((4, _OWN), Int32)
        words.fill(0)
        for own in cutlass.range_constexpr(_OWN):
            row = first + WARPS * own
            if (begin <= row) & (row < end) & there:
                cute.autovec_copy(cute.local_tile(dy[row, None], (4,), (place,)), words[None, own])
        of_bias = cute.make_rmem_tensor((4,), Int32)
        if const_expr(self.factors):
            of_bias.fill(0)
            if there:
                cute.autovec_copy(cute.local_tile(biases[expert, None], (4,), (place,)), of_bias)
        sums = cute.make_rmem_tensor((8,), Float32)
        sums.fill(0.0)
        for own in cutlass.range_constexpr(_OWN):
            row = first + WARPS * own
            if (begin <= row) & (row < end):  # a bias may be infinite, which times no row's zeros is no number
                factor = Float32(1.0)
                if const_expr(self.factors):
                    factor = factors[row]
                for word in cutlass.range_constexpr(4):
                    low, high = self.wide(words[word, own])
                    if const_expr(self.factors):
                        one, other = self.wide(of_bias[word])
                        products[own] = products[own] + low * one + high * other
                        low, high = low * factor, high * factor
                    sums[2 * word] = sums[2 * word] + low
                    sums[2 * word + 1] = sums[2 * word + 1] + high
        cute.autovec_copy(sums, cute.local_tile(shared[warp, None], (8,), (cute.arch.lane_idx(),)))


class PartTotals:
    """``out[i]``: the sum of expert i's parts, of a matrix with such offsets; zero for one without rows.

    parts (parts, C) float32; offsets (N + 1,); out (N, C).

    Args:
        pairs: ``None``, or of which columns come in pairs, to be stored as halves in blocks of so many (`pairs`).
    """

    def __init__(self, *, pairs: int | None) -> None:
        self.pairs = pairs

    @cute.jit
    def __call__(self, parts, offsets, out, stream: cuda.CUstream):
        """Launch."""
        grid = [cute.ceil_div(out.shape[1], WARP), out.shape[0], 1]
        self.kernel(parts, offsets, out).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, parts, offsets, out):
        """A block of threads for 32 columns of an expert; a warp adds each eighth part."""
        thread, _, _ = cute.arch.thread_idx()
        block, expert, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), thread // WARP
        shared = _floats(WARPS, WARP)
        column = block * WARP + lane
        begin, end = offsets[expert], offsets[expert + 1]
        total = Float32(0.0)
        if (begin < end) & (column < out.shape[1]):
            for part in cutlass.range(begin // ROWS + expert + warp, (end - 1) // ROWS + expert + 1, WARPS, unroll=4):
                total += parts[part, column]
        shared[warp, lane] = total
        cute.arch.sync_threads()
        if (warp == 0) & (column < out.shape[1]):
            total = Float32(0.0)
            for other in cutlass.range_constexpr(WARPS):
                total += shared[other, lane]
            out[expert, self.place_of(column, out.shape[1])] = total.to(out.element_type)

    def place_of(self, column: Any, columns: Any) -> Any:
        """Where a column is stored."""
        if self.pairs is None:
            return column
        pair, other = column // 2, column % 2
        if self.pairs == 0:
            return other * (columns // 2) + pair
        return pair // self.pairs * (2 * self.pairs) + other * self.pairs + pair % self.pairs
