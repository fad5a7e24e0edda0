"""Quantized weights of an unfused GroupedLinear between its forward and its backward: let go of, and made again.

In: an op and its context. Out: the saved tuple without weights, then with them. Keeps true: Transformer Engine's own
functions quantize both times, and where the second time could give other bits, weights stay as they are. Does not: know of
fused ops, which hold quantized weights by themselves.
"""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.ops.op import OperationContext
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

from te_offload.errors import SavedTensorModifiedError

_OF_NUMBERS_AT_HAND = Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer


def let_go_of_weights(op: Any, ctx: OperationContext) -> str | None:
    """After a forward: take its quantized weights out of what it saves, if it made some.

    Returns:
        why they stay, if they do.
    """
    if ctx.to_save is None or not getattr(ctx, "with_quantized_compute", False):
        return None
    count, registered = _count(op, ctx), op._get_weight_tensors()
    weights = ctx.to_save[-count:]
    if weights[0] is None or weights[0] is registered[0]:  # not needed; or a weight that is quantized, or a dense one
        return None
    quantizer, override = ctx.weight_quantizers[0], getattr(ctx.te_offload_recipe, "backward_override", None)
    kind = type(quantizer).__name__
    if not isinstance(quantizer, _OF_NUMBERS_AT_HAND):
        return f"{kind} has scales that may be others by the time of the backward"
    if getattr(quantizer, "with_amax_reduction", False):
        return f"{kind} reduces largest magnitudes over ranks"
    if getattr(quantizer, "stochastic_rounding", False):
        return f"{kind} rounds at random"
    if override is not None:
        return f"the recipe has backward_override={override}"
    ctx.to_save = (*ctx.to_save[:-count], *[None] * count)
    ctx.te_offload_weight_versions = [weight._version for weight in registered]
    return None


def make_weights_again(op: Any, ctx: OperationContext) -> None:
    """Before a backward: put the weights back that its forward let go of, if it did.

    Raises:
        SavedTensorModifiedError: a weight was written to since.
    """
    versions = ctx.__dict__.pop("te_offload_weight_versions", None)
    if versions is None:
        return
    registered = op._get_weight_tensors()
    if [weight._version for weight in registered] != versions:
        raise SavedTensorModifiedError(
            f"{type(op).__name__}: a weight was written to in place between the forward and its backward, which quantizes "
            "it again (keep_quantized_weight=False), so gradients would be wrong. Call optimizer.step() after the backward."
        )
    more = {"columnwise_usage": True, "with_quantized_compute": True, "dtype": ctx.dtype}
    if op.single_grouped_weight:
        weights = [op._get_grouped_weight_for_gemm(registered[0], ctx.weight_quantizers, **more)]
    else:
        weights = op._get_discrete_weights_for_gemm(registered, ctx.weight_quantizers, **more)
    if not ctx.use_grouped_tensor_path:  # as its forward does
        for weight in weights:
            weight.update_usage(rowwise_usage=False, columnwise_usage=True)
    ctx.saved_tensors = (*ctx.saved_tensors[: -len(weights)], *weights)


def _count(op: Any, ctx: OperationContext) -> int:
    return 1 if ctx.use_grouped_tensor_path and op.single_grouped_weight else int(op.num_groups)
