"""Which way a quantized call of the fused grouped MLP goes: one FP8 scale a tensor, or a block-scaled format.

In: recipes, ops. Out: reasons, kernels, `Fp8Pass` or `BlockPass`. Keeps true: a call goes one way, forward and backward.
Does not: quantize.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.common import recipe as te_recipe

from te_offload.fused import block_pass, fp8_pass, machine, parameters
from te_offload.fused.block_pass import BlockPass
from te_offload.fused.fp8_pass import Fp8Pass
from te_offload.fused.kernels.interface import Activation, Counts, Gated, Kernels
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.fused.kernels.reference_fp8 import ReferenceFp8Kernels
from te_offload.ops import te_adapter
from te_offload.ops.scaling import BlockFormat, LinearBlockScaling, LinearScaling

Way = BlockFormat | str
"""Of a call: by blocks, or one of the following two."""
DENSE, TENSOR_SCALES = "dense", "FP8"
RECIPES: dict[str, type[te_recipe.Recipe]] = {
    "fp8": te_recipe.Float8CurrentScaling,
    "fp8-block": te_recipe.Float8BlockScaling,
}
"""Those without state that run on Hopper, by the names that ``te-offload demo`` has for them."""


def way_of_call() -> Way:
    """Of a call here and now."""
    return way_of(te_adapter.active_recipe())


def way_of(recipe: Any) -> Way:
    """Of a recipe; ``None``: of none."""
    if recipe is None:
        return DENSE
    return te_adapter.block_format(recipe) or TENSOR_SCALES


def structure_reason(ops: Sequence[tuple[str, Any]], recipe: Any, *, reference: bool) -> str | None:
    """Why linears, with names, do not go a quantized way under a recipe; ``None`` if they do."""
    if te_adapter.block_format(recipe) is not None:
        return block_pass.structure_reason(ops, recipe, reference=reference)
    return fp8_pass.structure_reason(ops, recipe)


def scaling_of(way: Way, op: Any, *, reference: bool) -> LinearScaling | LinearBlockScaling | str | None:
    """Of a linear in a call; or why it does not go a way. ``None``: nothing is quantized."""
    if way == DENSE:
        return None
    if not isinstance(way, BlockFormat):
        return fp8_pass.scaling_of(op)
    if not reference and (reason := block_pass.format_reason(way)):
        return reason  # the recipe may be another one than when it was fused
    found = te_adapter.block_scaling(op)
    if isinstance(found, LinearBlockScaling) and found.input.format is not way:
        return f"quantizers of {found.input.format.value} under a recipe of {way.value}"
    return found


def scaling_of_recipe(recipe: Any) -> LinearScaling | LinearBlockScaling:
    """Of any linear under a recipe that has no state: current scaling, or FP8 by blocks."""
    scaling_of = te_adapter.fp8_recipe_scaling if way_of(recipe) == TENSOR_SCALES else te_adapter.block_recipe_scaling
    return scaling_of(recipe)


def takes_as_it_lies(way: Way, weight: torch.Tensor) -> bool:
    """Whether a quantized weight goes a way without being quantized again."""
    if way == TENSOR_SCALES:
        return te_adapter.is_fp8_weight(weight)
    return way is BlockFormat.FP8 and te_adapter.is_block_weight(weight)


def kept_weight_bytes(way: Way, *ops: Any) -> int:
    """Of quantized weights that a fused forward keeps for its backward, without scales of blocks."""
    if way not in (TENSOR_SCALES, BlockFormat.FP8):
        return 0
    kept = [op for op in ops if parameters.keeps_quantized_weight(op)]
    kept = [op for op in kept if not takes_as_it_lies(way, parameters.first_weight(op))]
    return sum(op.num_groups * op.in_features * op.out_features for op in kept)


def make_pass(
    way: Way,
    kernels: Any,
    fc1: Any,
    fc2: Any,
    scalings: Sequence[Any],
    offsets: tuple[torch.Tensor, torch.Tensor],
    counts: Counts,
    router: torch.Tensor,
    weights: Sequence[list[torch.nn.Parameter]],
    *,
    backward: bool,
    again: bool = False,
) -> Fp8Pass | BlockPass | None:
    """One forward and backward of a way, ``None`` if nothing is quantized. ``scalings``: of both linears. ``counts``: of
    the forward's products. ``weights``: `parameters.weight_parameters` of both linears. ``again``: whether the backward
    will compute FC1 once more.
    """
    if way == DENSE:
        return None
    kind: type[Fp8Pass | BlockPass] = Fp8Pass if way == TENSOR_SCALES else BlockPass
    first, second = (parameters.linear_weights(op, own) for op, own in zip((fc1, fc2), weights, strict=True))
    one, other = scalings
    return kind(kernels, first, second, (one, other), offsets, counts, router, backward=backward, again=again)


def stored_input(fc1: Any, found: Any, x: torch.Tensor, split_sizes: torch.Tensor) -> Any:
    """What a pass made of FC1's input x (T, columns) for the backward, as Transformer Engine has it saved: columns by
    blocks in its storage of groups.
    """
    if not isinstance(found, tuple):
        return found
    return te_adapter.grouped_columns(fc1, (x.shape[0], x.shape[1]), x.dtype, split_sizes, found)


def read_input(stored: Any) -> Any:
    """What a pass made, of `stored_input`."""
    return stored if stored is None or isinstance(stored, torch.Tensor) else te_adapter.columns_of(stored)


def make_kernels(way: Way, activation: Activation, *, reference: bool) -> Kernels:
    """What computes a way."""
    if reference:
        kinds: dict[Way, type[ReferenceKernels]] = {DENSE: ReferenceKernels, TENSOR_SCALES: ReferenceFp8Kernels}
        return kinds.get(way, ReferenceBlockKernels)(activation)
    from te_offload.fused.kernels.sm90_tiles import tiles_of

    gated, tiles = isinstance(activation, Gated), tiles_of(quick_memory=machine.has_quick_memory())
    if way == DENSE:
        from te_offload.fused.kernels.sm90 import Sm90Kernels
        from te_offload.fused.kernels.sm90_glu import Sm90GluKernels

        return (Sm90GluKernels if gated else Sm90Kernels)(activation, tiles)
    if way == TENSOR_SCALES:
        from te_offload.fused.kernels.sm90_fp8 import Sm90Fp8Kernels
        from te_offload.fused.kernels.sm90_fp8_glu import Sm90Fp8GluKernels

        return (Sm90Fp8GluKernels if gated else Sm90Fp8Kernels)(activation, tiles)
    from te_offload.fused.kernels.sm90_block_glu import Sm90BlockGluKernels
    from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels

    return (Sm90BlockGluKernels if gated else Sm90BlockKernels)(activation, tiles)
