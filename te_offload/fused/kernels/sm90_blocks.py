"""The fused grouped MLP in FP8 by blocks on Hopper: compiles, caches and launches the kernels of `sm90_block_device`.

In: bf16 or fp16 tensors, offsets of experts on the GPU. Out: as in `block_interface.BlockKernels`. Keeps true: no split
size reaches the host; numbers and scales are Transformer Engine's; two runs give the same bits. Does not: quantize, or know
of other formats. Needs quack-kernels, and triton (`fp8`).

FC1's epilogue sees a block's columns one part after the other, so FC2's input is quantized from what it has stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_offload.errors import UnsupportedError
from te_offload.fused.kernels import blocks, fp8, sm90_block_device
from te_offload.fused.kernels.block_interface import BlockNumbers, BlockWeights, Parts
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.interface import Activation, Orders, TileCount, TileOrder
from te_offload.fused.kernels.sm90 import Sm90Kernels
from te_offload.fused.kernels.sm90_experts import TABLE
from te_offload.fused.kernels.sm90_launch import Tile, Way
from te_offload.fused.kernels.sm90_tiles import Regime, tile_for
from te_offload.ops.scaling import BlockScaling

_INDEXED = 2**31
_TURNED_FROM = 64  # bytes of columns for each that padding adds, from which on they are saved as wgrads read them
_E4M3 = torch.float8_e4m3fn


class Sm90BlockKernels(Sm90Kernels):
    """See `block_interface.BlockKernels`."""

    def __init__(self, activation: Activation, tiles: Callable[..., Tile] = tile_for) -> None:
        super().__init__(activation, tiles)
        self._quantizers = blocks.Quantizers()

    def block_weights(self, weights: Experts, scaling: BlockScaling, *, by_column: bool) -> BlockWeights:
        """See `BlockKernels.block_weights`."""
        return self._quantizers.weights(weights, scaling, by_column=by_column)

    def block_weight_columns(self, weights: Experts, scaling: BlockScaling) -> BlockWeights:
        """See `BlockKernels.block_weight_columns`."""
        return self._quantizers.weight_columns(weights, scaling)

    def take_block_weights(self, name: str, rows: Parts, columns: Parts | None) -> BlockWeights:
        """See `BlockKernels.take_block_weights`."""
        found: list[blocks.Weights | None] = []
        for way, parts in (("as they lie", rows), ("the other way round", columns)):
            if parts is None:
                found.append(None)
            else:
                numbers, inverses = parts
                of_both = self.prepare(f"{name}, {way}", numbers), self.prepare(f"{name}' scales, {way}", inverses)
                found.append(blocks.Weights(*of_both))
        return BlockWeights(*found)

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
        """See `BlockKernels.block_rows`."""
        tokens = x.shape[0]
        padding = fp8.padded_tokens(tokens, offsets.shape[0] - 1) - tokens
        as_rows = saved and (exact or padding * _TURNED_FROM > tokens)
        columns = blocks.NOT if not by_column else blocks.SAVED if as_rows else blocks.TURNED
        rows, found = self._quantizers.rows(x, offsets, scaling, columns=columns)
        assert rows is not None
        return rows, found

    def block_columns(self, x: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling) -> BlockNumbers:
        """See `BlockKernels.block_columns`."""
        _, columns = self._quantizers.rows(x, offsets, scaling, by_row=False, columns=blocks.TURNED)
        assert columns is not None
        return columns

    def block_dact_rows(
        self, dact_input: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling, *, by_column: bool
    ) -> tuple[BlockNumbers, BlockNumbers | None]:
        """See `BlockKernels.block_dact_rows`."""
        return self.block_rows(dact_input, offsets, scaling, by_column=by_column)

    def turn_blocks(self, saved: BlockNumbers, offsets: torch.Tensor) -> BlockNumbers:
        """See `BlockKernels.turn_blocks`."""
        tokens, columns = saved.shape
        numbers, scales = saved.numbers.view(_E4M3), saved.scales.view(-1, columns)
        as_rows = numbers.numel() == tokens * columns  # else there is padding
        turned = fp8.turn(numbers.view(saved.shape), offsets) if as_rows else numbers.view(columns, -1)
        return BlockNumbers(saved.shape, saved.scaling, turned, scales)

    def rebuild_blocks(
        self, act_input: torch.Tensor, router: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling
    ) -> BlockNumbers:
        """See `BlockKernels.rebuild_blocks`."""
        _, columns = self._quantizers.rows(
            act_input,
            offsets,
            scaling,
            activation=(self._activation, router),
            by_row=False,
            columns=blocks.TURNED,
        )
        assert columns is not None
        return columns

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
        """See `BlockKernels.fc1_blocks`."""
        shape, device = (x.shape[0], weights.rows.numbers.view.shape[1]), x.numbers.device
        act_input = torch.empty(shape, dtype=dtype, device=device)
        self.fc1_linear_blocks(x, weights, bias, act_input, offsets[0], count)
        if offsets[1] is not offsets[0]:  # FC2 may read rows that FC1 did not write
            self.clear(offsets[0], act_input)
        rows, _ = self._quantizers.rows(act_input, offsets[1], scaling, activation=(self._activation, router))
        assert rows is not None
        return act_input, rows

    def fc1_linear_blocks(
        self,
        x: BlockNumbers,
        weights: BlockWeights,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """See `BlockKernels.fc1_linear_blocks`."""
        way = self._fc1_way(bias=bias is not None)
        values = {} if bias is None else {"bias": self._as_read(bias)}
        tile = self._block_tile(way.product, x, weights.rows)
        self._multiply(way.kernel, tile, x, weights.rows, out, None, values, offsets, count, **way.more)

    def _fc1_way(self, *, bias: bool) -> Way:
        return Way(getattr(sm90_block_device, "BlockBiasGemm" if bias else "BlockGemm"), "blocks")

    def _dact_way(self) -> Way:
        """Of FC2's dgrad with the activation's."""
        tanh = "" if self._activation.clamp is None else "Tanh"
        return Way(getattr(sm90_block_device, f"BlockD{tanh}SReLUGemm"), "blocks dact")

    def _as_read(self, bias: torch.Tensor) -> torch.Tensor:
        """FC1's bias in the order in which its kernels have columns."""
        return bias

    def linear_blocks(
        self,
        x: BlockNumbers,
        weights: blocks.Weights,
        out: torch.Tensor,
        offsets: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
        count: TileCount | None = None,
    ) -> None:
        """See `BlockKernels.linear_blocks`."""
        name, values = "BlockGemm", {}
        if bias is not None:
            name, values = "BlockBiasGemm", {"bias": bias}
            if bias_scales is not None:
                name, values = "BlockScaledBiasGemm", {"bias": bias, "scale": bias_scales}
        tile = self._block_tile("blocks", x, weights)
        self._multiply(getattr(sm90_block_device, name), tile, x, weights, out, None, values, offsets, count)

    def fc2_dgrad_blocks(
        self,
        dy: BlockNumbers,
        weights: BlockWeights,
        act_input: torch.Tensor,
        router: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Orders]:
        """See `BlockKernels.fc2_dgrad_blocks`."""
        dact_input, columns, way = torch.empty_like(act_input), weights.columns.numbers.view.shape[1], self._dact_way()
        tile = self._block_tile(way.product, dy, weights.columns)
        parts = act_input.new_empty(act_input.shape[0], tile.parts(columns), dtype=torch.float32)
        values = {"scale": router, "dscale": parts, **self._numbers()}
        count = self._backward_count(offsets)
        self._multiply(way.kernel, tile, dy, weights.columns, dact_input, act_input, values, offsets, count, **way.more)
        return dact_input, *self._sums(parts, offsets, count)

    def wgrad_blocks(
        self,
        dy: BlockNumbers,
        x: BlockNumbers,
        offsets: torch.Tensor,
        out: Experts,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
        padded: torch.Tensor | None = None,
    ) -> None:
        """See `BlockKernels.wgrad_blocks`."""
        kernel = getattr(sm90_block_device, f"{'Adding' if accumulate else ''}BlockWgradGemm")
        padded = fp8.padded_offsets(offsets) if padded is None else padded
        values = {TABLE: out.table, "starts": padded, "a_scales": _indexed(dy), "b_scales": _indexed(x)}
        one, other = dy.numbers.view(_E4M3), x.numbers.view(_E4M3)
        tile = self._wgrad_tile("blocks wgrad", x.shape[0], out)
        self._launch_wgrad(kernel, tile, one, other, out.view, values, padded, order)

    def padded_offsets(self, offsets: torch.Tensor) -> torch.Tensor:
        """See `BlockKernels.padded_offsets`."""
        return fp8.padded_offsets(offsets)

    def _block_tile(self, product: str, x: BlockNumbers, weights: blocks.Weights) -> Tile:
        tokens, depth = x.shape
        experts, columns = weights.numbers.table.shape[0], weights.numbers.view.shape[1]
        return self._tile_for(product, Regime.of(tokens, experts), None, columns, depth)

    def _multiply(
        self,
        kernel: type[Any],
        tile: Tile,
        x: BlockNumbers,
        weights: blocks.Weights,
        out: torch.Tensor,
        c: torch.Tensor | None,
        values: dict[str, Any],
        offsets: torch.Tensor,
        count: TileCount | None,
        **ways: Any,
    ) -> None:
        numbers, inverses = weights.numbers, weights.inverses
        values = values | {"a_scales": _indexed(x), "b_scales": inverses.view, "starts": offsets}
        values |= {TABLE: numbers.table, sm90_block_device.SCALE_TABLE: inverses.table}
        rows = x.numbers.view(_E4M3).view(x.shape)
        self._launch(kernel, tile, rows, numbers.view.view(_E4M3), out, c, values, offsets, count, **ways)


def _indexed(numbers: BlockNumbers) -> torch.Tensor:
    """Their scales, which kernels index with 32 bits."""
    if numbers.scales.numel() >= _INDEXED:
        raise UnsupportedError(
            f"The kernels of FP8 by blocks read less than 2**31 scales of one operand; {tuple(numbers.shape)} has"
            f" {numbers.scales.numel()}. Give the op fewer tokens at a time."
        )
    return numbers.scales
