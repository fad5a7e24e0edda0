"""Hopper's grouped GEMMs with the activation in their epilogue, as classes of QuACK's GEMM in CuTe DSL.

In: nothing when imported. Out: kernel classes, which `sm90` compiles and launches. Keeps true: the FC2 input that the
backward rebuilds has the bits of the forward's, since both come from the rounded activation input by the same formula;
all else is computed in float32 and rounded once. Does not: launch, or choose tiles. Needs quack-kernels.

Where weights lie is `sm90_experts`' affair; when a kernel begins, `sm90_order`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.ops import ColVecReduce, EpiOp, Scalar, TileStore
from quack.epilogue.visit import _EpiModMixinBase
from quack.gemm_sm90 import GemmSm90

from te_offload.fused.kernels.sm90_apart import GroupsApart
from te_offload.fused.kernels.sm90_experts import (
    TABLE,
    Column,
    ExpertRow,
    GradsByTable,
    TableArgument,
    WeightsByTable,
)
from te_offload.fused.kernels.sm90_order import AfterWorkBefore, AheadOfAnother, BesideWorkBefore, RowsTogether

_OPTIONAL_TENSOR = cute.Tensor | None


def narrow_parts(of: Callable[[int], bool]) -> type[Any]:
    """Mixin before QuACK's GEMM: the epilogue takes 16 columns at a time, not 32, in tiles of so many columns."""

    class NarrowParts:
        @staticmethod
        def _compute_tile_shape_or_override(tile: Any, *args: Any, **kwargs: Any) -> Any:
            rows, columns = GemmSm90._compute_tile_shape_or_override(tile, *args, **kwargs)
            return rows, 16 if of(tile[1]) else columns

    return NarrowParts


# Of 192 columns five stages fit then beside FC2's dgrad, and four with parts of 32; FC1 with a bias stays in registers.
_NarrowParts = narrow_parts(lambda columns: columns == 192)


_SPLIT_K = ("split_k_semaphore", "split_k_workspace")  # which QuACK's mixin asks for


def make_kernel(
    name: str,
    epilogue: Callable[..., dict[str, Any]],
    *,
    ops: Sequence[EpiOp] = (),
    operands: Sequence[tuple[str, str]] = (),
    outputs: Sequence[str] = (),
    sinks: Sequence[str] = (),
    by_table: type[Any] = WeightsByTable,
    adds: bool = False,
    mixins: Sequence[type[Any]] = (),
    begins: type[Any] = AfterWorkBefore,
    module: str = __name__,
) -> type[Any]:
    """A kernel class of this module, under its own name: QuACK's compile cache finds it by that.

    Args:
        name: the class's. epilogue: a function of the accumulator and the operands, element by element.
        ops: load and store the operands and outputs. operands: names and kinds. outputs, sinks: names of what the epilogue
            returns beside ``D``. by_table: which operand goes through the table.
        adds: ``D`` is added to what is there. mixins: before all others. begins: when it may, one of three of
            `sm90_order`. module: where the class is to be found.
    """
    every = (*ops, TableArgument(TABLE))
    fields = [(op.name, op.arg_spec_type()) for op in every] + [(field, _OPTIONAL_TENSOR) for field in _SPLIT_K]
    arguments = NamedTuple("EpilogueArguments", fields)  # type: ignore[misc]
    arguments.__new__.__defaults__ = (None,) * len(fields)  # type: ignore[attr-defined]
    arguments = mlir_namedtuple(arguments)
    arguments.add_to_output = adds  # type: ignore[attr-defined]
    return type(
        name,
        (*mixins, by_table, GroupsApart, begins, _EpiModMixinBase, GemmSm90),
        {
            "__module__": module,
            "__qualname__": name,
            "_epi_ops": every,
            "_epi_mod_fn": staticmethod(epilogue),
            "_epi_mod_operands": tuple(operands),
            "_epi_mod_outputs": tuple(outputs),
            "_epi_mod_sinks": tuple(sinks),
            "_extra_param_fields": tuple((field, _OPTIONAL_TENSOR, None) for field in _SPLIT_K),
            "EpilogueArguments": arguments,
        },
    )


def relu(x: Any) -> Any:
    """The larger of a number and zero."""
    return cute.arch.fmax(x, 0.0)


def rounded_relu(x: Any, dtype: Any) -> Any:
    """The ReLU of a number as a dtype stores it, which is the number's ReLU as the dtype stores that.

    Rounded first, sums of 32 columns at a time make ptxas wait after each instruction of the tensor cores
    (tests/support/sass.py): it takes the rounding for a use of sums that are not there yet.
    """
    return relu(x).to(dtype).to(Float32)


def squared_relu(above: Any, clamp: Any, inverse: Any) -> tuple[Any, Any]:
    """Of a number's `relu` ``r``: ``r``, or ``clamp * tanh(r / clamp)``, squared; and the derivative by the number."""
    if clamp is None:
        return above * above, above + above
    decay = cute.math.exp2(above * inverse * _EXP2_OF_MINUS_TWO, fastmath=True)  # exp(-2z), which never overflows
    tanh = (1.0 - decay) / (1.0 + decay)
    soft = clamp * tanh
    return soft * soft, (soft + soft) * (1.0 - tanh * tanh)


