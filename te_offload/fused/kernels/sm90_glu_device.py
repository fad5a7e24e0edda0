"""Hopper's grouped GEMMs of a gated grouped MLP, as classes of QuACK's GEMM in CuTe DSL; see `sm90_device`.

In: nothing when imported. Out: kernel classes, which `sm90_glu` compiles and launches. Keeps true: what FC1's
epilogue and that of FC2's dgrad make of a pair has the same bits; weights and their gradients stay as Transformer Engine
has them. Does not: launch, or choose tiles. Needs quack-kernels.

Transformer Engine's two halves of FC1's columns, a (the gate) and b, lie one behind the other, or alternate in blocks of
``te_offload_interleave`` columns. An epilogue needs both numbers of a pair in one thread, which has two neighbours of a
tile's columns. So the kernels see a's and b's columns in turns: FC1's weight rows through a layout (2, F) of two strides,
which is TMA's to follow as long as the other dimension is contiguous. ``act_input`` and its gradient are pairs, (T, F, 2),
in memory; nobody else reads them. FC1's dgrad sums over pairs and its weight gradient stores them by the same layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T
from quack.epilogue.math import Pair
from quack.epilogue.ops import Scalar, TileStore

from te_offload.fused.kernels.interface import Gate, Gated
from te_offload.fused.kernels.sm90_device import BIAS, COLUMN, DSCALE, ROW, SCALE, linear, make_kernel, narrow_parts
from te_offload.fused.kernels.sm90_experts import GradsByTable, WeightsByTable
from te_offload.fused.kernels.sm90_order import AheadOfAnother, BesideWorkBefore, RowsTogether

_MINUS_LOG2_E = -math.log2(math.e)
DTYPES = {"BF16": BFloat16, "FP16": Float16}
_EXPONENT, _SIGN = 0x7F800000, -(1 << 31)  # of a float32
_LEAST_NORMAL_FP16 = (127 - 14) << 23  # its exponent, as a float32's bits
_LOST_BITS, _MOST_FP16 = 13, 65504.0  # of a float32's fraction in fp16; the largest finite one


class Paired:
    """Mixin before QuACK's GEMM.

    Attributes:
        te_offload_interleave: columns of a block of each half; 0: there is one of each. Set before the kernel is traced.
    """

    te_offload_interleave: int

    def paired(self, tensor: Any, dim: int) -> Any:
        """The tensor with a's and b's places of one dimension in turns."""
        width, step = self.te_offload_interleave, tensor.stride[dim]
        if const_expr(width == 1):  # they are
            return tensor
        half = cute.size(tensor, mode=[dim]) // 2
        if const_expr(width == 0):
            shape, stride = (2, half), (half * step, step)
        else:
            shape, stride = (2, (width, half // width)), (width * step, (step, 2 * width * step))
        shape = (*tensor.shape[:dim], shape, *tensor.shape[dim + 1 :])
        stride = (*tensor.stride[:dim], stride, *tensor.stride[dim + 1 :])
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


class PairedWeights(Paired, WeightsByTable):
    """Operand B goes through the table; its rows are pairs."""

    def make_tma_load_atoms_and_tensors(self, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        return super().make_tma_load_atoms_and_tensors(a, self.paired(b, 0), *args, **kwargs)


class PairedSums(Paired, WeightsByTable):
    """Operand B goes through the table; what is summed over are pairs."""

    def make_tma_load_atoms_and_tensors(self, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        return super().make_tma_load_atoms_and_tensors(a, self.paired(b, 1), *args, **kwargs)


class PairedGrads(Paired, GradsByTable):
    """D goes through the table; its rows are pairs."""

    def make_tma_epilogue_atoms_and_tensors(self, d: Any, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        return super().make_tma_epilogue_atoms_and_tensors(self.paired(d, 0), *args, **kwargs)


# Pairs of 32 columns would not stay in registers (160 and 192 by turns), or leave room for two stages alone (192 and 256).
_NarrowParts = narrow_parts(lambda columns: columns > 128)
Halves = tuple[Any, Any, Any, Any]
"""gate(a), its derivative, linear(b), its derivative: as in `te_offload.ops.arithmetic`, one number at a time."""


def _sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * _MINUS_LOG2_E, fastmath=True))


def _swiglu(a: Any, b: Any) -> Halves:
    sigmoid = _sigmoid(a)
    gate = a * sigmoid
    return gate, sigmoid + gate * (1.0 - sigmoid), b, Float32(1.0)


def _clamped_qgeglu(a: Any, b: Any, limit: Any, alpha: Any, offset: Any) -> Halves:
    least = cute.arch.fmin(a, limit, nan=True)
    sigmoid = _sigmoid(alpha * least)
    gate = least * sigmoid
    inside = cute.arch.fmax(cute.arch.fmin(b, limit, nan=True), -limit, nan=True)
    dgate = sigmoid + alpha * gate * (1.0 - sigmoid)
    return gate, _where(a <= limit, dgate), inside + offset, _where(inside == b, Float32(1.0))


def _situ_glu(a: Any, b: Any, beta1: Any, beta2: Any, inverse1: Any, inverse2: Any) -> Halves:
    soft, sigmoid, line = cute.math.tanh(a * inverse1), _sigmoid(a), cute.math.tanh(b * inverse2)
    gate = beta1 * soft * sigmoid
    return gate, (1.0 - soft * soft) * sigmoid + gate * (1.0 - sigmoid), beta2 * line, 1.0 - line * line


def _where(condition: Any, value: Any) -> Any:
    return Float32(cutlass.select_(condition, value, Float32(0.0)))


def rounded(x: Any, dtype: Any) -> Any:
    """As if stored in a dtype and read again.

    For fp16 by sums in float32: where FC1's epilogue converts pairs to fp16 and back, by whichever instructions, ptxas
    waits after each instruction of the tensor cores (tests/support/sass.py). What is added has its own last bit where fp16
    has x's, and is a multiple of two of those, so that ties go to even as they should. Zero keeps its sign.
    """
    if const_expr(dtype is BFloat16):
        return x.to(BFloat16).to(Float32)
    bits = Int32(llvm.bitcast(T.i32(), x.ir_value()))
    exponent = cutlass.max(bits & _EXPONENT, Int32(_LEAST_NORMAL_FP16))
    power = Float32(llvm.bitcast(T.f32(), (exponent + Int32(_LOST_BITS << 23)).ir_value()))
    found = (x + 1.5 * power) - 1.5 * power
    most = cute.arch.fmax(found, -found) > _MOST_FP16
    found = Float32(cutlass.select_(most, found * Float32(math.inf), found))
    signed = Int32(llvm.bitcast(T.i32(), found.ir_value())) | (bits & Int32(_SIGN))
    return Float32(llvm.bitcast(T.f32(), signed.ir_value()))


def _fc1(dtype: Any, halves: Callable[..., Halves]) -> Callable[..., dict[str, Any]]:
    def epilogue(acc: Any, scale: Any, bias: Any = None, **numbers: Any) -> dict[str, Any]:
        both = acc if bias is None else Pair(acc[0] + bias[0], acc[1] + bias[1])
        gate, _, linear_, _ = halves(*(rounded(one, dtype) for one in both), **numbers)
        return {"D": both, "fc2_input": gate * linear_ * scale}

    return epilogue


def _dact(halves: Callable[..., Halves]) -> Callable[..., dict[str, Any]]:
    def epilogue(acc: Any, c: Any, scale: Any, **numbers: Any) -> dict[str, Any]:
        gate, dgate, linear_, dlinear = halves(c[0], c[1], **numbers)
        product, grad = gate * linear_, acc * scale
        return {
            "D": Pair(grad * linear_ * dgate, grad * gate * dlinear),
            "fc2_input": product * scale,
            "dscale": (product, acc),
        }

    return epilogue


KINDS: dict[Gate, tuple[Callable[..., Halves], tuple[str, ...]]] = {
    Gate.SWIGLU: (_swiglu, ()),
    Gate.CLAMPED_QGEGLU: (_clamped_qgeglu, ("limit", "alpha", "offset")),
    Gate.SITU_GLU: (_situ_glu, ("beta1", "beta2", "inverse1", "inverse2")),
}


def numbers_of(activation: Gated) -> dict[str, float]:
    """What the epilogues with a gate take beside tensors."""
    values = activation.numbers
    if activation.gate is Gate.SITU_GLU:
        values = (*values, *(1 / value for value in values))
    return dict(zip(KINDS[activation.gate][1], values, strict=True))


_FC2_INPUT, _PAIRED_FC2_INPUT = TileStore("fc2_input"), TileStore("fc2_input", gated=True)


def _make(name: str, *args: Any, **kwargs: Any) -> type[Any]:
    kernel = globals()[name] = make_kernel(name, *args, **kwargs, module=__name__)
    return kernel


def fc1_name(gate: Gate, dtype: str, *, bias: bool) -> str:
    """Name of the kernel class of FC1 with its activation: ``D`` is the activation's input, in pairs, rounded."""
    return f"{'Bias' if bias else ''}{gate.value}Gemm{dtype}"


