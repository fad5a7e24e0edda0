"""What computes a fused grouped MLP in a block-scaled format, whichever device it runs on; see `interface`.

In: dense tensors and scalings. Out: numbers with scales, dense results. Keeps true: split sizes never reach the host in an
implementation for a GPU; an expert's blocks of tokens begin with its first one. Does not: save tensors, or know of ops or
recipes.

Rows are for products over their columns (a forward, a dgrad), columns for those over tokens (a wgrad). One is not made of
the other, since a block's numbers share a scale in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from te_offload.fused.kernels.interface import Kernels, Orders, TileCount, TileOrder
from te_offload.ops.scaling import BlockScaling


@dataclass(frozen=True)
class BlockNumbers:
    """Of all experts' tokens in one direction, in a layout of the implementation's.

    Attributes:
        shape: (T, columns) of what was quantized. scaling: by which.
        numbers, scales: what multiplies them. amaxes: (N,) float32, of NVFP4.
    """

    shape: tuple[int, int]
    scaling: BlockScaling
    numbers: torch.Tensor
    scales: torch.Tensor
    amaxes: torch.Tensor | None = None


Parts = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Of each weight: bytes (rows, columns), and inverse scales (rows / 128, columns / 128), rows of which may be longer."""


@dataclass(frozen=True)
class BlockWeights:
    """Of all experts' weights.

    Attributes:
        rows, columns: in layouts of the implementation's, for the forward and for the dgrad; ``None``: not needed.
    """

    rows: Any
    columns: Any


class BlockKernels(Kernels, Protocol):
    """Quantizers, and grouped products of what they make."""

    def block_weights(self, weights: Any, scaling: BlockScaling, *, by_column: bool) -> BlockWeights:
        """N weights. ``weights``: from `Kernels.prepare`. ``by_column``: for the dgrad too."""

    def block_weight_columns(self, weights: Any, scaling: BlockScaling) -> BlockWeights:
        """What `block_weights` makes for the dgrad alone, with the same numbers."""

    def take_block_weights(self, name: str, rows: Parts, columns: Parts | None) -> BlockWeights:
        """N weights that are FP8 in square blocks already, read where they lie.

        Args:
            name: of this set of weights. rows, columns: as they lie, and the other way round, if asked for.
        """

    def block_rows(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        scaling: BlockScaling,
        *,
        by_column: bool,
        saved: bool = False,
        exact: bool = False,
    ) -> tuple[BlockNumbers, BlockNumbers | None]:
        """Rows of x (T, columns), and its columns if asked for.

        Args:
            saved: the columns are kept for a backward, in as few bytes as they take, or up to two percent more where that
                spares turning them; `turn_blocks` follows.
            exact: then they are T bytes of numbers and ``T // 128 + N`` scales each, of FP8, whatever the split sizes.
        """

    def block_columns(self, x: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling) -> BlockNumbers:
        """The columns of x (T, columns) alone, as `wgrad_blocks` reads them."""

    def block_dact_rows(
        self, dact_input: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling, *, by_column: bool
    ) -> tuple[BlockNumbers, BlockNumbers | None]:
        """The same of the gradient that `fc2_dgrad_blocks` made, in the order of FC1's weights."""

    def turn_blocks(self, saved: BlockNumbers, offsets: torch.Tensor) -> BlockNumbers:
        """Columns that were saved, as `wgrad_blocks` reads them."""

    def rebuild_blocks(
        self, act_input: torch.Tensor, router: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling
    ) -> BlockNumbers:
        """Columns of what the activation makes of its input, as `wgrad_blocks` reads them."""

    def fc1_blocks(
        self,
        x: BlockNumbers,
        weights: BlockWeights,
        bias: torch.Tensor | None,
        router: torch.Tensor,
        offsets: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        scaling: BlockScaling,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, BlockNumbers]:
        """``act_input = x @ w1.T + bias`` (T, F), and rows of what the activation makes of it.

        Args:
            router: scales (T,). offsets: of FC1's rows, and of those in which the activation's blocks lie.
            dtype: of act_input. scaling: of FC2's input.
        """

    def fc1_linear_blocks(
        self,
        x: BlockNumbers,
        weights: BlockWeights,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """`fc1_blocks` without what the activation makes of ``out`` (T, F), its input."""

    def linear_blocks(
        self,
        x: BlockNumbers,
        weights: Any,
        out: torch.Tensor,
        offsets: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
        count: TileCount | None = None,
    ) -> None:
        """``out = x @ w.T + bias * bias_scale``, in the experts' rows alone. ``weights``: rows of `BlockWeights` (FC2), or
        columns (the dgrad of FC1).
        """

    def fc2_dgrad_blocks(
        self,
        dy: BlockNumbers,
        weights: BlockWeights,
        act_input: torch.Tensor,
        router: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Orders]:
        """The gradient by act_input (T, F), that by the router's scales (T,) in float32, and how the products that
        follow take their tiles.
        """

    def wgrad_blocks(
        self,
        dy: BlockNumbers,
        x: BlockNumbers,
        offsets: torch.Tensor,
        out: Any,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
        padded: torch.Tensor | None = None,
    ) -> None:
        """``out_i (+)= dy_i.T @ x_i``; zero for an expert without tokens. ``dy``, ``x``: columns. ``order``: as
        `Kernels.wgrad` takes it. ``padded``: from `padded_offsets`; ``None``: they are made.
        """

    def padded_offsets(self, offsets: torch.Tensor) -> torch.Tensor | None:
        """See `Fp8Kernels.padded_offsets`."""
