"""FP8 with a scale a tensor and a gated activation on Hopper: launches the quantizers of `fp8_glu_device`.

In: pairs of bf16 or fp16 (`pairs`), a scale for each row, offsets of experts on the GPU. Out: FP8. Keeps true: no number
reaches the host; layouts are those of `fp8_interface.QuantizedRows`. Does not: look for scales; `fp8` does. Needs
quack-kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.fused.kernels import sm90_compile
from te_offload.fused.kernels.fp8 import padded_tokens
from te_offload.fused.kernels.interface import Gated
from te_offload.fused.kernels.progress import said_if_slow
from te_offload.fused.kernels.sm90_launch import COMPILING


class PairQuantizers:
    """Quantizers that have been launched, ready to be launched again."""

    def __init__(self) -> None:
        self._functions: dict[Any, Any] = {}

    def activated(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        activation: tuple[Gated, torch.Tensor],
        *,
        by_column: bool,
    ) -> torch.Tensor:
        """What the activation makes of pairs x (T, 2F): rows (T, F), or columns (F, P).

        Args:
            scales: of each row. dtype: of the numbers. activation: and router scales (T,).
        """
        gated, router = activation
        tokens, width = x.shape[0], x.shape[1] // 2
        size = (width, padded_tokens(tokens, offsets.shape[0] - 1)) if by_column else (tokens, width)
        found = torch.empty(size, dtype=dtype, device=x.device)
        rows, columns = (None, found) if by_column else (found, None)
        if tokens:
            self._launch(x, router, offsets, rows, scales, columns, gated=gated, by_column=by_column)
        return found

    def halves(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        interleave: int,
        *,
        by_column: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Pairs x (T, 2F) in Transformer Engine's order (`pairs.to_halves`): rows, and columns (2F, P) if asked for."""
        tokens, width = x.shape
        rows, columns = torch.empty(tokens, width, dtype=dtype, device=x.device), None
        if by_column:
            padded = padded_tokens(tokens, offsets.shape[0] - 1)
            columns = torch.empty(width, padded, dtype=dtype, device=x.device)
        if tokens:
            self._launch(x, None, offsets, rows, scales, columns, pairs=interleave, by_column=by_column)
        return rows, columns

    def _launch(
        self,
        x: torch.Tensor,
        router: torch.Tensor | None,
        offsets: torch.Tensor,
        rows: torch.Tensor | None,
        scales: torch.Tensor,
        columns: torch.Tensor | None,
        **kind: Any,
    ) -> None:
        out = next(one.dtype for one in (rows, columns) if one is not None)
        key = x.dtype, out, *kind.items()
        function = self._functions.get(key)
        if function is None:
            with said_if_slow(f"{COMPILING}: a quantizer"):
                function = self._functions[key] = sm90_compile.compiled_pair_quantizer(x.dtype, out, **kind)
        function(_words(x), router, offsets, _words(rows), scales, _words(columns), None, 1.0, 0.0, 1.0)


def _words(matrix: torch.Tensor | None) -> torch.Tensor | None:
    return None if matrix is None else matrix.view(torch.int32)
