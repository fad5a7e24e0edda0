"""Weights in FP8 with a scale a tensor on Hopper: launches the quantizers of `fp8_weights_device`.

In: weights of bf16 or fp16. Out: `QuantizedWeights`. Keeps true: no number reaches the host; scales and numbers are
Transformer Engine's. Does not: take scales that are known beforehand; `fp8` does. Needs quack-kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.fused.kernels import sm90_compile
from te_offload.fused.kernels.experts import Experts, ExpertsCache
from te_offload.fused.kernels.fp8_interface import QuantizedWeights
from te_offload.fused.kernels.progress import said_if_slow
from te_offload.fused.kernels.sm90_launch import COMPILING
from te_offload.ops.scaling import Scaling

_MOST = torch.finfo(torch.float32).max


class ScaledWeightQuantizers:
    """Quantizers that have been launched, ready to be launched again."""

    def __init__(self) -> None:
        self._functions: dict[Any, Any] = {}
        self._experts = ExpertsCache()

    def quantize(self, weights: Experts, scaling: Scaling, *, by_column: bool) -> QuantizedWeights:
        """All experts' weights in FP8, as they lie, and the other way round if asked for.

        Args:
            weights: rows and columns multiples of 16. scaling: of which no scales are given.
        """
        count, (rows, columns), device = weights.table.shape[0], weights.view.shape[1:], weights.view.device
        numbers = torch.empty(count, rows, columns, dtype=scaling.dtype, device=device)
        turned = torch.empty(count, columns, rows, dtype=scaling.dtype, device=device) if by_column else None
        inverses = torch.empty(count, dtype=torch.float32, device=device)
        work = torch.zeros(2 * count + 1, dtype=torch.int32, device=device)
        function = self._get(weights.view.dtype, scaling, by_column)
        words = _words(weights.view), weights.table, _words(numbers), None if turned is None else _words(turned)
        function(*words, work, inverses, scaling.epsilon, _MOST)
        back = None if turned is None else self._experts.get("columns", turned)
        return QuantizedWeights(self._experts.get("rows", numbers), back, inverses)

    def _get(self, dtype: torch.dtype, scaling: Scaling, both: bool) -> Any:
        key = dtype, scaling.dtype, scaling.power_of_two, both
        function = self._functions.get(key)
        if function is None:
            ways = {"both": both, "power_of_two": scaling.power_of_two}
            with said_if_slow(f"{COMPILING}: a quantizer"):
                function = sm90_compile.compiled_scaled_weights(dtype, scaling.dtype, **ways)
            self._functions[key] = function
        return function


def _words(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(torch.int32)
