"""Kernels in Triton for FP8 by blocks on Hopper: quantizers. Their products are those of `sm90_block_device`.

In: nothing when imported. Out: kernels, which `sm90_blocks` launches. Keeps true: no number reaches the host; two runs give
the same bits; an expert's blocks of tokens begin with its first one; rows of no expert are not read. Does not: launch.

Rows (T, columns) have a scale for each 128 columns, stored as (columns / 128, T); columns one for each 128 tokens of an
expert, stored as (blocks, columns); weights one for 128 x 128 numbers. What is stored is one over the scale. Scales follow
`fp8_device`, but that an infinite one becomes ``most``, the largest number of the dtype that is quantized.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_offload.fused.kernels.fp8_device import _squared_relu, _to_fp8

BLOCK = 128
"""Numbers that share a scale."""

PLAIN, ACTIVATION = (tl.constexpr(kind) for kind in range(2))
"""What is quantized: numbers as they are, or what the scaled squared ReLU makes of them."""
NOT, SAVED, TURNED = (tl.constexpr(kind) for kind in range(3))
"""Columns that are written: none; as their rows lie, (T, columns); with tokens side by side, (columns, P)."""


@triton.jit
def _scale_of(magnitude, epsilon, most, POWER_OF_TWO: tl.constexpr):
    magnitude = tl.maximum(magnitude, epsilon)
    scale = tl.div_rn(tl.full(magnitude.shape, 448.0, tl.float32), magnitude)
    scale = tl.where(scale == float("inf"), most, scale)
    scale = tl.where((magnitude == 0.0) | (magnitude == float("inf")), 1.0, scale)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _inverse_of(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _magnitudes(value):
    return tl.maximum(tl.abs(value), tl.zeros(value.shape, tl.float32))  # NaN is none


@triton.jit
def _place_of(block, offsets, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The expert of a block of tokens (or more than there are), the block's first row, and the expert's end."""
    index = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + index, mask=index < experts, other=0)
    ends = tl.load(offsets + index + 1, mask=index < experts, other=0)
    blocks = (ends - begins + BLOCK - 1) // BLOCK
    upto = tl.cumsum(blocks, 0)
    inside = block < tl.sum(blocks, 0)
    expert = tl.sum((upto <= block).to(tl.int32), 0)
    mine = index == expert
    first = tl.sum(tl.where(mine, begins + (block - upto + blocks) * BLOCK, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return inside, expert, first, end


@triton.jit
def _turned(found):
    """The other way round, as bytes. Through float16, which holds each of them: bytes change lanes one by one."""
    return tl.trans(found.to(tl.float16)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def quantize_blocks(
    source,
    router,
    offsets,
    by_row,
    row_scales,
    by_column,
    column_scales,
    experts,
    tokens,
    columns,
    padded,
    clamp,
    epsilon,
    most,
    SOURCE: tl.constexpr,
    CLAMPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BY_ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """FP8 of rows (tokens, columns), in either direction or both."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    inside, _, first, end = _place_of(block, offsets, experts, EXPERTS, BLOCK)
    if inside:
        rows = first + tl.arange(0, BLOCK)
        used = rows < end
        column = part * BLOCK + tl.arange(0, BLOCK)
        there = column < columns
        mask = used[:, None] & there[None, :]
        places = rows.to(tl.int64)[:, None] * columns + column[None, :]
        wide = tl.load(source + places, mask=mask, other=0.0)
        value = wide.to(tl.float32)
        if SOURCE == ACTIVATION:
            factor = tl.load(router + rows, mask=used, other=0.0)
            value = (_squared_relu(value, clamp, CLAMPS) * factor[:, None]).to(wide.dtype).to(tl.float32)
        magnitudes = _magnitudes(value)
        if BY_ROW:
            scale = _scale_of(tl.max(magnitudes, 1), epsilon, most, POWER_OF_TWO)
            tl.store(by_row + places, _to_fp8(value * scale[:, None], False), mask=mask)
            tl.store(row_scales + part.to(tl.int64) * tokens + rows, _inverse_of(scale), mask=used)
        if COLUMNS != NOT:
            scale = _scale_of(tl.max(magnitudes, 0), epsilon, most, POWER_OF_TWO)
            found = (value * scale[None, :]).to(tl.float8e4nv)
            tl.store(column_scales + block.to(tl.int64) * columns + column, _inverse_of(scale), mask=there)
            if COLUMNS == SAVED:
                tl.store(by_column + places, found.to(tl.uint8, bitcast=True), mask=mask)
            else:
                token = block * BLOCK + tl.arange(0, BLOCK)
                turned = by_column + column.to(tl.int64)[:, None] * padded + token[None, :]
                tl.store(turned, _turned(found), mask=there[:, None])


@triton.jit
def quantize_weight_blocks(
    weights,
    table,
    stride,
    by_row,
    by_column,
    inverses,
    turned_inverses,
    rows,
    columns,
    epsilon,
    most,
    POWER_OF_TWO: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """FP8 of each weight (rows, columns), as it lies (N, rows, columns), and the other way round (N, columns, rows)."""
    expert = tl.program_id(0)
    part, other = tl.program_id(1), tl.program_id(2)
    base = weights + tl.load(table + expert).to(tl.int64) * stride
    row = part * BLOCK + tl.arange(0, BLOCK)
    column = other * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(base + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    magnitude = tl.max(tl.max(_magnitudes(value), 1), 0)
    scale = _scale_of(tl.full((1,), 0.0, tl.float32) + magnitude, epsilon, most, POWER_OF_TWO)
    found = (value * scale[:, None]).to(tl.float8e4nv)
    parts, others, one = tl.num_programs(1), tl.num_programs(2), tl.arange(0, 1)
    tl.store(inverses + (expert.to(tl.int64) * parts + part) * others + other + one, _inverse_of(scale))
    begin = expert.to(tl.int64) * rows * columns
    by_row += begin + row[:, None] * columns + column[None, :]
    tl.store(by_row, found.to(tl.uint8, bitcast=True), mask=mask)
    if BY_COLUMN:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(by_column + begin + column[:, None] * rows + row[None, :], _turned(found), mask=turned)
        tl.store(turned_inverses + (expert.to(tl.int64) * others + other) * parts + part + one, _inverse_of(scale))
