"""What Transformer Engine's block-scaled recipes say of a grouped linear, and its storage for columns of all experts.

In: recipes, GroupedLinear ops whose recipe state is made, buffers. Out: `LinearBlockScaling`; grouped storages, and their
buffers again. Keeps true: state stays Transformer Engine's. Does not: quantize.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    GroupedTensorStorage,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

from te_offload.ops.scaling import BlockFormat, BlockScaling, LinearBlockScaling

_ROWS, _ROW_SCALES = map(operator.attrgetter, ("_rowwise_data", "_rowwise_scale_inv"))
_COLUMNS, _COLUMN_SCALES = map(operator.attrgetter, ("_columnwise_data", "_columnwise_scale_inv"))


def block_format(recipe: Any) -> BlockFormat | None:
    """Of a recipe; ``None`` if it does not scale by blocks."""
    if recipe.float8_block_scaling():
        return BlockFormat.FP8
    if recipe.mxfp8():
        return BlockFormat.MXFP8
    return BlockFormat.NVFP4 if recipe.nvfp4() else None


def block_scaling(op: Any) -> LinearBlockScaling | str:
    """Of a GroupedLinear inside ``te.autocast``; or why it is none that is computed by blocks here."""
    forward, backward = op._quantizers["forward"], op._quantizers["backward"]
    found = []
    for name, quantizer in (("inputs", forward[0]), ("weights", forward[1]), ("gradients", backward[0])):
        scaling = _scaling(quantizer)
        if isinstance(scaling, str):
            return f"{name}: {scaling}"
        found.append(scaling)
    if len({scaling.format for scaling in found}) > 1 or found[0].square or found[2].square:
        return "recipe with square blocks of activations, or with several formats"
    return LinearBlockScaling(*found)


def _scaling(quantizer: Any) -> BlockScaling | str:
    if isinstance(quantizer, Float8BlockQuantizer):
        if DType.cast(quantizer.dtype) != DType.kFloat8E4M3:
            return "FP8 by blocks in another format than E4M3"
        square = quantizer.block_scaling_dim == 2
        return BlockScaling(BlockFormat.FP8, square, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    if isinstance(quantizer, MXFP8Quantizer):
        if DType.cast(quantizer.dtype) != DType.kFloat8E4M3:
            return "MXFP8 in another format than E4M3"
        return BlockScaling(BlockFormat.MXFP8)
    if isinstance(quantizer, NVFP4Quantizer):
        if quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6 or quantizer.with_amax_reduction:
            return "NVFP4 with scales by row, 4 over 6, or an amax that is reduced over ranks"
        return BlockScaling(
            BlockFormat.NVFP4,
            quantizer.with_2d_quantization,
            hadamard=quantizer.with_rht and quantizer.columnwise_usage,
        )
    return f"quantizers of {type(quantizer).__name__}"


def block_recipe_scaling(recipe: Any) -> LinearBlockScaling:
    """What `block_scaling` finds of linears under a `Float8BlockScaling` with its formats and blocks as they are."""
    return LinearBlockScaling(
        *(
            BlockScaling(BlockFormat.FP8, dimensions == 2, ways.amax_epsilon, ways.power_2_scale)
            for dimensions, ways in (
                (recipe.x_block_scaling_dim, recipe.fp8_quant_fwd_inp),
                (recipe.w_block_scaling_dim, recipe.fp8_quant_fwd_weight),
                (recipe.grad_block_scaling_dim, recipe.fp8_quant_bwd_grad),
            )
        )
    )


def is_block_weight(weight: torch.Tensor) -> bool:
    """Whether a weight is FP8 (E4M3) in square blocks, as it lies."""
    return (
        isinstance(weight, Float8BlockwiseQTensor)
        and weight._rowwise_data is not None
        and weight._is_2D_scaled
        and DType.cast(weight._fp8_dtype) == DType.kFloat8E4M3
    )


_Parts = tuple[list[torch.Tensor], list[torch.Tensor]]


def block_weights(weights: Sequence[Any], *, columns: bool) -> tuple[_Parts, _Parts | None]:
    """FP8 weights in square blocks, as they lie, and the other way round if asked for: of each its bytes (rows, columns)
    and its inverse scales (rows / 128, columns / 128), rows of which may be longer.

    Whoever quantized the weights may have made both; else the second one is made now, and kept as long as it is right.
    """
    if columns:
        for weight in weights:
            if weight._columnwise_data is None or weight._columnwise_scale_inv is None:
                weight.update_usage(rowwise_usage=True, columnwise_usage=True)
    rows = list(map(_ROWS, weights)), list(map(_ROW_SCALES, weights))
    return rows, (list(map(_COLUMNS, weights)), list(map(_COLUMN_SCALES, weights))) if columns else None


def grouped_columns(
    op: Any,
    shape: tuple[int, int],
    dtype: torch.dtype,
    split_sizes: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> GroupedTensorStorage:
    """The storage in which a GroupedLinear's own grouped path saves its input: columns alone, of all experts. What lies in
    the buffers where is the kernels' own; nothing of Transformer Engine's reads them.

    Args:
        op: the GroupedLinear. shape: of the input. dtype: before it was quantized. split_sizes: (N,).
        buffers: numbers as bytes, scales, and amaxes (N,), each flat.
    """
    numbers, scales, amaxes = buffers
    return GroupedTensorStorage(
        shape=shape,
        dtype=dtype,
        num_tensors=op.num_groups,
        quantizer=op._quantizers["forward"][0],
        columnwise_data=numbers,
        columnwise_scale_inv=scales,
        columnwise_amax=amaxes,
        first_dims=split_sizes,
    )


def columns_of(storage: GroupedTensorStorage) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The buffers of `grouped_columns`."""
    numbers, scales = storage.columnwise_data, storage.columnwise_scale_inv
    assert numbers is not None and scales is not None
    return numbers, scales, storage.columnwise_amax


def nvfp4_reference(
    scaling: BlockScaling, *, by_column: bool
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Transformer Engine's NVFP4 quantizer in plain torch, for one direction: numbers, two in a byte, by rows (of the
    transpose, if by column), scales in E4M3, and the amax (1,). It rounds to nearest, also where a recipe asks for
    stochastic rounding.
    """
    quantizer = reference_nvfp4.NVFP4QuantizerRef(
        dtype=reference_utils.Fp4Formats.E2M1,
        rowwise=not by_column,
        columnwise=by_column,
        quant_tile_shape=(16, 16) if scaling.square else (1, 16),
        with_rht=scaling.hadamard and by_column,
    )

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = quantizer.quantize(x)
        if by_column:
            return found.data_t, found.scale_t, found.global_amax_col
        return found.data, found.scale, found.global_amax_row

    return quantize


def nvfp4_numbers(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of bytes (R, C / 2) of NVFP4, without scales: (R, C) float32."""
    found: torch.Tensor = reference_nvfp4.cast_from_fp4x2(packed, torch.float32)
    return found
