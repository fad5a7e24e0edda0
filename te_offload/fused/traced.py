"""The fused grouped MLP as ops of torch's own registry, which torch.compile keeps whole, also with ``fullgraph=True``.

In: rows of one expert after the other, all experts' weights of a linear as one tensor, split sizes. Out: rows, and
gradients by autograd. Keeps true: kernels, and bits, are those of `HopperGroupedMLP`; no number reaches the host; what the
backward reads are tensors that whoever traces it sees: checkpoints, partitioners, saved-tensor hooks. Does not: take
biases, separate weights or recipes. `te_offload.functional` calls it.

Nobody is attached to an op of tensors alone, and a saved tensor may be another one of its memory. So it names the storages
of its slots to whoever's saved-tensor hook comes first, if that is an observer of storages.

The backward is two ops, so that what the first one alone reads is given up before the second makes its gradients.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

from te_offload.errors import ArgumentError, UnsupportedError
from te_offload.fused import activations, machine, quantized
from te_offload.fused.grads import wide_scales
from te_offload.fused.judge import SWITCH, in_torch_arithmetic
from te_offload.fused.kernels.experts import TMA_BYTES
from te_offload.fused.kernels.interface import Activation, Gate, Gated, Orders, SquaredReLU, TileCount
from te_offload.ops import te_adapter
from te_offload.slots import TENSORS_OP, SlotName, StorageObserver

_HOW = "str gate, float[] numbers, int interleave"
_FORWARD, _FC1_AGAIN, _FC2, _FC1 = (
    f"te_offload::grouped_mlp{part}" for part in ("", "_fc1_again", "_fc2_backward", "_fc1_backward")
)
_DEVICES = ("cpu", "cuda")
_GATES = {gate.value: gate for gate in Gate}
_NUMBERS = {
    "": (0, 1),
    Gate.SWIGLU.value: (0,),
    Gate.CLAMPED_QGEGLU.value: (3,),
    Gate.SITU_GLU.value: (2,),
}  # of a gate
_ALIGNED = 8  # 16-bit elements in TMA's 16 bytes

torch.library.define(
    _FORWARD,
    f"(Tensor x, Tensor w1, Tensor w2, Tensor split_sizes, Tensor? scales, {_HOW}, bool saves, str[] stays)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    _FC2,
    f"(Tensor dy, Tensor w2, Tensor? scales, Tensor offsets, Tensor act_input, {_HOW}, bool wgrad)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    _FC1,
    f"(Tensor dact_input, Tensor? x, Tensor w1, Tensor offsets, Tensor(a!) work, {_HOW}, bool wgrad) -> (Tensor, Tensor)",
)
torch.library.define(_FC1_AGAIN, f"(Tensor x, Tensor w1, Tensor offsets, {_HOW}) -> Tensor")


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
def _kernels_of(activation: Activation, switch: str | None, *, reference: bool) -> Any:
    """They hold compiled functions, and of tensors nothing but the numbers of experts.

    Raises:
        UnsupportedError: they do not run here.
    """
    if not reference:
        reason = f"{SWITCH} is {switch}" if switch not in (None, "1") else None
        reason = reason or machine.reason_against(SWITCH, quantizes=False) or machine.broken_package(quantizes=False)
        if isinstance(activation, Gated):
            reason = reason or activations.reason_of_blocks(activation.interleave)
        if reason is not None:
            raise UnsupportedError(f"grouped_mlp: its kernels do not run here: {reason}.")
    return quantized.make_kernels(quantized.DENSE, activation, reference=reference)


def _kernels(x: torch.Tensor, gate: str, numbers: Sequence[float], interleave: int) -> Any:
    activation, reference = activation_of(gate, numbers, interleave), in_torch_arithmetic(x)
    return _kernels_of(activation, os.environ.get(SWITCH), reference=reference)


def _check(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    split_sizes: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    gated: bool,
    interleave: int,
) -> None:
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


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % TMA_BYTES else tensor


def _scales(given: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[0], dtype=torch.float32, device=x.device) if given is None else wide_scales(given)


def _name_slots(slots: dict[SlotName, torch.Tensor], stays: Sequence[str]) -> None:
    """Tell whose saved-tensor hook will see them first, if that is one who wants to know."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    observer = None if top is None else getattr(top[0], "__self__", None)
    if isinstance(observer, StorageObserver):
        observer.name_storages(TENSORS_OP, [(name, tensor, name.value in stays) for name, tensor in slots.items()])


