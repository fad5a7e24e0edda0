"""Quantized weights of Transformer Engine's ops between a forward and its backward: let go of, and made again.

In: ops and the context that they save on. Out: the saved tuple without weights, then with them. Keeps true: Transformer
Engine's own functions quantize both times, and where the second time could give other bits, weights stay as they are. Does
not: know of the fused op for Hopper, which holds quantized weights by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformer_engine.pytorch.ops.op import OperationContext
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

from te_offload.errors import SavedTensorModifiedError
from te_offload.ops.te_adapter.fusion import active_recipe
from te_offload.ops.te_adapter.layouts import fused_places

_OF_NUMBERS_AT_HAND = Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer


class _Away(NamedTuple):
    """Weights of an op that were taken out of what is saved.

    Attributes:
        first: the first one's place in the saved tuple. registered: the parameters in that forward: by the backward the op
            may have others. versions: theirs.
    """

    op: Any
    first: int
    quantizers: list[Any]
    registered: Any
    versions: list[int]


def let_go_of_weights(op: Any, ctx: OperationContext) -> str | None:
    """After a forward of an unfused GroupedLinear: take its quantized weights out of what it saves, if it made some.

    Returns:
        why they stay, if they do.
    """
    if ctx.to_save is None or not getattr(ctx, "with_quantized_compute", False):
        return None
    count = 1 if ctx.use_grouped_tensor_path and op.single_grouped_weight else int(op.num_groups)
    return _take_out(op, ctx, len(ctx.to_save) - count, len(ctx.to_save), ctx.weight_quantizers)


def let_go_of_fused_weights(basic_ops: Sequence[Any], ctx: OperationContext) -> list[str | None]:
    """The same after a forward of the Blackwell fused op: of those of its linears that keep none.

    Args:
        basic_ops: the three. ctx: of FC1, which has what all of them save (Note [Saved layouts]).

    Returns:
        for FC1 and for FC2 why its weights stay, if they do though they were not to.
    """
    if ctx.to_save is None:
        return [None, None]
    count = len(ctx.to_save)
    at_fc1_input, at_act_input, at_fc2_input = fused_places(basic_ops, count)
    reasons: list[str | None] = []
    for op, first, end in (
        (basic_ops[0], at_fc1_input + 1, at_act_input),
        (basic_ops[2], at_fc2_input + 1, count),
    ):
        if getattr(op, "keep_quantized_weight", True):
            reasons.append(None)
        elif op.single_grouped_weight and op.num_groups == 1:
            reasons.append("one grouped weight of one expert is quantized in a way of its own")
        else:
            quantizers = [op.get_quantizer("forward", 2 * expert + 1) for expert in range(op.num_groups)]
            reasons.append(_take_out(op, ctx, first, end, quantizers))
    return reasons


def _take_out(op: Any, ctx: OperationContext, first: int, end: int, quantizers: list[Any]) -> str | None:
    """The entries from one to before another."""
    if first <= 0:  # a layout that `read_grouped_linear` or `read_fused` will refuse
        return None
    registered, weights = op._get_weight_tensors(), ctx.to_save[first:end]
    if weights[0] is None or weights[0] is registered[0]:  # not needed; or a weight that is quantized, or a shard
        return None
    quantizer, kind = quantizers[0], type(quantizers[0]).__name__
    if not isinstance(quantizer, _OF_NUMBERS_AT_HAND):
        return f"{kind} has scales that may be others by the time of the backward"
    if getattr(quantizer, "with_amax_reduction", False):
        return f"{kind} reduces largest magnitudes over ranks"
    if getattr(quantizer, "stochastic_rounding", False):
        return f"{kind} rounds at random"
    override = getattr(active_recipe(), "backward_override", None)
    if override is not None:
        return f"the recipe has backward_override={override}"
    away = _Away(op, first, quantizers, registered, [weight._version for weight in registered])
    ctx.to_save = (*ctx.to_save[:first], *[None] * len(weights), *ctx.to_save[end:])
    ctx.te_offload_weights_away = (*getattr(ctx, "te_offload_weights_away", ()), away)
    return None


def make_weights_again(ctx: OperationContext) -> None:
    """Before a backward: put the weights back that its forward let go of, if it did.

    Raises:
        SavedTensorModifiedError: a weight was written to since.
    """
    for op, first, quantizers, registered, versions in ctx.__dict__.pop("te_offload_weights_away", ()):
        if [weight._version for weight in registered] != versions:
            raise SavedTensorModifiedError(
                f"{type(op).__name__}: a weight was written to in place between the forward and its backward, which "
                "quantizes it again (keep_quantized_weight=False), so gradients would be wrong. Call optimizer.step() "
                "after the backward."
            )
        more = {"columnwise_usage": True, "with_quantized_compute": True, "dtype": ctx.dtype}
        if op.single_grouped_weight:
            weights = [op._get_grouped_weight_for_gemm(registered[0], quantizers, **more)]
        else:
            weights = op._get_discrete_weights_for_gemm(registered, quantizers, **more)
        if getattr(ctx, "use_grouped_tensor_path", None) is False:  # as the split path's forward does
            for weight in weights:
                weight.update_usage(rowwise_usage=False, columnwise_usage=True)
        saved = list(ctx.saved_tensors)  # a list, as Transformer Engine has it, and looks whether slices of it are one
        saved[first : first + len(weights)] = weights
        ctx.saved_tensors = saved
