"""Kernels in Triton that turn rows of bf16 and fp16 into FP8: largest magnitudes, scales, and the numbers, both ways round.

In: nothing when imported. Out: kernels, which `fp8` launches. Keeps true: no number reaches the host; two runs give the
same bits; nothing is read in rows of no expert. Does not: launch; know of recipes.

Hopper's FP8 GEMMs read both operands along K. So what is summed over tokens, in a weight's gradient, must lie with tokens
side by side: "columns" below, (C, P), in which each expert's tokens begin at a multiple of `BLOCK` and what is between them
is zero. P is a number of tokens that is enough for any split sizes.

Formulas are those of Transformer Engine 2.20.2: a scale is the format's largest number over the largest magnitude
(common/recipe/recipe_common.cuh: 1 for a magnitude of zero or infinity, the largest float if the quotient has none), NaN is
no magnitude, numbers saturate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_offload.fused.kernels.triton_launch import Relaunched

BLOCK = 128
"""Rows and columns of a tile; K of a GEMM's tile too."""

BF16, FP8, ACTIVATION = (tl.constexpr(kind) for kind in range(3))
"""What a tile is read from: 16-bit numbers, FP8 as it is, or the activation's input."""

SCALES, MAGNITUDES, BLOCKS = (tl.constexpr(kind) for kind in range(3))
"""What a weight's numbers follow from: its scale, its largest magnitude, or those of its blocks."""


