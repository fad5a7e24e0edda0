"""Hopper's grouped GEMMs in FP8 by blocks, as classes of QuACK's GEMM in CuTe DSL; see `sm90_device`.

In: nothing when imported. Out: kernel classes, which `sm90_blocks` compiles and launches. Keeps true: both operands lie
along K; a tile's K is a block; what tensor cores add up over it is multiplied by both operands' inverse scales and added in
float32, as cuBLAS does with ``use_split_accumulator``. Does not: launch, quantize, or choose tiles. Needs quack-kernels.

``a_scales`` are (K / 128, T) by row, or (blocks, rows) of a weight gradient; ``b_scales`` (J, columns / 128, K / 128),
through ``scale_table`` as the weights go through theirs, or (blocks, columns). ``starts`` (N + 1,) are the experts' first
tokens, padded ones where they lie along K.

QuACK's main loop knows neither which tile it works on nor the epilogue's arguments. So scales go into the kernel with
operand B, which is an object of ours anyway (see `sm90_device`), and the tile's place is noted when the loop over tiles
asks for it, which is in the same region of code as the main loop that follows.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import EpiOp
from quack.tile_scheduler import WorkTileInfo

from te_offload.fused.kernels.sm90_device import (
    BIAS,
    CLAMP,
    COLUMN,
    DSCALE,
    NUMBERS,
    ROW,
    SCALE,
    linear,
    make_kernel,
    squared_relu,
)
from te_offload.fused.kernels.sm90_experts import ByExpert, GradsByTable, WeightsByTable
from te_offload.fused.kernels.sm90_fp8_device import PaddedColumns
from te_offload.fused.kernels.sm90_order import RowsTogether
from te_offload.fused.kernels.sm90_sums import SplitSums

BLOCK = 128
SCALE_TABLE = "scale_table"
_WARP = 32


class _Noted:
    """Of one kernel while it is traced: operand B as the kernel has it, and the tile that its main loop works on next."""

    def __init__(self) -> None:
        self.in_kernel = False
        self.operand: Any = None
        self.tile: Any = None


class _Work(WorkTileInfo):  # type: ignore[misc]
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
    """B, which may go through a table of its own, with more tensors beside it."""

    def __init__(self, tensor: Any, more: list[Any], noted: _Noted) -> None:
        super().__init__(tensor, None)
        self.more = more
        self._noted = noted
        if noted.in_kernel and noted.operand is None:
            noted.operand = self

    def __getitem__(self, place: Any) -> Any:
        return self._tensor[place]

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for one in (self._tensor, *self.more) for value in cutlass.extract_mlir_values(one)]

    def __new_from_mlir_values__(self, values: list[Any]) -> _Operand:
        parts, begin = [], 0
        for one in (self._tensor, *self.more):
            count = len(cutlass.extract_mlir_values(one))
            parts.append(cutlass.new_from_mlir_values(one, values[begin : begin + count]))
            begin += count
        return _Operand(parts[0], parts[1:], self._noted)


class _Argument(EpiOp):  # type: ignore[misc]
    """Brings a tensor into the kernel's parameters; no epilogue reads it."""

    def __init__(self, name: str, dtype: Any, rank: int) -> None:
        super().__init__(name)
        self._dtype, self._rank = dtype, rank

    def config_key(self) -> Any:
        return self._dtype.__name__, self._rank

    def fake(self) -> Any:
        shape = tuple(cute.sym_int() for _ in range(self._rank))
        return make_fake_tensor(self._dtype, shape, leading_dim=self._rank - 1, divisibility=1)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        return self.fake()

    def param_fields(self) -> list[Any]:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        return {self.name: getattr(args, self.name)}


