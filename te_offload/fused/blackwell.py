"""Transformer Engine's fused grouped MLP for Blackwell, with the marks and slots of te_offload.

In: windows with at least one op of `te_offload.ops`. Out: the same fused kernels, and marks on what they save. Keeps
true: kernels, saved layout and gradients are Transformer Engine's own, less the rows that no backward reads in NVFP4, and
quantized weights that the backward makes again where an op keeps none; windows of plain `te.ops` are left to it. Does not:
run anywhere but on compute capability 10.x. Both ops have been run with their kernels replaced, in MXFP8 and NVFP4
(tests/layouts); neither has run on such a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload.fused.calls import calls_of
from te_offload.fused.support import Support
from te_offload.fused.window import Window, find_windows
from te_offload.ops import GroupedLinear, row_check, te_adapter
from te_offload.ops.slot_owner import declare_slots


class _DeclaresSlots:
    """Mixin before a fused op of Transformer Engine: marks and declares the slots after its forward."""

    basic_ops: Sequence[torch.nn.Module]

    def fuser_forward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], input_: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """The fused forward of Transformer Engine; afterwards quantized weights that are not to stay are let go of, and
        every slot of its window is marked and declared.
        """
        kwargs["basic_op_extra_inputs"] = [
            (row_check.fitting(op, extra[0], input_.shape[:-1].numel()), *extra[1:])
            if isinstance(op, te.ops.GroupedLinear)
            else extra
            for op, extra in zip(self.basic_ops, kwargs["basic_op_extra_inputs"], strict=True)
        ]
        with te_adapter.OffloadSwitch(on=False):
            result: tuple[torch.Tensor, Any] = super().fuser_forward(basic_op_ctxs, input_, **kwargs)  # type: ignore[misc]
        te_adapter.drop_unread_rows(self.basic_ops, basic_op_ctxs, self.grouped_gemm_wgrad_kernel())  # type: ignore[attr-defined]
        reasons = te_adapter.let_go_of_fused_weights(self.basic_ops, basic_op_ctxs[0])
        for op, reason in zip((self.basic_ops[0], self.basic_ops[2]), reasons, strict=True):
            if isinstance(op, GroupedLinear):
                op.say_that_it_keeps(reason)
        activation: Any = self.basic_ops[1]
        if getattr(activation, "recompute_act_input", False) and basic_op_ctxs[0].to_save is not None:
            activation.say_that_it_saves("Transformer Engine's fused op for Blackwell runs, which saves it")
        declare_slots(self.basic_ops, basic_op_ctxs, te_adapter.read_fused)
        calls_of(self.basic_ops[0]).fused += 1
        return result

    def fuser_backward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], grad_output: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, Any, Any]:
        """The fused backward of Transformer Engine, with what was carried past the hooks."""
        te_adapter.bring_carried(self.basic_ops[0], basic_op_ctxs[0])
        te_adapter.make_weights_again(basic_op_ctxs[0])
        result: tuple[torch.Tensor, Any, Any] = super().fuser_backward(  # type: ignore[misc]
            basic_op_ctxs, grad_output, **kwargs
        )
        return result


class BlackwellUnaryGroupedMLP(_DeclaresSlots, te_adapter.fused_unary_class()):  # type: ignore[misc]
    """Transformer Engine's fused GroupedLinear, ScaledSReLU or ScaledTanhSReLU, GroupedLinear, with slots."""


class BlackwellGLUGroupedMLP(_DeclaresSlots, te_adapter.fused_glu_class()):  # type: ignore[misc]
    """Transformer Engine's fused GroupedLinear, scaled GLU, GroupedLinear, with slots."""


class Apart(te.ops.FusedOperation):
    """One op by itself: Transformer Engine's own scan, which asks for types alone, does not take it into a window."""

    def fuser_forward(self, basic_op_ctxs: list[te_adapter.OperationContext], *args: Any, **kwargs: Any) -> Any:
        """The op's."""
        return self.basic_ops[0].fuser_forward(basic_op_ctxs, *args, **kwargs)

    def fuser_backward(self, basic_op_ctxs: list[te_adapter.OperationContext], *args: Any, **kwargs: Any) -> Any:
        """The op's."""
        return self.basic_ops[0].fuser_backward(basic_op_ctxs, *args, **kwargs)


def explain(window: Window, recipe: Any = None) -> Support:
    """Whether Transformer Engine's Blackwell kernels take a window on this machine under a recipe, and if not, why.

    Args:
        window: from `find_windows`.
        recipe: a Transformer Engine recipe; ``None`` means unquantized.
    """
    reason = te_adapter.unfused_reason(window.ops, recipe) or window.needs_ops
    return Support(True) if reason is None else Support(False, reason)


def fuse_unary_windows(ops: list[Any], *, recipe: Any = None, **_: Any) -> list[Any]:
    """The fusion function for unary activations, as `te.ops.register_forward_backward_fusion` wants it."""
    if not BlackwellUnaryGroupedMLP.is_supported():
        return ops
    return _fuse(ops, recipe, BlackwellUnaryGroupedMLP, te_adapter.fused_unary_activations())


def fuse_glu_windows(ops: list[Any], *, recipe: Any = None, **_: Any) -> list[Any]:
    """The fusion function for gated activations, as `te.ops.register_forward_backward_fusion` wants it."""
    if not BlackwellGLUGroupedMLP.is_supported():
        return ops
    return _fuse(ops, recipe, BlackwellGLUGroupedMLP, te_adapter.fused_glu_activations())


def _fuse(ops: list[Any], recipe: Any, fused_class: type[Any], activations: tuple[type, ...]) -> list[Any]:
    """Hand each window with an op of ours to Transformer Engine's own scan, and leave the rest of the list alone."""
    fused: list[Any] = []
    position = 0
    for window in find_windows(ops):
        if not window.has_slot_owner:
            continue
        fused += ops[position : window.start]
        position = window.start + 3
        if window.needs_ops is not None:
            fused += [window.fc1, Apart([window.activation]), window.fc2]
            continue
        fused += te_adapter.fuse_windows(
            list(window.ops), recipe=recipe, fused_class=fused_class, activations=activations
        )
    return fused + ops[position:]


def register() -> None:
    """Put both fusion functions before Transformer Engine's own. Does nothing the second time."""
    te_adapter.register_joint_fusion(fuse_unary_windows)
    te_adapter.register_joint_fusion(fuse_glu_windows)
