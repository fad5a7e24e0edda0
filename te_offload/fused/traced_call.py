"""What the ops of `traced` and `traced_quantized` have in common: their arguments, kernels, and names of slots.

In: arguments of an op. Out: kernels, what these read, errors. Keeps true: kernels of one activation are made once in a
process; nothing reaches the host. Does not: compute, or know of autograd.

Nobody is attached to an op of tensors alone, and a saved tensor may be another one of its memory. So it names the storages
of its slots to whoever's saved-tensor hook comes first, if that is an observer of storages.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_offload.errors import ArgumentError, UnsupportedError
from te_offload.fused import activations, machine, quantized
from te_offload.fused.grads import wide_scales
from te_offload.fused.judge import SWITCH, in_torch_arithmetic
from te_offload.fused.kernels.experts import TMA_BYTES, places_in_order
from te_offload.fused.kernels.interface import Activation, Gate, Gated, SquaredReLU
from te_offload.slots import TENSORS_OP, SlotName, StorageObserver

HOW = "str gate, float[] numbers, int interleave"
"""Of an op's schema: the activation."""
DEVICES = ("cpu", "cuda")
_GATES = {gate.value: gate for gate in Gate}
_NUMBERS = {
    "": (0, 1),
    Gate.SWIGLU.value: (0,),
    Gate.CLAMPED_QGEGLU.value: (3,),
    Gate.SITU_GLU.value: (2,),
}  # of a gate
_ALIGNED = 8  # 16-bit elements in TMA's 16 bytes


def activation_of(gate: str, numbers: Sequence[float], interleave: int) -> Activation:
    """What the kernels are told, of the ops' arguments.

    Raises:
        ArgumentError: a gate of another name, or with another number of numbers.
    """
    if gate not in _NUMBERS:
        raise ArgumentError(f"grouped_mlp: gate is {gate!r}, but must be one of {', '.join(_GATES)}, or empty.")
    if len(numbers) not in _NUMBERS[gate]:
        raise ArgumentError(
            f"grouped_mlp: numbers are {tuple(numbers)}, but gate={gate!r} takes {' or '.join(map(str, _NUMBERS[gate]))}."
        )
    if gate == "":
        return SquaredReLU(*numbers)
    return Gated(_GATES[gate], tuple(numbers), interleave)


@functools.cache
def _kernels_of(way: quantized.Way, activation: Activation, switch: str | None, *, reference: bool) -> Any:
    """They hold compiled functions, and of tensors nothing but the numbers of experts.

    Raises:
        UnsupportedError: they do not run here.
    """
    if not reference:
        quantizes = way != quantized.DENSE
        reason = f"{SWITCH} is {switch}" if switch not in (None, "1") else None
        reason = reason or machine.reason_against(SWITCH, quantizes=quantizes)
        reason = reason or machine.broken_package(quantizes=quantizes)
        if isinstance(activation, Gated):
            reason = reason or activations.reason_of_blocks(activation.interleave)
        if reason is not None:
            raise UnsupportedError(f"grouped_mlp: its kernels do not run here: {reason}.")
    return quantized.make_kernels(way, activation, reference=reference)


def kernels_of(way: quantized.Way, x: torch.Tensor, gate: str, numbers: Sequence[float], interleave: int) -> Any:
    """What computes a way on x's device.

    Raises:
        ArgumentError: of the activation. UnsupportedError: they do not run here.
    """
    activation, reference = activation_of(gate, numbers, interleave), in_torch_arithmetic(x)
    return _kernels_of(way, activation, os.environ.get(SWITCH), reference=reference)


