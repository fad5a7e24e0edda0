"""Candidates for FP8 by blocks on Hopper: QuACK's GEMM, whose sums over each K tile of 128 are multiplied by block scales.

In: nothing when imported. Out: kernel classes, which `benchmarks.block_products` compiles and launches. Keeps true: both
operands lie along K; a K tile is a block; what tensor cores add up over it is multiplied by both operands' inverse scales
and added in float32. Does not: launch. Needs quack-kernels.

QuACK's main loop knows neither which tile it works on nor the epilogue's arguments. So scales go into the kernel with
operand B, which is an object of ours anyway (see `sm90_device`), and the tile's place is noted when the loop over tiles
asks for it, which is in the same region of code as the main loop that follows.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import EpiOp
from quack.tile_scheduler import WorkTileInfo

from te_offload.fused.kernels.sm90_device import ByExpert, GradsByTable, WeightsByTable, make_kernel
from te_offload.fused.kernels.sm90_fp8_device import _PaddedColumns

BLOCK = 128


class _Noted:
    """Of one kernel while it is traced: operand B as the kernel has it, and the tile that its main loop works on next."""

    def __init__(self) -> None:
        self.in_kernel = False
        self.operand: Any = None
        self.tile: Any = None


class _Work(WorkTileInfo):
    def __init__(self, tile: Any, is_valid: Any, noted: _Noted) -> None:
        super().__init__(tile, is_valid)
        self._noted = noted

    @property
    def tile_idx(self) -> Any:
        self._noted.tile = self._tile_idx
        return self._tile_idx

    def __new_from_mlir_values__(self, values: list[Any]) -> _Work:
        count = len(cutlass.extract_mlir_values(self._tile_idx))
        tile = cutlass.new_from_mlir_values(self._tile_idx, values[:count])
        return _Work(tile, cutlass.new_from_mlir_values(self._is_valid_tile, values[count:]), self._noted)


class _Operand(ByExpert):
    """B, with more tensors beside it."""

    def __init__(self, tensor: Any, table: Any, more: list[Any], noted: _Noted) -> None:
        super().__init__(tensor, table)
        self.more = more
        self._noted = noted
        if noted.in_kernel and noted.operand is None:
            noted.operand = self

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for one in (self._tensor, self._table, *self.more) for value in cutlass.extract_mlir_values(one)]

    def __new_from_mlir_values__(self, values: list[Any]) -> _Operand:
        parts, begin = [], 0
        for one in (self._tensor, self._table, *self.more):
            count = len(cutlass.extract_mlir_values(one))
            parts.append(cutlass.new_from_mlir_values(one, values[begin : begin + count]))
            begin += count
        return _Operand(parts[0], parts[1], parts[2:], self._noted)


class _Direct(_Operand):
    """B of a wgrad, which goes through no table."""

    def __getitem__(self, place: Any) -> Any:
        return self._tensor[place]

    def __new_from_mlir_values__(self, values: list[Any]) -> _Direct:
        found = super().__new_from_mlir_values__(values)
        return _Direct(found._tensor, found._table, found.more, self._noted)


class _Argument(EpiOp):
    """Brings a tensor into the kernel's parameters; no epilogue reads it."""

    def __init__(self, name: str, dtype: Any, rank: int) -> None:
        super().__init__(name)
        self._dtype, self._rank = dtype, rank

    def config_key(self) -> Any:
        return self._dtype.__name__, self._rank

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        shape = tuple(cute.sym_int() for _ in range(self._rank))
        return make_fake_tensor(self._dtype, shape, leading_dim=self._rank - 1, divisibility=1)

    def param_fields(self) -> list[Any]:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        return {self.name: getattr(args, self.name)}


