"""Hopper's grouped FP8 GEMMs with a gated activation, as classes of QuACK's GEMM in CuTe DSL; see `sm90_fp8_device`.

In: nothing when imported. Out: kernel classes, which `sm90_fp8_glu` compiles and launches. Keeps true: as
`sm90_fp8_device`; pairs as in `sm90_glu_device`. Does not: launch, quantize, or choose tiles. Needs quack-kernels.

Only FC1 and FC2's dgrad see pairs. FP8 operands lie along K, where no layout can bring FC1's weights into that order, so
the gradient of ``act_input`` is written in Transformer Engine's when it is quantized (`fp8`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from quack.epilogue.math import Pair
from quack.epilogue.ops import Scalar

from te_offload.fused.kernels.interface import Gate
from te_offload.fused.kernels.sm90_device import make_kernel
from te_offload.fused.kernels.sm90_fp8_device import BIAS, COLUMNS, DSCALE, FACTOR, MAGNITUDE, ROW, SCALE, SUMS
from te_offload.fused.kernels.sm90_glu_device import DTYPES, KINDS, Halves, PairedWeights, rounded
from te_offload.fused.kernels.sm90_order import RowsTogether


def _fc1(dtype: Any, halves: Callable[..., Halves]) -> Callable[..., dict[str, Any]]:
    def epilogue(acc: Any, factor: Any, scale: Any, bias: Any = None, **numbers: Any) -> dict[str, Any]:
        both = Pair(acc[0] * factor, acc[1] * factor)
        if bias is not None:
            both = Pair(both[0] + bias[0], both[1] + bias[1])
        gate, _, linear, _ = halves(*(rounded(one, dtype) for one in both), **numbers)
        fc2_input = gate * linear * scale
        return {"D": both, "magnitude": Pair(fc2_input, fc2_input)}

    return epilogue


def _dact(halves: Callable[..., Halves]) -> Callable[..., dict[str, Any]]:
    def epilogue(acc: Any, c: Any, factor: Any, scale: Any, **numbers: Any) -> dict[str, Any]:
        gate, dgate, linear, dlinear = halves(c[0], c[1], **numbers)
        grad = acc * factor
        scaled = grad * scale
        da, db = scaled * linear * dgate, scaled * gate * dlinear
        most = cute.arch.fmax(cute.arch.fmax(da, -da), cute.arch.fmax(db, -db))
        return {"D": Pair(da, db), "dscale": (gate * linear, grad), "magnitude": most}

    return epilogue


def _make(name: str, *args: Any, **kwargs: Any) -> type[Any]:
    kernel = globals()[name] = make_kernel(name, *args, **kwargs, module=__name__)
    return kernel


def fc1_name(gate: Gate, dtype: str, *, bias: bool, fast: bool) -> str:
    """Name of the kernel class of FC1: ``D`` is the activation's input, in pairs; ``magnitude`` of what is made of it."""
    return f"{'Fast' if fast else 'Split'}{'Bias' if bias else ''}{gate.value}Gemm{dtype}"


def dact_name(gate: Gate, *, fast: bool) -> str:
    """The same of FC2's dgrad with the activation's."""
    return f"{'Fast' if fast else 'Split'}D{gate.value}Gemm"


for _fast, (_gate, (_halves, _numbers)) in itertools.product((False, True), KINDS.items()):
    _scalars = tuple(Scalar(_number) for _number in _numbers)
    _kinds = (*COLUMNS, *((_number, "scalar") for _number in _numbers))
    for (_dtype_name, _dtype), _with_bias in itertools.product(DTYPES.items(), (False, True)):
        _make(
            fc1_name(_gate, _dtype_name, bias=_with_bias, fast=_fast),
            _fc1(_dtype, _halves),
            mixins=(RowsTogether, SUMS[_fast]),
            by_table=PairedWeights,
            ops=(*((BIAS,) if _with_bias else ()), FACTOR, SCALE, *_scalars, MAGNITUDE),
            operands=(*((ROW,) if _with_bias else ()), *_kinds),
            sinks=("magnitude",),
        )._epi_mod_group_n = 2
    _make(
        dact_name(_gate, fast=_fast),
        _dact(_halves),
        mixins=(SUMS[_fast],),
        ops=(FACTOR, SCALE, *_scalars, DSCALE, MAGNITUDE),
        operands=(("c", "c"), *_kinds),
        sinks=("dscale", "magnitude"),
    )._epi_mod_packed_cd = True
