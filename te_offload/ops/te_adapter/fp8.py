"""What Transformer Engine's FP8 recipes say of a grouped linear: scales, and weights that are FP8 already.

In: recipes, and GroupedLinear ops whose recipe state is made. Out: `LinearScaling`; tensors of the weights. Keeps true:
state stays Transformer Engine's. Does not: quantize.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_fp8_te_dtype
from transformer_engine.pytorch.tensor import (
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)

from te_offload.errors import ArgumentError
from te_offload.ops.scaling import LinearScaling, Scaling

QUANTIZED_WEIGHTS = Float8Tensor, Float8BlockwiseQTensor
"""Parameters whose gradients are dense, and whose nodes in autograd's graph are those of dense ones."""
_FORMAT, _BYTES, _TURNED, _INVERSE = map(operator.attrgetter, ("_fp8_dtype", "_data", "_transpose", "_scale_inv"))
_USAGES = operator.attrgetter("rowwise_usage", "columnwise_usage")
_DTYPES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


def fp8_recipe_reason(recipe: Any) -> str | None:
    """Why a recipe is none of one FP8 scale a tensor; ``None`` if it is one."""
    name = type(recipe).__name__
    if not (recipe.float8_current_scaling() or recipe.delayed()):
        return f"recipe {name}: it computes in bf16, fp16, and FP8 with a scale a tensor alone"
    override = getattr(recipe, "backward_override", None)
    if override is not None:
        return f"recipe {name} with backward_override={override}"
    return None


def fp8_scaling(op: Any) -> LinearScaling | str:
    """Of a GroupedLinear inside ``te.autocast``; or why it has none of one FP8 scale a tensor."""
    forward, backward = op._quantizers["forward"], op._quantizers["backward"]
    found = []
    for mode, quantizers, first, step in (
        ("forward", forward, 0, 2),
        ("forward", forward, 1, 2),
        ("backward", backward, 0, 1),
    ):
        quantizer = quantizers[first]
        kind = type(quantizer)
        if kind is Float8CurrentScalingQuantizer:
            if quantizer.with_amax_reduction:
                return "largest magnitudes that are reduced over ranks"
            found.append(
                Scaling(_DTYPES[DType.cast(quantizer.dtype)], quantizer.amax_epsilon, quantizer.force_pow_2_scales)
            )
        elif kind is Float8Quantizer:
            state = op._fp8_metas[mode][FP8GlobalStateManager.get_meta_tensor_key(forward=mode == "forward")]
            given, kept = state.scale[first::step], state.amax_history[0][first::step]
            found.append(Scaling(_DTYPES[DType.cast(quantizer.dtype)], given=given, kept=kept))
        else:
            return f"quantizers of {kind.__name__}"
    return LinearScaling(*found)


def fp8_recipe_scaling(recipe: Any) -> LinearScaling:
    """What `fp8_scaling` finds of linears under a recipe of current scaling, which has no state."""
    forward, backward = (_DTYPES[DType.cast(get_fp8_te_dtype(recipe, way))] for way in (True, False))
    return LinearScaling(
        *(
            Scaling(dtype, ways.amax_epsilon, ways.power_2_scale)
            for dtype, ways in (
                (forward, recipe.fp8_quant_fwd_inp),
                (forward, recipe.fp8_quant_fwd_weight),
                (backward, recipe.fp8_quant_bwd_grad),
            )
        )
    )


def usages_are_set(op: Any, *, requires_grad: bool) -> bool:
    """Whether each quantizer of a GroupedLinear says already which ways round it is used. Its `pre_fuser_forward` tells
    each of them before every forward, which takes the host several times as long as to look.

    Args:
        op: the GroupedLinear. requires_grad: whether a backward needs it.
    """
    if not FP8GlobalStateManager.is_fp8_enabled():
        return False
    wgrad = requires_grad and op._parameters["weight" if op.single_grouped_weight else "weight0"].requires_grad
    activations, weights = (True, wgrad), (True, requires_grad)
    forward, backward = op._quantizers["forward"], op._quantizers["backward"]
    experts = op.num_groups
    return (
        list(map(_USAGES, forward)) == [activations, weights] * experts
        and list(map(_USAGES, backward)) == [activations] * experts
    )


def is_fp8_weight(weight: torch.Tensor) -> bool:
    """Whether a weight is FP8 with one scale, as it lies."""
    return isinstance(weight, Float8Tensor) and weight._data is not None


def fp8_weights(
    weights: Sequence[Any], *, columns: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.dtype]:
    """Bytes (rows, columns) of FP8 weights, the same the other way round if asked for, inverse scales (N,), and what the
    bytes are: a view of each would take the host a microsecond.

    Whoever quantized the weights may have made both; else the second one is made now, and kept as long as it is right.

    Raises:
        ArgumentError: they are not all in one FP8 format.
    """
    if columns:
        for weight in weights:
            if weight._transpose_invalid or weight._transpose is None:
                weight._create_transpose()
    formats = list(map(_FORMAT, weights))
    if formats.count(formats[0]) < len(formats):
        number, other = next((number, one) for number, one in enumerate(formats) if one != formats[0])
        raise ArgumentError(
            f"FP8 weights: expert {number}'s are {DType.cast(other).name}, expert 0's {DType.cast(formats[0]).name}. Give "
            "all experts weights in one format."
        )
    turned = list(map(_TURNED, weights)) if columns else []
    return list(map(_BYTES, weights)), turned, torch.cat([*map(_INVERSE, weights)]), _DTYPES[DType.cast(formats[0])]
