"""The fused grouped MLP as ops of torch's own registry, which torch.compile keeps whole, also with ``fullgraph=True``.

In: rows of one expert after the other, all experts' weights of a linear as one tensor, split sizes. Out: rows, and
gradients by autograd. Keeps true: kernels, and bits, are those of `HopperGroupedMLP`; no number reaches the host; what the
backward reads are tensors that whoever traces it sees: checkpoints, partitioners, saved-tensor hooks. Does not: take
biases or separate weights, or quantize (`traced_quantized`). `te_offload.functional` calls it.

The backward is three ops, so that what one alone reads is given up before the next makes its gradients: FC1's weight
gradients come first, since without its input there is room for the gradient by that. The forward is two where it saves the
activation's input: of a checkpoint's second forward a compiler leaves FC2's out, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_offload.errors import UnsupportedError
from te_offload.fused import quantized
from te_offload.fused.judge import in_torch_arithmetic
from te_offload.fused.kernels.interface import Orders, TileCount
from te_offload.fused.traced_call import (
    DEVICES,
    HOW,
    check,
    define_differentiable,
    have_table_made,
    kernels_of,
    name_slots,
    readable,
    router_scales,
)
from te_offload.ops import te_adapter
from te_offload.slots import SlotName

_OP, _FORWARD, _FC1_FORWARD, _FC2_FORWARD, _FC1_AGAIN, _FC2, _WGRAD, _DGRAD = (
    f"te_offload::grouped_mlp{part}"
    for part in ("", "_forward", "_fc1", "_fc2", "_fc1_again", "_fc2_backward", "_fc1_wgrad", "_fc1_dgrad")
)
_GIVEN = f"Tensor x, Tensor w1, Tensor w2, Tensor split_sizes, Tensor? scales, {HOW}"

torch.library.define(_OP, f"({_GIVEN}, bool saves, str[] stays) -> Tensor")
torch.library.define(_FORWARD, f"({_GIVEN}, str[] stays) -> (Tensor, Tensor)")
torch.library.define(_FC1_FORWARD, f"({_GIVEN}, str[] stays) -> (Tensor, Tensor, Tensor)")
torch.library.define(_FC2_FORWARD, f"(Tensor fc2_input, Tensor w2, Tensor split_sizes, {HOW}) -> Tensor")
torch.library.define(
    _FC2,
    f"(Tensor dy, Tensor w2, Tensor? scales, Tensor offsets, Tensor act_input, {HOW}, bool wgrad)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    _WGRAD, f"(Tensor dact_input, Tensor x, Tensor w1, Tensor offsets, Tensor(a!) work, {HOW}) -> Tensor"
)
torch.library.define(_DGRAD, f"(Tensor dact_input, Tensor w1, Tensor offsets, Tensor(a!) work, {HOW}) -> Tensor")
torch.library.define(_FC1_AGAIN, f"(Tensor x, Tensor w1, Tensor offsets, {HOW}) -> Tensor")


def _forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    split_sizes: torch.Tensor,
    scales: torch.Tensor | None,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
    stays: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Y and offsets of experts (N + 1,), where no backward gets the activation's input from here.

    Args:
        stays: names of slots that are to stay on the device. The rest as of `te_offload.functional.grouped_mlp`.
    """
    kernels, given, x = *_checked(x, w1, w2, split_sizes, scales, gate, numbers, interleave), readable(x)
    y = x.new_empty(x.shape)
    offsets, counts = kernels.offsets(split_sizes, y)
    weights1, weights2 = kernels.prepare("w1", w1), kernels.prepare("w2", w2)
    fc2_input = kernels.fc1_activated(x, weights1, None, router_scales(scales, x), offsets, counts.fc1)
    kernels.fc2(fc2_input, weights2, None, None, offsets, y, counts.fc2)
    name_slots([(SlotName.FC1_INPUT, given)], stays)
    return y, offsets


