"""Quantizers in CuTe DSL for FP8 with a scale a tensor and a gated activation on Hopper; see `block_glu_device`.

In: nothing when imported. Out: kernel classes, which `sm90_compile` compiles. Keeps true: as `block_device`; a row's scale
is given, and the same both ways round, so that numbers are made once and turned. Does not: look for scales (`fp8_device`),
or launch. Needs quack-kernels.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from te_offload.fused.kernels.block_device import NOT, TURNED
from te_offload.fused.kernels.block_glu_device import GatedRowQuantizer, HalvesRowQuantizer
from te_offload.fused.kernels.tile_device import BLOCK, in_fp8


class _Scaled:
    """Mixin before a quantizer by blocks: ``row_scales`` (T,) float32 is read, and ``column_scales`` is not there.

    Attributes:
        form: of the numbers, ``"e4m3"`` or ``"e5m2"``.
    """

    by_row: bool
    columns: int
    form: str

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
        place = part * 16 + group
        there = 8 * place < self.width(x)
        value = self.values(x, router, clamp, first, end, four, place, there)
        numbers = cute.make_rmem_tensor((2, 4, 2), Int32)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                scale = Float32(0.0)
                row = first + 64 * half + 4 * four + i
                if row < end:
                    scale = row_scales[row]
                for word in cutlass.range_constexpr(2):
                    low, high = self.wide(value[2 * word, i, half]), self.wide(value[2 * word + 1, i, half])
                    four_of = [one * scale for one in (*low, *high)]
                    numbers[word, i, half] = in_fp8(*four_of, self.form)
        if const_expr(self.by_row):
            self.write(rows, numbers, first, end, four, place, there)
        if const_expr(self.columns != NOT):
            turned, last = self.turned(numbers, group, four), Int32(columns.shape[1])
            self.write_turned(turned, columns, thread, part * BLOCK, columns.shape[0], block * 32, last)


class ScaledGatedRows(_Scaled, GatedRowQuantizer):
    """FP8 of what a gated activation makes of pairs, (T, F) of x (T, F) words, or with tokens side by side.

    Args:
        by_column: tokens lie side by side, else rows are written as they lie. form: see `_Scaled`. others: of
            `GatedRowQuantizer`.
    """

    def __init__(self, *, by_column: bool, form: str, **others: Any) -> None:
        super().__init__(by_row=not by_column, columns=TURNED if by_column else NOT, power_of_two=False, **others)
        self.form = form


class ScaledHalvesRows(_Scaled, HalvesRowQuantizer):
    """FP8 of pairs as halves, (T, 2F) of x (T, F) words.

    Args:
        by_column: with tokens side by side too. form: see `_Scaled`. others: of `HalvesRowQuantizer`.
    """

    def __init__(self, *, by_column: bool, form: str, **others: Any) -> None:
        super().__init__(by_row=True, columns=TURNED if by_column else NOT, power_of_two=False, **others)
        self.form = form
