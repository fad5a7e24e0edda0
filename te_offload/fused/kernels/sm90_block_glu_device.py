"""Hopper's grouped GEMMs in FP8 by blocks with a gated activation, as classes of QuACK's GEMM in CuTe DSL; see
`sm90_block_device`.

In: nothing when imported. Out: kernel classes, which `sm90_block_glu` compiles and launches. Keeps true: as
`sm90_block_device`; pairs as in `sm90_glu_device`. Does not: launch, quantize, or choose tiles. Needs quack-kernels.

FC1's tile of 128 columns of pairs are 64 of each half, which lie in two blocks of its weights' scales where each half is
one block of columns, and in one block where the halves alternate. A wider one has parts of 32 columns of each half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from quack.epilogue.math import Pair
from quack.epilogue.ops import Scalar

from te_offload.fused.kernels.interface import Gate
from te_offload.fused.kernels.sm90_block_device import BY_ROW, RowScales
from te_offload.fused.kernels.sm90_device import BIAS, COLUMN, DSCALE, ROW, SCALE, linear, make_kernel
from te_offload.fused.kernels.sm90_glu_device import KINDS, Halves, Paired
from te_offload.fused.kernels.sm90_order import RowsTogether
from te_offload.fused.kernels.sm90_sums import of_rows, of_tiles

HALF_TILE = 64
"""Columns of each half in a tile of FC1's, of which a half is a multiple where it is one block of columns."""


class PairedRowScales(Paired, RowScales):
    """As `RowScales`, where B's rows are pairs: their first and second numbers have a scale each."""

    def make_tma_load_atoms_and_tensors(self, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        return super().make_tma_load_atoms_and_tensors(a, self.paired(b, 0), *args, **kwargs)

    def count(self, acc: Any) -> Any:
        """Those of a thread's rows, and of both halves of the weights: of a wide tile's columns two blocks each."""
        parts = self._parts()
        return super().count(acc) - parts + 2 * (1 if parts == 1 else 2)

    @cute.jit
    def blocks(self):
        """As of `RowScales`, of the first and second half each: the first one, and if the tile is wide the next."""
        firsts = [begin // per_block for begin, per_block in self.begins()]
        return firsts if const_expr(self._parts() == 1) else [*firsts, *(first + 1 for first in firsts)]

    @cute.jit
    def begins(self):
        """Of both halves: which part of its columns is the tile's first one, and how many parts a block has."""
        parts, tile = const_expr(self._parts()), self._noted.tile[1]
        of_tile = tile * parts
        if const_expr(self.te_offload_interleave):
            per_block = const_expr(min(parts, 2))  # whose columns are of both halves
            return (of_tile, per_block), (of_tile, per_block)
        per_block = const_expr(2 * min(parts, 2))
        before = self._noted.operand.more[1].shape[1] * min(parts, 2)
        return (of_tile, per_block), (of_tile + before, per_block)

    @cute.jit
    def more_places(self):
        """Of both halves: how many parts of the tile's columns are in the first block."""
        found = cute.make_rmem_tensor((2,), Int32)
        if const_expr(self._parts() > 1):
            for half, (begin, per_block) in enumerate(self.begins()):
                found[half] = per_block - begin % per_block
        return found

    def prepare(self, acc: Any, found: Any) -> Any:
        """Of both tiles of K: each row's, and those of the first and second columns of pairs, block by block."""
        count = cute.size(acc.shape, mode=[1])
        of_columns = [found[i] for i in range(count, self.count(acc))]
        return of_rows([found[m] for m in range(count)]), of_tiles(of_columns)

    @cute.jit
    def factors(self, acc, prepared, one, places):
        """Of each row, and of the first and second columns of pairs, part by part."""
        groups, parts = const_expr(cute.size(acc.shape[0][2])), const_expr(self._parts())
        own, in_first = prepared[1][one], places[-1]
        found = cute.make_rmem_tensor((2, parts), Float32)
        for half in cutlass.range_constexpr(2):
            found[half, 0] = own[half, 0]
            for part in cutlass.range_constexpr(1, parts):
                found[half, part] = Float32(cutlass.select_(in_first[half] > part, own[half, 0], own[half, 1]))
        shape = (2, (groups // parts, parts), cute.size(acc.shape, mode=[2]))
        return prepared[0][one], cute.make_tensor(found.iterator, cute.make_layout(shape, stride=(1, (0, 2), 0)))


def _dact(halves: Callable[..., Halves]) -> Callable[..., dict[str, Any]]:
    def epilogue(acc: Any, c: Any, scale: Any, **numbers: Any) -> dict[str, Any]:
        gate, dgate, linear_, dlinear = halves(c[0], c[1], **numbers)
        grad = acc * scale
        return {"D": Pair(grad * linear_ * dgate, grad * gate * dlinear), "dscale": (gate * linear_, acc)}

    return epilogue


def _make(name: str, *args: Any, **kwargs: Any) -> type[Any]:
    kernel = globals()[name] = make_kernel(name, *args, **kwargs, module=__name__)
    return kernel


PairedBlockGemm = _make("PairedBlockGemm", linear, ops=BY_ROW, by_table=PairedRowScales, mixins=(RowsTogether,))
PairedBlockBiasGemm = _make(
    "PairedBlockBiasGemm",
    linear,
    ops=(*BY_ROW, BIAS),
    operands=(ROW,),
    by_table=PairedRowScales,
    mixins=(RowsTogether,),
)
"""``D = A @ w.T``, plus a bias an expert, w and D in pairs: FC1."""


def dact_name(gate: Gate) -> str:
    """Name of the kernel class of FC2's dgrad with the activation's: ``C`` is the activation's input, ``D`` its gradient,
    both in pairs.
    """
    return f"BlockD{gate.value}Gemm"


for _gate, (_halves, _numbers) in KINDS.items():
    _make(
        dact_name(_gate),
        _dact(_halves),
        ops=(*BY_ROW, SCALE, *(Scalar(_number) for _number in _numbers), DSCALE),
        operands=(("c", "c"), COLUMN, *((_number, "scalar") for _number in _numbers)),
        sinks=("dscale",),
        by_table=RowScales,
    )._epi_mod_packed_cd = True
