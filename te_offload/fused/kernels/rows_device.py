"""Small kernels over rows, in CuTe DSL: offsets of the experts' rows, sums of router-scale gradients with the order of
experts by rows, rows of no expert.

In: nothing when imported. Out: kernel classes, which `sm90_compile` compiles. Keeps true: no number reaches the host; sums
are taken in one order. Does not: need Hopper; or launch. Needs nvidia-cutlass-dsl.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

_WARP = 32
_THREADS = 256
_BLOCKS = 132  # as many as an H200 has SMs; they step through the rows, so any number is right


@cute.jit  # type: ignore[untyped-decorator]
def inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """Of the values of a warp's lanes up to this one."""
    for power in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(value, offset=1 << power, mask_and_clamp=0)
        if lane >= 1 << power:
            value += before
    return value


@cute.jit  # type: ignore[untyped-decorator]
def _clear(out: cute.Tensor, first: Int32) -> None:
    """Set rows from ``first`` on to zero, all blocks together."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    for row in cutlass.range(first + block, out.shape[0], _BLOCKS):
        for column in cutlass.range(thread, out.shape[1], _THREADS):
            out[row, column] = out.element_type(0.0)


class ExpertOffsets:
    """``offsets[i + 1] = min(sum(sizes[: i + 1]), rows of out)``; zero in the rows of ``out`` beyond the last one, and the
    counts behind the offsets.

    sizes (N,) int32 or int64; offsets (N + 1 + counts,) int32, of at most 256 counts; out (T, columns).
    """

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(self, sizes: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream) -> None:
        """Launch."""
        self.kernel(sizes, offsets, out).launch(grid=[_BLOCKS, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel  # type: ignore[untyped-decorator]
    def kernel(self, sizes: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor) -> None:
        """Every warp adds up the sizes; the first one of all writes."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        rows = Int32(out.shape[0])
        count = Int32(sizes.shape[0])
        writes = (block == 0) & (thread < _WARP)
        if (block == 0) & (thread == 0):
            offsets[0] = Int32(0)
        if (block == 0) & (count + 1 + thread < Int32(offsets.shape[0])):
            offsets[count + 1 + thread] = Int32(0)
        end = Int32(0)
        for begin in cutlass.range(0, count, _WARP):
            index = begin + lane
            size = Int32(0)
            if index < count:  # cut first, so that no sum can overflow
                size = Int32(cutlass.min(cutlass.max(Int64(sizes[index]), Int64(0)), Int64(rows)))
            upto = inclusive_sum(size, lane)
            if writes & (index < count):
                offsets[index + 1] = cutlass.min(end + upto, rows)
            end = cutlass.min(end + cute.arch.shuffle_sync(upto, _WARP - 1), rows)
        _clear(out, end)


class ClearRows:
    """Zero in the rows of ``out`` (T, columns) from ``offsets[N]`` on, which belong to no expert."""

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(self, offsets: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream) -> None:
        """Launch."""
        self.kernel(offsets, out).launch(grid=[_BLOCKS, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel  # type: ignore[untyped-decorator]
    def kernel(self, offsets: cute.Tensor, out: cute.Tensor) -> None:
        """See the class."""
        _clear(out, offsets[offsets.shape[0] - 1])


class RowSums:
    """``sums[i]`` of each row of ``parts`` (T, columns) in float32, from left to right; zero from row ``offsets[N]`` on.
    And the first N of ``work``, int32, for weight gradients: the experts, those with most rows first.
    """

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(
        self, parts: cute.Tensor, offsets: cute.Tensor, sums: cute.Tensor, work: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        """Launch."""
        blocks = cute.ceil_div(parts.shape[0], _THREADS)
        self.kernel(parts, offsets, sums, work).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel  # type: ignore[untyped-decorator]
    def kernel(self, parts: cute.Tensor, offsets: cute.Tensor, sums: cute.Tensor, work: cute.Tensor) -> None:
        """A thread for each row, and a warp for each expert, which counts those before it."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        experts = Int32(offsets.shape[0]) - 1
        first = block * (_THREADS // _WARP) + cute.arch.warp_idx()
        for expert in cutlass.range(first, experts, blocks * (_THREADS // _WARP)):
            rows = offsets[expert + 1] - offsets[expert]
            before = Int32(0)
            for begin in cutlass.range(0, experts, _WARP):
                other = begin + lane
                if other < experts:
                    of_other = offsets[other + 1] - offsets[other]
                    before += Int32((of_other > rows) | ((of_other == rows) & (other < expert)))
            before = cute.arch.warp_reduction_sum(before)
            if lane == 0:
                work[before] = expert
        row = block * _THREADS + thread
        if row < parts.shape[0]:
            total = Float32(0.0)
            if row < offsets[offsets.shape[0] - 1]:
                for column in cutlass.range(parts.shape[1]):
                    total += parts[row, column]
            sums[row] = total


KERNELS: dict[str, Any] = {"offsets": ExpertOffsets, "clear": ClearRows, "sums": RowSums}
