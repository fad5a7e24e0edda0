"""The fused grouped MLP in FP8 by blocks on Hopper: the kernels of `block_device`.

In: bf16 or fp16 tensors, offsets of experts on the GPU. Out: as in `block_interface.BlockKernels`. Keeps true: no split
size reaches the host; numbers and scales are Transformer Engine's; two runs give the same bits. Does not: know of other
formats. Needs triton, and quack-kernels for what is not FP8.

FC1's epilogue sees all of a block, so it quantizes FC2's input too.
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.fused.kernels import blocks, fp8
from te_offload.fused.kernels.block_interface import BlockNumbers, BlockWeights
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.sm90 import Sm90Kernels
from te_offload.ops.scaling import BlockScaling

_E4M3 = torch.float8_e4m3fn


class Sm90BlockKernels(Sm90Kernels):
    """See `block_interface.BlockKernels`."""

    def __deepcopy__(self, memo: Any) -> Sm90BlockKernels:
        return Sm90BlockKernels(self._activation)

    def __reduce__(self) -> Any:
        return Sm90BlockKernels, (self._activation,)

    def block_weights(self, weights: Experts, scaling: BlockScaling, *, by_column: bool) -> BlockWeights:
        """See `BlockKernels.block_weights`."""
        return blocks.quantize_weights(weights, scaling, by_column=by_column)

    def block_rows(
        self, x: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling, *, by_column: bool, saved: bool = False
    ) -> tuple[BlockNumbers, BlockNumbers | None]:
        """See `BlockKernels.block_rows`."""
        columns = blocks.NOT if not by_column else blocks.SAVED if saved else blocks.TURNED
        rows, found = blocks.quantize(x, offsets, scaling, columns=columns)
        assert rows is not None
        return rows, found

    def turn_blocks(self, saved: BlockNumbers, offsets: torch.Tensor) -> BlockNumbers:
        """See `BlockKernels.turn_blocks`."""
        turned = fp8.turn(saved.numbers.view(_E4M3).view(saved.shape), offsets)
        return BlockNumbers(saved.shape, saved.scaling, turned, saved.scales)

    def rebuild_blocks(
        self, act_input: torch.Tensor, router: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling
    ) -> BlockNumbers:
        """See `BlockKernels.rebuild_blocks`."""
        _, columns = blocks.quantize(
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
    ) -> tuple[torch.Tensor, BlockNumbers]:
        """See `BlockKernels.fc1_blocks`."""
        act_input, rows = blocks.fc1(x, weights.rows, bias, router, offsets[0], dtype, scaling, self._activation)
        if offsets[1] is not offsets[0]:  # FC2 may read rows that FC1 did not write
            self.clear(offsets[0], act_input)
            found, _ = blocks.quantize(act_input, offsets[1], scaling, activation=(self._activation, router))
            assert found is not None
            rows = found
        return act_input, rows

    def linear_blocks(
        self,
        x: BlockNumbers,
        weights: blocks.Weights,
        out: torch.Tensor,
        offsets: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
    ) -> None:
        """See `BlockKernels.linear_blocks`."""
        blocks.linear(x, weights, out, offsets, bias=bias, bias_scales=bias_scales)

    def fc2_dgrad_blocks(
        self,
        dy: BlockNumbers,
        weights: BlockWeights,
        act_input: torch.Tensor,
        router: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockKernels.fc2_dgrad_blocks`."""
        dact_input, parts = blocks.fc2_dgrad(dy, weights.columns, act_input, router, offsets, self._activation)
        dscales = torch.empty(act_input.shape[0], dtype=torch.float32, device=act_input.device)
        if act_input.shape[0]:
            self._rows("sums", torch.float32)(parts, offsets, dscales)
        return dact_input, dscales

    def wgrad_blocks(
        self, dy: BlockNumbers, x: BlockNumbers, offsets: torch.Tensor, out: Experts, *, accumulate: bool
    ) -> None:
        """See `BlockKernels.wgrad_blocks`."""
        blocks.wgrad(dy, x, offsets, out, accumulate=accumulate)
