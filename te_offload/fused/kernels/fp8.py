"""FP8 on a GPU: scales and numbers of rows and of weights, made where they are by the kernels of `fp8_device`.

In: rows of bf16 or fp16, or FP8 rows; offsets of experts on the GPU. Out: `QuantizedRows`, `QuantizedWeights`. Keeps true:
no number reaches the host; scales and numbers are Transformer Engine's. Does not: multiply. Needs triton.
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.fused.kernels import fp8_device
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.fp8_interface import QuantizedRows, QuantizedWeights
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.ops.scaling import BlockScaling, Scaling

BLOCK = fp8_device.BLOCK
_SCALE_BLOCK = 1024
_ROUNDS = {torch.bfloat16: 1, torch.float16: 2}
_ROWS, _COLUMNS = 8, 512  # of a step of the search for the largest magnitude


def _parts(size: int, of: int) -> int:
    """Rounded up; Triton's own takes the host more than a microsecond."""
    return -(-size // of)


def _power_of_two(size: int) -> int:
    """The least that is no less."""
    return 1 << (size - 1).bit_length()


def padded_tokens(tokens: int, experts: int) -> int:
    """P: columns enough for so many tokens of so many experts, however they are split."""
    return (tokens // BLOCK + experts) * BLOCK


def quantize(
    x: torch.Tensor,
    offsets: torch.Tensor,
    scaling: Scaling,
    *,
    weights: torch.Tensor | None = None,
    magnitudes: torch.Tensor | None = None,
    activation: tuple[SquaredReLU, torch.Tensor] | None = None,
    by_row: bool = True,
    by_column: bool = False,
) -> QuantizedRows:
    """Rows in FP8, each expert's with a scale of its own.

    Args:
        x: (T, C), T not zero. offsets: (N + 1,) int32.
        weights: (N,) inverse scales of the weights that they meet, for ``factors``.
        magnitudes: (T, parts), the largest ones in parts of each row, before they were rounded to x's dtype; ``None``: they
            are looked for.
        activation: and router scales (T,): the numbers are what the activation makes of x.
        by_row, by_column: what is returned.
    """
    tokens, experts = x.shape[0], offsets.shape[0] - 1
    rounded = None if magnitudes is None else x.dtype
    if magnitudes is None:
        magnitudes = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
        grid = (_parts(tokens, _ROWS),)
        fp8_device.row_magnitudes[grid](x, offsets, magnitudes, experts, x.shape[1], _ROWS, _COLUMNS)
    inverses, scales, factors = scales_of(magnitudes, offsets, scaling, weights, rounded=rounded, rows=tokens)
    ways = {"by_row": by_row, "by_column": by_column}
    rows, columns = _numbers(x, offsets, scales, scaling.dtype, activation, **ways)
    return QuantizedRows(rows, columns, scales, inverses, factors)


def given_scales(
    offsets: torch.Tensor, scaling: Scaling, *, weights: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse scales (N,), scales (T,) and factors (T,) of rows that are quantized elsewhere, with delayed scaling."""
    nothing = torch.empty(rows, 0, dtype=torch.float32, device=offsets.device)
    inverses, scales, factors = scales_of(nothing, offsets, scaling, weights, rounded=None, rows=rows)
    return inverses, scales, _required(factors)


def keep_magnitudes(magnitudes: torch.Tensor, offsets: torch.Tensor, scaling: Scaling, dtype: torch.dtype) -> None:
    """Of what was quantized elsewhere, for delayed scaling. ``dtype``: that it was rounded to."""
    scales_of(magnitudes, offsets, scaling, None, rounded=dtype, rows=magnitudes.shape[0])


def turn(
    x: torch.Tensor,
    offsets: torch.Tensor,
    *,
    activation: tuple[SquaredReLU, torch.Tensor, torch.Tensor, torch.dtype] | None = None,
) -> torch.Tensor:
    """Columns (C, P) of what was quantized before.

    Args:
        x: (T, C) in FP8; or the activation's input, with ``activation``: that, router scales (T,), the scale of each row
            (T,), and the dtype of the numbers.
    """
    if activation is None:
        return _required(_numbers(x, offsets, None, x.dtype, None, by_row=False, by_column=True)[1])
    function, router, scales, dtype = activation
    return _required(_numbers(x, offsets, scales, dtype, (function, router), by_row=False, by_column=True)[1])


def padded_offsets(offsets: torch.Tensor) -> torch.Tensor:
    """Where each expert's tokens begin and the last one's end in columns: (N + 1,) int32."""
    out = torch.empty_like(offsets)
    experts = offsets.shape[0] - 1
    fp8_device.padded_offsets[(1,)](offsets, out, experts, _power_of_two(experts), BLOCK)
    return out


def factors_of(one: torch.Tensor, other: torch.Tensor, columns: int) -> torch.Tensor:
    """``one[expert] * other[expert]``, in so many columns: (N, columns)."""
    out = torch.empty(one.shape[0], columns, dtype=torch.float32, device=one.device)
    fp8_device.expert_factors[(one.shape[0],)](one, other, out, columns, _SCALE_BLOCK)
    return out


def quantize_weights(weights: Experts, scaling: Scaling, *, by_column: bool = True) -> QuantizedWeights:
    """All experts' weights in FP8 by scales that are given, as they lie, and the other way round if asked for. They are
    read once. `fp8_current` has current scaling.
    """
    assert scaling.given is not None and scaling.kept is not None
    count, (rows, columns), device = weights.table.shape[0], weights.view.shape[1:], weights.view.device
    each = torch.arange(count + 1, dtype=torch.int32, device=device)
    nothing = torch.empty(count, 0, dtype=torch.float32, device=device)
    inverses, scales, _ = scales_of(nothing, each, scaling, None, rounded=None, rows=count)
    by_row = torch.empty(count, rows, columns, dtype=scaling.dtype, device=device)
    turned = torch.empty(count, columns, rows, dtype=scaling.dtype, device=device) if by_column else None
    fp8_device.quantize_weights[(count, _parts(rows, BLOCK), _parts(columns, BLOCK))](
        weights.view,
        weights.table,
        weights.view.stride(0),
        scales,
        _bytes(by_row),
        _bytes(turned),
        scaling.kept,
        scaling.kept.stride(0),
        rows,
        columns,
        scaling.dtype is torch.float8_e5m2,
        by_column,
        BLOCK,
        num_warps=8,
    )
    table = each[:-1]
    back = None if turned is None else Experts(turned, table)
    return QuantizedWeights(Experts(by_row, table), back, inverses, scales=scales)


def weight_columns(weights: Experts, quantized: QuantizedWeights, scaling: Scaling) -> torch.Tensor:
    """FP8 of weights that were quantized before, the other way round alone: (N, columns, rows). See
    `Fp8Kernels.weight_columns`.
    """
    given = quantized.scales is not None
    known = quantized.scales if given else quantized.magnitudes
    assert known is not None
    kind = fp8_device.SCALES if given else fp8_device.MAGNITUDES
    most = torch.finfo(torch.float32).max
    return _turned_weights(weights, scaling.dtype, kind, known, None, scaling.epsilon, most, scaling.power_of_two)


def block_weight_columns(weights: Experts, scaling: BlockScaling) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of weights in square blocks of E4M3, as bytes, and one over each block's scale: (N, parts, parts)."""
    count, (rows, columns) = weights.table.shape[0], weights.view.shape[1:]
    parts = _parts(columns, BLOCK), _parts(rows, BLOCK)
    inverses = torch.empty(count, *parts, dtype=torch.float32, device=weights.view.device)
    most = torch.finfo(weights.view.dtype).max
    kind, dtype = fp8_device.BLOCKS, torch.float8_e4m3fn
    turned = _turned_weights(weights, dtype, kind, None, inverses, scaling.epsilon, most, scaling.power_of_two)
    return turned.view(torch.uint8), inverses


def _turned_weights(
    weights: Experts,
    dtype: torch.dtype,
    kind: Any,
    known: torch.Tensor | None,
    inverses: torch.Tensor | None,
    epsilon: float,
    most: float,
    power_of_two: bool,
) -> torch.Tensor:
    count, (rows, columns) = weights.table.shape[0], weights.view.shape[1:]
    turned = torch.empty(count, columns, rows, dtype=dtype, device=weights.view.device)
    fp8_device.weight_columns[(count, _parts(rows, BLOCK), _parts(columns, BLOCK))](
        weights.view,
        weights.table,
        weights.view.stride(0),
        known,
        0 if known is None else known.stride(0),
        _bytes(turned),
        inverses,
        rows,
        columns,
        torch.finfo(dtype).max,
        epsilon,
        most,
        kind,
        dtype is torch.float8_e5m2,
        power_of_two,
        BLOCK,
        num_warps=8,
    )
    return turned


def scales_of(
    magnitudes: torch.Tensor,
    offsets: torch.Tensor,
    scaling: Scaling,
    weights: torch.Tensor | None,
    *,
    rounded: torch.dtype | None,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Inverse scales (N,), the scale of each row, and ``factors``. ``magnitudes``, ``weights``: as `quantize` takes them.
    ``rounded``: to what they were, if they were taken before that.
    """
    experts = offsets.shape[0] - 1

    def empty(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=offsets.device)

    inverses, scales = empty(experts), empty(rows)
    factors = None if weights is None else empty(rows)
    fp8_device.expert_scales[(experts,)](
        magnitudes,
        magnitudes.shape[1],
        offsets,
        torch.finfo(scaling.dtype).max,
        scaling.epsilon,
        weights,
        inverses,
        scales,
        factors,
        scaling.given,
        scaling.kept,
        0 if scaling.given is None else scaling.given.stride(0),
        scaling.power_of_two,
        0 if rounded is None else _ROUNDS[rounded],
        scaling.given is not None,
        factors is not None,
        _SCALE_BLOCK,
    )
    return inverses, scales, factors


def _numbers(
    x: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor | None,
    dtype: torch.dtype,
    activation: tuple[SquaredReLU, torch.Tensor] | None,
    *,
    by_row: bool,
    by_column: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    (tokens, columns), experts = x.shape, offsets.shape[0] - 1
    function, router = activation if activation is not None else (SquaredReLU(), None)
    kind = fp8_device.BF16 if activation is None else fp8_device.ACTIVATION
    padded = padded_tokens(tokens, experts)
    rows = torch.empty(tokens, columns, dtype=dtype, device=x.device) if by_row else None
    turned = torch.empty(columns, padded, dtype=dtype, device=x.device) if by_column else None
    fp8_device.quantize_tokens[(padded // BLOCK, _parts(columns, BLOCK))](
        x.view(torch.uint8) if scales is None else x,
        router,
        scales,
        offsets,
        _bytes(rows),
        _bytes(turned),
        experts,
        columns,
        padded,
        1.0 if function.clamp is None else function.clamp,
        fp8_device.FP8 if scales is None else kind,
        function.clamp is not None,
        dtype is torch.float8_e5m2,
        by_row,
        by_column,
        _power_of_two(experts),
        BLOCK,
        num_warps=8,
    )
    return rows, turned


def _bytes(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.view(torch.uint8)


def _required(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
