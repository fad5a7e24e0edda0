"""Hopper's grouped GEMMs with the activation in their epilogue, as classes of QuACK's GEMM in CuTe DSL.

In: nothing when imported. Out: kernel classes, which `sm90` compiles and launches. Keeps true: the FC2 input that the
backward rebuilds has the bits of the forward's, since both come from the rounded activation input by the same formula;
all else is computed in float32 and rounded once. Does not: launch, or choose tiles. Needs quack-kernels.

Weights need not lie side by side. One TMA descriptor covers all experts' memory as (J, F, H) with overlapping strides: the
third one is not a weight's length but any common divisor of the distances between the weights (16 bytes or more), and a
table says for each expert at which multiple of it its weight begins. A tile load is in bounds of its own weight because F
and H are the dimensions of one. Weight gradients are stored the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.ops import ColVecLoad, ColVecReduce, EpiOp, RowVecLoad, Scalar, TileStore
from quack.epilogue.visit import _EpiModMixinBase
from quack.gemm_sm90 import GemmSm90

TABLE = "table"
_FIVE_STAGES_WIDE = 192  # columns of a tile of which five stages fit beside parts of 16 columns, and four beside 32
_OPTIONAL_TENSOR = cute.Tensor | None


class ByExpert(cute.Tensor):  # type: ignore[misc]
    """A batched tensor whose last index goes through a table.

    Args:
        tensor: (F, H, J). table: (N,) int32, J of each expert.
    """

    def __init__(self, tensor: Any, table: Any) -> None:
        self._tensor = tensor
        self._table = table

    def __extract_mlir_values__(self) -> list[Any]:
        return [*cutlass.extract_mlir_values(self._tensor), *cutlass.extract_mlir_values(self._table)]

    def __new_from_mlir_values__(self, values: list[Any]) -> ByExpert:
        count = len(cutlass.extract_mlir_values(self._tensor))
        return ByExpert(
            cutlass.new_from_mlir_values(self._tensor, values[:count]),
            cutlass.new_from_mlir_values(self._table, values[count:]),
        )

    def __getitem__(self, place: Any) -> Any:
        row, column, expert = place
        return self._tensor[row, column, self._table[expert]]

    def __setitem__(self, place: Any, value: Any) -> None:
        raise TypeError("ByExpert is read by TMA only.")

    def fill(self, value: Any) -> None:
        """Not for this tensor."""
        raise TypeError("ByExpert is read by TMA only.")

    def __str__(self) -> str:
        return f"ByExpert({self._tensor})"

    value = property(lambda self: self._tensor.value)
    element_type = property(lambda self: self._tensor.element_type)
    dtype = property(lambda self: self._tensor.dtype)
    memspace = property(lambda self: self._tensor.memspace)
    iterator = property(lambda self: self._tensor.iterator)
    leading_dim = property(lambda self: self._tensor.leading_dim)
    layout = property(lambda self: self._tensor.layout)
    shape = property(lambda self: self._tensor.shape)
    stride = property(lambda self: self._tensor.stride)


class _TableArgument(EpiOp):  # type: ignore[misc]
    """Brings the table into the kernel; no epilogue reads it."""

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        return make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0, divisibility=1)

    def param_fields(self) -> list[Any]:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        return {self.name: getattr(args, self.name)}


class ExpertRow(RowVecLoad):  # type: ignore[misc]
    """A row of (N, columns) an expert; QuACK's own takes N for the J of the weights."""

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        """QuACK's."""
        dtype, _ = key
        return make_fake_tensor(dtype, (cute.sym_int(), fctx.n), leading_dim=1, divisibility=4)


class _TableFound:
    """Mixin before QuACK's GEMM: takes the table from the epilogue's arguments before tensors for TMA are made."""

    _table: Any

    def _setup_attributes(self, epilogue_args: Any) -> None:
        self._table = getattr(epilogue_args, TABLE)
        super()._setup_attributes(epilogue_args)  # type: ignore[misc]


class AfterWorkBefore:
    """Mixin before QuACK's GEMM: no warp asks for its first tile before the kernels before this one are over.

    QuACK launches its GEMMs so that they may begin while the kernel before them ends (CUDA's programmatic dependent
    launch), and lets only the warps that load operands wait for its end. The other warps find their first tile by
    themselves: from offsets that the kernel before may just have written, or of no tokens, whose zeros are then stored
    where that kernel may still read.
    """

    lets_next_begin = (
        False  # as soon as this one's blocks all run, if it is `BesideWorkBefore`; else near this one's end
    )

    def get_scheduler_class(self, varlen_m: bool = False) -> Any:
        """QuACK's."""
        base = super().get_scheduler_class(varlen_m)  # type: ignore[misc]
        lets_next_begin = self.lets_next_begin

        class Scheduler(base):  # type: ignore[misc]
            @classmethod
            def create(cls, *args: Any, **kwargs: Any) -> Any:
                cute.arch.griddepcontrol_wait()
                if lets_next_begin:  # not before the wait: the next one counts on what is over by then
                    cute.arch.griddepcontrol_launch_dependents()
                return super().create(*args, **kwargs)

        return Scheduler


class AheadOfAnother(AfterWorkBefore):
    """The same of a kernel after which one that is `BesideWorkBefore` may be launched."""

    lets_next_begin = True


