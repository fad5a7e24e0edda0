"""Hopper's grouped FP8 GEMMs, as classes of QuACK's GEMM in CuTe DSL; see `sm90_device`.

In: nothing when imported. Out: kernel classes, which `sm90_fp8` compiles and launches. Keeps true: both operands lie along
K; sums are of float32, or of Hopper's FP8 accumulators alone where that is asked for; a result is multiplied by its
operands' inverse scales before anything else. Does not: launch, quantize, or choose tiles. Needs quack-kernels.

Hopper's tensor cores add up FP8 products with 14 bits or so. ``Split`` kernels move each sum over a tile's K (128) into
float32, as cuBLAS does for ``use_split_accumulator``; the others leave it to the tensor cores until the end. ``Given`` ones
know the scale of FC2's input beforehand, as delayed scaling has it, and store that in FP8 too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from cutlass import BFloat16, Float16, Float32
from quack.epilogue.ops import ColVecReduce, Scalar, TileStore

from te_offload.fused.kernels.sm90_device import make_kernel, relu, rounded_relu, squared_relu
from te_offload.fused.kernels.sm90_experts import Column, ExpertRow, GradsByTable
from te_offload.fused.kernels.sm90_order import RowsTogether
from te_offload.fused.kernels.sm90_sums import SplitSums


class _FastSums:
    """Mixin before QuACK's GEMM: sums stay in the tensor cores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, fp8_fast_accum=True)  # type: ignore[call-arg]


class PaddedColumns:
    """Mixin before QuACK's GEMM: each expert's part of K begins at a multiple of a tile and ends with zeros, so that no
    tile holds two experts' numbers; QuACK's own way would need steps of one element, which TMA has not for 8 bits.
    """

    def make_tma_load_atoms_and_tensors(
        self, a: Any, b: Any, a_layout: Any, b_layout: Any, varlen_k: bool, **kwargs: Any
    ) -> Any:
        """QuACK's."""
        return super().make_tma_load_atoms_and_tensors(a, b, a_layout, b_layout, False, **kwargs)  # type: ignore[misc]


def _linear(acc: Any, factor: Any, bias: Any = None, scale: Any = None) -> dict[str, Any]:
    found = acc * factor
    if bias is None:
        return {"D": found}
    return {"D": found + bias if scale is None else found + bias * scale}


def _fc1(dtype: Any, *, given: bool) -> Callable[..., dict[str, Any]]:
    def epilogue(
        acc: Any,
        factor: Any,
        scale: Any,
        fp8_scale: Any = None,
        bias: Any = None,
        clamp: Any = None,
        inverse: Any = None,
    ) -> dict[str, Any]:
        act_input = acc * factor if bias is None else acc * factor + bias
        square, _ = squared_relu(rounded_relu(act_input, dtype), clamp, inverse)
        fc2_input = square * scale
        found = {"D": act_input, "magnitude": fc2_input}
        return {**found, "fc2_input": fc2_input.to(dtype).to(Float32) * fp8_scale} if given else found

    return epilogue


def _dact(acc: Any, c: Any, factor: Any, scale: Any, clamp: Any = None, inverse: Any = None) -> dict[str, Any]:
    square, slope = squared_relu(relu(c), clamp, inverse)
    grad = acc * factor
    dact_input = grad * scale * slope
    return {"D": dact_input, "dscale": (square, grad), "magnitude": dact_input}


FACTOR, SCALE, BIAS = Column("factor"), Column("scale"), ExpertRow("bias")
_FP8_SCALE, _FC2_INPUT = Column("fp8_scale"), TileStore("fc2_input")
_CLAMP = Scalar("clamp"), Scalar("inverse")
_NUMBERS = ("clamp", "scalar"), ("inverse", "scalar")
MAGNITUDE, DSCALE = ColVecReduce("magnitude", combine="max_abs"), ColVecReduce("dscale", scaled=True)
COLUMNS, ROW = (("factor", "col"), ("scale", "col")), ("bias", "row")


def _make(name: str, *args: Any, **kwargs: Any) -> None:
    globals()[name] = make_kernel(name, *args, **kwargs, module=__name__)


SUMS = {False: SplitSums, True: _FastSums}  # by whether sums stay in the tensor cores
for _fast in (False, True):
    _mixins = (SUMS[_fast],)
    _way = "Fast" if _fast else "Split"
    _make(f"{_way}Gemm", _linear, ops=(FACTOR,), operands=COLUMNS[:1], mixins=(RowsTogether, *_mixins))
    _make(
        f"{_way}BiasGemm",
        _linear,
        ops=(BIAS, FACTOR),
        operands=(ROW, *COLUMNS[:1]),
        mixins=(RowsTogether, *_mixins),
    )
    _make(
        f"{_way}ScaledBiasGemm",
        _linear,
        ops=(BIAS, FACTOR, SCALE),
        operands=(ROW, *COLUMNS),
        mixins=(RowsTogether, *_mixins),
    )
    for _adds in (False, True):
        _make(
            f"{_way}{'Adding' if _adds else ''}WgradGemm",
            _linear,
            ops=(ExpertRow("factor"),),
            operands=(("factor", "row"),),
            by_table=GradsByTable,
            adds=_adds,
            mixins=(PaddedColumns, *_mixins),
        )
    for _with_tanh in (False, True):
        _tanh = "Tanh" if _with_tanh else ""
        for _dtype_name, _dtype in (("BF16", BFloat16), ("FP16", Float16)):
            for _with_bias, _given in itertools.product((False, True), (False,) if _with_tanh else (False, True)):
                _make(
                    f"{_way}{'Given' if _given else ''}{'Bias' if _with_bias else ''}{_tanh}SReLUGemm{_dtype_name}",
                    _fc1(_dtype, given=_given),
                    ops=(
                        *((BIAS,) if _with_bias else ()),
                        FACTOR,
                        SCALE,
                        *((_FP8_SCALE,) if _given else ()),
                        *(_CLAMP if _with_tanh else ()),
                        *((_FC2_INPUT,) if _given else ()),
                        MAGNITUDE,
                    ),
                    operands=(
                        *((ROW,) if _with_bias else ()),
                        *COLUMNS,
                        *((("fp8_scale", "col"),) if _given else ()),
                        *(_NUMBERS if _with_tanh else ()),
                    ),
                    outputs=("fc2_input",) if _given else (),
                    sinks=("magnitude",),
                    mixins=(RowsTogether, *_mixins),
                )
        _make(
            f"{_way}D{_tanh}SReLUGemm",
            _dact,
            ops=(FACTOR, SCALE, *(_CLAMP if _with_tanh else ()), DSCALE, MAGNITUDE),
            operands=(("c", "c"), *COLUMNS, *(_NUMBERS if _with_tanh else ())),
            sinks=("dscale", "magnitude"),
            mixins=_mixins,
        )
