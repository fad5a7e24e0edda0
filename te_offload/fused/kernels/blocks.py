"""FP8 by blocks on a GPU: launches the kernels of `block_device`.

In: rows of bf16 or fp16, weights, offsets of experts on the GPU. Out: `BlockNumbers`, `Weights`, dense results. Keeps true:
no number reaches the host; layouts are those of `block_device`. Does not: know of the rest of a grouped MLP. Needs triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Launch:
    """Of a product: rows of a tile, warps, and stages of its loads."""

    rows: int = 128
    warps: int = 8
    stages: int = 4


# Measured on an H200 at 64 experts (docs/results/).
LAUNCHES = {
    block_device.LINEAR.value: Launch(128, 8, 5),
    block_device.FC1.value: Launch(64, 4, 4),
    block_device.DACT.value: Launch(64, 4, 3),
}
WGRAD = Launch(64, 4, 3)
_QUANTIZING_WARPS = 16  # with fewer, each takes so many registers that fewer warps are at work


@dataclass(frozen=True)
class Weights:
    """N weights, one way round.

    Attributes:
        numbers: (N, rows, columns) bytes, columns what is summed over. inverses: (N, parts, parts) float32, one a block.
        turned: the scales' parts are those of (columns, rows).
    """

    numbers: torch.Tensor
    inverses: torch.Tensor
    turned: bool


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
        num_warps=_QUANTIZING_WARPS,
    )
    return rows, found


def quantize_weights(weights: Experts, scaling: BlockScaling, *, by_column: bool) -> BlockWeights:
    """All experts' weights in FP8, as they lie, and the other way round if asked for."""
    count, (rows, columns), device = weights.table.shape[0], weights.view.shape[1:], weights.view.device
    numbers = torch.empty(count, rows, columns, dtype=torch.uint8, device=device)
    turned = torch.empty(count, columns, rows, dtype=torch.uint8, device=device) if by_column else None
    inverses = torch.empty(count, _parts(rows), _parts(columns), dtype=torch.float32, device=device)
    block_device.quantize_weight_blocks[inverses.shape](
        weights.view,
        weights.table,
        weights.view.stride(0),
        numbers,
        turned,
        inverses,
        rows,
        columns,
        scaling.epsilon,
        torch.finfo(weights.view.dtype).max,
        scaling.power_of_two,
        by_column,
        BLOCK,
        num_warps=_QUANTIZING_WARPS,
    )
    return BlockWeights(
        Weights(numbers, inverses, turned=False), None if turned is None else Weights(turned, inverses, turned=True)
    )


def linear(
    x: BlockNumbers,
    weights: Weights,
    out: torch.Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    bias_scales: torch.Tensor | None = None,
) -> None:
    """See `BlockKernels.linear_blocks`."""
    _multiply(block_device.LINEAR, x, weights, out, offsets, bias=bias, row_factors=bias_scales)


def fc1(
    x: BlockNumbers,
    weights: Weights,
    bias: torch.Tensor | None,
    router: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
    scaling: BlockScaling,
    activation: SquaredReLU,
) -> tuple[torch.Tensor, BlockNumbers]:
    """See `BlockKernels.fc1_blocks`, with offsets that are FC2's too."""
    tokens, width, device = x.shape[0], weights.numbers.shape[1], x.numbers.device
    act_input = torch.empty(tokens, width, dtype=dtype, device=device)
    rows = BlockNumbers((tokens, width), scaling, _bytes(tokens, width, device), _floats(_parts(width), tokens, device))
    _multiply(
        block_device.FC1,
        x,
        weights,
        act_input,
        offsets,
        bias=bias,
        row_factors=router,
        rows=rows,
        scaling=scaling,
        activation=activation,
    )
    return act_input, rows


def fc2_dgrad(
    dy: BlockNumbers,
    weights: Weights,
    act_input: torch.Tensor,
    router: torch.Tensor,
    offsets: torch.Tensor,
    activation: SquaredReLU,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient by act_input, and that by the router's scales in parts (T, parts) to be summed up."""
    dact_input = torch.empty_like(act_input)
    parts = _floats(act_input.shape[0], _parts(act_input.shape[1]), act_input.device)
    _multiply(
        block_device.DACT,
        dy,
        weights,
        dact_input,
        offsets,
        row_factors=router,
        act_input=act_input,
        parts=parts,
        activation=activation,
    )
    return dact_input, parts


def wgrad(dy: BlockNumbers, x: BlockNumbers, offsets: torch.Tensor, out: Experts, *, accumulate: bool) -> None:
    """See `BlockKernels.wgrad_blocks`; both turned."""
    rows, padded = dy.numbers.shape
    columns, experts = x.numbers.shape[0], offsets.shape[0] - 1
    launch = WGRAD
    block_device.multiply_columns[(experts, -(-rows // launch.rows) * _parts(columns))](
        dy.numbers.view(torch.uint8),
        dy.scales,
        x.numbers.view(torch.uint8),
        x.scales,
        offsets,
        out.view,
        out.table,
        out.view.stride(0),
        experts,
        rows,
        columns,
        padded,
        accumulate,
        triton.next_power_of_2(experts),
        launch.rows,
        BLOCK,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def _multiply(
    after: Any,
    x: BlockNumbers,
    weights: Weights,
    out: torch.Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    row_factors: torch.Tensor | None = None,
    act_input: torch.Tensor | None = None,
    rows: BlockNumbers | None = None,
    scaling: BlockScaling | None = None,
    parts: torch.Tensor | None = None,
    activation: SquaredReLU | None = None,
) -> None:
    (tokens, depth), experts = x.shape, offsets.shape[0] - 1
    columns, inverses = weights.numbers.shape[1], weights.inverses
    function = activation if activation is not None else SquaredReLU()
    step_row, step_depth = inverses.stride()[1:]
    if weights.turned:
        step_row, step_depth = step_depth, step_row
    launch = LAUNCHES[after.value]
    blocks = tokens // launch.rows + experts
    block_device.multiply_rows[(blocks * _parts(columns),)](
        x.numbers.view(torch.uint8),
        x.scales,
        weights.numbers,
        inverses,
        step_row,
        step_depth,
        inverses.stride(0),
        offsets,
        out,
        bias,
        row_factors,
        act_input,
        *_both(rows),
        parts,
        experts,
        tokens,
        columns,
        depth,
        _clamp(function),
        0.0 if scaling is None else scaling.epsilon,
        torch.finfo(out.dtype).max,
        after,
        bias is not None,
        row_factors is not None,
        function.clamp is not None,
        scaling is not None and scaling.power_of_two,
        depth % BLOCK == 0,
        triton.next_power_of_2(experts),
        launch.rows,
        BLOCK,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


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
