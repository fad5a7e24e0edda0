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
from cutlass import Float32, Int32, Int64, const_expr
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import EpiOp, EpiSmemBytes
from quack.tile_scheduler import WorkTileInfo

from te_offload.fused.kernels.sm90_apart import wait_for_own
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
    relu,
    squared_relu,
)
from te_offload.fused.kernels.sm90_experts import ByExpert, GradsByTable, WeightsByTable
from te_offload.fused.kernels.sm90_fp8_device import PaddedColumns
from te_offload.fused.kernels.sm90_order import RowsTogether
from te_offload.fused.kernels.sm90_sums import SplitSums, lane_of, of_rows

BLOCK = 128
SCALE_TABLE = "scale_table"


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


class _Columns(_Argument):
    """Scales of a tile's columns, which threads find in shared memory: of each of four lanes 32, which are padded so that
    all banks are used, of two tiles of K, of two turns and two warp groups.
    """

    _LAYOUT = (32, 4, 2, 2, 2), (1, 36, 144, 288, 576)
    _SIZE = 1152

    def smem_bytes(self, arg_tensor: Any, cta_tile_shape_mnk: Any, epi_tile: Any, warp_shape_mnk: Any = None) -> Any:
        """QuACK's."""
        return EpiSmemBytes(unstaged=4 * self._SIZE)

    def smem_struct_field(self, gemm: Any, params: Any) -> Any:
        """QuACK's."""
        return f"s_{self.name}", cute.struct.Align[cute.struct.MemRange[Float32, self._SIZE], 16]

    def get_smem_tensor(self, gemm: Any, params: Any, storage_epi: Any) -> Any:
        """QuACK's."""
        return getattr(storage_epi, f"s_{self.name}").get_tensor(
            cute.make_layout(self._LAYOUT[0], stride=self._LAYOUT[1])
        )


@cute.jit
def row_of(coords, m: cutlass.Constexpr, second):
    """The fragment's first row of two in its tile, or the second one."""
    return Int32(cutlass.select_(second > 0, coords[(0, 1, 0), m, 0][0], coords[(0, 0, 0), m, 0][0]))


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
    def advance(self, places, step):
        """See `SplitSums`. Places begin with addresses, and what lies between the scales of two tiles of K at each."""
        addresses, strides = places[:2]
        for i in cutlass.range_constexpr(cute.size(addresses)):
            addresses[i] = addresses[i] + Int64(step * strides[i]) * 4

    @cute.jit
    def load(self, found, acc, places):
        """See `SplitSums`."""
        addresses = places[0]
        for i in cutlass.range_constexpr(cute.size(addresses)):
            found[i] = cute.make_ptr(Float32, addresses[i], cute.AddressSpace.gmem, assumed_align=4).load()

    @cute.jit
    def add(self, acc, acc_slow, factors):
        """A fragment is ((2, 2, columns / 8), rows / 64, columns / 128): its rows are the second number of the first mode,
        and the second mode.
        """
        by_row, by_column = factors  # each row's is for all columns, or for a group of eight
        for m in cutlass.range_constexpr(cute.size(acc.shape, mode=[1])):
            for n in cutlass.range_constexpr(cute.size(acc.shape, mode=[2])):
                for j in cutlass.range_constexpr(cute.size(acc.shape[0][2])):
                    for r in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            at = ((i, r, j), m, n)
                            if const_expr(by_column is None):
                                acc_slow[at] = acc_slow[at] + acc[at] * by_row[r, m, j]
                            else:
                                acc_slow[at] = acc_slow[at] + acc[at] * (by_row[r, m] * by_column[i, j, n])


