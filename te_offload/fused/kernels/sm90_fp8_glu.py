"""The gated grouped MLP's FP8 products on Hopper: compiles, caches and launches the kernels of `sm90_fp8_glu_device`.

In: as `sm90_fp8`, with a `Gated` activation. Out: as there; ``act_input`` and its gradient are pairs (`sm90_glu`), of which
the quantizers make Transformer Engine's order. Keeps true: as `Sm90Fp8Kernels`. Does not: quantize in an epilogue. Needs
quack-kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_offload.fused.kernels import fp8, sm90_fp8_glu_device, sm90_glu_device
from te_offload.fused.kernels.fp8_glu import PairQuantizers
from te_offload.fused.kernels.fp8_interface import QuantizedRows
from te_offload.fused.kernels.interface import Activation, Gated
from te_offload.fused.kernels.pairs import to_pairs
from te_offload.fused.kernels.sm90 import DTYPE_NAMES
from te_offload.fused.kernels.sm90_fp8 import Sm90Fp8Kernels, product_name
from te_offload.fused.kernels.sm90_launch import Tile, Way
from te_offload.fused.kernels.sm90_tiles import tile_for
from te_offload.ops.scaling import Scaling


class Sm90Fp8GluKernels(Sm90Fp8Kernels):
    """See `Fp8Kernels`."""

    def __init__(self, activation: Activation, tiles: Callable[..., Tile] = tile_for) -> None:
        super().__init__(activation, tiles)
        self._quantizers = PairQuantizers()

    @property
    def _gated(self) -> Gated:
        assert isinstance(self._activation, Gated)
        return self._activation

    @property
    def _two_passes(self) -> bool:
        return True

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
        """See `Fp8Kernels.quantize`."""
        if router is None:
            return super().quantize(x, offsets, scaling, weights=weights, magnitudes=magnitudes, by_column=by_column)
        assert magnitudes is not None and not by_column
        inverses, scales, factors = fp8.scales_of(
            magnitudes, offsets, scaling, weights, rounded=x.dtype, rows=x.shape[0]
        )
        activation = self._gated, router
        rows = self._quantizers.activated(x, offsets, scales, scaling.dtype, activation, by_column=False)
        return QuantizedRows(rows, None, scales, inverses, factors)

    def quantize_dact(
        self,
        dact_input: torch.Tensor,
        offsets: torch.Tensor,
        scaling: Scaling,
        *,
        weights: torch.Tensor,
        magnitudes: torch.Tensor,
        by_column: bool = False,
    ) -> QuantizedRows:
        """See `Fp8Kernels.quantize_dact`."""
        inverses, scales, factors = fp8.scales_of(
            magnitudes, offsets, scaling, weights, rounded=dact_input.dtype, rows=dact_input.shape[0]
        )
        rows, columns = self._quantizers.halves(
            dact_input, offsets, scales, scaling.dtype, self._gated.interleave, by_column=by_column
        )
        return QuantizedRows(rows, columns, scales, inverses, factors)

    def rebuild(
        self,
        act_input: torch.Tensor,
        router: torch.Tensor,
        rows: QuantizedRows,
        offsets: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedRows:
        """See `Fp8Kernels.rebuild`."""
        activation = self._gated, router
        columns = self._quantizers.activated(act_input, offsets, rows.scales, dtype, activation, by_column=True)
        return rows._replace(rows=None, columns=columns)

    def _fc1_way(self, dtype: torch.dtype, *, bias: bool, given: bool, fast: bool) -> Way:
        assert not given, "two passes"
        gated = self._gated
        name = sm90_fp8_glu_device.fc1_name(gated.gate, DTYPE_NAMES[dtype], bias=bias, fast=fast)
        return Way(getattr(sm90_fp8_glu_device, name), f"{product_name(fast)} glu", {"pairs": gated.interleave})

    def _dact_way(self, *, fast: bool) -> Way:
        kernel = getattr(sm90_fp8_glu_device, sm90_fp8_glu_device.dact_name(self._gated.gate, fast=fast))
        return Way(kernel, f"{product_name(fast)} dglu", {"packed": True})

    def _as_read(self, bias: torch.Tensor) -> torch.Tensor:
        return to_pairs(bias, self._gated.interleave)

    def _tiled(self, act_input: torch.Tensor) -> torch.Tensor:
        return act_input.view(act_input.shape[0], act_input.shape[1] // 2, 2)[..., 0]  # also of no tokens

    def _numbers(self) -> dict[str, Any]:
        return sm90_glu_device.numbers_of(self._gated)
