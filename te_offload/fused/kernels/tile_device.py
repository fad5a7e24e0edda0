"""What quantizers in CuTe DSL on Hopper do with a tile of 128 x 128 numbers: read, find magnitudes and scales, turn, write.

In: nothing when imported. Out: a class that quantizers extend, and what it extends, for any kernel of packed numbers;
pieces of PTX. Keeps true: a tile stays packed in registers and is read once; two runs give the same bits. Does not: know
which tile, or what shares a scale (`block_device`, `fp8_current_device`). Needs quack-kernels.

Matrices of 16-bit numbers come as int32 words of two, those of bytes as words of four. Thread t of 256 has the columns
8 (t % 16) to 8 (t % 16) + 7 of rows 4 (t / 16) to 4 (t / 16) + 3, and of the rows 64 after them. Bytes are turned four by
four in registers, and then through shared memory, where the words of a column are shifted by two for each eighth column, so
that neither writes nor reads meet in a bank. Scales follow `fp8_device`, but that an infinite one becomes ``most``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from te_offload.fused.kernels.rows_device import inclusive_sum

BLOCK = 128
"""Rows and columns of a tile."""
THREADS, WARPS, WARP = 256, 8, 32
ABS = 0x7FFF7FFF
"""Of a word of two numbers what is not their signs."""
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
RESIDENT_WEIGHTS = 3
"""Tiles of weights that an SM works on at a time, by what was quickest on an H200 (docs/results/)."""


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


def pick_bytes(one: Any, other: Any, selector: int) -> Any:
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


def shared_words(count: int) -> Any:
    """So many words of shared memory."""
    return cute.make_tensor(cute.arch.alloc_smem(Int32, count, alignment=16), cute.make_layout((count,)))


@cute.jit
def sums_up_to(value, before, totals, thread, lane):
    """Of the values of a block's threads up to each, and of all, both with what came ``before``. ``totals``: shared memory
    for `WARPS` words.
    """
    upto = before + inclusive_sum(value, lane)
    if lane == WARP - 1:
        totals[thread // WARP] = upto - before
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(WARPS):
        total = totals[warp]
        if warp < thread // WARP:
            upto += total
        before += total
    cute.arch.sync_threads()  # they may be written again
    return upto, before


class Packed:
    """What kernels do with numbers of 16 bits, two a word.

    Args:
        half: whether they are fp16; else bf16.
    """

    def __init__(self, *, half: bool) -> None:
        self.half = half

    def launch(self, kernel: Any, grid: list[Any], stream: Any, *, resident: int) -> None:
        """``resident``: how many blocks of threads an SM is to run at a time."""
        kernel.launch(
            grid=grid,
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=resident,
            preferred_smem_carveout=50,
        )

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


class TileQuantizer(Packed):
    """What quantizers share; a block of threads has a tile.

    Args:
        half: as above. power_of_two: whether scales are.

    Attributes:
        form: of the numbers that are made, ``"e4m3"`` or ``"e5m2"``.
    """

    form = "e4m3"

    def __init__(self, *, half: bool, power_of_two: bool) -> None:
        super().__init__(half=half)
        self.power_of_two = power_of_two

    @cute.jit
    def scale_of(self, bits, epsilon, most):
        """The scale of the magnitude whose bits are the low 16, and one over it."""
        magnitude = cute.arch.fmax(self.wide(bits & 0xFFFF)[0], epsilon)
        infinite = _float(Int32(0x7F800000))
        scale = _divide(Float32(_LARGEST[self.form]), magnitude)
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
                    largest = self.larger(largest, value[word, i, half] & ABS)
        for power in cutlass.range_constexpr(5):
            largest = self.larger(largest, cute.arch.shuffle_sync_bfly(largest, 1 << power))
        return self.larger(largest, pick_bytes(largest, largest, 0x1032))

    @cute.jit
    def numbers_of(self, value, scale):
        """FP8 of what was read, by one scale: (2 words, 4 rows, 2 halves)."""
        numbers = cute.make_rmem_tensor((2, 4, 2), Int32)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                for word in cutlass.range_constexpr(2):
                    low, high = self.wide(value[2 * word, i, half]), self.wide(value[2 * word + 1, i, half])
                    numbers[word, i, half] = in_fp8(*[one * scale for one in (*low, *high)], self.form)
        return numbers

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
                low, other = pick_bytes(one, two, 0x5140), pick_bytes(three, four, 0x5140)
                turned[column, place] = pick_bytes(low, other, 0x5410)
                turned[column + 1, place] = pick_bytes(low, other, 0x7632)
                low, other = pick_bytes(one, two, 0x7362), pick_bytes(three, four, 0x7362)
                turned[column + 2, place] = pick_bytes(low, other, 0x5410)
                turned[column + 3, place] = pick_bytes(low, other, 0x7632)

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
