"""Kernels in Triton for FP8 by blocks on Hopper: quantizers, and grouped products with a scale a block.

In: nothing when imported. Out: kernels, which `sm90_blocks` launches. Keeps true: no number reaches the host; two runs give
the same bits; an expert's blocks of tokens begin with its first one; rows of no expert are not read. Does not: launch.

Rows (T, columns) have a scale for each 128 columns, stored as (columns / 128, T); columns one for each 128 tokens of an
expert, stored as (blocks, columns); weights one for 128 x 128 numbers. What is stored is one over the scale. Tensor cores
add up 128 products; their sum is multiplied by both operands' inverse scales and added in float32, as cuBLAS does with
``use_split_accumulator``. Scales follow `fp8_device`, but that an infinite one becomes ``most``, the largest number of the
dtype that is quantized: with float32's they differed from Transformer Engine's quantizer; that these agree was not seen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_offload.fused.kernels.fp8_device import _squared_relu, _to_fp8

BLOCK = 128
"""Numbers that share a scale; columns and K of a product's tile."""

PLAIN, ACTIVATION = (tl.constexpr(kind) for kind in range(2))
"""What is quantized: numbers as they are, or what the scaled squared ReLU makes of them."""
NOT, SAVED, TURNED = (tl.constexpr(kind) for kind in range(3))
"""Columns that are written: none; as their rows lie, (T, columns); with tokens side by side, (columns, P)."""
LINEAR, FC1, DACT = (tl.constexpr(kind) for kind in range(3))
"""What follows a product."""


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
            found = _to_fp8(value * scale[None, :], False)
            tl.store(column_scales + block.to(tl.int64) * columns + column, _inverse_of(scale), mask=there)
            if COLUMNS == SAVED:
                tl.store(by_column + places, found, mask=mask)
            else:
                token = block * BLOCK + tl.arange(0, BLOCK)
                turned = by_column + column.to(tl.int64)[:, None] * padded + token[None, :]
                tl.store(turned, tl.trans(found), mask=there[:, None])