def _forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    split_sizes: torch.Tensor,
    scales: torch.Tensor | None,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
    saves: bool,
    stays: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, offsets of experts (N + 1,), and the activation's input, empty unless the backward gets it from here.

    Args:
        stays: names of slots that are to stay on the device. The rest as of `te_offload.functional.grouped_mlp`.
    """
    if te_adapter.quantization_enabled():
        raise UnsupportedError(
            "grouped_mlp: it was called inside te.autocast, and does not quantize. Use ops of te_offload.ops, which are "
            "not compiled, or have te.autocast(enabled=False) around it."
        )
    kernels = _kernels(x, gate, numbers, interleave)
    _check(x, w1, w2, split_sizes, scales, gated=gate != "", interleave=interleave)
    given, x = x, _readable(x)
    y = x.new_empty(x.shape)
    offsets, counts = kernels.offsets(split_sizes, y)
    weights1, weights2 = kernels.prepare("w1", w1), kernels.prepare("w2", w2)
    of_fc1 = x, weights1, None, _scales(scales, x), offsets, counts.fc1
    if saves:
        act_input, fc2_input = kernels.fc1(*of_fc1)
    else:
        act_input, fc2_input = x.new_empty(0, w1.shape[1]), kernels.fc1_activated(*of_fc1)
    kernels.fc2(fc2_input, weights2, None, None, offsets, y, counts.fc2)
    _name_slots({SlotName.FC1_INPUT: given} | ({SlotName.ACT_INPUT: act_input} if saves else {}), stays)
    return y, offsets, act_input


def _fc1_again(
    x: torch.Tensor, w1: torch.Tensor, offsets: torch.Tensor, gate: str, numbers: Sequence[float], interleave: int
) -> torch.Tensor:
    """The activation's input, with the bits of the forward's."""
    kernels, x = _kernels(x, gate, numbers, interleave), _readable(x)
    count = TileCount(offsets.new_zeros(1), 0) if x.shape[0] else None
    act_input: torch.Tensor = kernels.fc1_linear(x, kernels.prepare("w1", w1), None, offsets, count)
    return act_input


def _fc2_backward(
    dy: torch.Tensor,
    w2: torch.Tensor,
    scales: torch.Tensor | None,
    offsets: torch.Tensor,
    act_input: torch.Tensor,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
    wgrad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients by the activation's input, by w2 (empty if not asked for) and by the scales in float32; and how the
    products of FC1's backward take their tiles, once.
    """
    kernels, dy = _kernels(dy, gate, numbers, interleave), _readable(dy)
    weights2 = kernels.prepare("w2", w2)
    dact_input, fc2_input, dscales, orders = kernels.fc2_dgrad(dy, weights2, act_input, _scales(scales, dy), offsets)
    dw2 = torch.empty_like(w2) if wgrad else w2.new_empty(0)
    if wgrad and dy.shape[0]:
        grads = kernels.prepare("w2's gradient", dw2)
        kernels.wgrad(dy, fc2_input, offsets, grads, accumulate=False, order=orders.fc2_wgrad)
    elif wgrad:
        dw2.zero_()
    work = offsets.new_empty(0) if orders.fc1_dgrad is None else orders.fc1_dgrad.work
    return dact_input, dw2, dscales, work