class _Scaled(SplitSums):
    """What is added is scaled."""

    _beside: tuple[str, ...] = ("a_scales", "b_scales", "starts")

    def _setup_attributes(self, epilogue_args: Any) -> None:
        self._noted = _Noted()
        self._more = [getattr(epilogue_args, name) for name in self._beside]
        super()._setup_attributes(epilogue_args)  # type: ignore[misc]

    def make_tma_load_atoms_and_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        *first, operand = super().make_tma_load_atoms_and_tensors(*args, **kwargs)  # type: ignore[misc]
        found = _Operand(operand, self._more, self._noted)
        self._noted.in_kernel = True
        return (*first, found)

    def get_scheduler_class(self, varlen_m: bool = False) -> Any:
        """QuACK's."""
        noted, base = self._noted, super().get_scheduler_class(varlen_m)  # type: ignore[misc]

        class Scheduler(base):  # type: ignore[misc]
            def get_current_work(self, *, loc: Any = None, ip: Any = None) -> _Work:
                work = super().get_current_work(loc=loc, ip=ip)
                return _Work(work._tile_idx, work._is_valid_tile, noted)

            def initial_work_tile_info(self, *, loc: Any = None, ip: Any = None) -> _Work:
                work = super().initial_work_tile_info(loc=loc, ip=ip)
                return _Work(work._tile_idx, work._is_valid_tile, noted)

        return Scheduler

    @cute.jit
    def add(self, acc, acc_slow, factors):
        """A fragment is ((2, 2, columns / 8), rows / 64, columns / 128): its rows are the second number of the first mode,
        and the second mode.
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
    """A's are by row, B's one a tile."""

    _beside = (*_Scaled._beside, SCALE_TABLE)

    def count(self, acc: Any) -> Any:
        """Scales of a thread for a tile of K: its rows', and the weight's."""
        assert self.cta_tile_shape_mnk[1:] == (BLOCK, BLOCK) and not self.pingpong, "a tile is a block"
        return 2 * cute.size(acc.shape, mode=[1]) + 1

    @cute.jit
    def places(self, acc, coords):
        """Of each row of the fragment in A, and which of B's."""
        tile = self._noted.tile
        _, _, starts, scale_table = self._noted.operand.more
        begin = starts[tile[3]] + tile[0] * self.cta_tile_shape_mnk[0]
        last = starts[tile[3] + 1] - 1
        count = const_expr(cute.size(acc.shape, mode=[1]))
        rows = cute.make_rmem_tensor((2, count), Int32)
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                rows[r, m] = cutlass.min(begin + coords[(0, r, 0), m, 0][0], last)
        return rows, scale_table[tile[3]]

    @cute.jit
    def load(self, found, acc, places, k_tile):
        """Begin to load those of a tile of K."""
        rows, weight = places
        a_scales, b_scales, _, _ = self._noted.operand.more
        count = const_expr(cute.size(acc.shape, mode=[1]))
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                found[2 * m + r] = a_scales[k_tile, rows[r, m]]
        found[2 * count] = b_scales[weight, self._noted.tile[1], k_tile]

    @cute.jit
    def factors(self, acc, now):
        """Of each row: both inverse scales."""
        count = const_expr(cute.size(acc.shape, mode=[1]))
        found = cute.make_rmem_tensor((2, count), Float32)
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                found[r, m] = now[2 * m + r] * now[2 * count]
        return found, None


