"""The fused grouped MLP of te_offload: GEMM, scaled activation and GEMM with the activation in the epilogues (Hopper).

In: the three ops of a window, and their calls. Out: their results, and their slots: ``fc1_input`` and ``act_input`` are
saved, ``fc2_input`` is rebuilt in the backward, as ``act_input`` is if its op asks for that. Keeps true: each slot is
declared when it is written and read back just before its first use; what one call cannot take goes through the three ops
one by one, for a reason that `HopperGroupedMLP.support` gives. Does not: choose windows (`hopper_choice`), or know how
numbers are quantized (`quantized`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload.errors import ArgumentError, SavedTensorModifiedError
from te_offload.fused import activations, parameters, quantized
from te_offload.fused.calls import calls_of
from te_offload.fused.grads import bias_grads, fc1_bias_grads, weight_grads, wide_scales
from te_offload.fused.judge import SWITCH as SWITCH
from te_offload.fused.judge import Judged, in_torch_arithmetic, judge
from te_offload.fused.kernels.experts import TMA_BYTES
from te_offload.fused.kernels.interface import Kernels, TileCount
from te_offload.fused.stand_ins import stand_ins_of
from te_offload.fused.support import Support
from te_offload.ops import GroupedLinear, ScaledSReLU, ScaledTanhSReLU, row_check, te_adapter
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SaveState, SlotName


class HopperGroupedMLP(te.ops.FusedOperation):
    """FC1, a scaled activation and FC2 in three launches forward and six backward.

    Args:
        basic_ops: the three ops.
    """

    def __init__(self, basic_ops: Sequence[torch.nn.Module]) -> None:
        super().__init__(basic_ops)
        self._ops: tuple[Any, Any, Any] = tuple(basic_ops)  # type: ignore[assignment]  # quicker to ask than a ModuleList
        self._kernels: dict[tuple[bool, quantized.Way], Kernels] = {}  # on a GPU or not, for a module may move
        self._judged: list[Judged] = []  # of the call that runs now; a module's attribute takes the host longer to set

    def support(
        self, ctxs: Sequence[te_adapter.OperationContext], input_: torch.Tensor, extra_inputs: Sequence[Any]
    ) -> Support:
        """Whether the kernels take one call.

        Args:
            ctxs: of the three ops. input_: of FC1.
            extra_inputs: of each op: split sizes; router scales; split sizes.
        """
        reason = judge(self._ops, [bool(ctx.requires_grad) for ctx in ctxs], input_, extra_inputs).reason
        return Support(True) if reason is None else Support(False, reason)

    def stand_ins(
        self,
        input_: torch.Tensor | None,
        extra_inputs: Sequence[Sequence[torch.Tensor | None]],
        requires_grad: Sequence[bool],
    ) -> Sequence[Sequence[torch.Tensor]] | None:
        """What passes autograd in place of the parameters of each op in the forward that follows at once; the backward
        gives gradients of as many tensors. ``None``: the parameters do. It judges the call for that, since ops one by one
        take their parameters. An op whose parameters pass themselves keeps no stand-in: it may be called in the capture of
        a CUDA graph, where autograd's nodes of its parameters must not be those of eager steps.

        Args:
            input_: of FC1. extra_inputs, requires_grad: of each op. Of inputs ``None`` stands for what an op before the
                window will make.
        """
        self._judged.clear()
        if input_ is None or True in [tensor is None for those in extra_inputs for tensor in those]:
            return None
        judged = judge(self._ops, requires_grad, input_, extra_inputs)
        self._judged.append(judged)
        if judged.reason is not None or not requires_grad[0]:
            return None
        fc1, _, fc2 = self._ops
        judged.registered = parameters.weight_parameters(fc1), parameters.weight_parameters(fc2)
        passed: list[Sequence[torch.Tensor]] = []
        for number, op in enumerate((fc1, fc2)):
            own = parameters.registered(op, judged.registered[number])
            found = None
            if not parameters.in_one(op) and not (op.has_bias and op.single_grouped_bias):
                into_main_grad = bool(op._accumulate_into_main_grad)
                found = stand_ins_of(op).of(own, op.num_groups, into_main_grad=into_main_grad)
            if found is None:
                op.__dict__.pop(te_adapter.STAND_INS, None)
            judged.stand_ins[number] = found is not None
            passed.append(own if found is None else found)
        return passed[0], (), passed[1]

    def begin_call(self) -> None:
        """A call begins that the kernels take: `stand_ins` has judged it."""
        for op in self._ops:
            if isinstance(op, GroupedLinear):
                op.begin_call()
            else:
                op.pre_fuser_forward(requires_grad=True)

    # Forward ---------------------------------------------------------------------------------------------------------

    def fuser_forward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], input_: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """The forward of the three ops.

        Raises:
            ArgumentError: another number of columns, or of split sizes, than the ops have; wrong router scales; weights on
                a GPU that do not begin at multiples of 16 bytes, which neither our kernels nor cuBLAS can read; on the CPU
                also split sizes that do not sum to the tokens.
        """
        fc1, activation, fc2 = self._ops
        ctx1, ctx2, ctx3 = basic_op_ctxs
        extra_inputs = kwargs["basic_op_extra_inputs"]
        if self._judged:
            judged = self._judged.pop()
        else:
            judged = judge(self._ops, [bool(ctx.requires_grad) for ctx in basic_op_ctxs], input_, extra_inputs)
        way, reason, scalings = judged.way, judged.reason, judged.scalings
        ctx1.te_offload_fused = reason is None
        ctx1.te_offload_stand_ins = judged.stand_ins
        calls = calls_of(fc1)
        if reason is not None:
            calls.handed_over += 1
            calls.reason = reason
            return self._forward_one_by_one(basic_op_ctxs, input_, **kwargs)
        calls.fused += 1
        splits1, scales, splits2 = extra_inputs[0][0], extra_inputs[1][0], extra_inputs[2][0]
        self._check(input_, splits1, scales, splits2)
        for op, splits in ((fc1, splits1), (fc2, splits2)):  # of which no kernel reads more than there are rows
            row_check.note(op, splits, input_.shape[:-1].numel())
        kernels = self._kernels_for(input_, way)
        dtype = judged.dtype
        assert dtype is not None
        bias1, bias2 = parameters.bias(fc1, dtype), parameters.bias(fc2, dtype)
        bias_scales = extra_inputs[2][1] if fc2._scale_bias else None
        x = _readable(te_adapter.maybe_dequantize(input_, dtype), fc1.in_features)
        if x is input_:
            x = x.detach()  # the caller's may carry marks, and its graph
        flat_scales = wide_scales(scales)
        shape = [*input_.shape[:-1], fc2.out_features]
        buffer = kwargs["basic_op_kwargs"][2].get(te_adapter.GROUPED_LINEAR_OUTPUT_KEY)
        out = te_adapter.validate_or_alloc_output(buffer, shape, dtype, input_.device)
        y = _rows(out)
        offsets1, counts = kernels.offsets(splits1, y)
        offsets2 = offsets1 if splits2 is splits1 else kernels.offsets(splits2, y)[0]

        saves = bool(ctx1.requires_grad)
        offsets = offsets1, offsets2
        registered = judged.registered or (parameters.weight_parameters(fc1), parameters.weight_parameters(fc2))
        again = saves and bool(getattr(activation, "recompute_act_input", False))
        of_call: Any = scalings, offsets, counts, flat_scales, registered
        numbers = quantized.make_pass(way, kernels, fc1, fc2, *of_call, backward=saves, again=again)
        wgrad1 = saves and registered[0][0].requires_grad
        if numbers is not None:
            x = quantized.stored_input(fc1, numbers.quantize_input(x, wgrad=wgrad1), x, splits1)
        if saves:
            calls.kept_weight_bytes = quantized.kept_weight_bytes(way, fc1, fc2)
            ctx1.te_offload_quantized = way, numbers
            ctx1.weight_requires_grad = wgrad1
            wgrad2 = ctx3.weight_requires_grad = registered[1][0].requires_grad
            ctx1.te_offload_rebuilt = False
            ctx2.te_offload_rebuilt = again
            ctx1.te_offload_fc1_again = (bias1, dtype, counts.fc1 is not None) if again else None
            # By the backward the ops may have others (`torch.func.functional_call`).
            ctx1.te_offload_weights = registered
            ctx3.te_offload_bias = bias2 if fc2._scale_bias else None
            read = [*parameters.registered(fc1, registered[0]), *parameters.registered(fc2, registered[1])]
            ctx1.te_offload_versions = read, parameters.versions(read)
            beside = (None, None, None) if numbers is None else numbers.beside_input()
            self._save_linear(fc1, ctx1, (splits1, offsets1, *beside), (), x if wgrad1 or again else None, kwargs, 0)
        ctx1.te_offload_two_splits = offsets2 is not offsets1
        if numbers is not None:
            act_input: torch.Tensor | None = numbers.fc1(bias1, dtype)
        else:
            weights1, weights2 = _prepared(kernels, fc1, fc2, registered)
            of_fc1 = x, weights1, bias1, flat_scales, offsets1, counts.fc1
            if saves and not again:
                act_input, fc2_input = kernels.fc1(*of_fc1)
            else:
                act_input, fc2_input = None, kernels.fc1_activated(*of_fc1)
            for rows in (act_input, fc2_input):
                if offsets2 is not offsets1 and rows is not None:  # FC2 may read rows that FC1 did not write
                    kernels.clear(offsets1, rows)
        if saves:
            ctx2.to_save = (None if again else act_input, scales)
            te_adapter.mark_activations(ctx2.to_save[0])
            del act_input
            if isinstance(activation, SlotOwner):
                absent = SaveState.RECOMPUTED
                activation.declare_one(te_adapter.read_activation, ctx2, 0, name=SlotName.ACT_INPUT, absent=absent)
        wide = None if bias_scales is None else wide_scales(bias_scales)
        if numbers is not None:
            numbers.fc2(bias2, wide, y)
        else:
            kernels.fc2(fc2_input, weights2, bias2, wide, offsets2, y, counts.fc2)
        if saves:
            ctx3.te_offload_rebuilt = wgrad2
            more = () if bias_scales is None else (bias_scales,)
            self._save_linear(fc2, ctx3, (splits2, offsets2, None, None, None), more, None, kwargs, 2)
        return out, [(), (), ()]

    def _save_linear(
        self,
        op: Any,
        ctx: te_adapter.OperationContext,
        metadata: tuple[torch.Tensor | None, ...],
        bias_scales: tuple[torch.Tensor, ...],
        x: torch.Tensor | None,
        kwargs: dict[str, Any],
        number: int,
    ) -> None:
        """Save for a GroupedLinear what its own grouped path would, in its layout, but for the weights: to pass hundreds of
        them through autograd takes the host longer than all else, and the backward finds them on the op.
        """
        ctx.use_grouped_tensor_path = ctx.te_offload_weights_apart = True
        ctx.dgrad_out = kwargs["basic_op_kwargs"][number].get(te_adapter.GROUPED_LINEAR_GRAD_INPUT_KEY)
        ctx.to_save = (*metadata, *bias_scales, x)
        te_adapter.mark_activations(x)
        if isinstance(op, SlotOwner):
            absent = SaveState.RECOMPUTED if ctx.te_offload_rebuilt else SaveState.NOT_SAVED
            op.declare_one(te_adapter.read_grouped_linear, ctx, len(ctx.to_save) - 1, absent=absent)

    def _check(self, input_: torch.Tensor, splits1: Any, scales: Any, splits2: Any) -> None:
        fc1, activation, fc2 = self._ops
        if input_.shape[-1] != fc1.in_features:
            raise ArgumentError(f"FC1: its input has {input_.shape[-1]} columns, but in_features={fc1.in_features}.")
        for name, op, splits in (("FC1", fc1, splits1), ("FC2", fc2, splits2)):
            if splits.shape != (op.num_groups,):
                raise ArgumentError(
                    f"{name}: got split sizes of shape {tuple(splits.shape)} for {op.num_groups} experts; give "
                    "one an expert."
                )
        if isinstance(activation, (ScaledSReLU, ScaledTanhSReLU)):
            activation.check_scales(input_, scales)
        if not input_.is_cuda:
            for op, splits in ((fc1, splits1), (fc2, splits2)):
                if isinstance(op, GroupedLinear):
                    op.checked_splits(torch.empty(*input_.shape[:-1], op.in_features, device="meta"), splits)

    def _forward_one_by_one(
        self, ctxs: list[te_adapter.OperationContext], input_: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        ops = list(self._ops)
        before = [kwargs["prev_op_grad_output_quantizer"], *(op.get_grad_output_quantizer() for op in ops[:-1])]
        after = [*(op.get_input_quantizer() for op in ops[1:]), kwargs["next_op_input_quantizer"]]
        x, extra_outputs = input_, []
        for number, op in enumerate(ops):
            x, extra = op.fuser_forward(
                [ctxs[number]],
                x,
                basic_op_extra_inputs=[kwargs["basic_op_extra_inputs"][number]],
                prev_op_grad_output_quantizer=before[number],
                next_op_input_quantizer=after[number],
                basic_op_kwargs=[kwargs["basic_op_kwargs"][number]],
            )
            extra_outputs += list(extra)
        return x, extra_outputs

    # Backward --------------------------------------------------------------------------------------------------------

    def fuser_backward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], grad_output: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The backward of the three ops, as its forward ran."""
        ctx1, ctx2, ctx3 = basic_op_ctxs
        if not ctx1.te_offload_fused:
            return self._backward_one_by_one(basic_op_ctxs, grad_output, **kwargs)
        fc1, activation, fc2 = self._ops
        registered = ctx1.te_offload_weights
        read, versions = ctx1.te_offload_versions
        if parameters.versions(read) != versions:
            raise SavedTensorModifiedError(
                f"{type(fc1).__name__}: a weight or a bias was written to in place between the forward and its backward, "
                "so gradients would be wrong. Call optimizer.step() after the backward."
            )
        bias2 = ctx3.te_offload_bias
        ctx1.te_offload_weights = ctx1.te_offload_versions = ctx3.te_offload_bias = None  # the graph may live on
        te_adapter.bring_carried(fc2, ctx3)
        offsets2 = ctx3.saved_tensors[1]
        bias_scales = ctx3.saved_tensors[5] if fc2._scale_bias else None
        te_adapter.bring_carried(activation, ctx2)
        act_input, scales = ctx2.saved_tensors
        again, ctx1.te_offload_fc1_again = ctx1.te_offload_fc1_again, None
        if again is not None:
            te_adapter.bring_carried(fc1, ctx1)  # FC1's input, of which the activation's is made again
        dtype = act_input.dtype if again is None else again[1]
        dy = _readable(te_adapter.maybe_dequantize(grad_output, dtype), fc2.out_features)
        way, numbers = ctx1.te_offload_quantized
        ctx1.te_offload_quantized = None  # it holds quantized weights, and a second backward is an error
        kernels = self._kernels_for(dy, way)
        flat_scales = wide_scales(scales)
        weights1, weights2 = (None, None) if numbers is not None else _prepared(kernels, fc1, fc2, registered)
        if again is not None:
            act_input = _fc1_again(kernels, ctx1, again, weights1, flat_scales, numbers)
        if numbers is not None:
            dact_input, dscales = numbers.fc2_dgrad(dy, act_input, flat_scales, wgrad=ctx3.weight_requires_grad)
            multiply: Callable[..., None] = (numbers.for_later() if fc2.need_backward_dw() else numbers).fc2_wgrad
        else:
            dact_input, fc2_input, dscales, orders = kernels.fc2_dgrad(dy, weights2, act_input, flat_scales, offsets2)
            multiply = functools.partial(kernels.wgrad, dy, fc2_input, offsets2, order=orders.fc2_wgrad)
            del fc2_input
        ctx2.saved_tensors = act_input = None  # the session, or the allocator, may have its memory now
        together1, together2 = ctx1.te_offload_stand_ins
        grads2 = weight_grads("FC2", fc2, ctx3, kernels, dy, multiply, together=together2)
        del multiply
        dbias2, dbias_scales = bias_grads(fc2, kernels, dy, offsets2, bias2, bias_scales)

        bring_x = te_adapter.bring_exempt(fc1, ctx1)
        offsets1 = ctx1.saved_tensors[1]
        if ctx1.te_offload_two_splits and numbers is None:
            kernels.clear(offsets2, dact_input)
        shape = [*grad_output.shape[:-1], fc1.in_features]
        grad_input = te_adapter.validate_or_alloc_output(ctx1.dgrad_out, shape, dtype, dy.device)
        dx = _rows(grad_input)
        together = numbers is None and bring_x is None and ctx1.weight_requires_grad and not fc1.need_backward_dw()
        if numbers is not None:
            numbers.fc1_dgrad(dact_input, dx, wgrad=ctx1.weight_requires_grad)
        elif not together:
            kernels.fc1_dgrad(dact_input, weights1, offsets1, dx, orders.fc1_dgrad)
        if bring_x is not None:  # only now: what is on its way has had the dgrad's time
            bring_x()
        x = ctx1.saved_tensors[5]
        if numbers is not None:
            multiply = functools.partial(numbers.fc1_wgrad, quantized.read_input(x), ctx1.saved_tensors[2:5])
        elif together:
            multiply = functools.partial(
                kernels.fc1_backward,
                dact_input,
                x,
                weights1,
                offsets1,
                dx,
                order=orders.fc1_wgrad,
                count=orders.fc1_dgrad,
            )
        else:
            multiply = functools.partial(kernels.fc1_wgrad, dact_input, x, offsets1, order=orders.fc1_wgrad)
        grads1 = weight_grads("FC1", fc1, ctx1, kernels, dact_input, multiply, together=together1)
        dbias1 = fc1_bias_grads(fc1, kernels, dact_input, offsets1)
        params = [
            parameters.in_order(fc1, grads1, dbias1, together=together1),
            [],
            parameters.in_order(fc2, grads2, dbias2, together=together2),
        ]
        extra: tuple[torch.Tensor | None, ...] = (None,)
        if bias_scales is not None and dbias_scales is not None:
            extra = (None, dbias_scales.reshape(bias_scales.shape).to(bias_scales.dtype))
        return grad_input, params, [(None,), (dscales.reshape(scales.shape).to(scales.dtype),), extra]

    def _backward_one_by_one(
        self, ctxs: list[te_adapter.OperationContext], grad_output: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        dy: torch.Tensor | None = grad_output
        grads: list[Any] = []
        extras: list[Any] = []
        for op, ctx in zip(reversed(self._ops), reversed(ctxs), strict=True):
            if not ctx.requires_grad:
                dy = None
                grads.insert(0, None)
                extras.insert(0, (None,) * op.num_extra_inputs)
                continue
            dy, params, extra = op.fuser_backward([ctx], dy, basic_op_grad_extra_outputs=[()])
            grads.insert(0, next(iter(params)))
            extras.insert(0, next(iter(extra)))
        return dy, grads, extras

    def _kernels_for(self, tensor: torch.Tensor, way: quantized.Way) -> Any:
        key = tensor.is_cuda, way
        kernels = self._kernels.get(key)
        if kernels is None:
            reference = in_torch_arithmetic(tensor)
            activation = activations.activation_of(self.basic_ops[1])
            kernels = self._kernels[key] = quantized.make_kernels(way, activation, reference=reference)
        return kernels


def _prepared(kernels: Kernels, fc1: Any, fc2: Any, registered: Sequence[list[torch.nn.Parameter]]) -> tuple[Any, Any]:
    one, other = registered
    return (
        kernels.prepare("FC1's weights", parameters.weights(fc1, one)),
        kernels.prepare("FC2's weights", parameters.weights(fc2, other)),
    )


def _fc1_again(
    kernels: Kernels, ctx1: Any, again: tuple[Any, torch.dtype, bool], weights: Any, scales: torch.Tensor, numbers: Any
) -> torch.Tensor:
    """The activation's input, by the forward's own product. ``numbers``: of a call that quantizes."""
    bias, dtype, counts = again
    offsets, x = ctx1.saved_tensors[1], ctx1.saved_tensors[5]
    # The forward's own count is used up: a launch that began there would find no tile left.
    count = TileCount(offsets.new_zeros(1), 0) if counts else None
    if numbers is not None:
        act_input: torch.Tensor = numbers.fc1_again(x, ctx1.saved_tensors[2:5], bias, scales, dtype, count)
    else:
        act_input = kernels.fc1_linear(x, weights, bias, offsets, count)
    if ctx1.te_offload_two_splits:
        kernels.clear(offsets, act_input)
    return act_input


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


def _readable(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows of so many columns, where TMA can read them."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(-1, columns)
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % TMA_BYTES else rows