class RowScales(_Scaled, WeightsByTable):
    """A's are by row; B's one a tile that is a block, in a wider one of each half of a block."""

    _beside = (*_Scaled._beside, SCALE_TABLE)
    _widths: tuple[int, ...] = (BLOCK, BLOCK + BLOCK // 2)

    def count(self, acc: Any) -> Any:
        """Those of a lane's row, and the weights'."""
        _, columns, depth = self.cta_tile_shape_mnk
        assert columns in self._widths, f"tiles have {self._widths} columns"
        assert depth == BLOCK and not self.pingpong, "a tile of K is a block, and both warp groups share a tile"
        return cute.size(acc.shape, mode=[1]) + self._parts()

    def _parts(self) -> int:
        columns = self.cta_tile_shape_mnk[1]
        return 1 if columns == BLOCK else columns // (BLOCK // 2)

    @cute.jit
    def places(self, acc, coords):
        """Of the lane's row of the fragment in A, and of B's parts, for its one of two tiles of K."""
        tile = self._noted.tile
        a_scales, b_scales, starts, scale_table = self._noted.operand.more
        begin = starts[tile[3]] + tile[0] * self.cta_tile_shape_mnk[0]
        last = starts[tile[3] + 1] - 1
        one, second = lane_of()
        own = cutlass.min(one, a_scales.shape[0] - 1)
        addresses, strides = cute.make_rmem_tensor((self.count(acc),), Int64), []
        count, blocks = const_expr(cute.size(acc.shape, mode=[1])), self.blocks()
        for m in cutlass.range_constexpr(count):
            row = cutlass.min(begin + row_of(coords, m, second), last)
            addresses[m] = (a_scales.iterator + (row + own * Int32(a_scales.stride[0]))).toint()
            strides.append(Int32(a_scales.stride[0]))
        scales, stride = b_scales[scale_table[tile[3]], 0, None].iterator, Int32(b_scales.stride[1])
        for i in cutlass.range_constexpr(len(blocks)):
            block = cutlass.min(blocks[i], b_scales.shape[1] - 1)
            addresses[count + i] = (scales + (block * stride + own)).toint()
            strides.append(Int32(1))
        return addresses, strides, self.more_places()

    def more_places(self) -> Any:
        """What a subclass's `factors` needs of a tile."""
        return None

    @cute.jit
    def blocks(self):
        """Of the tile's columns, part by part: which of a weight's scales they have."""
        tile, parts = self._noted.tile[1], const_expr(self._parts())
        return [(tile * parts + i) // min(parts, 2) for i in range(parts)]

    def prepare(self, acc: Any, found: Any) -> Any:
        """Of both tiles of K, of each row and part of the columns: both inverse scales."""
        count = cute.size(acc.shape, mode=[1])
        return of_rows([found[m] * found[count + part] for part in range(self._parts()) for m in range(count)])

    @cute.jit
    def factors(self, acc, prepared, one, places):
        """Of one tile of K: of each row, and of each group of eight columns."""
        parts, rows = const_expr(self._parts()), const_expr(cute.size(acc.shape, mode=[1]))
        groups = const_expr(cute.size(acc.shape[0][2]))
        shape = (2, rows, (groups // parts, parts))
        return cute.make_tensor(prepared[one].iterator, cute.make_layout(shape, stride=(1, 2, (0, 2 * rows)))), None


class BothScales(_Scaled, GradsByTable):
    """A's are by row, B's by column: a warp group's threads load a column each, and find all of theirs in shared memory."""

    def count(self, acc: Any) -> Any:
        """Those of a lane's row, and of both tiles of K a column's."""
        assert self.cta_tile_shape_mnk[1:] == (BLOCK, BLOCK) and not self.pingpong, "a column a thread"
        return cute.size(acc.shape, mode=[1]) + 2

    def epi_get_smem_tensors(self, params: Any, storage: Any) -> Any:
        """QuACK's."""
        found = super().epi_get_smem_tensors(params, storage)  # type: ignore[misc]
        self._columns = found["b_scales"]
        return found

    @cute.jit
    def places(self, acc, coords):
        """Of the lane's row of the fragment, for its one of two tiles of K, and of the thread's column, for both."""
        tile = self._noted.tile
        a_scales, b_scales, starts = self._noted.operand.more
        row, column = tile[0] * self.cta_tile_shape_mnk[0], tile[1] * self.cta_tile_shape_mnk[1]
        first, end = starts[tile[3]] // BLOCK, a_scales.shape[0] - 1  # an expert without tokens has no block
        one, second = lane_of()
        addresses, strides = cute.make_rmem_tensor((self.count(acc),), Int64), []
        count, stride = const_expr(cute.size(acc.shape, mode=[1])), Int32(a_scales.stride[0])
        for m in cutlass.range_constexpr(count):
            within = cutlass.min(row + row_of(coords, m, second), a_scales.shape[1] - 1)
            addresses[m] = (a_scales.iterator + (within + cutlass.min(first + one, end) * stride)).toint()
            strides.append(stride)
        thread, _, _ = cute.arch.thread_idx()
        stride, column = Int32(b_scales.stride[0]), cutlass.min(column + thread % BLOCK, b_scales.shape[1] - 1)
        for i in cutlass.range_constexpr(2):
            addresses[count + i] = (b_scales.iterator + (column + cutlass.min(first + i, end) * stride)).toint()
            strides.append(stride)
        return addresses, strides, self.shared_of(thread)

    @cute.jit
    def shared_of(self, thread):
        """Where in shared memory the thread's column is written, and where its columns are read, in bytes, of the second of
        two turns; and what leads to the other one.
        """
        group, column = thread // BLOCK, thread % BLOCK
        place = column // 8 * 2 + column % 2  # each of four lanes has its columns beside each other: two of every eight
        found = cute.make_rmem_tensor((3,), Int32)
        base = self._columns.iterator.toint()
        found[0] = base + 4 * self._columns.layout((place, column % 8 // 2, 0, 1, group))
        found[1] = base + 4 * self._columns.layout((0, thread % 4, 0, 1, group))
        found[2] = -4 * self._columns.stride[3]
        return found

    @cute.jit
    def own(self, address, one: cutlass.Constexpr, align: cutlass.Constexpr):
        """Of one of two tiles of K, at an address."""
        at = address + 4 * one * self._columns.stride[2]
        return cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=align)

    def prepare(self, acc: Any, found: Any) -> Any:
        """Of both tiles of K each row's, and the column's."""
        count = cute.size(acc.shape, mode=[1])
        return of_rows([found[m] for m in range(count)]), (found[count], found[count + 1])

    @cute.jit
    def publish(self, prepared, places):
        """The column's, in the other turn's place."""
        shared = places[2]
        shared[0] = shared[0] + shared[2]
        shared[1] = shared[1] + shared[2]
        shared[2] = -shared[2]
        for one in cutlass.range_constexpr(2):
            self.own(shared[0], one, 4).store(prepared[1][one])
        thread, _, _ = cute.arch.thread_idx()
        wait_for_own(thread // BLOCK)

    @cute.jit
    def factors(self, acc, prepared, one, places):
        """Of each row, and of each column."""
        groups, parts = const_expr(cute.size(acc.shape[0][2])), const_expr(cute.size(acc.shape, mode=[2]))
        found = cute.make_rmem_tensor((2, groups, parts), Float32)
        own = cute.make_tensor(self.own(places[2][1], one, 16), cute.make_layout(cute.size(found)))
        cute.autovec_copy(own, cute.make_tensor(found.iterator, own.layout))
        return prepared[0][one], found


def _dact(acc: Any, c: Any, scale: Any, clamp: Any = None, inverse: Any = None) -> dict[str, Any]:
    square, slope = squared_relu(relu(c), clamp, inverse)
    return {"D": acc * scale * slope, "dscale": (square, acc)}


_STARTS = _Argument("starts", Int32, 1)
BY_ROW = (
    _Argument("a_scales", Float32, 2),
    _Argument("b_scales", Float32, 3),
    _STARTS,
    _Argument(SCALE_TABLE, Int32, 1),
)
WGRAD_ARGUMENTS = _Argument("a_scales", Float32, 2), _Columns("b_scales", Float32, 2), _STARTS


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
