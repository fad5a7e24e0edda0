"""The gated grouped MLP on Hopper: compiles, caches and launches the kernels of `sm90_glu_device`.

In: as in `interface.Kernels`, with a `Gated` activation. Out: as there; ``act_input`` and its gradient are pairs
of a's and b's columns, (T, F, 2) in memory, whatever the order of FC1's weights. Keeps true: as `Sm90Kernels`; a bias of
FC1's, which is small, is brought into that order. Does not: quantize. Needs quack-kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.fused.kernels import sm90_glu_device
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.interface import Gated, Orders, TileCount
from te_offload.fused.kernels.pairs import to_pairs
from te_offload.fused.kernels.sm90 import DTYPE_NAMES, Sm90Kernels
from te_offload.fused.kernels.sm90_experts import TABLE


class Sm90GluKernels(Sm90Kernels):
    """See `interface.Kernels`."""

    @property
    def _gated(self) -> Gated:
        assert isinstance(self._activation, Gated)
        return self._activation

    def _fc1_into(
        self,
        act_input: torch.Tensor | None,
        x: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None,
    ) -> torch.Tensor:
        gated, columns = self._gated, weights.view.shape[1]
        fc2_input = x.new_empty(x.shape[0], columns // 2)
        values = {"scale": scales, "fc2_input": fc2_input, TABLE: weights.table, **self._numbers()}
        if bias is not None:
            values["bias"] = to_pairs(bias, gated.interleave)
        kernel = getattr(
            sm90_glu_device, sm90_glu_device.fc1_name(gated.gate, DTYPE_NAMES[x.dtype], bias=bias is not None)
        )
        tile = self._tile("glu", x, weights, columns)
        self._launch(kernel, tile, x, weights.view, act_input, None, values, offsets, count, pairs=self._pairs)
        return fc2_input

    def fc1_linear(
        self,
        x: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> torch.Tensor:
        """See `Kernels.fc1_linear`."""
        act_input = x.new_empty(x.shape[0], weights.view.shape[1])
        kernel, values = sm90_glu_device.PairedGemm, {TABLE: weights.table}
        if bias is not None:
            kernel, values["bias"] = sm90_glu_device.PairedBiasGemm, to_pairs(bias, self._gated.interleave)
        tile = self._tile("glu", x, weights, act_input.shape[1])
        self._launch(kernel, tile, x, weights.view, act_input, None, values, offsets, count, pairs=self._pairs)
        return act_input

    def fc2_dgrad(
        self,
        dy: torch.Tensor,
        weights: Experts,
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Orders]:
        """See `Kernels.fc2_dgrad`."""
        tokens, columns = act_input.shape[0], act_input.shape[1] // 2
        fc2_input, dact_input = act_input.new_empty(tokens, columns), torch.empty_like(act_input)
        tile = self._tile("dglu", dy, weights, columns)
        parts = torch.empty(tokens, tile.parts(columns), dtype=torch.float32, device=dy.device)
        values = {"scale": scales, "fc2_input": fc2_input, "dscale": parts, TABLE: weights.table, **self._numbers()}
        kernel = getattr(sm90_glu_device, sm90_glu_device.dact_name(self._gated.gate))
        count, ways = self._backward_count(offsets), {"transposed": True, "packed": True}
        self._launch(kernel, tile, dy, weights.view, dact_input, act_input, values, offsets, count, **ways)
        return dact_input, fc2_input, *self._sums(parts, offsets, count)

    @property
    def _pairs(self) -> int | None:
        return self._gated.interleave

    def _dgrad_kernel(self) -> type[Any]:
        return sm90_glu_device.PairedDgradGemm

    def _fc1_wgrad_kernel(self, *, accumulate: bool, beside: bool) -> type[Any]:
        name = f"{'Adding' if accumulate else ''}Paired{'Beside' if beside else ''}WgradGemm"
        kernel: type[Any] = getattr(sm90_glu_device, name)
        return kernel

    def _numbers(self) -> dict[str, Any]:
        return sm90_glu_device.numbers_of(self._gated)
