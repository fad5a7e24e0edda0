"""What computes a fused grouped MLP in FP8 with one scale an expert, whichever device it runs on; see `interface`.

In: dense tensors and scalings. Out: FP8 rows and weights, dense results. Keeps true: split sizes never reach the host in an
implementation for a GPU; numbers and scales are those that Transformer Engine's quantizers make. Does not: save tensors, or
know of ops or recipes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from te_offload.fused.kernels.interface import Kernels, Orders, TileCount, TileOrder
from te_offload.ops.scaling import Scaling


class QuantizedRows(NamedTuple):
    """FP8 numbers of rows, as they lie, with tokens side by side, or both.

    Attributes:
        rows: (T, columns). columns: (columns, P); each expert's tokens begin at a multiple of 128, with zeros between.
        scales: (T,) float32, of each row. inverses: (N,) float32, one over an expert's scale.
        factors: (T,) float32, of each row the inverse times that of the weight which it meets.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    scales: torch.Tensor
    inverses: torch.Tensor
    factors: torch.Tensor | None


class QuantizedWeights(NamedTuple):
    """FP8 numbers of all experts' weights.

    Attributes:
        rows, columns: as `prepare` makes them, of (rows, columns) and of (columns, rows) each; ``None``: not needed.
        inverses: (N,) float32.
        scales, magnitudes: what numbers can be made from again: scales (N,) float32, or the largest magnitudes (N,) in the
            weights' dtype, whichever the implementation has.
    """

    rows: Any
    columns: Any
    inverses: torch.Tensor
    scales: torch.Tensor | None = None
    magnitudes: torch.Tensor | None = None


class Fp8Kernels(Kernels, Protocol):
    """Quantizers, and grouped products of what they make. ``fast``: sums may stay in Hopper's FP8 accumulators, as
    Transformer Engine's forward has them.
    """

    def quantize_weights(self, weights: Any, scaling: Scaling, *, by_column: bool = True) -> QuantizedWeights:
        """N weights in FP8. ``weights``: from `Kernels.prepare`. ``by_column``: both ways round."""

    def weight_columns(self, weights: Any, quantized: QuantizedWeights, scaling: Scaling) -> QuantizedWeights:
        """Of weights that `quantize_weights` made as they lie alone, the other way round alone, with the same numbers.
        ``weights``: not changed since. ``scaling``: as before; of delayed scaling nothing is read or kept again.
        """

    def take_weights(
        self, name: str, rows: Any, columns: Any, inverses: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedWeights:
        """Weights that are FP8 already.

        Args:
            name: of this set of weights. rows, columns: N (rows, columns) and N (columns, rows), or none of the latter, as
                bytes. inverses: (N,) inverse scales. dtype: what the bytes are.
        """

    def quantize(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        scaling: Scaling,
        *,
        weights: torch.Tensor,
        magnitudes: torch.Tensor | None = None,
        router: torch.Tensor | None = None,
        by_column: bool = False,
    ) -> QuantizedRows:
        """Rows in FP8.

        Args:
            x: (T, columns). weights: (N,) inverse scales of the weights that they meet.
            magnitudes: (T, parts), the largest ones in parts of each row, not rounded yet; ``None``: they are looked for.
            router: scales (T,): the numbers are what the activation makes of x, rounded to its dtype. With ``magnitudes``.
            by_column: both ways round.
        """

    def quantize_dact(
        self,
        dact_input: torch.Tensor,
        offsets: torch.Tensor,
        scaling: Scaling,
        *,
        weights: torch.Tensor,
        magnitudes: torch.Tensor,
        by_column: bool,
    ) -> QuantizedRows:
        """`quantize` of the gradient by act_input, with its columns as FC1's weights have their rows."""

    def turn(self, rows: QuantizedRows, offsets: torch.Tensor) -> QuantizedRows:
        """FP8 rows with their columns alone."""

    def rebuild(
        self,
        act_input: torch.Tensor,
        router: torch.Tensor,
        rows: QuantizedRows,
        offsets: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedRows:
        """Columns of what `quantize` made of the activation before. ``rows``: with its scales. ``dtype``: of FP8."""

    def fc1_fp8(
        self,
        x: QuantizedRows,
        weights: QuantizedWeights,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        *,
        fast: bool,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``act_input = x @ w1.T + bias`` (T, F), and magnitudes (T, parts) of what the activation makes of it.

        Args:
            scales: of the router, (T,). dtype: of act_input.
        """

    def fc1_given(
        self,
        x: QuantizedRows,
        weights: QuantizedWeights,
        bias: torch.Tensor | None,
        router: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        scaling: Scaling,
        others: torch.Tensor,
        *,
        stores: bool,
        fast: bool,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor | None, QuantizedRows]:
        """`fc1_fp8`, and `quantize` of what the activation makes of it, in one pass where scales are known beforehand.

        Args:
            scaling: of FC2's input, delayed. others: (N,) inverse scales of the weights that it meets.
            stores: act_input; otherwise there is none.
        """

    def linear_fp8(
        self,
        x: QuantizedRows,
        weights: Any,
        out: torch.Tensor,
        offsets: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
        fast: bool,
        count: TileCount | None = None,
    ) -> None:
        """``out = x @ w.T + bias * bias_scale``, in the experts' rows alone. ``weights``: rows of `QuantizedWeights` (FC2),
        or columns (the dgrad of FC1).
        """

    def fc2_dgrad_fp8(
        self,
        dy: QuantizedRows,
        weights: QuantizedWeights,
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        *,
        fast: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Orders]:
        """The gradient by act_input (T, F), its magnitudes (T, parts), the gradient by scales (T,) in float32, and
        how the products that follow take their tiles.
        """

    def wgrad_fp8(
        self,
        dy: QuantizedRows,
        x: QuantizedRows,
        offsets: torch.Tensor,
        out: Any,
        *,
        accumulate: bool,
        fast: bool,
        order: TileOrder | None = None,
        padded: torch.Tensor | None = None,
    ) -> None:
        """``out_i (+)= dy_i.T @ x_i``; zero for an expert without tokens. ``dy``, ``x``: with columns. ``order``: as
        `Kernels.wgrad` takes it. ``padded``: from `padded_offsets`; ``None``: they are made.
        """

    def padded_offsets(self, offsets: torch.Tensor) -> torch.Tensor | None:
        """Where each expert's tokens begin in columns, and the last one's end, for both wgrads of a backward; ``None``:
        nothing reads it.
        """
