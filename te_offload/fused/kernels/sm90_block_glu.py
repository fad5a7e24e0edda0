"""The gated grouped MLP in FP8 by blocks on Hopper: compiles, caches and launches the kernels of `sm90_block_glu_device`.

In: as `sm90_blocks`, with a `Gated` activation. Out: as there; ``act_input`` and its gradient are pairs (`sm90_glu`), of
which the quantizers make Transformer Engine's order. Keeps true: as `Sm90BlockKernels`. Does not: quantize. Needs
quack-kernels, and triton (`fp8`).
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.fused.kernels import blocks, sm90_block_glu_device, sm90_glu_device
from te_offload.fused.kernels.block_interface import BlockNumbers
from te_offload.fused.kernels.interface import Gated
from te_offload.fused.kernels.pairs import to_pairs
from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels
from te_offload.fused.kernels.sm90_launch import Way
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

    def _fc1_way(self, *, bias: bool) -> Way:
        kernels = sm90_block_glu_device
        kernel = kernels.PairedBlockBiasGemm if bias else kernels.PairedBlockGemm
        return Way(kernel, "blocks pairs", {"pairs": self._gated.interleave})

    def _dact_way(self) -> Way:
        name = sm90_block_glu_device.dact_name(self._gated.gate)
        return Way(getattr(sm90_block_glu_device, name), "blocks dact", {"packed": True})

    def _as_read(self, bias: torch.Tensor) -> torch.Tensor:
        return to_pairs(bias, self._gated.interleave)

    def _numbers(self) -> dict[str, Any]:
        return sm90_glu_device.numbers_of(self._gated)