def _fc1(dtype: Any) -> Callable[..., dict[str, Any]]:
    def epilogue(acc: Any, scale: Any, bias: Any = None, clamp: Any = None, inverse: Any = None) -> dict[str, Any]:
        act_input = acc if bias is None else acc + bias
        square, _ = squared_relu(rounded_relu(act_input, dtype), clamp, inverse)
        return {"D": act_input, "fc2_input": square * scale}

    return epilogue


def linear(acc: Any, bias: Any = None, scale: Any = None) -> dict[str, Any]:
    """An epilogue: plus the bias, if there is one, times the row's scale, if there is one."""
    if bias is None:
        return {"D": acc}
    return {"D": acc + bias if scale is None else acc + bias * scale}


def _dact(acc: Any, c: Any, scale: Any, clamp: Any = None, inverse: Any = None) -> dict[str, Any]:
    square, slope = squared_relu(relu(c), clamp, inverse)
    return {"D": acc * scale * slope, "fc2_input": square * scale, "dscale": (square, acc)}


_EXP2_OF_MINUS_TWO = -2.0 * math.log2(math.e)
_FC2_INPUT = TileStore("fc2_input")
# What epilogues load and add up, and kinds of operands.
SCALE, BIAS = Column("scale"), ExpertRow("bias")
COLUMN, ROW = ("scale", "col"), ("bias", "row")
CLAMP = Scalar("clamp"), Scalar("inverse")
NUMBERS = ("clamp", "scalar"), ("inverse", "scalar")
DSCALE = ColVecReduce("dscale", scaled=True)

PlainGemm = make_kernel("PlainGemm", linear, mixins=(RowsTogether,))
BiasGemm = make_kernel("BiasGemm", linear, ops=(BIAS,), operands=(ROW,), mixins=(RowsTogether,))
ScaledBiasGemm = make_kernel(
    "ScaledBiasGemm", linear, ops=(BIAS, SCALE), operands=(ROW, COLUMN), mixins=(RowsTogether,)
)
"""``D = A @ w``, plus a bias an expert, times a scale a row: FC2."""

DgradGemm = make_kernel("DgradGemm", linear, begins=AheadOfAnother, mixins=(RowsTogether,))
"""``D = A @ w``: the dgrad of FC1."""

WgradGemm = make_kernel("WgradGemm", linear, by_table=GradsByTable)
AddingWgradGemm = make_kernel("AddingWgradGemm", linear, by_table=GradsByTable, adds=True)
"""``D_i (+)= A_i @ B_i.T``, the experts' parts of A and B lying side by side along K: a weight's gradient."""

BesideWgradGemm = make_kernel("BesideWgradGemm", linear, by_table=GradsByTable, begins=BesideWorkBefore)
AddingBesideWgradGemm = make_kernel(
    "AddingBesideWgradGemm", linear, by_table=GradsByTable, adds=True, begins=BesideWorkBefore
)
"""The same, launched right after a dgrad of which it needs nothing."""


def fc1_name(dtype: str, *, bias: bool, tanh: bool) -> str:
    """Name of the kernel class of FC1: ``D`` is the activation input, rounded; ``fc2_input`` its squared ReLU, soft-clamped
    by a tanh or not, times the row's scale.
    """
    return f"{'Bias' if bias else ''}{'Tanh' if tanh else ''}SReLUGemm{dtype}"


for _dtype_name, _dtype in (("BF16", BFloat16), ("FP16", Float16)):
    for _with_bias in (False, True):
        for _with_tanh in (False, True):
            _name = fc1_name(_dtype_name, bias=_with_bias, tanh=_with_tanh)
            globals()[_name] = make_kernel(
                _name,
                _fc1(_dtype),
                mixins=(RowsTogether, _NarrowParts),
                ops=(*((BIAS,) if _with_bias else ()), SCALE, *(CLAMP if _with_tanh else ()), _FC2_INPUT),
                operands=(*((ROW,) if _with_bias else ()), COLUMN, *(NUMBERS if _with_tanh else ())),
                outputs=("fc2_input",),
            )

DSReLUGemm = make_kernel(
    "DSReLUGemm",
    _dact,
    mixins=(_NarrowParts,),
    ops=(SCALE, _FC2_INPUT, DSCALE),
    operands=(("c", "c"), COLUMN),
    outputs=("fc2_input",),
    sinks=("dscale",),
)
DTanhSReLUGemm = make_kernel(
    "DTanhSReLUGemm",
    _dact,
    mixins=(_NarrowParts,),
    ops=(SCALE, *CLAMP, _FC2_INPUT, DSCALE),
    operands=(("c", "c"), COLUMN, *NUMBERS),
    outputs=("fc2_input",),
    sinks=("dscale",),
)
"""The dgrad of FC2 and of the activation, ``C`` being the activation input: ``D`` is that one's gradient, ``fc2_input`` is
rebuilt, and ``dscale`` holds the parts of the scales' gradients, one a row and column of tiles.
"""
