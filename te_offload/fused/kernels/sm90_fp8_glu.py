"""The gated grouped MLP's FP8 products on Hopper: compiles, caches and launches the kernels of `sm90_fp8_glu_device`.

In: as `sm90_fp8`, with a `Gated` activation. Out: as there; ``act_input`` and its gradient are pairs (`sm90_glu`), of which
the quantizers make Transformer Engine's order. Keeps true: as `Sm90Fp8Kernels`. Does not: quantize in an epilogue. Needs
quack-kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.fused.kernels import fp8, sm90_fp8_glu_device, sm90_glu_device
from te_offload.fused.kernels.fp8_interface import QuantizedRows
from te_offload.fused.kernels.interface import Gated
from te_offload.fused.kernels.pairs import to_halves, to_pairs
from te_offload.fused.kernels.sm90 import DTYPE_NAMES
from te_offload.fused.kernels.sm90_fp8 import Sm90Fp8Kernels, Way, product_name


class Sm90Fp8GluKernels(Sm90Fp8Kernels):
    """See `Fp8Kernels`."""

    @property
    def _gated(self) -> Gated:
        assert isinstance(self._activation, Gated)
        return self._activation

    @property
    def _two_passes(self) -> bool:
        return True

    def quantize_dact(self, *args: Any, **kwargs: Any) -> QuantizedRows:
        """See `Fp8Kernels.quantize_dact`."""
        return fp8.quantize(*args, **kwargs, pairs=self._gated.interleave)

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
        return act_input.view(act_input.shape[0], -1, 2)[..., 0]

    def fc1_bias_grads(self, dact_input: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `Kernels.fc1_bias_grads`."""
        return to_halves(super().fc1_bias_grads(dact_input, bias, offsets), self._gated.interleave)

    def _numbers(self) -> dict[str, Any]:
        return sm90_glu_device.numbers_of(self._gated)
