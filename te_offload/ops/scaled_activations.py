"""Scaled activations of `te.ops` with `no_offload_activation`: the middle op of a grouped MLP.

In: what the `te.ops` classes take. Out: the same results; the op's input is the slot `act_input`. Keeps true: on a GPU
Transformer Engine's kernels run unchanged, on the CPU `arithmetic` computes; both save the same tensors, which are the
input as it came unless ``act_input_dtype`` says FP8, or none where ``recompute_act_input`` has the fused op make it again.
Does not: offload.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from te_offload.ops import act_input, arithmetic, te_adapter
from te_offload.ops.arithmetic import Pair
from te_offload.ops.slot_owner import SlotOwner


class _ScaledActivation(SlotOwner):
    """The forward and backward around a `te.ops` scaled activation: checks, slot, and the CPU's arithmetic."""

    act_input_dtype: torch.dtype | None = None
    recompute_act_input: bool = False
    _said_that_it_saves: bool = False

    def _init_activation(
        self, no_offload_activation: bool, act_input_dtype: torch.dtype | None, recompute_act_input: bool
    ) -> None:
        op = type(self).__name__
        self._init_slot_owner(no_offload_activation)
        self.act_input_dtype = act_input.check_dtype(op, act_input_dtype)
        if not isinstance(recompute_act_input, bool):
            raise ArgumentTypeError(
                f"{op}: recompute_act_input must be True or False, but is {recompute_act_input!r} "
                f"({type(recompute_act_input).__name__})."
            )
        if recompute_act_input and act_input_dtype is not None:
            raise ArgumentError(
                f"{op}: recompute_act_input=True saves no input, act_input_dtype={act_input_dtype} says how to. Give one."
            )
        self.recompute_act_input = recompute_act_input

    def fuser_forward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], input_: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """The `te.ops` forward; afterwards the slot is marked and declared.

        Raises:
            ArgumentError: router scales of a wrong shape, dtype or device.
        """
        self.check_scales(input_, kwargs["basic_op_extra_inputs"][0][0])
        if self.computes_on_cpu(input_) and te_adapter.quantization_enabled():
            raise UnsupportedError(
                f"{type(self).__name__}: te.autocast quantizes on a GPU, but the input is on the CPU."
            )
        result: tuple[torch.Tensor, Any] = super().fuser_forward(basic_op_ctxs, input_, **kwargs)  # type: ignore[misc]
        if self.act_input_dtype is not None:
            te_adapter.save_act_input(basic_op_ctxs[0], act_input.quantize)
        if self.recompute_act_input and basic_op_ctxs[0].to_save is not None:
            self.say_that_it_saves("this call runs op by op (te-offload explain and session.report() say why)")
        self.declare(te_adapter.read_activation, basic_op_ctxs[0])
        return result

    def fuser_backward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], grad_output: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The `te.ops` backward."""
        te_adapter.bring_carried(self, basic_op_ctxs[0])  # type: ignore[arg-type]
        te_adapter.restore_act_input(basic_op_ctxs[0], act_input.dequantize)
        if self.computes_on_cpu(grad_output):
            te_adapter.keep_after_backward(basic_op_ctxs[0].saved_tensors[0])
        result: tuple[torch.Tensor | None, Any, Any] = super().fuser_backward(  # type: ignore[misc]
            basic_op_ctxs, grad_output, **kwargs
        )
        return result

    def say_that_it_saves(self, why: str) -> None:
        """Warn, once, that a call saves the input though its backward was to compute it again."""
        if self._said_that_it_saves:
            return
        self._said_that_it_saves = True
        warnings.warn(
            f"{type(self).__name__}: recompute_act_input=True, but {why}: act_input is saved, as without it.",
            stacklevel=2,
        )

    def check_scales(self, input_: torch.Tensor, scales: torch.Tensor) -> None:
        """Check the router scales against the op's input, or against any tensor with its rows.

        Raises:
            ArgumentTypeError: no floating-point tensor. ArgumentError: another device, or not one scale a row.
        """
        op = type(self).__name__
        if not isinstance(scales, torch.Tensor) or not scales.is_floating_point():
            found = scales.dtype if isinstance(scales, torch.Tensor) else type(scales).__name__
            raise ArgumentTypeError(
                f"{op}: the router scales must be a floating-point tensor, but are {found}. Convert them with .to(dtype)."
            )
        if scales.device != input_.device:
            raise ArgumentError(
                f"{op}: the router scales are on {scales.device}, its input is on {input_.device}. Move the scales there."
            )
        if scales.shape != input_.shape[:-1]:
            raise ArgumentError(
                f"{op}: the router scales have shape {tuple(scales.shape)}, but an input of shape {tuple(input_.shape)} "
                f"needs one scale a row: {tuple(input_.shape[:-1])}."
            )


class ScaledSReLU(_ScaledActivation, te.ops.ScaledSReLU):
    """``te.ops.ScaledSReLU`` plus ``no_offload_activation``: ``relu(x)^2`` times one scale a row.

    Args:
        no_offload_activation: keep this op's input (slot ``act_input``) on the GPU.
        act_input_dtype: ``torch.float8_e4m3fn``: save the input so for the backward, with a scale a row, which changes
            gradients; ``None``: as it came.
        recompute_act_input: where our fused grouped MLP runs (on Hopper), do not save this op's input: the backward
            computes FC1 again, with the same bits. Other calls save it and warn once. The rest is as in ``te.ops``.

    Raises:
        ArgumentTypeError: ``no_offload_activation`` or ``recompute_act_input`` is not a bool. ArgumentError: another
            ``act_input_dtype``, or one and ``recompute_act_input``.
        UnsupportedReleaseError: the installed Transformer Engine has no row in the adapter's table.
    """

    def __init__(
        self,
        *,
        no_offload_activation: bool = False,
        act_input_dtype: torch.dtype | None = None,
        recompute_act_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._init_activation(no_offload_activation, act_input_dtype, recompute_act_input)

    def _scaled_unary_forward(self, input_: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if not self.computes_on_cpu(input_):
            kernel: torch.Tensor = super()._scaled_unary_forward(input_, scales)
            return kernel
        return arithmetic.scaled_srelu(input_, scales)

    def _scaled_unary_backward(
        self, grad_output: torch.Tensor, input_: torch.Tensor, scales: torch.Tensor, *, compute_scale_grad: bool
    ) -> Pair:
        if not self.computes_on_cpu(input_):
            kernel: Pair = super()._scaled_unary_backward(
                grad_output, input_, scales, compute_scale_grad=compute_scale_grad
            )
            return kernel
        return arithmetic.scaled_dsrelu(grad_output, input_, scales, need_scales=compute_scale_grad)


class ScaledTanhSReLU(_ScaledActivation, te.ops.ScaledTanhSReLU):
    """``te.ops.ScaledTanhSReLU`` plus ``no_offload_activation``: squared ReLU behind a tanh clamp, scaled by row.

    Args:
        no_offload_activation: keep this op's input (slot ``act_input``) on the GPU.
        act_input_dtype: ``torch.float8_e4m3fn``: save the input so for the backward, with a scale a row, which changes
            gradients; ``None``: as it came.
        recompute_act_input: where our fused grouped MLP runs (on Hopper), do not save this op's input: the backward
            computes FC1 again, with the same bits. Other calls save it and warn once. The rest is as in ``te.ops``.

    Raises:
        ArgumentTypeError: ``no_offload_activation`` or ``recompute_act_input`` is not a bool. ArgumentError: another
            ``act_input_dtype``, or one and ``recompute_act_input``.
        UnsupportedReleaseError: the installed Transformer Engine has no row in the adapter's table.
    """

    def __init__(
        self,
        *,
        tanh_clamp_scale: float,
        no_offload_activation: bool = False,
        act_input_dtype: torch.dtype | None = None,
        recompute_act_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(tanh_clamp_scale=tanh_clamp_scale, **kwargs)
        self._init_activation(no_offload_activation, act_input_dtype, recompute_act_input)

    def _scaled_unary_forward(self, input_: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if not self.computes_on_cpu(input_):
            there: torch.Tensor = super()._scaled_unary_forward(input_, scales)
            return there
        return arithmetic.scaled_tanh_srelu(input_, scales, self.tanh_clamp_scale)

    def _scaled_unary_backward(
        self, grad_output: torch.Tensor, input_: torch.Tensor, scales: torch.Tensor, *, compute_scale_grad: bool
    ) -> Pair:
        if not self.computes_on_cpu(input_):
            there: Pair = super()._scaled_unary_backward(
                grad_output, input_, scales, compute_scale_grad=compute_scale_grad
            )
            return there
        clamp = self.tanh_clamp_scale
        return arithmetic.scaled_dtanh_srelu(grad_output, input_, scales, clamp, need_scales=compute_scale_grad)


class _ScaledGLU(_ScaledActivation):
    """The CPU's arithmetic of the gated activations."""

    glu_interleave_size: int | None

    def _gate(self) -> arithmetic.Gate:
        raise NotImplementedError(f"{type(self).__name__} must say which gate it computes")

    def _scaled_glu_forward(self, input_: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if not self.computes_on_cpu(input_):
            kernel: torch.Tensor = super()._scaled_glu_forward(input_, scales)  # type: ignore[misc]
            return kernel
        return arithmetic.scaled_glu(input_, scales, self._gate(), self.glu_interleave_size)

    def _scaled_glu_backward(
        self, grad_output: torch.Tensor, input_: torch.Tensor, scales: torch.Tensor, *, compute_scale_grad: bool
    ) -> Pair:
        if not self.computes_on_cpu(input_):
            kernel: Pair = super()._scaled_glu_backward(  # type: ignore[misc]
                grad_output, input_, scales, compute_scale_grad=compute_scale_grad
            )
            return kernel
        return arithmetic.scaled_dglu(
            grad_output, input_, scales, self._gate(), self.glu_interleave_size, need_scales=compute_scale_grad
        )

    def check_scales(self, input_: torch.Tensor, scales: torch.Tensor) -> None:
        """The same, and the columns of a gated activation."""
        super().check_scales(input_, scales)
        block = 2 * (self.glu_interleave_size or 1)
        if input_.shape[-1] % block:
            raise ArgumentError(
                f"{type(self).__name__}: its input has {input_.shape[-1]} columns, which is no multiple of {block} "
                f"(2 x glu_interleave_size, with glu_interleave_size={self.glu_interleave_size})."
            )


class ScaledSwiGLU(_ScaledGLU, te.ops.ScaledSwiGLU):
    """``te.ops.ScaledSwiGLU`` plus ``no_offload_activation``: ``silu(a) * b`` times one scale a row.

    Args:
        no_offload_activation: keep this op's input (slot ``act_input``) on the GPU.
        act_input_dtype: ``torch.float8_e4m3fn``: save the input so for the backward, with a scale a row, which changes
            gradients; ``None``: as it came.
        recompute_act_input: where our fused grouped MLP runs (on Hopper), do not save this op's input: the backward
            computes FC1 again, with the same bits. Other calls save it and warn once. The rest is as in ``te.ops``.

    Raises:
        ArgumentTypeError: ``no_offload_activation`` or ``recompute_act_input`` is not a bool. ArgumentError: another
            ``act_input_dtype``, or one and ``recompute_act_input``.
        UnsupportedReleaseError: the installed Transformer Engine has no row in the adapter's table.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        no_offload_activation: bool = False,
        act_input_dtype: torch.dtype | None = None,
        recompute_act_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(glu_interleave_size, **kwargs)
        self._init_activation(no_offload_activation, act_input_dtype, recompute_act_input)

    def _gate(self) -> arithmetic.Gate:
        return arithmetic.swiglu_gate


class ScaledClampedQGeGLU(_ScaledGLU, te.ops.ScaledClampedQGeGLU):
    """``te.ops.ScaledClampedQGeGLU`` plus ``no_offload_activation``: the clamped gate of gpt-oss, scaled by row.

    Args:
        no_offload_activation: keep this op's input (slot ``act_input``) on the GPU.
        act_input_dtype: ``torch.float8_e4m3fn``: save the input so for the backward, with a scale a row, which changes
            gradients; ``None``: as it came.
        recompute_act_input: where our fused grouped MLP runs (on Hopper), do not save this op's input: the backward
            computes FC1 again, with the same bits. Other calls save it and warn once. The rest is as in ``te.ops``.

    Raises:
        ArgumentTypeError: ``no_offload_activation`` or ``recompute_act_input`` is not a bool. ArgumentError: another
            ``act_input_dtype``, or one and ``recompute_act_input``.
        UnsupportedReleaseError: the installed Transformer Engine has no row in the adapter's table.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        no_offload_activation: bool = False,
        act_input_dtype: torch.dtype | None = None,
        recompute_act_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(glu_interleave_size, **kwargs)
        self._init_activation(no_offload_activation, act_input_dtype, recompute_act_input)

    def _gate(self) -> arithmetic.Gate:
        clamped = self._clamped
        return arithmetic.clamped_qgeglu_gate(clamped.limit, clamped.alpha, clamped.glu_linear_offset)


class ScaledSiTUGLU(_ScaledGLU, te.ops.ScaledSiTUGLU):
    """``te.ops.ScaledSiTUGLU`` plus ``no_offload_activation``: a soft-capped gate and linear part, scaled by row.

    Args:
        no_offload_activation: keep this op's input (slot ``act_input``) on the GPU.
        act_input_dtype: ``torch.float8_e4m3fn``: save the input so for the backward, with a scale a row, which changes
            gradients; ``None``: as it came.
        recompute_act_input: where our fused grouped MLP runs (on Hopper), do not save this op's input: the backward
            computes FC1 again, with the same bits. Other calls save it and warn once. The rest is as in ``te.ops``.

    Raises:
        ArgumentTypeError: ``no_offload_activation`` or ``recompute_act_input`` is not a bool. ArgumentError: another
            ``act_input_dtype``, or one and ``recompute_act_input``.
        UnsupportedReleaseError: the installed Transformer Engine has no row in the adapter's table.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        no_offload_activation: bool = False,
        act_input_dtype: torch.dtype | None = None,
        recompute_act_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(glu_interleave_size, **kwargs)
        self._init_activation(no_offload_activation, act_input_dtype, recompute_act_input)

    def _gate(self) -> arithmetic.Gate:
        return arithmetic.situ_glu_gate(self.beta1, self.beta2)
