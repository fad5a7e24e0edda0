"""Quantizers in CuTe DSL for current scaling in FP8 on Hopper, one scale a weight or an expert's rows; see `tile_device`.

In: nothing when imported. Out: kernel classes, which `sm90_compile` compiles. Keeps true: as `tile_device`; a weight, or
an expert's rows, that the L2 cache can hold are read from memory once. Does not: launch, or take scales that are known
beforehand (`fp8_device`). Needs quack-kernels.

A scale needs all that it is of, and numbers need the scale. So there are two tasks a tile: one adds the tile's magnitude to
those of its weight, or expert, the other one waits for the last of them and makes numbers. Blocks of threads take tasks one
by one, in an order in which numbers begin a little after the last magnitude that they need, with magnitudes of what comes
after it between: so the wait is short, and the tile is still in the L2 cache. Who waits has taken its task after all those
that it waits for; of all that wait the first waits for none that does; so all end, however many run at a time.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, StoreCacheMode

from te_offload.fused.kernels.tile_device import (
    BLOCK,
    RESIDENT_WEIGHTS,
    THREADS,
    WARP,
    WARPS,
    TileQuantizer,
    shared_words,
    sums_up_to,
)

# What CUTLASS has for TMA (cute/arch/copy_sm90_desc.hpp, CacheHintSm90): the last, and the first to leave the L2 cache.
_STAYS, _LEAVES = 0x14F0000000000000, 0x12F0000000000000
# Tiles whose magnitudes come between the last one that numbers need and the first of these, by what was quickest on an H100
# (docs/results/): with fewer, numbers wait; with more, they are no longer in the L2 cache.
_BETWEEN_WEIGHTS, _BETWEEN_ROWS = 132, 264
_TASK, _TILES, _DONE = 0, 4, 6  # words of shared memory, of `ScaledRows`


class _Current(TileQuantizer):
    """What both quantizers share. ``work`` (2 N + 1,) int32, zeros: how many tasks are taken, and of each of N scales the
    magnitude's bits and how many tiles have added theirs.

    Args:
        both: whether numbers are written the other way round too. form, others: of `TileQuantizer`.
    """

    def __init__(self, *, both: bool, form: str, **others: Any) -> None:
        super().__init__(**others)
        self.both = both
        self.form = form

    def next_task(self, work: Any) -> Any:
        """Of one thread of a block."""
        return cute.arch.atomic_add(work.iterator, Int32(1), sem="relaxed", scope="gpu")

    @cute.jit
    def read_for(self, is_magnitude, matrix, first, end, four, place, there):
        """As `read`: what is read again soon stays in the L2 cache, and leaves it after that."""
        hint = Int64(_LEAVES)
        if is_magnitude:
            hint = Int64(_STAYS)
        return self.read(matrix, first, end, four, place, there, hint)

    @cute.jit
    def add(self, value, work, which, shared, thread, lane):
        """A tile's magnitude to those of its scale."""
        largest = self.largest_of(value)
        if lane == 0:
            shared[thread // WARP] = largest
        cute.arch.sync_threads()
        if thread == 0:
            for warp in cutlass.range_constexpr(1, WARPS):
                largest = self.larger(largest, shared[warp])
            # The bits of numbers that are not negative are in their order.
            cute.arch.atomic_max(work.iterator + 1 + 2 * which, largest & 0xFFFF, sem="relaxed", scope="gpu")
            cute.arch.atomic_add(work.iterator + 2 + 2 * which, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def wait(self, tiles, work, which, shared, thread, epsilon, most):
        """The scale once so many tiles have added theirs, and one over it."""
        if thread == 0:
            added = work.iterator + 2 + 2 * which
            so_far = cute.arch.load(added, Int32, sem="acquire", scope="gpu")
            while so_far < tiles:
                so_far = cute.arch.load(added, Int32, sem="acquire", scope="gpu")
            shared[0] = cute.arch.load(work.iterator + 1 + 2 * which, Int32, sem="relaxed", scope="gpu")
        cute.arch.sync_threads()
        return self.scale_of(shared[0], epsilon, most)

    def get(self, of: Any, words: Any, hint: Any) -> None:
        """See `TileQuantizer.get`."""
        cute.copy(cute.make_copy_atom(CopyG2ROp(), Int32, num_bits_per_copy=128), of, words, cache_policy=hint)

    def put(self, words: Any, to: Any) -> None:
        """See `TileQuantizer.put`; they are the first to leave the L2 cache."""
        ways = {"num_bits_per_copy": 32 * cute.size(words.shape), "store_cache_mode": StoreCacheMode.STREAMING}
        cute.copy(cute.make_copy_atom(CopyR2GOp(), Int32, **ways), words, to)


class ScaledWeights(_Current):
    """FP8 of N weights (rows, columns) with a scale each, as they lie, and the other way round if ``both``."""

    @cute.jit
    def __call__(self, weights, table, rows, columns, work, inverses, epsilon, most, stream: cuda.CUstream):
        """Launch. weights (J, rows, columns / 2) words; table (N,): J of each expert; rows (N, rows, columns / 4); columns
        (N, columns, rows / 4); inverses (N,).
        """
        tiles = cute.ceil_div(weights.shape[1], BLOCK) * cute.ceil_div(2 * weights.shape[2], BLOCK)
        kernel = self.kernel(weights, table, rows, columns, work, inverses, epsilon, most)
        self.launch(kernel, [2 * tiles * table.shape[0], 1, 1], stream, resident=RESIDENT_WEIGHTS)

    @cute.kernel
    def kernel(self, weights, table, rows, columns, work, inverses, epsilon, most):
        """A block of threads for each task."""
        thread, _, _ = cute.arch.thread_idx()
        group, four = thread % 16, thread // 16
        shared = shared_words(WARPS)
        if thread == 0:
            shared[0] = self.next_task(work)
        cute.arch.sync_threads()
        task = shared[0]
        beside = cute.ceil_div(2 * weights.shape[2], BLOCK)
        tiles = cute.ceil_div(weights.shape[1], BLOCK) * beside
        is_magnitude, tile = self.tile_of(task, tiles * table.shape[0], tiles + _BETWEEN_WEIGHTS)
        expert, part, other = tile // tiles, tile % tiles // beside, tile % beside
        place = other * 16 + group
        there = 4 * place < weights.shape[2]
        first, end = part * BLOCK, weights.shape[1]
        value = self.read_for(is_magnitude, weights[table[expert], None, None], first, end, four, place, there)
        cute.arch.sync_threads()  # all have read the task
        if is_magnitude:
            self.add(value, work, expert, shared, thread, cute.arch.lane_idx())
        else:
            scale, inverse = self.wait(tiles, work, expert, shared, thread, epsilon, most)
            if (thread == 0) & (tile % tiles == 0):
                inverses[expert] = inverse
            numbers = self.numbers_of(value, scale)
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


class ScaledRows(_Current):
    """FP8 of rows (T, C), those of each expert with one scale, as they lie, and with tokens side by side if ``both``."""

    @cute.jit
    def __call__(
        self, x, offsets, others, rows, columns, work, inverses, scales, factors, epsilon, most, stream: cuda.CUstream
    ):
        """Launch. x (T, C / 2) words; offsets (N + 1,); others (N,); rows (T, C / 4); columns (C, P / 4); inverses (N,);
        scales (T,); factors (T,): one over the scale, times that of ``others``.
        """
        blocks = x.shape[0] // BLOCK + offsets.shape[0] - 1  # at most
        tasks = 2 * blocks * cute.ceil_div(2 * x.shape[1], BLOCK) + _BETWEEN_ROWS
        kernel = self.kernel(x, offsets, others, rows, columns, work, inverses, scales, factors, epsilon, most)
        self.launch(kernel, [tasks, 1, 1], stream, resident=RESIDENT_WEIGHTS)

    @cute.kernel
    def kernel(self, x, offsets, others, rows, columns, work, inverses, scales, factors, epsilon, most):
        """A block of threads for each task; those without one end at once."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        group, four = thread % 16, thread // 16
        shared = shared_words(WARPS)
        beside = cute.ceil_div(2 * x.shape[1], BLOCK)
        self.find(work, beside, offsets, shared, thread, lane)
        task, is_magnitude, expert, tile, tiles, before = [shared[place] for place in range(_DONE)]
        if task == 0:
            self.write_those_of_none(offsets, inverses, thread, epsilon, most)
        if tiles > 0:
            begin, end = offsets[expert], offsets[expert + 1]
            block, part = tile // beside, tile % beside
            first, place = begin + block * BLOCK, part * 16 + group
            there = 4 * place < x.shape[1]
            value = self.read_for(is_magnitude != 0, x, first, end, four, place, there)
            cute.arch.sync_threads()  # all have read the task
            if is_magnitude != 0:
                self.add(value, work, expert, shared, thread, lane)
            else:
                scale, inverse = self.wait(tiles, work, expert, shared, thread, epsilon, most)
                if (thread == 0) & (tile == 0):
                    inverses[expert] = inverse
                if (part == 0) & (thread < BLOCK) & (first + thread < end):
                    scales[first + thread] = scale
                    factors[first + thread] = inverse * others[expert]
                numbers = self.numbers_of(value, scale)
                self.write(rows, numbers, first, end, four, place, there)
                if const_expr(self.both):
                    turned = self.turned(numbers, group, four)
                    first_word, last_word = (before // beside + block) * 32, Int32(columns.shape[1])
                    self.write_turned(turned, columns, thread, part * BLOCK, columns.shape[0], first_word, last_word)

    @cute.jit
    def find(self, work, beside, offsets, shared, thread, lane):
        """Take a task, and leave in shared memory: its number, whether it is of a magnitude, its expert, the tile among
        those of the expert, how many these are (0: there is no task), and how many the experts before it have. Each thread
        looks at some experts.

        Magnitudes are in order, and after the last one of an expert and `_BETWEEN_ROWS` more come that expert's numbers.
        With E tiles of experts up to one, its own S among them, these are the S tasks from 2 E - S + `_BETWEEN_ROWS` on.
        """
        totals = shared_words(WARPS)
        if thread == 0:
            shared[_TASK] = self.next_task(work)
            shared[_TILES] = 0
            shared[_DONE] = 0
        before, experts = Int32(0), Int32(offsets.shape[0]) - 1
        for begin in cutlass.range(0, experts, THREADS):
            expert = begin + thread
            start, stop = offsets[cutlass.min(expert, experts)], offsets[cutlass.min(expert + 1, experts)]
            mine = (stop - start + BLOCK - 1) // BLOCK * beside
            upto, before = sums_up_to(mine, before, totals, thread, lane)
            task = shared[_TASK]
            numbers = 2 * upto - mine + _BETWEEN_ROWS
            if (numbers <= task) & (task < numbers + mine):
                self.tell(shared, 0, expert, task - numbers, mine, upto - mine)
            ended = cute.arch.popc(cute.arch.vote_ballot_sync(numbers + mine <= task))  # of the warp's first experts
            if (ended > 0) & (lane == ended - 1):
                cute.arch.atomic_max(shared.iterator + _DONE, upto, sem="relaxed", scope="cta")
            cute.arch.sync_threads()
            magnitude = task - shared[_DONE]
            if (shared[_TILES] == 0) & (upto - mine <= magnitude) & (magnitude < upto):
                self.tell(shared, 1, expert, magnitude - upto + mine, mine, upto - mine)
        cute.arch.sync_threads()

    @cute.jit
    def tell(self, shared, is_magnitude, expert, tile, tiles, before):
        """By the one thread whose expert a task is of."""
        shared[_TASK + 1] = is_magnitude
        shared[_TASK + 2] = expert
        shared[_TASK + 3] = tile
        shared[_TILES] = tiles
        shared[_TILES + 1] = before

    @cute.jit
    def write_those_of_none(self, offsets, inverses, thread, epsilon, most):
        """One over the scale of each expert without rows."""
        _, inverse = self.scale_of(Int32(0), epsilon, most)
        for expert in cutlass.range(thread, Int32(offsets.shape[0]) - 1, THREADS):
            if offsets[expert] == offsets[expert + 1]:
                inverses[expert] = inverse
