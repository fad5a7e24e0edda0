"""Quantizers in CuTe DSL for weights in FP8 with a scale a tensor on Hopper; see `block_device`.

In: nothing when imported. Out: a kernel class, which `sm90_compile` compiles. Keeps true: as `block_device`; a weight that
the L2 cache can hold is read from memory once. Does not: launch, or take scales that are known beforehand (`fp8_device`).
Needs quack-kernels.

A scale needs all of its weight, and numbers need the scale. So there are two tasks a tile: one adds the tile's magnitude
to its weight's, the other one waits for the last of that weight's and makes numbers. Blocks of threads take tasks one by
one, in an order in which the numbers of a weight begin a little after its last magnitude and take turns with magnitudes of
the weights after it: so the wait is short, and the tile is still in the L2 cache. Who waits has taken its task after all
those that it waits for; of all that wait the first waits for none that does; so all end, however many run at a time.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from te_offload.fused.kernels.block_device import (
    _RESIDENT_WEIGHTS,
    _THREADS,
    _WARPS,
    BLOCK,
    _Tile,
    in_fp8,
)

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
# What CUTLASS has for TMA (cute/arch/copy_sm90_desc.hpp, CacheHintSm90): the last, and the first to leave the L2 cache.
_STAYS, _LEAVES = 0x14F0000000000000, 0x12F0000000000000
# Tiles whose magnitudes come between the last one of a weight and its first numbers, by what was quickest on an H100
# (docs/results/): with fewer, numbers wait; with more, they are no longer in the L2 cache.
_BETWEEN = 132


class ScaledWeights(_Tile):
    """FP8 of N weights (rows, columns) with a scale each, as they lie, and the other way round if ``both``.

    Args:
        form: of the numbers, ``"e4m3"`` or ``"e5m2"``. others: of `_Tile`.
    """

    def __init__(self, *, both: bool, form: str, **others: Any) -> None:
        super().__init__(**others)
        self.both = both
        self.form = form
        self.largest = _LARGEST[form]

    @cute.jit
    def __call__(self, weights, table, rows, columns, work, inverses, epsilon, most, stream: cuda.CUstream):
        """Launch. weights (J, rows, columns / 2) words; table (N,): J of each expert; rows (N, rows, columns / 4); columns
        (N, columns, rows / 4); work (2 N + 1,) zeros: how many tasks are taken, and of each weight the magnitude's bits and
        how many tiles have added theirs; inverses (N,).
        """
        tiles = cute.ceil_div(weights.shape[1], BLOCK) * cute.ceil_div(2 * weights.shape[2], BLOCK)
        self.kernel(weights, table, rows, columns, work, inverses, epsilon, most).launch(
            grid=[2 * tiles * table.shape[0], 1, 1],
            block=[_THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=_RESIDENT_WEIGHTS,
            preferred_smem_carveout=50,
        )

    @cute.kernel
    def kernel(self, weights, table, rows, columns, work, inverses, epsilon, most):
        """A block of threads for each task."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        group, four = thread % 16, thread // 16
        shared = cute.make_tensor(cute.arch.alloc_smem(Int32, _WARPS, alignment=16), cute.make_layout((_WARPS,)))
        if thread == 0:
            shared[0] = cute.arch.atomic_add(work.iterator, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.sync_threads()
        beside = cute.ceil_div(2 * weights.shape[2], BLOCK)
        tiles = cute.ceil_div(weights.shape[1], BLOCK) * beside
        is_magnitude, tile = self.tile_of(shared[0], tiles * table.shape[0], tiles + _BETWEEN)
        expert, part, other = tile // tiles, tile % tiles // beside, tile % beside
        place = other * 16 + group
        there = 4 * place < weights.shape[2]
        first, end = part * BLOCK, weights.shape[1]
        hint = Int64(_LEAVES)
        if is_magnitude:
            hint = Int64(_STAYS)
        value = self.read(weights[table[expert], None, None], first, end, four, place, there, hint)
        cute.arch.sync_threads()  # all have read the task
        magnitude, added = work.iterator + 1 + 2 * expert, work.iterator + 2 + 2 * expert
        if is_magnitude:
            largest = self.largest_of(value)
            if lane == 0:
                shared[thread // 32] = largest
            cute.arch.sync_threads()
            if thread == 0:
                for warp in cutlass.range_constexpr(1, _WARPS):
                    largest = self.larger(largest, shared[warp])
                # The bits of numbers that are not negative are in their order.
                cute.arch.atomic_max(magnitude, largest & 0xFFFF, sem="relaxed", scope="gpu")
                cute.arch.atomic_add(added, Int32(1), sem="release", scope="gpu")
        else:
            if thread == 0:
                so_far = cute.arch.load(added, Int32, sem="acquire", scope="gpu")
                while so_far < tiles:
                    so_far = cute.arch.load(added, Int32, sem="acquire", scope="gpu")
                shared[0] = cute.arch.load(magnitude, Int32, sem="relaxed", scope="gpu")
            cute.arch.sync_threads()
            scale, inverse = self.scale_of(shared[0], epsilon, most)
            if (thread == 0) & (tile % tiles == 0):
                inverses[expert] = inverse
            numbers = cute.make_rmem_tensor((2, 4, 2), Int32)
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    for word in cutlass.range_constexpr(2):
                        low, high = self.wide(value[2 * word, i, half]), self.wide(value[2 * word + 1, i, half])
                        numbers[word, i, half] = in_fp8(*[one * scale for one in (*low, *high)], self.form)
            self.write(rows[expert, None, None], numbers, first, end, four, place, there)
            if const_expr(self.both):
                turned = self.turned(numbers, group, four)
                out = columns[expert, None, None]
                first_column, last_word = other * BLOCK, Int32(columns.shape[2])
                self.write_turned(turned, out, thread, first_column, columns.shape[1], part * 32, last_word)

    @cute.jit
    def tile_of(self, task, tiles, before):
        """Whether a task is of a magnitude, and its tile, of all weights': first so many magnitudes, then those and numbers
        by turns, and then the rest of the numbers.
        """
        before = cutlass.min(before, tiles)
        is_magnitude, tile = task < before, task
        if task >= before:
            after = task - before
            tile = task - tiles
            if after < 2 * (tiles - before):
                is_magnitude = after % 2 == 0
                tile = after // 2
                if is_magnitude:
                    tile = tile + before
        return is_magnitude, tile

    def get(self, of: Any, words: Any, hint: Any) -> None:
        """See `_Tile.get`."""
        found = llvm.inline_asm(
            llvm.StructType.get_literal([T.i32()] * 4),
            [of.iterator.toint().ir_value(), hint.ir_value()],
            "ld.global.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4], $5;",
            "=r,=r,=r,=r,l,l",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
        for place in range(4):
            words[place] = Int32(llvm.extractvalue(T.i32(), found, [place]))

    def put(self, words: Any, to: Any) -> None:
        """See `_Tile.put`; they are the first to leave the L2 cache."""
        count = cute.size(words.shape)
        llvm.inline_asm(
            None,
            [to.iterator.toint().ir_value(), *[words[place].ir_value() for place in range(count)]],
            f"st.global.cs.v{count}.b32 [$0], {{{', '.join(f'${1 + place}' for place in range(count))}}};",
            "l" + ",r" * count,
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
