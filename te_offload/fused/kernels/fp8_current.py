"""Current scaling in FP8 on Hopper: launches the quantizers of `fp8_current_device`.

In: rows and weights of bf16 or fp16, offsets of experts on the GPU. Out: `QuantizedRows`, `QuantizedWeights`. Keeps true:
no number reaches the host; scales and numbers are Transformer Engine's. Does not: take magnitudes that were found
elsewhere, or scales that are known beforehand; `fp8` does. Needs quack-kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_offload.fused.kernels import sm90_compile
from te_offload.fused.kernels.blocks import aligned
from te_offload.fused.kernels.experts import Experts, ExpertsCache
from te_offload.fused.kernels.fp8 import padded_tokens
from te_offload.fused.kernels.fp8_interface import QuantizedRows, QuantizedWeights
from te_offload.fused.kernels.progress import said_if_slow
from te_offload.fused.kernels.sm90_launch import COMPILING
from te_offload.ops.scaling import Scaling

_MOST = torch.finfo(torch.float32).max


class CurrentQuantizers:
    """Quantizers that have been launched, ready to be launched again."""

    def __init__(self) -> None:
        self._functions: dict[Any, Any] = {}
        self._experts = ExpertsCache()

    def weights(self, weights: Experts, scaling: Scaling, *, by_column: bool) -> QuantizedWeights:
        """All experts' weights in FP8, as they lie, and the other way round if asked for.

        Args:
            weights: rows and columns multiples of 16. scaling: of which no scales are given.
        """
        count, (rows, columns), device = weights.table.shape[0], weights.view.shape[1:], weights.view.device
        numbers = torch.empty(count, rows, columns, dtype=scaling.dtype, device=device)
        turned = torch.empty(count, columns, rows, dtype=scaling.dtype, device=device) if by_column else None
        inverses, work = torch.empty(count, dtype=torch.float32, device=device), _work(count, device)
        magnitudes = work.view(weights.view.dtype)[2::4]  # the lower halves of what follows the number of tasks
        function = self._get(sm90_compile.compiled_scaled_weights, weights.view.dtype, scaling, by_column)
        words = _words(weights.view), weights.table, _words(numbers), _words(turned)
        function(*words, work, inverses, scaling.epsilon, _MOST)
        back = None if turned is None else self._experts.get("columns", turned)
        return QuantizedWeights(self._experts.get("rows", numbers), back, inverses, magnitudes=magnitudes)

    def rows(
        self, x: torch.Tensor, offsets: torch.Tensor, scaling: Scaling, *, weights: torch.Tensor, by_column: bool
    ) -> QuantizedRows:
        """Rows in FP8, each expert's with a scale of its own, and with tokens side by side if asked for.

        Args:
            x: (T, C), T not zero, C a multiple of 16. offsets: (N + 1,) int32. scaling: as above.
            weights: (N,) inverse scales of the weights that they meet, for ``factors``.
        """
        (tokens, columns), experts, device = x.shape, weights.shape[0], x.device
        numbers, turned = torch.empty(tokens, columns, dtype=scaling.dtype, device=device), None
        if by_column:
            turned = torch.empty(columns, padded_tokens(tokens, experts), dtype=scaling.dtype, device=device)
        inverses, scales, factors = (
            torch.empty(size, dtype=torch.float32, device=device) for size in (experts, tokens, tokens)
        )
        function = self._get(sm90_compile.compiled_scaled_rows, x.dtype, scaling, by_column)
        words = _words(aligned(x)), offsets, weights, _words(numbers), _words(turned), _work(experts, device)
        function(*words, inverses, scales, factors, scaling.epsilon, _MOST)
        return QuantizedRows(numbers, turned, scales, inverses, factors)

    def _get(self, compiles: Callable[..., Any], dtype: torch.dtype, scaling: Scaling, both: bool) -> Any:
        key = compiles, dtype, scaling.dtype, scaling.power_of_two, both
        function = self._functions.get(key)
        if function is None:
            with said_if_slow(f"{COMPILING}: a quantizer"):
                function = compiles(dtype, scaling.dtype, both=both, power_of_two=scaling.power_of_two)
            self._functions[key] = function
        return function


def _work(scales: int, device: torch.device) -> torch.Tensor:
    """As `fp8_current_device` has it."""
    return torch.zeros(2 * scales + 1, dtype=torch.int32, device=device)


def _words(matrix: torch.Tensor | None) -> torch.Tensor | None:
    return None if matrix is None else matrix.view(torch.int32)
