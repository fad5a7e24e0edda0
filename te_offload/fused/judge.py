"""Whether the fused op's kernels take one call, and if not, why.

In: the three ops, and the inputs of a call. Out: a `Judged` value. Keeps true: nothing that is on a GPU is read; what is
said of a call holds until its forward is over. Does not: know structure (`hopper_choice.explain` does), or run anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from te_offload.fused import activations, parameters, quantized
from te_offload.ops import te_adapter
from te_offload.ops.slot_owner import SlotOwner

SWITCH = "TE_OFFLOAD_FUSED_MLP"
_SPLIT_DTYPES = torch.int32, torch.int64
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass
class Judged:
    """How one call runs.

    Attributes:
        way: of its numbers. scalings: of FC1 and FC2, if they are. reason: why it does not run fused; ``None``: it does.
        dtype: of the weights, if it does.
        stand_ins: of which of them one passes autograd in place of the parameters.
        registered: the weights of FC1 and of FC2, if they are known.
    """

    way: quantized.Way
    scalings: list[Any]
    reason: str | None = None
    dtype: torch.dtype | None = None
    stand_ins: list[bool] = field(default_factory=lambda: [False, False])
    registered: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] | None = None


def judge(
    ops: Sequence[Any], requires_grad: Sequence[bool], input_: torch.Tensor, extra_inputs: Sequence[Any]
) -> Judged:
    """How one call runs.

    Args:
        ops: the three. requires_grad: whether a backward needs each of them. input_: of FC1.
        extra_inputs: of each op: split sizes; router scales; split sizes.
    """
    way = quantized.way_of_call()
    scalings: list[Any] = [None, None]
    if way != quantized.DENSE:
        reference = in_torch_arithmetic(input_)
        scalings = [quantized.scaling_of(way, ops[place], reference=reference) for place in (0, 2)]
    judged = Judged(way, scalings)
    judged.reason = _call_reason(ops, judged, requires_grad, input_, extra_inputs)
    return judged


def _call_reason(
    ops: Sequence[Any],
    judged: Judged,
    requires_grad: Sequence[bool],
    input_: torch.Tensor,
    extra_inputs: Sequence[Any],
) -> str | None:
    """Why it does not run fused. Of one that does, ``judged`` is told the dtype."""
    fc1, activation, fc2 = ops
    way = judged.way
    scales = extra_inputs[1][0]
    right = scales.shape == input_.shape[:-1] and scales.device == input_.device and scales.is_floating_point()
    if not right and not isinstance(activation, SlotOwner):  # ours raises its own error
        return "the router scales are not one floating-point number a row, where the input is"
    splits1, splits2 = extra_inputs[0][0], extra_inputs[2][0]
    both = (splits1,) if splits2 is splits1 else (splits1, splits2)
    for sizes in both:
        if sizes.dtype not in _SPLIT_DTYPES:
            return f"the split sizes are {sizes.dtype}"
    if te_adapter.is_grouped_tensor(input_):
        return "its input is a GroupedTensor"
    if not requires_grad[0] == requires_grad[1] == requires_grad[2]:
        return "a gradient is needed by some of its ops alone"
    dtypes, device, on_gpu = [], input_.device, input_.is_cuda
    if on_gpu and way != quantized.DENSE:
        # The recipe may be another one than when it was fused.
        reason = activations.reason_quantized(activation, fc1.out_features, by_blocks=way != quantized.TENSOR_SCALES)
        if reason is not None:
            return reason
    for op, scaling in zip((fc1, fc2), judged.scalings, strict=True):
        if isinstance(scaling, str):
            return scaling
        first = parameters.first_weight(op)
        # All of an op are of one kind: Transformer Engine says so before each forward.
        weight = first if quantized.takes_as_it_lies(way, first) else parameters.dense_weight(op, first)
        if weight is None:
            return "weights that are quantized, or no plain tensors"
        dtype = weight.dtype
        dtypes.append(dtype)
        if te_adapter.is_distributed_weight(first):
            return "distributed weights"
        if weight.device != device:
            return f"a weight is on {weight.device}, the input on {device}"
        if dtype != _compute_dtype(weight):
            return f"a weight is {dtype}, autocast asks for {_compute_dtype(weight)}"
    if dtypes[0] != dtypes[1]:
        return f"FC1's weights are {dtypes[0]}, FC2's {dtypes[1]}"
    for op in (fc1, fc2):
        if op._accumulate_into_main_grad:
            dtype = te_adapter.main_grad_of(parameters.first_weight(op)).dtype  # an error here if there is none
            if on_gpu and dtype not in (*_DTYPES, torch.float32):
                return f"main_grad is {dtype}"
    if on_gpu:
        if dtypes[0] not in _DTYPES:
            return f"there are no kernels for {dtypes[0]}"
        for sizes in both:
            if not sizes.is_cuda:
                return "the split sizes are on the CPU"
    judged.dtype = dtypes[0]
    return None


def in_torch_arithmetic(tensor: torch.Tensor) -> bool:
    """Whether a call with a tensor is computed by the reference."""
    return not tensor.is_cuda or os.environ.get(SWITCH) == "reference"


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    device = "cuda" if weight.is_cuda else weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
