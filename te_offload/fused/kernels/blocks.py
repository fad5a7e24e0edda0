"""FP8 by blocks on Hopper: launches the quantizers of `block_device`.

In: rows of bf16 or fp16, weights, offsets of experts on the GPU. Out: `BlockNumbers`, `Weights`. Keeps true: no
number reaches the host; layouts are those of `block_device`. Does not: know of the rest of a grouped MLP. Needs
quack-kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_offload.fused.kernels import block_device, fp8, sm90_compile, tile_device
from te_offload.fused.kernels.block_interface import BlockNumbers, BlockWeights
from te_offload.fused.kernels.experts import Experts, ExpertsCache
from te_offload.fused.kernels.interface import Activation, Gated, SquaredReLU
from te_offload.fused.kernels.progress import said_if_slow
from te_offload.fused.kernels.sm90_launch import COMPILING
from te_offload.ops.scaling import BlockScaling

BLOCK, NOT, SAVED, TURNED = tile_device.BLOCK, block_device.NOT, block_device.SAVED, block_device.TURNED
_ALIGNED = 16  # bytes that a thread reads at once


@dataclass(frozen=True)
class Weights:
    """N weights, one way round.

    Attributes:
        numbers: bytes (rows, columns), columns what is summed over. inverses: (parts, parts) float32, one a block.
    """

    numbers: Experts
    inverses: Experts


class Quantizers:
    """Quantizers that have been launched, ready to be launched again."""

    def __init__(self) -> None:
        self._functions: dict[Any, Any] = {}
        self._experts = ExpertsCache()

    def rows(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        scaling: BlockScaling,
        *,
        activation: tuple[Activation, torch.Tensor] | None = None,
        pairs: int | None = None,
        by_row: bool = True,
        columns: int = NOT,
    ) -> tuple[BlockNumbers | None, BlockNumbers | None]:
        """Rows and columns of x (T, C), C a multiple of 16.

        Args:
            activation: and router scales (T,): the numbers are what the activation makes of x; of half as many columns if
                it is gated, from pairs.
            pairs: x is in pairs of columns, of which these are the blocks in Transformer Engine's order
                (`pairs.to_halves`), and what is returned is in that.
            columns: `NOT`, `SAVED`: as the rows lie, `TURNED`: (C, P), as `wgrad` reads them.
        """
        function, router = activation if activation is not None else (None, None)
        gated = function if isinstance(function, Gated) else None
        tokens, experts, device = x.shape[0], offsets.shape[0] - 1, x.device
        width = x.shape[1] if gated is None else x.shape[1] // 2
        padded, shape = fp8.padded_tokens(tokens, experts), (tokens, width)
        rows = found = None
        if by_row:
            rows = BlockNumbers(shape, scaling, _bytes(tokens, width, device), _floats(_parts(width), tokens, device))
        if columns != NOT:
            size = (width, padded) if columns == TURNED else (tokens, width)
            found = BlockNumbers(shape, scaling, _bytes(*size, device), _floats(padded // BLOCK, width, device))
        if not tokens:
            return rows, found
        clamp = function.clamp if isinstance(function, SquaredReLU) else None
        kind = {"activated": activation is not None, "clamps": clamp is not None, "gated": gated, "pairs": pairs}
        compiled = self._get(
            sm90_compile.compiled_row_quantizer, x.dtype, scaling, by_row=by_row, columns=columns, **kind
        )
        numbers = 1.0 if clamp is None else clamp, scaling.epsilon, torch.finfo(x.dtype).max
        compiled(_words(aligned(x)), router, offsets, *_both(rows), *_both(found), *numbers)
        return rows, found

    def weights(self, weights: Experts, scaling: BlockScaling, *, by_column: bool) -> BlockWeights:
        """All experts' weights in FP8, as they lie, and the other way round if asked for."""
        count, (rows, columns), device = weights.table.shape[0], weights.view.shape[1:], weights.view.device
        numbers = torch.empty(count, rows, columns, dtype=torch.uint8, device=device)
        inverses = torch.empty(count, _parts(rows), _parts(columns), dtype=torch.float32, device=device)
        turned = others = None
        if by_column:
            turned = torch.empty(count, columns, rows, dtype=torch.uint8, device=device)
            others = torch.empty(count, _parts(columns), _parts(rows), dtype=torch.float32, device=device)
        compiled = self._get(sm90_compile.compiled_weight_quantizer, weights.view.dtype, scaling, both=by_column)
        most = torch.finfo(weights.view.dtype).max
        back = None if turned is None else _words(turned)
        compiled(_words(weights.view), weights.table, _words(numbers), inverses, back, others, scaling.epsilon, most)
        return BlockWeights(self._in_order(numbers, inverses), self._in_order(turned, others))

    def weight_columns(self, weights: Experts, scaling: BlockScaling) -> BlockWeights:
        """What `weights` makes the other way round, alone."""
        return BlockWeights(None, self._in_order(*fp8.block_weight_columns(weights, scaling)))

    def _in_order(self, numbers: torch.Tensor | None, inverses: torch.Tensor | None) -> Weights | None:
        """Of what was made just now, an expert after the other."""
        if numbers is None or inverses is None:
            return None
        return Weights(self._experts.get("numbers", numbers), self._experts.get("inverse scales", inverses))

    def _get(self, compiles: Callable[..., Any], dtype: torch.dtype, scaling: BlockScaling, **ways: Any) -> Any:
        key = dtype, scaling.power_of_two, *ways.values()
        function = self._functions.get(key)
        if function is None:
            with said_if_slow(f"{COMPILING}: a quantizer"):
                function = compiles(dtype, power_of_two=scaling.power_of_two, **ways)
            self._functions[key] = function
        return function


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows whose memory begins where a thread may read 16 bytes at once, as ours does, and weights', by `Experts`."""
    return x if x.data_ptr() % _ALIGNED == 0 else x.clone()


def _words(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(torch.int32)


def _parts(size: int) -> int:
    return -(-size // BLOCK)


def _both(numbers: BlockNumbers | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if numbers is None else (_words(numbers.numbers), numbers.scales)


def _bytes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.uint8, device=device)


def _floats(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device=device)
