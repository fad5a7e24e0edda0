"""Kernels in CuTe DSL for FP8 by blocks on Hopper: quantizers. Their products are those of `sm90_block_device`.

In: nothing when imported. Out: kernel classes, which `sm90_compile` compiles. Keeps true: no number reaches the host; two
runs give the same bits; an expert's blocks of tokens begin with its first one; rows of no expert are not read; a tile of
128 x 128 numbers stays packed in registers and is read once. Does not: launch. Needs quack-kernels.

Rows (T, columns) have a scale for each 128 columns, stored as (columns / 128, T); columns one for each 128 tokens of an
expert, stored as (blocks, columns); weights one for 128 x 128 numbers. What is stored is one over the scale. Scales follow
`fp8_device`, but that an infinite one becomes ``most``, the largest number of the dtype that is quantized.

Matrices of 16-bit numbers come as int32 words of two, those of bytes as words of four. Thread t of 256 has the columns
8 (t % 16) to 8 (t % 16) + 7 of rows 4 (t / 16) to 4 (t / 16) + 3, and of the rows 64 after them. Bytes are turned four by
four in registers, and then through shared memory, where the words of a column are shifted by two for each eighth column, so
that neither writes nor reads meet in a bank.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from te_offload.fused.kernels.rows_device import inclusive_sum
from te_offload.fused.kernels.sm90_device import squared_relu

BLOCK = 128
"""Numbers that share a scale."""
NOT, SAVED, TURNED = range(3)
"""Columns that are written: none; as their rows lie, (T, columns); with tokens side by side, (columns, P)."""

_THREADS, _WARPS, _WARP = 256, 8, 32
_ABS = 0x7FFF7FFF
# Tiles that an SM works on at a time, by what was quickest on an H200 (docs/results/): 4 leave a thread 64 registers.
_RESIDENT_ROWS, _RESIDENT_WEIGHTS = 4, 3


def asm(kind: Any, text: str, constraints: str, *values: Any) -> Any:
    """What one piece of PTX makes of values: a float32 or an int32."""
    found = llvm.inline_asm(
        kind,
        [value.ir_value() for value in values],
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Float32(found) if kind == T.f32() else Int32(found)


def _bytes(one: Any, other: Any, selector: int) -> Any:
    """Four of eight bytes."""
    return asm(T.i32(), f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", one, other)


def _divide(one: Any, other: Any) -> Any:
    return asm(T.f32(), "div.rn.f32 $0, $1, $2;", "=f,f,f", one, other)


def _float(bits: Any) -> Any:
    return asm(T.f32(), "mov.b32 $0, $1;", "=f,r", bits)


def _bits(value: Any) -> Any:
    return asm(T.i32(), "mov.b32 $0, $1;", "=r,f", value)


def in_fp8(a: Any, b: Any, c: Any, d: Any, form: str = "e4m3") -> Any:
    """Four numbers in E4M3, or E5M2, the first one lowest."""
    text = (
        f"{{.reg .b16 x, y; cvt.rn.satfinite.{form}x2.f32 x, $2, $1; cvt.rn.satfinite.{form}x2.f32 y, $4, $3; "
        "mov.b32 $0, {x, y};}"
    )
    return asm(T.i32(), text, "=r,f,f,f,f", a, b, c, d)


@cute.jit
def _place_of(block, offsets, lane):
    """The first row of a block of tokens, and the end of its expert; twice 0 for a block that no expert has."""
    first, end, before = Int32(0), Int32(0), Int32(0)
    experts = Int32(offsets.shape[0]) - 1
    for begin in cutlass.range(0, experts, _WARP):
        start = offsets[cutlass.min(begin + lane, experts)]
        stop = offsets[cutlass.min(begin + lane + 1, experts)]
        blocks = (stop - start + BLOCK - 1) // BLOCK
        upto = before + inclusive_sum(blocks, lane)
        found = cute.arch.vote_ballot_sync((upto > block) & (upto - blocks <= block))
        if found != 0:  # of one lane at most
            owner = cute.arch.popc(found - 1)
            first = cute.arch.shuffle_sync(start + (block - upto + blocks) * BLOCK, owner)
            end = cute.arch.shuffle_sync(stop, owner)
        before = cute.arch.shuffle_sync(upto, _WARP - 1)
    return first, end


class _Tile:
    """What both quantizers share.

    Args:
        half: whether numbers are fp16; else bf16. power_of_two: whether scales are.

    Attributes:
        largest: of the numbers that are made.
    """

    largest = 448.0

    def __init__(self, *, half: bool, power_of_two: bool) -> None:
        self.half = half
        self.power_of_two = power_of_two

    def larger(self, one: Any, other: Any) -> Any:
        """Of two words of magnitudes, number by number; NaN is none."""
        kind = "f16x2" if self.half else "bf16x2"
        return asm(T.i32(), f"max.{kind} $0, $1, $2;", "=r,r,r", one, other)

    def wide(self, word: Any, *, again: bool = False) -> tuple[Any, Any]:
        """Both numbers of a word in float32. ``again``: made anew, where a compiler would keep them in more registers."""
        if self.half:
            text = "{.reg .b16 x, y; mov.b32 {x, y}, $1; cvt.f32.f16 $0, "
            low, high = (f"{text}{name};}}" for name in "xy")
        else:
            low, high = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"
        more = "// again" if again else ""
        return asm(T.f32(), low + more, "=f,r", word), asm(T.f32(), high + more, "=f,r", word)

    def narrow(self, low: Any, high: Any) -> Any:
        """A word of two numbers, rounded."""
        kind = "f16x2" if self.half else "bf16x2"
        return asm(T.i32(), f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f", low, high)

    @cute.jit
    def scale_of(self, bits, epsilon, most):
        """The scale of the magnitude whose bits are the low 16, and one over it."""
        magnitude = cute.arch.fmax(self.wide(bits & 0xFFFF)[0], epsilon)
        infinite = _float(Int32(0x7F800000))
        scale = _divide(Float32(self.largest), magnitude)
        if scale == infinite:
            scale = most
        if (magnitude == 0.0) | (magnitude == infinite):
            scale = Float32(1.0)
        if const_expr(self.power_of_two):
            scale = _float(_bits(scale) & 0x7F800000)
        return scale, _divide(Float32(1.0), scale)

    @cute.jit
    def largest_of(self, value):
        """The bits of a warp's largest magnitude, twice in a word."""
        largest = Int32(0)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                for word in cutlass.range_constexpr(4):
                    largest = self.larger(largest, value[word, i, half] & _ABS)
        for power in cutlass.range_constexpr(5):
            largest = self.larger(largest, cute.arch.shuffle_sync_bfly(largest, 1 << power))
        return self.larger(largest, _bytes(largest, largest, 0x1032))

    @cute.jit
    def read(self, matrix, first, end, four, place, there, hint=None):
        """8 columns of 8 rows, from ``first`` on up to ``end``, else zero: (4 words, 4 rows, 2 halves). ``hint``: for the
        L2 cache, of classes that read with one.
        """
        value = cute.make_rmem_tensor((4, 4, 2), Int32)
        value.fill(0)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                row = first + 64 * half + 4 * four + i
                if (row < end) & there:
                    self.get(cute.local_tile(matrix[row, None], (4,), (place,)), value[None, i, half], hint)
        return value

    def get(self, of: Any, words: Any, hint: Any) -> None:
        """Read words that lie one after the other."""
        cute.autovec_copy(of, words)

    def put(self, words: Any, to: Any) -> None:
        """Write words that lie one after the other."""
        cute.autovec_copy(words, to)

    @cute.jit
    def write(self, out, numbers, first, end, four, place, there):
        """As the rows lie."""
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                row = first + 64 * half + 4 * four + i
                if (row < end) & there:
                    self.put(numbers[None, i, half], cute.local_tile(out[row, None], (2,), (place,)))

    @cute.jit
    def turn(self, turned, numbers, group, rows):
        """Write 8 columns of 4 rows, twice, into shared memory (128, 32): ``numbers`` (2 words, 4 rows, 2 halves)."""
        for half in cutlass.range_constexpr(2):
            place = (16 * half + rows + 2 * group) % 32
            for word in cutlass.range_constexpr(2):
                one, two, three, four = [numbers[word, row, half] for row in range(4)]
                column = 8 * group + 4 * word
                low, other = _bytes(one, two, 0x5140), _bytes(three, four, 0x5140)
                turned[column, place] = _bytes(low, other, 0x5410)
                turned[column + 1, place] = _bytes(low, other, 0x7632)
                low, other = _bytes(one, two, 0x7362), _bytes(three, four, 0x7362)
                turned[column + 2, place] = _bytes(low, other, 0x5410)
                turned[column + 3, place] = _bytes(low, other, 0x7632)

    @cute.jit
    def turned(self, numbers, group, rows):
        """Shared memory (128, 32) in which all threads have turned theirs."""
        place = cute.arch.alloc_smem(Int32, BLOCK * 32, alignment=16)
        shared = cute.make_tensor(place, cute.make_layout((BLOCK, 32), stride=(32, 1)))
        self.turn(shared, numbers, group, rows)
        cute.arch.sync_threads()
        return shared

    @cute.jit
    def write_turned(self, turned, out, thread, first_column, last_column, first_word, last_word):
        """Rows of 128 bytes to ``out``, 16 a thread: columns up to one, words up to one."""
        words = cute.make_rmem_tensor((4,), Int32)
        place = 4 * (thread % 8)
        for step in cutlass.range_constexpr(4):
            column = thread // 8 + 32 * step
            for pair in cutlass.range_constexpr(2):
                at = (place + 2 * pair + 2 * (column // 8)) % 32
                words[2 * pair] = turned[column, at]
                words[2 * pair + 1] = turned[column, at + 1]
            if (first_column + column < last_column) & (first_word + place < last_word):
                to = cute.local_tile(out[first_column + column, None], (4,), ((first_word + place) // 4,))
                self.put(words, to)


class RowQuantizer(_Tile):
    """FP8 of rows (T, C), in either direction or both.

    Args:
        by_row: whether rows are written. columns: `NOT`, `SAVED` or `TURNED`. activated: numbers are the scaled squared
            ReLU of x. clamps: whether that has a clamp. others: of `_Tile`.
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
        self.kernel(x, router, offsets, rows, row_scales, columns, column_scales, clamp, epsilon, most).launch(
            grid=grid,
            block=[_THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=_RESIDENT_ROWS,
            preferred_smem_carveout=50,
        )

    @cute.kernel
    def kernel(self, x, router, offsets, rows, row_scales, columns, column_scales, clamp, epsilon, most):
        """A block of threads for each tile."""
        thread, _, _ = cute.arch.thread_idx()
        block, part, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        first, end = _place_of(block, offsets, lane)
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
        square, _ = squared_relu(x, clamp, 1.0 / clamp) if self.clamps else squared_relu(x, None, None)
        return square

    @cute.jit
    def row_scale(self, value, group, epsilon, most):
        """Of the row that this lane looks after: the ``group % 8``-th of the 8 that it has with 15 others."""
        packed = cute.make_rmem_tensor((4,), Int32)
        for half in cutlass.range_constexpr(2):
            for pair in cutlass.range_constexpr(2):
                both = cute.make_rmem_tensor((2,), Int32)
                for one in cutlass.range_constexpr(2):
                    largest = value[0, 2 * pair + one, half] & _ABS
                    largest = self.larger(largest, Int32(0))
                    for word in cutlass.range_constexpr(1, 4):
                        largest = self.larger(largest, value[word, 2 * pair + one, half] & _ABS)
                    both[one] = self.larger(largest, _bytes(largest, largest, 0x1032))
                packed[2 * half + pair] = _bytes(both[0], both[1], 0x5410)
        for power in cutlass.range_constexpr(4):
            for index in cutlass.range_constexpr(4):
                packed[index] = self.larger(packed[index], cute.arch.shuffle_sync_bfly(packed[index], 1 << power))
        mine = packed[0]
        for index in cutlass.range_constexpr(1, 4):
            if (group % 8) // 2 == index:
                mine = packed[index]
        if group % 2 == 1:
            mine = _bytes(mine, mine, 0x3232)
        return self.scale_of(mine, epsilon, most)

    @cute.jit
    def column_scale(self, value, thread, lane, group, block, part, column_scales, epsilon, most):
        """Of the 8 columns of this thread."""
        maxima = cute.make_tensor(
            cute.arch.alloc_smem(Int32, _WARPS * 64, alignment=16), cute.make_layout((_WARPS, 64), stride=(64, 1))
        )
        scales = cute.make_tensor(cute.arch.alloc_smem(Float32, BLOCK, alignment=16), cute.make_layout((BLOCK,)))
        for word in cutlass.range_constexpr(4):
            largest = Int32(0)
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    largest = self.larger(largest, value[word, i, half] & _ABS)
            largest = self.larger(largest, cute.arch.shuffle_sync_bfly(largest, 16))
            if lane < 16:
                maxima[thread // 32, 4 * group + word] = largest
        cute.arch.sync_threads()
        if thread < BLOCK:
            largest = maxima[0, thread // 2]
            for warp in cutlass.range_constexpr(1, _WARPS):
                largest = self.larger(largest, maxima[warp, thread // 2])
            if thread % 2 == 1:
                largest = _bytes(largest, largest, 0x3232)
            scale, inverse = self.scale_of(largest, epsilon, most)
            scales[thread] = scale
            if part * BLOCK + thread < column_scales.shape[1]:
                column_scales[block, part * BLOCK + thread] = inverse
        cute.arch.sync_threads()
        found = cute.make_rmem_tensor((8,), Float32)
        cute.autovec_copy(cute.local_tile(scales, (8,), (group,)), found)
        return found


class WeightQuantizer(_Tile):
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
        self.kernel(weights, table, rows, inverses, columns, others, epsilon, most).launch(
            grid=grid,
            block=[_THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=_RESIDENT_WEIGHTS,
            preferred_smem_carveout=50,
        )

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
        maxima = cute.make_tensor(cute.arch.alloc_smem(Int32, _WARPS, alignment=16), cute.make_layout((_WARPS,)))
        if lane == 0:
            maxima[thread // 32] = largest
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(_WARPS):
            largest = self.larger(largest, maxima[warp])
        scale, inverse = self.scale_of(largest, epsilon, most)
        if thread == 0:
            inverses[expert, part, other] = inverse
            if const_expr(self.both):
                others[expert, other, part] = inverse
        numbers = cute.make_rmem_tensor((2, 4, 2), Int32)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                for word in cutlass.range_constexpr(2):
                    low, high = self.wide(value[2 * word, i, half]), self.wide(value[2 * word + 1, i, half])
                    numbers[word, i, half] = in_fp8(low[0] * scale, low[1] * scale, high[0] * scale, high[1] * scale)
        self.write(rows[expert, None, None], numbers, first, end, four, place, there)
        if const_expr(self.both):
            turned = self.turned(numbers, group, four)
            out = columns[expert, None, None]
            first_column, last_word = other * BLOCK, Int32(columns.shape[2])
            self.write_turned(turned, out, thread, first_column, columns.shape[1], part * 32, last_word)