def _fc1_forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    split_sizes: torch.Tensor,
    scales: torch.Tensor | None,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
    stays: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FC2's input, offsets of experts, and the activation's input. ``w2``: of which only the size is read."""
    kernels, given, x = *_checked(x, w1, w2, split_sizes, scales, gate, numbers, interleave), readable(x)
    offsets, counts = kernels.offsets(split_sizes, x.new_empty(x.shape[0], 1))  # of no rows but as many
    router = router_scales(scales, x)
    act_input, fc2_input = kernels.fc1(x, kernels.prepare("w1", w1), None, router, offsets, counts.fc1)
    name_slots([(SlotName.FC1_INPUT, given), (SlotName.ACT_INPUT, act_input)], stays)
    return fc2_input, offsets, act_input


def _fc2_forward(
    fc2_input: torch.Tensor,
    w2: torch.Tensor,
    split_sizes: torch.Tensor,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
) -> torch.Tensor:
    """Y. It makes its own offsets: a count of tiles serves one launch, and who traces may launch this one again."""
    kernels = kernels_of(quantized.DENSE, fc2_input, gate, numbers, interleave)
    y = fc2_input.new_empty(fc2_input.shape[0], w2.shape[1])
    offsets, counts = kernels.offsets(split_sizes, y)
    kernels.fc2(fc2_input, kernels.prepare("w2", w2), None, None, offsets, y, counts.fc2)
    return y


def _checked(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    split_sizes: torch.Tensor,
    scales: torch.Tensor | None,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
) -> tuple[Any, torch.Tensor]:
    """Kernels of a forward, and x as it was given.

    Raises:
        ArgumentError: as `check`. UnsupportedError: inside of te.autocast; the kernels do not run here.
    """
    if te_adapter.quantization_enabled():
        raise UnsupportedError(
            "grouped_mlp: it was called inside te.autocast, which says nothing to it. Give it a recipe by name, or have "
            "te.autocast(enabled=False) around it."
        )
    kernels = kernels_of(quantized.DENSE, x, gate, numbers, interleave)
    check(x, w1, w2, split_sizes, scales, gated=gate != "", interleave=interleave)
    return kernels, x


def _fc1_again(
    x: torch.Tensor, w1: torch.Tensor, offsets: torch.Tensor, gate: str, numbers: Sequence[float], interleave: int
) -> torch.Tensor:
    """The activation's input, with the bits of the forward's."""
    kernels, x = kernels_of(quantized.DENSE, x, gate, numbers, interleave), readable(x)
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
    kernels, dy = kernels_of(quantized.DENSE, dy, gate, numbers, interleave), readable(dy)
    weights2 = kernels.prepare("w2", w2)
    dact_input, fc2_input, dscales, orders = kernels.fc2_dgrad(
        dy, weights2, act_input, router_scales(scales, dy), offsets
    )
    dw2 = torch.empty_like(w2) if wgrad else w2.new_empty(0)
    if wgrad and dy.shape[0]:
        grads = kernels.prepare("w2's gradient", dw2)
        kernels.wgrad(dy, fc2_input, offsets, grads, accumulate=False, order=orders.fc2_wgrad)
    elif wgrad:
        dw2.zero_()
    work = offsets.new_empty(0) if orders.fc1_dgrad is None else orders.fc1_dgrad.work
    return dact_input, dw2, dscales, work


def _fc1_wgrad(
    dact_input: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    offsets: torch.Tensor,
    work: torch.Tensor,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
) -> torch.Tensor:
    """The gradient by w1, of which only the size is read."""
    kernels, dw1 = kernels_of(quantized.DENSE, dact_input, gate, numbers, interleave), torch.empty_like(w1)
    if not dact_input.shape[0]:
        return dw1.zero_()
    grads, order = kernels.prepare("w1's gradient", dw1), Orders.within(work, w1.shape[0]).fc1_wgrad
    kernels.fc1_wgrad(dact_input, readable(x), offsets, grads, accumulate=False, order=order)
    return dw1


def _fc1_dgrad(
    dact_input: torch.Tensor,
    w1: torch.Tensor,
    offsets: torch.Tensor,
    work: torch.Tensor,
    gate: str,
    numbers: Sequence[float],
    interleave: int,
) -> torch.Tensor:
    """The gradient by x."""
    kernels = kernels_of(quantized.DENSE, dact_input, gate, numbers, interleave)
    dx = dact_input.new_empty(dact_input.shape[0], w1.shape[2])
    if dx.shape[0]:
        count = Orders.within(work, w1.shape[0]).fc1_dgrad
        kernels.fc1_dgrad(dact_input, kernels.prepare("w1", w1), offsets, dx, count)
    return dx


# For whoever traces ------------------------------------------------------------------------------------------------------


def _fake_forward(x: Any, w1: Any, w2: Any, split_sizes: Any, *_: Any) -> Any:
    have_table_made(w1)
    return x.new_empty(x.shape), split_sizes.new_empty(split_sizes.shape[0] + 1, dtype=torch.int32)


def _fake_fc1_forward(x: Any, w1: Any, w2: Any, split_sizes: Any, *_: Any) -> Any:
    have_table_made(w1)
    offsets = split_sizes.new_empty(split_sizes.shape[0] + 1, dtype=torch.int32)
    return x.new_empty(x.shape[0], w2.shape[2]), offsets, x.new_empty(x.shape[0], w1.shape[1])


def _fake_fc2_forward(fc2_input: Any, w2: Any, *_: Any) -> Any:
    return fc2_input.new_empty(fc2_input.shape[0], w2.shape[1])


def _fake_fc1_again(x: Any, w1: Any, *_: Any) -> Any:
    return x.new_empty(x.shape[0], w1.shape[1])


def _fake_fc2_backward(dy: Any, w2: Any, scales: Any, offsets: Any, act_input: Any, *how: Any) -> Any:
    wide = torch.float64 if dy.dtype is torch.float64 else torch.float32
    dscales, room = dy.new_empty(dy.shape[0], dtype=wide), 0 if in_torch_arithmetic(dy) else Orders.room(w2.shape[0])
    dw2 = torch.empty_like(w2) if how[-1] else w2.new_empty(0)
    return torch.empty_like(act_input), dw2, dscales, offsets.new_empty(room)


def _fake_fc1_wgrad(dact_input: Any, x: Any, w1: Any, *_: Any) -> Any:
    return torch.empty_like(w1)


def _fake_fc1_dgrad(dact_input: Any, w1: Any, *_: Any) -> Any:
    return dact_input.new_empty(dact_input.shape[0], w1.shape[2])


for _op, _computes, _says in (
    (_FORWARD, _forward, _fake_forward),
    (_FC1_FORWARD, _fc1_forward, _fake_fc1_forward),
    (_FC2_FORWARD, _fc2_forward, _fake_fc2_forward),
    (_FC1_AGAIN, _fc1_again, _fake_fc1_again),
    (_FC2, _fc2_backward, _fake_fc2_backward),
    (_WGRAD, _fc1_wgrad, _fake_fc1_wgrad),
    (_DGRAD, _fc1_dgrad, _fake_fc1_dgrad),
):
    torch.library.impl(_op, DEVICES, _computes)
    torch.library.register_fake(_op, _says)

# For autograd ------------------------------------------------------------------------------------------------------------


class _Differentiable(torch.autograd.Function):
    """The op, in parts that know nothing of autograd, so that compiled graphs call them at once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        split_sizes: torch.Tensor,
        scales: torch.Tensor | None,
        *how: Any,
    ) -> torch.Tensor:
        """As the op."""
        *ctx.how, saves, stays = how
        given, ops = (x, w1, w2, split_sizes, scales, *ctx.how), torch.ops.te_offload
        with torch._C._AutoDispatchBelowAutograd():
            if saves:
                fc2_input, offsets, act_input = ops.grouped_mlp_fc1(*given, stays)
                y: torch.Tensor = ops.grouped_mlp_fc2(fc2_input, w2, split_sizes, *ctx.how)
            else:
                (y, offsets), act_input = ops.grouped_mlp_forward(*given, stays), None
        reads_x = act_input is None or ctx.needs_input_grad[1]
        ctx.save_for_backward(x if reads_x else None, w1, w2, scales, offsets, act_input)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Gradients by the forward's arguments."""
        x, w1, w2, scales, offsets, act_input = ctx.saved_tensors
        ops = torch.ops.te_offload
        if act_input is None:
            act_input = ops.grouped_mlp_fc1_again(x, w1, offsets, *ctx.how)
        dgrad, wgrad1, wgrad2, *_ = ctx.needs_input_grad
        of_fc2 = dy, w2, scales, offsets, act_input
        dact_input, dw2, dscales, work = ops.grouped_mlp_fc2_backward(*of_fc2, *ctx.how, wgrad2)
        del act_input, of_fc2
        dw1 = ops.grouped_mlp_fc1_wgrad(dact_input, x, w1, offsets, work, *ctx.how) if wgrad1 else None
        del x
        dx = ops.grouped_mlp_fc1_dgrad(dact_input, w1, offsets, work, *ctx.how) if dgrad else None
        by_scales = None if scales is None else dscales.reshape(scales.shape).to(scales.dtype)
        return dx, dw1, dw2 if wgrad2 else None, None, by_scales, *[None] * 5


def _whole(*given: Any) -> torch.Tensor:
    """The op where no backward follows, whatever was to be saved."""
    *others, _, stays = given
    y: torch.Tensor = torch.ops.te_offload.grouped_mlp_forward(*others, stays)[0]
    return y


define_differentiable(_OP, _whole, _Differentiable)
