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
from te_offload.fused.kernels.interface import Gated, Orders, TileCount, TileOrder
from te_offload.fused.kernels.pairs import to_halves, to_pairs
from te_offload.fused.kernels.sm90 import DTYPE_NAMES, Sm90Kernels
from te_offload.fused.kernels.sm90_experts import TABLE


class Sm90GluKernels(Sm90Kernels):
    """See `interface.Kernels`."""

    @property
    def _gated(self) -> Gated:
        assert isinstance(self._activation, Gated)
        return self._activation

    def fc1(
        self,
        x: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.fc1`."""
        gated, columns = self._gated, weights.view.shape[1]
        act_input = x.new_empty(x.shape[0], columns)
        fc2_input = x.new_empty(x.shape[0], columns // 2)
        values = {"scale": scales, "fc2_input": fc2_input, TABLE: weights.table, **self._numbers()}
        if bias is not None:
            values["bias"] = to_pairs(bias, gated.interleave)
        kernel = getattr(
            sm90_glu_device, sm90_glu_device.fc1_name(gated.gate, DTYPE_NAMES[x.dtype], bias=bias is not None)
        )
        tile, pairs = self._tile("glu", x, weights, act_input), gated.interleave
        self._launch(kernel, tile, x, weights.view, act_input, None, values, offsets, count, pairs=pairs)
        return act_input, fc2_input

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
        tile = self._tile("dglu", dy, weights, fc2_input)
        parts = torch.empty(tokens, tile.parts(columns), dtype=torch.float32, device=dy.device)
        values = {"scale": scales, "fc2_input": fc2_input, "dscale": parts, TABLE: weights.table, **self._numbers()}
        kernel = getattr(sm90_glu_device, sm90_glu_device.dact_name(self._gated.gate))
        count, ways = self._backward_count(offsets), {"transposed": True, "packed": True}
        self._launch(kernel, tile, dy, weights.view, dact_input, act_input, values, offsets, count, **ways)
        return dact_input, fc2_input, *self._sums(parts, offsets, count)

    def fc1_dgrad(
        self,
        dact_input: torch.Tensor,
        weights: Experts,
        offsets: torch.Tensor,
        out: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """See `Kernels.fc1_dgrad`."""
        self.clear(offsets, out)
        kernel, values = sm90_glu_device.PairedDgradGemm, {TABLE: weights.table}
        tile, pairs = self._tile("dgrad", dact_input, weights, out), self._gated.interleave
        ways: dict[str, Any] = {"transposed": True, "pairs": pairs}
        self._launch(kernel, tile, dact_input, weights.view, out, None, values, offsets, count, **ways)

    def fc1_wgrad(
        self,
        dact_input: torch.Tensor,
        x: torch.Tensor,
        offsets: torch.Tensor,
        out: Experts,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
    ) -> None:
        """See `Kernels.fc1_wgrad`."""
        self._paired_wgrad("", dact_input, x, offsets, out, order, accumulate=accumulate)

    def fc1_backward(
        self,
        dact_input: torch.Tensor,
        x: torch.Tensor,
        weights: Experts,
        offsets: torch.Tensor,
        dx: torch.Tensor,
        dweights: Experts,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
        count: TileCount | None = None,
    ) -> None:
        """See `Kernels.fc1_backward`, and `Sm90Kernels.fc1_backward`."""
        self.fc1_dgrad(dact_input, weights, offsets, dx, count)
        self._paired_wgrad("Beside", dact_input, x, offsets, dweights, order, accumulate=accumulate)

    def fc1_bias_grads(self, dact_input: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `Kernels.fc1_bias_grads`."""
        return to_halves(super().fc1_bias_grads(dact_input, bias, offsets), self._gated.interleave)

    def _paired_wgrad(
        self,
        begins: str,
        dy: torch.Tensor,
        x: torch.Tensor,
        offsets: torch.Tensor,
        out: Experts,
        order: TileOrder | None,
        *,
        accumulate: bool,
    ) -> None:
        kernel = getattr(sm90_glu_device, f"{'Adding' if accumulate else ''}Paired{begins}WgradGemm")
        tile, values = self._wgrad_tile("wgrad", x.shape[0], out), {TABLE: out.table}
        pairs = self._gated.interleave
        self._launch_wgrad(kernel, tile, dy.mT, x.mT, out.view, values, offsets, order, pairs)

    def _numbers(self) -> dict[str, Any]:
        return sm90_glu_device.numbers_of(self._gated)