class BothScales(_Scaled, GradsByTable):
    """A's are by row, B's by column. A warp's lanes load a column each and ask each other for theirs."""

    def count(self, acc: Any) -> Any:
        """Scales of a thread for a tile of K: its rows', and a share of the columns'."""
        assert self.cta_tile_shape_mnk[2] == BLOCK and not self.pingpong, "K of a tile is a block's"
        assert self.cta_tile_shape_mnk[1] % _WARP == 0, "a warp's lanes share the columns"
        return 2 * cute.size(acc.shape, mode=[1]) + self.cta_tile_shape_mnk[1] // _WARP

    @cute.jit
    def places(self, acc, coords):
        """Of each row of the fragment and of the lane's columns, within the result, and of the first block."""
        tile = self._noted.tile
        a_scales, b_scales, starts = self._noted.operand.more
        row, column = tile[0] * self.cta_tile_shape_mnk[0], tile[1] * self.cta_tile_shape_mnk[1]
        last_row, last_column = a_scales.shape[1] - 1, b_scales.shape[1] - 1
        count, shares = const_expr(cute.size(acc.shape, mode=[1])), const_expr(self.cta_tile_shape_mnk[1] // _WARP)
        rows = cute.make_rmem_tensor((2, count), Int32)
        columns = cute.make_rmem_tensor((shares,), Int32)
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                rows[r, m] = cutlass.min(row + coords[(0, r, 0), m, 0][0], last_row)
        for share in cutlass.range_constexpr(shares):
            columns[share] = cutlass.min(column + _WARP * share + cute.arch.lane_idx(), last_column)
        return rows, columns, starts[tile[3]] // BLOCK

    @cute.jit
    def load(self, found, acc, places, k_tile):
        """Begin to load those of a tile of K."""
        a_scales, b_scales, _ = self._noted.operand.more
        rows, columns, first = places
        block = cutlass.min(first + k_tile, a_scales.shape[0] - 1)  # an expert without tokens has none
        count, shares = const_expr(cute.size(acc.shape, mode=[1])), const_expr(self.cta_tile_shape_mnk[1] // _WARP)
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                found[2 * m + r] = a_scales[block, rows[r, m]]
        for share in cutlass.range_constexpr(shares):
            found[2 * count + share] = b_scales[block, columns[share]]

    @cute.jit
    def factors(self, acc, now):
        """Of each row, and of each column, from the lane that has it."""
        count, parts = const_expr(cute.size(acc.shape, mode=[1])), const_expr(cute.size(acc.shape, mode=[2]))
        groups = const_expr(cute.size(acc.shape[0][2]))
        by_row = cute.make_rmem_tensor((2, count), Float32)
        by_column = cute.make_rmem_tensor((2, groups, parts), Float32)
        pair = 2 * (cute.arch.lane_idx() % 4)  # a thread has two neighbours of each group of 8 columns
        for m in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                by_row[r, m] = now[2 * m + r]
        for n in cutlass.range_constexpr(parts):
            for j in cutlass.range_constexpr(groups):
                for i in cutlass.range_constexpr(2):
                    column = const_expr(8 * (n * groups + j))
                    share = now[2 * count + column // _WARP]
                    by_column[i, j, n] = cute.arch.shuffle_sync(share, column % _WARP + pair + i)
        return by_row, by_column


def _dact(acc: Any, c: Any, scale: Any, clamp: Any = None, inverse: Any = None) -> dict[str, Any]:
    square, slope = squared_relu(c, clamp, inverse)
    return {"D": acc * scale * slope, "dscale": (square, acc)}


_STARTS = _Argument("starts", Int32, 1)
BY_ROW = (
    _Argument("a_scales", Float32, 2),
    _Argument("b_scales", Float32, 3),
    _STARTS,
    _Argument(SCALE_TABLE, Int32, 1),
)
WGRAD_ARGUMENTS = _Argument("a_scales", Float32, 2), _Argument("b_scales", Float32, 2), _STARTS


def _make(name: str, *args: Any, **kwargs: Any) -> None:
    globals()[name] = make_kernel(name, *args, **kwargs, module=__name__)


_make("BlockGemm", linear, ops=BY_ROW, by_table=RowScales, mixins=(RowsTogether,))
_make("BlockBiasGemm", linear, ops=(*BY_ROW, BIAS), operands=(ROW,), by_table=RowScales, mixins=(RowsTogether,))
_make(
    "BlockScaledBiasGemm",
    linear,
    ops=(*BY_ROW, BIAS, SCALE),
    operands=(ROW, COLUMN),
    by_table=RowScales,
    mixins=(RowsTogether,),
)
for _adds in (False, True):
    _make(
        f"{'Adding' if _adds else ''}BlockWgradGemm",
        linear,
        ops=WGRAD_ARGUMENTS,
        by_table=BothScales,
        adds=_adds,
        mixins=(PaddedColumns,),
    )
for _with_tanh in (False, True):
    _make(
        f"BlockD{'Tanh' if _with_tanh else ''}SReLUGemm",
        _dact,
        ops=(*BY_ROW, SCALE, *(CLAMP if _with_tanh else ()), DSCALE),
        operands=(("c", "c"), COLUMN, *(NUMBERS if _with_tanh else ())),
        sinks=("dscale",),
        by_table=RowScales,
    )