class _Scaled:
    """Mixin before QuACK's GEMM: a main loop with scales."""

    def _setup_attributes(self, epilogue_args: Any) -> None:
        self._noted = _Noted()
        self._more = [getattr(epilogue_args, name) for name in ("x_scales", "w_scales", "starts")]
        super()._setup_attributes(epilogue_args)

    def get_scheduler_class(self, varlen_m: bool = False) -> Any:
        noted, base = self._noted, super().get_scheduler_class(varlen_m)

        class Scheduler(base):
            def get_current_work(self, *, loc: Any = None, ip: Any = None) -> _Work:
                work = super().get_current_work(loc=loc, ip=ip)
                return _Work(work._tile_idx, work._is_valid_tile, noted)

            def initial_work_tile_info(self, *, loc: Any = None, ip: Any = None) -> _Work:
                work = super().initial_work_tile_info(loc=loc, ip=ip)
                return _Work(work._tile_idx, work._is_valid_tile, noted)

        return Scheduler

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
        """In place of QuACK's: one K tile after the other, each scaled."""
        thread, _, _ = cute.arch.thread_idx()
        whole = cute.make_identity_tensor(self.cta_tile_shape_mnk[:2])
        coords = mma_fn.args[0].get_slice(thread).partition_C(whole)
        places = self.places(acc, coords)
        ab_release_state = ab_read_state.clone()
        is_full = Boolean(True)
        if k_tile_cnt > 0:
            is_full = ab_pipeline.consumer_try_wait(ab_read_state)
        acc_slow.fill(0.0)
        for k_tile in cutlass.range(0, k_tile_cnt, unroll=1):
            factors = self.factors(acc, places, k_tile)  # on their way while the tensor cores work
            ab_pipeline.consumer_wait(ab_read_state, is_full)
            mma_fn(A_idx=ab_read_state.index, B_idx=ab_read_state.index, zero_init=Boolean(True))
            ab_read_state.advance()
            is_full = Boolean(True)
            if k_tile + 1 < k_tile_cnt:
                is_full = ab_pipeline.consumer_try_wait(ab_read_state)
            warpgroup.wait_group(0)
            ab_pipeline.consumer_release(ab_release_state)
            ab_release_state.advance()
            self.add(acc, acc_slow, factors)
        if const_expr(self.pingpong):
            self.pingpong_barrier_arrive(1 - warp_group_idx, stage="mma")
        acc.store(acc_slow.load())
        return ab_read_state

    @cute.jit
    def add(self, acc, acc_slow, factors):
        """A fragment is ((2, 2, columns / 8), rows / 64, 1): its rows are the second number of the first mode, and the
        second mode.
        """
        by_row, by_column = factors
        for m in cutlass.range_constexpr(cute.size(acc.shape, mode=[1])):
            for r in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(cute.size(acc.shape, mode=[2])):
                    for j in cutlass.range_constexpr(cute.size(acc.shape[0][2])):
                        for i in cutlass.range_constexpr(2):
                            at = ((i, r, j), m, n)
                            if const_expr(by_column is None):
                                acc_slow[at] = acc_slow[at] + acc[at] * by_row[r, m]
                            else:
                                acc_slow[at] = acc_slow[at] + acc[at] * (by_row[r, m] * by_column[i, j, n])


class RowScales(_Scaled, WeightsByTable):
    """``x_scales`` (K / 128, T), ``w_scales`` (N, columns / 128, K / 128), ``starts`` (N + 1,) int32: first rows."""

    def make_tma_load_atoms_and_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        *first, weights = super().make_tma_load_atoms_and_tensors(*args, **kwargs)
        found = _Operand(weights._tensor, weights._table, self._more, self._noted)
        self._noted.in_kernel = True
        return (*first, found)

    @cute.jit
    def places(self, acc, coords):
        """Of each row of the fragment in x."""
        tile = self._noted.tile
        starts = self._noted.operand.more[2]
        begin = starts[tile[3]] + tile[0] * self.cta_tile_shape_mnk[0]
        last = starts[tile[3] + 1] - 1
        count = const_expr(cute.size(acc.shape, mode=[1]))
        rows = cute.make_rmem_tensor((2, count), Int32)
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                rows[r, m] = cutlass.min(begin + coords[(0, r, 0), m, 0][0], last)
        return rows

    @cute.jit
    def factors(self, acc, rows, k_tile):
        """Of each row: both inverse scales."""
        tile = self._noted.tile
        x_scales, w_scales, _ = self._noted.operand.more
        of_weight = w_scales[tile[3], tile[1], k_tile]
        count = const_expr(cute.size(acc.shape, mode=[1]))
        found = cute.make_rmem_tensor((2, count), Float32)
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                found[r, m] = x_scales[k_tile, rows[r, m]] * of_weight
        return found, None


