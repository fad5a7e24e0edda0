"""Quantizers in CuTe DSL for FP8 by blocks with a gated activation on Hopper; see `block_device`.

In: nothing when imported. Out: kernel classes, which `sm90_compile` compiles. Keeps true: as `block_device`. Does not:
launch. Needs quack-kernels.

What is read are pairs of columns (`pairs`), a word each. A thread has 8 columns of what is written, which are 8 words side
by side: whole pairs for what the activation makes, one number of each for the gradient of the activation's input, whose
halves are written in Transformer Engine's order. Where they alternate in blocks of less than 8 columns it has whole blocks,
of 4 words.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cutlass_dsl import T

from te_offload.fused.kernels.block_device import RowQuantizer
from te_offload.fused.kernels.interface import Gated
from te_offload.fused.kernels.sm90_glu_device import KINDS, numbers_of
from te_offload.fused.kernels.tile_device import asm

_LOW, _HIGH = 0x5410, 0x7632  # the first number of each of two words, and the second


def picked(one: Any, other: Any, selector: Any) -> Any:
    """Bytes of two words; ``selector``: `_LOW` or `_HIGH`, which may be known at run time alone."""
    return asm(T.i32(), "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", one, other, selector)


def _in_short_blocks(word: int, interleave: int) -> tuple[int, int]:
    """Of which two pairs a word is, from the first one on, and which number of each, in blocks of 2 or 4 columns."""
    words = interleave // 2  # of a block of one half
    block, inner = divmod(word, 2 * words)
    return 2 * words * block + 2 * (inner % words), _LOW if inner < words else _HIGH


class _Pairs(RowQuantizer):
    @cute.jit
    def pairs(self, x, row, begin):
        """8 words of a row."""
        found = cute.make_rmem_tensor((4, 2), Int32)
        for part in cutlass.range_constexpr(2):
            cute.autovec_copy(cute.local_tile(x[row, None], (4,), (begin // 4 + part,)), found[None, part])
        return found


class GatedRowQuantizer(_Pairs):
    """FP8 of what a gated activation makes of pairs, (T, F) of x (T, F) words.

    Args:
        gated: the activation, whose numbers are the kernel's. others: of `RowQuantizer`.
    """

    def __init__(self, *, gated: Gated, **others: Any) -> None:
        super().__init__(activated=True, clamps=False, **others)
        self._halves = KINDS[gated.gate][0]
        self._numbers = numbers_of(gated)

    def width(self, x: Any) -> Any:
        """See `RowQuantizer.width`."""
        return x.shape[1]

    @cute.jit
    def values(self, x, router, clamp, first, end, four, place, there):
        """See `RowQuantizer.values`."""
        value = cute.make_rmem_tensor((4, 4, 2), Int32)
        value.fill(0)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                row = first + 64 * half + 4 * four + i
                if (row < end) & there:
                    factor = router[row]
                    pairs = self.pairs(x, row, 8 * place)
                    for word in cutlass.range_constexpr(4):
                        low, high = [self.made(pairs[2 * (word % 2) + one, word // 2], factor) for one in range(2)]
                        value[word, i, half] = self.narrow(low, high)
        return value

    def made(self, pair: Any, factor: Any) -> Any:
        """Of a pair, times the router's scale."""
        gate, _, linear, _ = self._halves(*self.wide(pair), **{name: Float32(n) for name, n in self._numbers.items()})
        return gate * linear * factor


class HalvesRowQuantizer(_Pairs):
    """FP8 of pairs as halves, (T, 2F) of x (T, F) words.

    Args:
        interleave: columns of a block of each half: 1, 2, 4 or a multiple of 8; 0: one block of each, which are multiples
            of 8. others: of `RowQuantizer`.
    """

    def __init__(self, *, interleave: int, **others: Any) -> None:
        super().__init__(activated=False, clamps=False, **others)
        assert interleave % 8 == 0 or interleave in (1, 2, 4), (
            "a thread's columns are of one half, or whole blocks of both"
        )
        self.interleave = interleave

    def part_of(self, part: Any, x: Any) -> Any:
        """Both halves of the same pairs one after the other, while they are in the L2 cache."""
        if self.interleave:
            return part
        parts = cute.ceil_div(self.width(x), 128)
        return part // 2 + part % 2 * ((parts + 1) // 2)

    @cute.jit
    def values(self, x, router, clamp, first, end, four, place, there):
        """See `RowQuantizer.values`."""
        value = cute.make_rmem_tensor((4, 4, 2), Int32)
        if const_expr(self.interleave == 1):  # pairs are Transformer Engine's order
            value = self.read(x, first, end, four, place, there)
        elif const_expr(self.interleave in (2, 4)):
            value = self.of_short_blocks(x, first, end, four, place, there)
        else:
            value = self.of_one_half(x, first, end, four, place, there)
        return value

    @cute.jit
    def of_short_blocks(self, x, first, end, four, place, there):
        """8 columns: whole blocks of both halves, of 4 pairs."""
        value = cute.make_rmem_tensor((4, 4, 2), Int32)
        value.fill(0)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                row = first + 64 * half + 4 * four + i
                if (row < end) & there:
                    pairs = cute.make_rmem_tensor((4,), Int32)
                    cute.autovec_copy(cute.local_tile(x[row, None], (4,), (place,)), pairs)
                    for word in cutlass.range_constexpr(4):
                        pair, selector = _in_short_blocks(word, self.interleave)
                        value[word, i, half] = picked(pairs[pair], pairs[pair + 1], Int32(selector))
        return value

    @cute.jit
    def of_one_half(self, x, first, end, four, place, there):
        """8 columns of one half: one number of each of 8 pairs."""
        block = Int32(self.interleave or x.shape[1])
        column = 8 * place
        inner = column % (2 * block)
        second = Int32(inner >= block)
        begin = column // (2 * block) * block + inner - second * block
        selector = Int32(_LOW) + second * (_HIGH - _LOW)
        value = cute.make_rmem_tensor((4, 4, 2), Int32)
        value.fill(0)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                row = first + 64 * half + 4 * four + i
                if (row < end) & there:
                    pairs = self.pairs(x, row, begin)
                    for word in cutlass.range_constexpr(4):
                        one, other = [pairs[2 * (word % 2) + index, word // 2] for index in range(2)]
                        value[word, i, half] = picked(one, other, selector)
        return value
