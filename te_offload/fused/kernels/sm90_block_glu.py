"""The gated grouped MLP in FP8 by blocks on Hopper: compiles, caches and launches the kernels of `sm90_block_glu_device`.

In: as `sm90_blocks`, with a `Gated` activation. Out: as there; ``act_input`` and its gradient are pairs (`sm90_glu`), of
which the quantizers make Transformer Engine's order. Keeps true: as `Sm90BlockKernels`. Does not: quantize. Needs
quack-kernels, and triton (`fp8`).
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.fused.kernels import blocks, sm90_block_glu_device, sm90_glu_device
from te_offload.fused.kernels.block_interface import BlockNumbers, BlockWeights
from te_offload.fused.kernels.interface import Gated, Orders, TileCount
from te_offload.fused.kernels.pairs import to_halves, to_pairs
from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels
from te_offload.ops.scaling import BlockScaling


class Sm90BlockGluKernels(Sm90BlockKernels):
    """See `block_interface.BlockKernels`."""

    @property
    def _gated(self) -> Gated:
        assert isinstance(self._activation, Gated)
        return self._activation

    def block_dact_rows(
        self, dact_input: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling, *, by_column: bool
    ) -> tuple[BlockNumbers, BlockNumbers | None]:
        """See `BlockKernels.block_dact_rows`."""
        columns = blocks.TURNED if by_column else blocks.NOT
        rows, found = self._quantizers.rows(dact_input, offsets, scaling, pairs=self._gated.interleave, columns=columns)
        assert rows is not None
        return rows, found

    def fc1_linear(
        self,
        x: BlockNumbers,
        weights: BlockWeights,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """See `BlockKernels.fc1_linear`."""
        interleave = self._gated.interleave
        kernel, values = sm90_block_glu_device.PairedBlockGemm, {}
        if bias is not None:
            kernel = sm90_block_glu_device.PairedBlockBiasGemm
            values = {"bias": to_pairs(bias, interleave)}
        self._multiply(kernel, x, weights.rows, out, None, values, offsets, count, pairs=interleave)

    def fc2_dgrad_blocks(
        self,
        dy: BlockNumbers,
        weights: BlockWeights,
        act_input: torch.Tensor,
        router: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Orders]:
        """See `BlockKernels.fc2_dgrad_blocks`."""
        dact_input = torch.empty_like(act_input)
        tokens, columns = act_input.shape[0], act_input.shape[1] // 2
        parts = self._dscale_parts(tokens, columns, act_input.device)
        values = {"scale": router, "dscale": parts, **self._numbers()}
        kernel = getattr(sm90_block_glu_device, sm90_block_glu_device.dact_name(self._gated.gate))
        count = self._backward_count(offsets)
        self._multiply(kernel, dy, weights.columns, dact_input, act_input, values, offsets, count, packed=True)
        return dact_input, *self._sums(parts, offsets, count)

    def fc1_bias_grads(self, dact_input: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `Kernels.fc1_bias_grads`."""
        return to_halves(super().fc1_bias_grads(dact_input, bias, offsets), self._gated.interleave)

    def _numbers(self) -> dict[str, Any]:
        return sm90_glu_device.numbers_of(self._gated)