def check(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    split_sizes: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    gated: bool,
    interleave: int,
) -> None:
    """Of the arguments of a forward.

    Raises:
        ArgumentError: they do not fit each other.
    """
    if x.dim() != 2 or w1.dim() != 3 or w2.dim() != 3:
        raise ArgumentError(
            f"grouped_mlp: x, w1 and w2 must have 2, 3 and 3 dimensions, but are {tuple(x.shape)}, {tuple(w1.shape)} and "
            f"{tuple(w2.shape)}."
        )
    (experts, wide, hidden), ffn = w1.shape, w2.shape[2]
    if w2.shape[:2] != (experts, hidden) or x.shape[1] != hidden or wide != ffn * (2 if gated else 1):
        raise ArgumentError(
            f"grouped_mlp: x is {tuple(x.shape)}, w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}; they must be (T, H), "
            f"(N, {'2F' if gated else 'F'}, H) and (N, H, F)."
        )
    if scales is not None and (scales.shape != x.shape[:1] or scales.device != x.device):
        raise ArgumentError(
            f"grouped_mlp: scales are {tuple(scales.shape)} on {scales.device}; give one for each of {x.shape[0]} rows, on "
            f"{x.device}."
        )
    if interleave and ffn % interleave:
        raise ArgumentError(f"grouped_mlp: F={ffn} is no multiple of interleave={interleave}.")
    if split_sizes.shape != (experts,) or split_sizes.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"grouped_mlp: split_sizes are {tuple(split_sizes.shape)} of {split_sizes.dtype}; give {experts} of int32 or "
            "int64."
        )
    if len({tensor.device for tensor in (x, w1, w2, split_sizes)}) > 1 or len({x.dtype, w1.dtype, w2.dtype}) > 1:
        raise ArgumentError(
            f"grouped_mlp: x is {x.dtype} on {x.device}, w1 {w1.dtype} on {w1.device}, w2 {w2.dtype} on {w2.device}, "
            f"split_sizes are on {split_sizes.device}; give all on one device, the first three of one dtype."
        )
    if x.is_cuda and (x.dtype not in (torch.bfloat16, torch.float16) or hidden % _ALIGNED or ffn % _ALIGNED):
        raise ArgumentError(
            f"grouped_mlp: H={hidden}, F={ffn}, {x.dtype}; its kernels take multiples of {_ALIGNED}, in bf16 and fp16."
        )


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that TMA can read."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % TMA_BYTES else tensor


def router_scales(given: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """For each of x's rows, (T,) as kernels read them."""
    return torch.ones(x.shape[0], dtype=torch.float32, device=x.device) if given is None else wide_scales(given)


def have_table_made(weights: torch.Tensor) -> None:
    """Before the first call, which may be in the memory pool of a CUDA graph. ``weights``: (N, ...), where it is traced,
    on a machine that may have no such device.
    """
    if not in_torch_arithmetic(weights) and isinstance(weights.shape[0], int) and torch.cuda.is_available():
        with _disable_current_modes():
            places_in_order(weights.shape[0], weights.device)


def name_slots(slots: Iterable[tuple[SlotName, torch.Tensor]], stays: Sequence[str]) -> None:
    """Tell whose saved-tensor hook will see them first, if that is one who wants to know. ``stays``: names of slots."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    observer = None if top is None else getattr(top[0], "__self__", None)
    if isinstance(observer, StorageObserver):
        observer.name_storages(TENSORS_OP, [(name, tensor, name.value in stays) for name, tensor in slots])


def define_differentiable(
    op: str, computes: Callable[..., torch.Tensor], function: type[torch.autograd.Function]
) -> None:
    """Register an op that computes one tensor like its first argument.

    Args:
        op: its name, of a schema that is defined. computes: it. function: the same, with gradients, whose forward calls
            ops below autograd, as what is traced will.
    """

    def differentiates(*given: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
            return function.apply(*given)
        with torch._C._AutoDispatchBelowAutograd():
            return computes(*given)

    def says(x: torch.Tensor, w1: torch.Tensor, *_: Any) -> torch.Tensor:
        have_table_made(w1)
        return x.new_empty(x.shape)

    torch.library.impl(op, DEVICES, computes)
    torch.library.register_fake(op, says)
    torch.library.impl(op, "Autograd", differentiates)