class BothScales(_Scaled, GradsByTable):
    """``x_scales`` (blocks, rows), ``w_scales`` (blocks, columns), ``starts`` (N + 1,) int32: first padded tokens."""

    def make_tma_load_atoms_and_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        *first, operand = super().make_tma_load_atoms_and_tensors(*args, **kwargs)
        found = _Direct(operand, self._table, self._more, self._noted)
        self._noted.in_kernel = True
        return (*first, found)

    @cute.jit
    def places(self, acc, coords):
        """Of each row and column of the fragment, within the result, and of the first block."""
        tile = self._noted.tile
        x_scales, w_scales, starts = self._noted.operand.more
        row, column = tile[0] * self.cta_tile_shape_mnk[0], tile[1] * self.cta_tile_shape_mnk[1]
        last_row, last_column = x_scales.shape[1] - 1, w_scales.shape[1] - 1
        count, parts = const_expr(cute.size(acc.shape, mode=[1])), const_expr(cute.size(acc.shape, mode=[2]))
        groups = const_expr(cute.size(acc.shape[0][2]))
        rows = cute.make_rmem_tensor((2, count), Int32)
        columns = cute.make_rmem_tensor((2, groups, parts), Int32)
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                rows[r, m] = cutlass.min(row + coords[(0, r, 0), m, 0][0], last_row)
        for n in cutlass.range_constexpr(parts):
            for j in cutlass.range_constexpr(groups):
                for i in cutlass.range_constexpr(2):
                    columns[i, j, n] = cutlass.min(column + coords[(i, 0, j), 0, n][1], last_column)
        return rows, columns, starts[tile[3]] // BLOCK

    @cute.jit
    def factors(self, acc, places, k_tile):
        """Of each row, and of each column."""
        x_scales, w_scales, _ = self._noted.operand.more
        rows, columns, first = places
        block = first + k_tile
        count, parts = const_expr(cute.size(acc.shape, mode=[1])), const_expr(cute.size(acc.shape, mode=[2]))
        groups = const_expr(cute.size(acc.shape[0][2]))
        by_row = cute.make_rmem_tensor((2, count), Float32)
        by_column = cute.make_rmem_tensor((2, groups, parts), Float32)
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                by_row[r, m] = x_scales[block, rows[r, m]]
        for n in cutlass.range_constexpr(parts):
            for j in cutlass.range_constexpr(groups):
                for i in cutlass.range_constexpr(2):
                    by_column[i, j, n] = w_scales[block, columns[i, j, n]]
        return by_row, by_column


def _same(acc: Any) -> dict[str, Any]:
    return {"D": acc}


_STARTS = _Argument("starts", Int32, 1)
BlockGemm = make_kernel(
    "BlockGemm",
    _same,
    ops=(_Argument("x_scales", Float32, 2), _Argument("w_scales", Float32, 3), _STARTS),
    by_table=RowScales,
    module=__name__,
)
BlockWgradGemm = make_kernel(
    "BlockWgradGemm",
    _same,
    ops=(_Argument("x_scales", Float32, 2), _Argument("w_scales", Float32, 2), _STARTS),
    by_table=BothScales,
    mixins=(_PaddedColumns,),
    module=__name__,
)