@Relaunched
@triton.jit
def row_magnitudes(x, offsets, out, experts, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``out[row]``: the largest magnitude in each row of x (T, columns), of rows of experts."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = rows < tl.load(offsets + experts)
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = used[:, None] & (column < columns)[None, :]
        places = x + rows.to(tl.int64)[:, None] * columns + column[None, :]
        found = tl.maximum(found, tl.abs(tl.load(places, mask=mask, other=0.0).to(tl.float32)))
    tl.store(out + rows, tl.max(found, 1), mask=used)


@triton.jit
def _scale_of(magnitude, largest, epsilon, most, POWER_OF_TWO: tl.constexpr):
    magnitude = tl.maximum(magnitude, epsilon)
    scale = tl.div_rn(largest, magnitude)
    scale = tl.where(scale == float("inf"), most, scale)
    scale = tl.where((magnitude == 0.0) | (magnitude == float("inf")), 1.0, scale)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@Relaunched
@triton.jit
def expert_scales(
    magnitudes,
    parts,
    offsets,
    largest,
    epsilon,
    others,
    inverses,
    row_scales,
    row_factors,
    given,
    kept,
    stride,
    POWER_OF_TWO: tl.constexpr,
    ROUND: tl.constexpr,
    GIVEN: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scale of each expert's rows from their magnitudes (T, parts), and where it is read: by row.

    ``inverses[expert]`` = 1 / scale, ``row_scales[row]`` = scale, ``row_factors[row]`` = others[expert] / scale.
    ``ROUND``: magnitudes are of numbers that are rounded after them, 1: to bf16, 2: to fp16. ``GIVEN``: scales come from
    ``given``, as delayed scaling has them, and magnitudes are kept for it in ``kept``, both (N) with a stride.
    """
    expert = tl.program_id(0)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    found = tl.zeros((BLOCK,), tl.float32)
    for place in range(begin * parts, end * parts, BLOCK):
        index = place + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(magnitudes + index, mask=index < end * parts, other=0.0))
    magnitude = tl.max(found, 0)
    if ROUND == 1:
        magnitude = magnitude.to(tl.bfloat16).to(tl.float32)
    if ROUND == 2:
        magnitude = magnitude.to(tl.float16).to(tl.float32)
    if GIVEN:
        scale = tl.load(given + expert * stride)
        tl.store(kept + expert * stride, tl.maximum(tl.load(kept + expert * stride), magnitude))
    else:
        scale = _scale_of(magnitude, largest, epsilon, 3.4028234663852886e38, POWER_OF_TWO)
    inverse = tl.div_rn(1.0, scale)
    tl.store(inverses + expert, inverse)
    if FACTORS:
        factor = inverse * tl.load(others + expert)
    for place in range(begin, end, BLOCK):
        index = place + tl.arange(0, BLOCK)
        tl.store(row_scales + index, tl.zeros((BLOCK,), tl.float32) + scale, mask=index < end)
        if FACTORS:
            tl.store(row_factors + index, tl.zeros((BLOCK,), tl.float32) + factor, mask=index < end)


@Relaunched
@triton.jit
def expert_factors(one, other, out, columns, BLOCK: tl.constexpr):
    """``out[expert, column] = one[expert] * other[expert]`` (N, columns): as an epilogue reads it."""
    expert = tl.program_id(0)
    factor = tl.load(one + expert) * tl.load(other + expert)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        tl.store(out + expert * columns + column, tl.zeros((BLOCK,), tl.float32) + factor, mask=column < columns)


@Relaunched
@triton.jit
def padded_offsets(offsets, out, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Where each expert's tokens begin and the last one's end in columns: (N + 1,)."""
    index = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + index, mask=index < experts, other=0)
    ends = tl.load(offsets + index + 1, mask=index < experts, other=0)
    tl.store(out + index + 1, tl.cumsum((ends - begins + BLOCK - 1) // BLOCK, 0) * BLOCK, mask=index < experts)
    tl.store(out + index, tl.zeros((EXPERTS,), tl.int32), mask=index < 1)


@triton.jit
def _squared_relu(x, clamp, CLAMPS: tl.constexpr):
    relu = tl.maximum(x, 0.0)
    if CLAMPS:
        decay = tl.exp2(relu * (-2.0 * 1.4426950408889634 / clamp))
        relu = clamp * tl.div_rn(1.0 - decay, 1.0 + decay)
    return relu * relu


@triton.jit
def _to_fp8(x, E5M2: tl.constexpr):
    if E5M2:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@Relaunched
@triton.jit
def quantize_tokens(
    source,
    router,
    row_scales,
    offsets,
    by_row,
    by_column,
    experts,
    columns,
    padded,
    clamp,
    SOURCE: tl.constexpr,
    CLAMPS: tl.constexpr,
    E5M2: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """FP8 of rows (T, columns), as they lie, as columns (columns, padded), or both.

    ``SOURCE``: `BF16`, `FP8`, or `ACTIVATION`: the scaled squared ReLU of the activation's input, rounded to its dtype.
    """
    block = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + index, mask=index < experts, other=0)
    ends = tl.load(offsets + index + 1, mask=index < experts, other=0)
    blocks = (ends - begins + BLOCK - 1) // BLOCK
    upto = tl.cumsum(blocks, 0)
    if block < tl.sum(blocks, 0):
        mine = index == tl.sum((upto <= block).to(tl.int32), 0)
        first = tl.sum(tl.where(mine, begins + (block - upto + blocks) * BLOCK, 0), 0)
        end = tl.sum(tl.where(mine, ends, 0), 0)
        rows = first + tl.arange(0, BLOCK)
        used = rows < end
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = column < columns
        mask = used[:, None] & there[None, :]
        places = rows.to(tl.int64)[:, None] * columns + column[None, :]
        if SOURCE == FP8:
            found = tl.load(source + places, mask=mask, other=0)
        else:
            wide = tl.load(source + places, mask=mask, other=0.0)
            value = wide.to(tl.float32)
            if SOURCE == ACTIVATION:
                factor = tl.load(router + rows, mask=used, other=0.0)
                value = (_squared_relu(value, clamp, CLAMPS) * factor[:, None]).to(wide.dtype).to(tl.float32)
            found = _to_fp8(value * tl.load(row_scales + rows, mask=used, other=0.0)[:, None], E5M2)
        if BY_ROW:
            tl.store(by_row + places, found, mask=mask)
        if BY_COLUMN:
            token = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(
                by_column + column.to(tl.int64)[:, None] * padded + token[None, :], tl.trans(found), mask=there[:, None]
            )


@Relaunched
@triton.jit
def quantize_weights(
    weights,
    table,
    stride,
    scales,
    by_row,
    by_column,
    kept,
    kept_stride,
    rows,
    columns,
    E5M2: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """FP8 of each weight (rows, columns), as it lies (N, rows, columns), and the other way round (N, columns, rows), by
    ``scales`` (N). The largest magnitudes are kept as `expert_scales` does.
    """
    expert = tl.program_id(0)
    base = weights + tl.load(table + expert).to(tl.int64) * stride
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(base + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
    found = tl.max(tl.max(tl.maximum(tl.abs(value), 0.0), 1), 0)  # NaN is no magnitude
    tl.atomic_max(kept + expert * kept_stride, found.to(tl.float32), sem="relaxed")
    found = _to_fp8(value.to(tl.float32) * tl.load(scales + expert), E5M2)
    begin = expert.to(tl.int64) * rows * columns
    tl.store(by_row + begin + row[:, None] * columns + column[None, :], found, mask=mask)
    if BY_COLUMN:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(by_column + begin + column[:, None] * rows + row[None, :], tl.trans(found), mask=turned)


@Relaunched
@triton.jit
def weight_columns(
    weights,
    table,
    stride,
    known,
    known_stride,
    by_column,
    inverses,
    rows,
    columns,
    largest,
    epsilon,
    most,
    KNOWN: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """FP8 of each weight (rows, columns), the other way round alone (N, columns, rows), with the numbers that were made as
    it lies. ``known``: scales or magnitudes (N); of `BLOCKS` nothing, and ``inverses`` (N, parts, parts) are written.
    """
    expert = tl.program_id(0)
    base = weights + tl.load(table + expert).to(tl.int64) * stride
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(base + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
    if KNOWN == SCALES:
        scale = tl.load(known + expert * known_stride)
    elif KNOWN == MAGNITUDES:
        magnitude = tl.load(known + expert * known_stride).to(tl.float32)
        scale = _scale_of(magnitude, largest, epsilon, most, POWER_OF_TWO)
    else:
        found = tl.max(tl.max(tl.maximum(tl.abs(value), 0.0), 1), 0)  # NaN is no magnitude
        scale = _scale_of(found.to(tl.float32), largest, epsilon, most, POWER_OF_TWO)
        place = (expert * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(1) + tl.program_id(1)
        tl.store(inverses + place, tl.div_rn(1.0, scale))
    numbers = tl.trans(_to_fp8(value.to(tl.float32) * scale, E5M2))
    begin = by_column + expert.to(tl.int64) * rows * columns
    tl.store(
        begin + column[:, None] * rows + row[None, :], numbers, mask=(column < columns)[:, None] & (row < rows)[None, :]
    )
