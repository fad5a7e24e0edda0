"""FP8 by blocks on a GPU: launches the quantizers of `block_device`.

In: rows of bf16 or fp16, weights, offsets of experts on the GPU. Out: `BlockNumbers`, `Weights`. Keeps true: no
number reaches the host; layouts are those of `block_device`. Does not: know of the rest of a grouped MLP. Needs triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from te_offload.fused.kernels import block_device
from te_offload.fused.kernels.block_interface import BlockNumbers, BlockWeights
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.fp8 import padded_tokens
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.ops.scaling import BlockScaling

BLOCK = block_device.BLOCK
NOT, SAVED, TURNED = (int(kind.value) for kind in (block_device.NOT, block_device.SAVED, block_device.TURNED))


# Warps of a quantizer: of rows alone, with columns, of weights. Measured on an H200 (docs/results/).
_ROWS, _COLUMNS, _WEIGHTS = 16, 4, 8


@dataclass(frozen=True)
class Weights:
    """N weights, one way round.

    Attributes:
        numbers: (N, rows, columns) bytes, columns what is summed over. inverses: (N, parts, parts) float32, one a block.
    """

    numbers: torch.Tensor
    inverses: torch.Tensor


def quantize(
    x: torch.Tensor,
    offsets: torch.Tensor,
    scaling: BlockScaling,
    *,
    activation: tuple[SquaredReLU, torch.Tensor] | None = None,
    by_row: bool = True,
    columns: int = NOT,
) -> tuple[BlockNumbers | None, BlockNumbers | None]:
    """Rows and columns of x (T, C).

    Args:
        activation: and router scales (T,): the numbers are what the activation makes of x. columns: `NOT`, `SAVED`: as the
            rows lie, `TURNED`: (C, P), as `wgrad` reads them.
    """
    (tokens, width), experts, device = x.shape, offsets.shape[0] - 1, x.device
    padded, shape = padded_tokens(tokens, experts), (x.shape[0], x.shape[1])
    rows = found = None
    if by_row:
        rows = BlockNumbers(shape, scaling, _bytes(tokens, width, device), _floats(_parts(width), tokens, device))
    if columns != NOT:
        size = (width, padded) if columns == TURNED else (tokens, width)
        found = BlockNumbers(shape, scaling, _bytes(*size, device), _floats(padded // BLOCK, width, device))
    function, router = activation if activation is not None else (SquaredReLU(), None)
    block_device.quantize_blocks[(padded // BLOCK, _parts(width))](
        x,
        router,
        offsets,
        *_both(rows),
        *_both(found),
        experts,
        tokens,
        width,
        padded,
        _clamp(function),
        scaling.epsilon,
        torch.finfo(x.dtype).max,
        block_device.PLAIN if activation is None else block_device.ACTIVATION,
        function.clamp is not None,
        scaling.power_of_two,
        by_row,
        columns,
        triton.next_power_of_2(experts),
        BLOCK,
        num_warps=_ROWS if columns == NOT else _COLUMNS,
    )
    return rows, found


def quantize_weights(weights: Experts, scaling: BlockScaling, *, by_column: bool) -> BlockWeights:
    """All experts' weights in FP8, as they lie, and the other way round if asked for."""
    count, (rows, columns), device = weights.table.shape[0], weights.view.shape[1:], weights.view.device
    numbers = torch.empty(count, rows, columns, dtype=torch.uint8, device=device)
    turned = torch.empty(count, columns, rows, dtype=torch.uint8, device=device) if by_column else None
    inverses = torch.empty(count, _parts(rows), _parts(columns), dtype=torch.float32, device=device)
    others = (
        torch.empty(count, _parts(columns), _parts(rows), dtype=torch.float32, device=device) if by_column else None
    )
    block_device.quantize_weight_blocks[inverses.shape](
        weights.view,
        weights.table,
        weights.view.stride(0),
        numbers,
        turned,
        inverses,
        others,
        rows,
        columns,
        scaling.epsilon,
        torch.finfo(weights.view.dtype).max,
        scaling.power_of_two,
        by_column,
        BLOCK,
        num_warps=_WEIGHTS,
    )
    found = None if turned is None or others is None else Weights(turned, others)
    return BlockWeights(Weights(numbers, inverses), found)


def _parts(size: int) -> int:
    return -(-size // BLOCK)


def _clamp(activation: SquaredReLU) -> float:
    return 1.0 if activation.clamp is None else activation.clamp


def _both(numbers: BlockNumbers | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if numbers is None else (numbers.numbers, numbers.scales)


def _bytes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.uint8, device=device)


def _floats(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device=device)