@triton.jit
def quantize_weight_blocks(
    weights,
    table,
    stride,
    by_row,
    by_column,
    inverses,
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
    found = _to_fp8(value * scale[:, None], False)
    place = (expert.to(tl.int64) * tl.num_programs(1) + part) * tl.num_programs(2) + other
    tl.store(inverses + place + tl.arange(0, 1), _inverse_of(scale))
    begin = expert.to(tl.int64) * rows * columns
    tl.store(by_row + begin + row[:, None] * columns + column[None, :], found, mask=mask)
    if BY_COLUMN:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(by_column + begin + column[:, None] * rows + row[None, :], tl.trans(found), mask=turned)


@triton.jit
def multiply_rows(
    x,
    x_scales,
    weights,
    w_scales,
    w_step_row,
    w_step_depth,
    w_scales_each,
    offsets,
    out,
    bias,
    row_factors,
    act_input,
    by_row,
    row_scales,
    parts,
    experts,
    tokens,
    columns,
    depth,
    clamp,
    epsilon,
    most,
    AFTER: tl.constexpr,
    BIAS: tl.constexpr,
    FACTORS: tl.constexpr,
    CLAMPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``x @ w.T`` of each expert's rows, in tiles of ROWS x 128.

    x (tokens, depth), weights (N, columns, depth), out (tokens, columns).

    ``AFTER``: `LINEAR`: ``+ bias * row_factors``, each if it is there. `FC1`: ``+ bias`` into out; the activation of it,
    scaled by ``row_factors``, in FP8 into ``by_row`` and ``row_scales``. `DACT`: out is the gradient by ``act_input``, and
    ``parts`` (tokens, tiles) that by ``row_factors``, summed up by tiles.
    """
    tiles = (columns + BLOCK - 1) // BLOCK
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    inside, expert, first, end = _place_of(block, offsets, experts, EXPERTS, ROWS)
    if inside:
        rows = first + tl.arange(0, ROWS)
        used = rows < end
        there_rows = tl.minimum(rows, end - 1).to(tl.int64)
        column = tile * BLOCK + tl.arange(0, BLOCK)
        there = column < columns
        there_columns = tl.minimum(column, columns - 1)
        inner = tl.arange(0, BLOCK)
        one = x + there_rows[:, None] * depth + inner[None, :]
        other = weights + expert.to(tl.int64) * columns * depth + there_columns[None, :] * depth + inner[:, None]
        w_scale = w_scales + expert * w_scales_each + tile * w_step_row
        acc = tl.zeros((ROWS, BLOCK), tl.float32)
        for step in range((depth + BLOCK - 1) // BLOCK):
            if EVEN:
                a = tl.load(one)
                b = tl.load(other)
            else:
                left = depth - step * BLOCK
                a = tl.load(one, mask=(inner < left)[None, :], other=0)
                b = tl.load(other, mask=(inner < left)[:, None], other=0)
            product = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
            factor = tl.load(x_scales + step * tokens + there_rows) * tl.load(w_scale + step * w_step_depth)
            acc += product * factor[:, None]
            one += BLOCK
            other += BLOCK
        mask = used[:, None] & there[None, :]
        places = there_rows[:, None] * columns + column[None, :]
        if BIAS:
            more = tl.load(bias + expert * columns + there_columns).to(tl.float32)[None, :]
            if AFTER == LINEAR and FACTORS:
                more = more * tl.load(row_factors + there_rows)[:, None]
            acc += more
        if AFTER == DACT:
            value = tl.load(act_input + places, mask=mask, other=0.0).to(tl.float32)
            relu = tl.maximum(value, 0.0)
            slope = 2.0 * relu
            if CLAMPS:
                decay = tl.exp2(relu * (-2.0 * 1.4426950408889634 / clamp))
                tanh = tl.div_rn(1.0 - decay, 1.0 + decay)
                relu = clamp * tanh
                slope = 2.0 * relu * (1.0 - tanh * tanh)
            factor = tl.load(row_factors + there_rows)
            tl.store(parts + there_rows * tiles + tile, tl.sum(acc * relu * relu, 1), mask=used)
            acc = acc * factor[:, None] * slope
        rounded = acc.to(out.dtype.element_ty)
        tl.store(out + places, rounded, mask=mask)
        if AFTER == FC1:
            factor = tl.load(row_factors + there_rows)
            value = _squared_relu(rounded.to(tl.float32), clamp, CLAMPS) * factor[:, None]
            value = tl.where(there[None, :], value.to(out.dtype.element_ty).to(tl.float32), 0.0)
            scale = _scale_of(tl.max(_magnitudes(value), 1), epsilon, most, POWER_OF_TWO)
            tl.store(by_row + places, _to_fp8(value * scale[:, None], False), mask=mask)
            tl.store(row_scales + tile.to(tl.int64) * tokens + there_rows, _inverse_of(scale), mask=used)


@triton.jit
def multiply_columns(
    dy,
    dy_scales,
    x,
    x_scales,
    offsets,
    out,
    table,
    stride,
    experts,
    rows,
    columns,
    padded,
    ACCUMULATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dy_i.T @ x_i`` in tiles of ROWS x 128: dy (rows, P), x (columns, P), zeros after each expert's tokens."""
    expert = tl.program_id(0)
    tiles = (columns + BLOCK - 1) // BLOCK
    tile_row, tile_column = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    index = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + index, mask=index < experts, other=0)
    ends = tl.load(offsets + index + 1, mask=index < experts, other=0)
    blocks = (ends - begins + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(index < expert, blocks, 0), 0)
    count = tl.sum(tl.where(index == expert, blocks, 0), 0)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    column = tile_column * BLOCK + tl.arange(0, BLOCK)
    there_rows = tl.minimum(row, rows - 1)
    there_columns = tl.minimum(column, columns - 1)
    inner = first * BLOCK + tl.arange(0, BLOCK)
    one = dy + there_rows.to(tl.int64)[:, None] * padded + inner[None, :]
    other = x + there_columns.to(tl.int64)[None, :] * padded + inner[:, None]
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    one_scale = dy_scales + first.to(tl.int64) * rows + there_rows
    other_scale = x_scales + first.to(tl.int64) * columns + there_columns
    for _ in range(count):
        a = tl.load(one)
        b = tl.load(other)
        product = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
        acc += product * tl.load(one_scale)[:, None] * tl.load(other_scale)[None, :]
        one += BLOCK
        other += BLOCK
        one_scale += rows
        other_scale += columns
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    places = out + tl.load(table + expert).to(tl.int64) * stride + row.to(tl.int64)[:, None] * columns + column[None, :]
    if ACCUMULATE:
        acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, acc.to(out.dtype.element_ty), mask=mask)