class BesideWorkBefore:
    """Mixin before QuACK's GEMM, in place of `AfterWorkBefore`, for a product that has nothing to do with the kernel
    launched right before it, an `AheadOfAnother`: its blocks begin on the SMs that have no tile left of that one. It is not
    over before that one is, so that whatever comes after waits for both.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_pdl = False  # by which QuACK's warps that load operands would wait

    def kernel(self, *args: Any, **kwargs: Any) -> Any:
        """QuACK's, launched so that it may begin early all the same."""
        launcher = super().kernel(*args, **kwargs)  # type: ignore[misc]
        launch = launcher.launch
        launcher.launch = lambda *args, **kwargs: launch(*args, **kwargs | {"use_pdl": True})
        return launcher

    def get_scheduler_class(self, varlen_m: bool = False) -> Any:
        """QuACK's."""
        base = super().get_scheduler_class(varlen_m)  # type: ignore[misc]

        class Scheduler(base):  # type: ignore[misc]
            def producer_tail(self) -> None:
                super().producer_tail()
                cute.arch.griddepcontrol_wait()

        return Scheduler


class _NarrowParts:
    """Mixin before QuACK's GEMM: the epilogue takes 16 columns at a time, not 32, where what it then needs less of shared
    memory holds one more stage of operands.
    """

    @staticmethod
    def _compute_tile_shape_or_override(tile: Any, *args: Any, **kwargs: Any) -> Any:
        rows, columns = GemmSm90._compute_tile_shape_or_override(tile, *args, **kwargs)
        return rows, 16 if tile[1] == _FIVE_STAGES_WIDE else columns


class WeightsByTable(_TableFound):
    """Operand B goes through the table."""

    def make_tma_load_atoms_and_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        *first, weights = super().make_tma_load_atoms_and_tensors(*args, **kwargs)  # type: ignore[misc]
        return (*first, ByExpert(weights, self._table))


class GradsByTable(_TableFound):
    """D goes through the table."""

    def make_tma_epilogue_atoms_and_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        atom, grads, *rest = super().make_tma_epilogue_atoms_and_tensors(*args, **kwargs)  # type: ignore[misc]
        return (atom, ByExpert(grads, self._table), *rest)

    def get_scheduler_arguments(self, a: Any, b: Any, d: Any, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        # without D, the number of experts is taken from the offsets: D's own counts multiples of a step
        return super().get_scheduler_arguments(a, b, None, *args, **kwargs)  # type: ignore[misc]


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
        adds: ``D`` is added to what is there. mixins: before all others. begins: when it may, one of the three
            above. module: where the class is to be found.
    """
    every = (*ops, _TableArgument(TABLE))
    fields = [(op.name, op.arg_spec_type()) for op in every] + [(field, _OPTIONAL_TENSOR) for field in _SPLIT_K]
    arguments = NamedTuple("EpilogueArguments", fields)  # type: ignore[misc]
    arguments.__new__.__defaults__ = (None,) * len(fields)  # type: ignore[attr-defined]
    arguments = mlir_namedtuple(arguments)
    arguments.add_to_output = adds  # type: ignore[attr-defined]
    return type(
        name,
        (*mixins, by_table, begins, _EpiModMixinBase, GemmSm90),
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


def squared_relu(x: Any, clamp: Any, inverse: Any) -> tuple[Any, Any]:
    """``relu(x)``, or ``clamp * tanh(relu(x) / clamp)``, squared; and its derivative."""
    relu = cute.arch.fmax(x, 0.0)
    if clamp is None:
        return relu * relu, relu + relu
    decay = cute.math.exp2(relu * inverse * _EXP2_OF_MINUS_TWO, fastmath=True)  # exp(-2z), which never overflows
    tanh = (1.0 - decay) / (1.0 + decay)
    soft = clamp * tanh
    return soft * soft, (soft + soft) * (1.0 - tanh * tanh)


def _fc1(dtype: Any) -> Callable[..., dict[str, Any]]:
    def epilogue(acc: Any, scale: Any, bias: Any = None, clamp: Any = None, inverse: Any = None) -> dict[str, Any]:
        act_input = acc if bias is None else acc + bias
        square, _ = squared_relu(act_input.to(dtype).to(Float32), clamp, inverse)
        return {"D": act_input, "fc2_input": square * scale}

    return epilogue


def linear(acc: Any, bias: Any = None, scale: Any = None) -> dict[str, Any]:
    """An epilogue: plus the bias, if there is one, times the row's scale, if there is one."""
    if bias is None:
        return {"D": acc}
    return {"D": acc + bias if scale is None else acc + bias * scale}


def _dact(acc: Any, c: Any, scale: Any, clamp: Any = None, inverse: Any = None) -> dict[str, Any]:
    square, slope = squared_relu(c, clamp, inverse)
    return {"D": acc * scale * slope, "fc2_input": square * scale, "dscale": (square, acc)}


_EXP2_OF_MINUS_TWO = -2.0 * math.log2(math.e)
_FC2_INPUT = TileStore("fc2_input")
# What epilogues load and add up, and kinds of operands.
SCALE, BIAS = ColVecLoad("scale"), ExpertRow("bias")
COLUMN, ROW = ("scale", "col"), ("bias", "row")
CLAMP = Scalar("clamp"), Scalar("inverse")
NUMBERS = ("clamp", "scalar"), ("inverse", "scalar")
DSCALE = ColVecReduce("dscale", scaled=True)

PlainGemm = make_kernel("PlainGemm", linear)
BiasGemm = make_kernel("BiasGemm", linear, ops=(BIAS,), operands=(ROW,))
ScaledBiasGemm = make_kernel("ScaledBiasGemm", linear, ops=(BIAS, SCALE), operands=(ROW, COLUMN))
"""``D = A @ w``, plus a bias an expert, times a scale a row: FC2."""

DgradGemm = make_kernel("DgradGemm", linear, begins=AheadOfAnother)
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
