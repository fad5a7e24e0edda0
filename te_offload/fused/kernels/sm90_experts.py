"""Experts' weights and gradients wherever they lie: one operand of QuACK's GEMM that goes through a table.

In: nothing when imported. Out: mixins before QuACK's GEMM, of which `sm90_device` makes kernels. Keeps true: a kernel reads
its expert's place on the GPU. Does not: know of epilogues. Needs quack-kernels.

Weights need not lie side by side. One TMA descriptor covers all experts' memory as (J, F, H) with overlapping strides: the
third one is not a weight's length but any common divisor of the distances between the weights (16 bytes or more), and a
table says for each expert at which multiple of it its weight begins. A tile load is in bounds of its own weight because F
and H are the dimensions of one. Weight gradients are stored the same way.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import ColVecLoad, EpiOp, RowVecLoad

from te_offload.fused.kernels.sm90_apart import OwnCopy

TABLE = "table"


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


class TableArgument(EpiOp):  # type: ignore[misc]
    """Brings the table into the kernel; no epilogue reads it."""

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        """QuACK's."""
        return make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0, divisibility=1)

    def param_fields(self) -> list[Any]:
        """QuACK's."""
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        """QuACK's."""
        return {self.name: getattr(args, self.name)}


class ExpertRow(OwnCopy, RowVecLoad):  # type: ignore[misc]
    """A row of (N, columns) an expert; QuACK's own takes N for the J of the weights."""

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        """QuACK's."""
        dtype, _ = key
        return make_fake_tensor(dtype, (cute.sym_int(), fctx.n), leading_dim=1, divisibility=4)


class Column(OwnCopy, ColVecLoad):  # type: ignore[misc]
    """A number a row of the result."""


class _TableFound:
    """Mixin before QuACK's GEMM: takes the table from the epilogue's arguments before tensors for TMA are made."""

    _table: Any

    def _setup_attributes(self, epilogue_args: Any) -> None:
        self._table = getattr(epilogue_args, TABLE)
        super()._setup_attributes(epilogue_args)  # type: ignore[misc]


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