def _fc1_backward(
    dact_input: torch.Tensor,
    x: torch.Tensor | None,
    w1: torch.Tensor,
    offsets: torch.Tensor,
    work: torch.Tensor,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
    wgrad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients by x, and by w1 (empty if not asked for)."""
    kernels = _kernels(dact_input, gate, numbers, interleave)
    weights1, orders = kernels.prepare("w1", w1), Orders.within(work, w1.shape[0])
    dx = dact_input.new_empty(dact_input.shape[0], w1.shape[2])
    if not wgrad:
        kernels.fc1_dgrad(dact_input, weights1, offsets, dx, orders.fc1_dgrad)
        return dx, w1.new_empty(0)
    dw1 = torch.empty_like(w1)
    if not dx.shape[0]:
        return dx, dw1.zero_()
    assert x is not None
    grads, ways = kernels.prepare("w1's gradient", dw1), {"order": orders.fc1_wgrad, "count": orders.fc1_dgrad}
    kernels.fc1_backward(dact_input, _readable(x), weights1, offsets, dx, grads, accumulate=False, **ways)
    return dx, dw1


# For whoever traces ------------------------------------------------------------------------------------------------------


def _fake_forward(x: Any, w1: Any, w2: Any, split_sizes: Any, *how: Any) -> Any:
    offsets = split_sizes.new_empty(split_sizes.shape[0] + 1, dtype=torch.int32)
    *_, saves, _ = how
    return x.new_empty(x.shape), offsets, x.new_empty(x.shape[0] if saves else 0, w1.shape[1])


def _fake_fc1_again(x: Any, w1: Any, *_: Any) -> Any:
    return x.new_empty(x.shape[0], w1.shape[1])


def _fake_fc2_backward(dy: Any, w2: Any, scales: Any, offsets: Any, act_input: Any, *how: Any) -> Any:
    wide = torch.float64 if dy.dtype is torch.float64 else torch.float32
    dscales, room = dy.new_empty(dy.shape[0], dtype=wide), 0 if in_torch_arithmetic(dy) else Orders.room(w2.shape[0])
    dw2 = torch.empty_like(w2) if how[-1] else w2.new_empty(0)
    return torch.empty_like(act_input), dw2, dscales, offsets.new_empty(room)


def _fake_fc1_backward(dact_input: Any, x: Any, w1: Any, *how: Any) -> Any:
    dw1 = torch.empty_like(w1) if how[-1] else w1.new_empty(0)
    return dact_input.new_empty(dact_input.shape[0], w1.shape[2]), dw1


for _op, _computes, _says in (
    (_FORWARD, _forward, _fake_forward),
    (_FC1_AGAIN, _fc1_again, _fake_fc1_again),
    (_FC2, _fc2_backward, _fake_fc2_backward),
    (_FC1, _fc1_backward, _fake_fc1_backward),
):
    torch.library.impl(_op, _DEVICES, _computes)
    torch.library.register_fake(_op, _says)

# For autograd ------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    x, w1, w2, _, scales, *ctx.how, saves, _ = inputs
    _, offsets, act_input = output
    ctx.mark_non_differentiable(offsets, act_input)
    ctx.again = not saves
    reads_x = ctx.again or ctx.needs_input_grad[1]
    ctx.save_for_backward(x if reads_x else None, w1, w2, scales, offsets, None if ctx.again else act_input)


def _backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, w1, w2, scales, offsets, act_input = ctx.saved_tensors
    ops = torch.ops.te_offload
    if ctx.again:
        act_input = ops.grouped_mlp_fc1_again(x, w1, offsets, *ctx.how)
    _, wgrad1, wgrad2, *_ = ctx.needs_input_grad
    dact_input, dw2, dscales, work = ops.grouped_mlp_fc2_backward(dy, w2, scales, offsets, act_input, *ctx.how, wgrad2)
    del act_input
    dx, dw1 = ops.grouped_mlp_fc1_backward(dact_input, x, w1, offsets, work, *ctx.how, wgrad1)
    by_scales = None if scales is None else dscales.reshape(scales.shape).to(scales.dtype)
    return dx, dw1 if wgrad1 else None, dw2 if wgrad2 else None, None, by_scales, None, None, None, None, None


torch.library.register_autograd(_FORWARD, _backward, setup_context=_save)