def dact_name(gate: Gate) -> str:
    """The same of FC2's dgrad with the activation's: ``C`` is the activation's input, ``D`` its gradient, both in pairs."""
    return f"D{gate.value}Gemm"


for _gate, (_halves, _numbers) in KINDS.items():
    _scalars = tuple(Scalar(_number) for _number in _numbers)
    _kinds = (COLUMN, *((_number, "scalar") for _number in _numbers))
    for (_dtype_name, _dtype), _with_bias in itertools.product(DTYPES.items(), (False, True)):
        _make(
            fc1_name(_gate, _dtype_name, bias=_with_bias),
            _fc1(_dtype, _halves),
            mixins=(RowsTogether,),
            by_table=PairedWeights,
            ops=(*((BIAS,) if _with_bias else ()), SCALE, *_scalars, _PAIRED_FC2_INPUT),
            operands=(*((ROW,) if _with_bias else ()), *_kinds),
            outputs=("fc2_input",),
        )._epi_mod_group_n = 2
    _make(
        dact_name(_gate),
        _dact(_halves),
        mixins=(_NarrowParts,),
        ops=(SCALE, *_scalars, _FC2_INPUT, DSCALE),
        operands=(("c", "c"), *_kinds),
        outputs=("fc2_input",),
        sinks=("dscale",),
    )._epi_mod_packed_cd = True

PairedGemm = _make("PairedGemm", linear, by_table=PairedWeights, mixins=(RowsTogether,))
PairedBiasGemm = _make(
    "PairedBiasGemm", linear, ops=(BIAS,), operands=(ROW,), by_table=PairedWeights, mixins=(RowsTogether,)
)
"""``D = A @ w``, D and w in pairs, plus a bias an expert: FC1 without its activation."""

PairedDgradGemm = _make("PairedDgradGemm", linear, by_table=PairedSums, begins=AheadOfAnother, mixins=(RowsTogether,))
"""``D = A @ w``, A and w in pairs: the dgrad of FC1."""

for _adds in (False, True):
    _prefix = "Adding" if _adds else ""
    _make(f"{_prefix}PairedWgradGemm", linear, by_table=PairedGrads, adds=_adds)
    _make(f"{_prefix}PairedBesideWgradGemm", linear, by_table=PairedGrads, adds=_adds, begins=BesideWorkBefore)
