"""`te.ops.GroupedLinear` with `no_offload_activation` and `keep_quantized_weight`: FC1 and FC2 of a grouped MLP.

In: what `te.ops.GroupedLinear` takes. Out: the same results; the op's input is its slot. Keeps true: on a GPU
Transformer Engine's forward and backward run unchanged, on the CPU `arithmetic` computes between Transformer Engine's
own saving and gradient protocol (`main_grad`, delayed wgrad, one grouped weight); both save the same slot and weights.
Does not: offload, or read split sizes on the host where Transformer Engine does not; where it does, it reads them once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from te_offload.ops import arithmetic, gathers, row_check, split_sizes, te_adapter
from te_offload.ops.slot_owner import SlotOwner


class GroupedLinear(SlotOwner, te.ops.GroupedLinear):
    """``te.ops.GroupedLinear`` plus two keywords: ``y_i = x_i @ w_i.T + b_i`` for each of N experts.

    Args:
        num_groups: number of experts, N.
        in_features, out_features: H and F of each weight, (F, H).
        no_offload_activation: keep this op's input (``fc1_input`` or ``fc2_input`` in a grouped MLP) on the GPU.
        keep_quantized_weight: where a step quantizes the weights, keep from the forward what the dgrad reads of them,
            N x F x H bytes in FP8, as Transformer Engine does. ``False``: the backward makes it again, with the same bits,
            from the weights. Calls that cannot keep it and warn once: under delayed scaling those that run unfused.
            The rest is as in ``te.ops.GroupedLinear``.

    Raises:
        ArgumentTypeError: ``no_offload_activation`` or ``keep_quantized_weight`` is not a bool.
        UnsupportedReleaseError: the installed Transformer Engine has no row in the adapter's table.
    """

    keep_quantized_weight: bool = True  # of modules that were pickled before there was the keyword
    _said_that_it_keeps: bool = False

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        no_offload_activation: bool = False,
        keep_quantized_weight: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_groups, in_features, out_features, **kwargs)
        self._init_slot_owner(no_offload_activation)
        if not isinstance(keep_quantized_weight, bool):
            raise ArgumentTypeError(
                f"{type(self).__name__}: keep_quantized_weight must be True or False, but is {keep_quantized_weight!r} "
                f"({type(keep_quantized_weight).__name__})."
            )
        self.keep_quantized_weight = keep_quantized_weight

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """For `Module.to` and its like, which may swap parameters: nobody else may hold one then."""
        self._let_go_of_stand_ins()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The same for `Module.load_state_dict`."""
        self._let_go_of_stand_ins()
        super()._load_from_state_dict(*args, **kwargs)

    def _let_go_of_stand_ins(self) -> None:
        self.__dict__.pop(te_adapter.STAND_INS, None)

    def check_parameters(self) -> None:
        """Each expert's weight and bias is a parameter of this module's, where there is not one of all experts.

        Raises:
            ArgumentError: one is not, as under torch's parametrizations: Transformer Engine reads it and trains nothing.
        """
        for name, apart in (
            ("weight", not self.single_grouped_weight),
            ("bias", self.has_bias and not self.single_grouped_bias),
        ):
            for number in range(self.num_groups if apart else 0):
                if f"{name}{number}" not in self._parameters:
                    raise te_adapter.missing_parameter(self, f"{name}{number}")

    def begin_call(self) -> None:
        """What `pre_fuser_forward` does beside quantizers, which the fused op on Hopper does not use."""
        gathers.wait_for_parameters(self)
        split_sizes.begin_call()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """As in ``te.ops.GroupedLinear``, which sets up the quantizers one by one; unless they are. A call begins."""
        self.begin_call()
        if not te_adapter.usages_are_set(self, requires_grad=requires_grad):
            super().pre_fuser_forward(requires_grad=requires_grad)

    def fuser_forward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], input_: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """The `te.ops` forward; afterwards the slot is marked and declared.

        Raises:
            ArgumentError: split sizes that do not sum to the tokens. Seen on the CPU, and on a GPU on the split path,
                which reads them on the host anyway; the grouped path never does (in a CUDA graph, see `row_check`).
                Or shapes that the recipe's format cannot hold, where Transformer Engine failed over them; in the
                backward, too.
        """
        extra_inputs = kwargs["basic_op_extra_inputs"][0]
        if self.computes_on_cpu(input_):
            result = self._cpu_forward(basic_op_ctxs, input_, **kwargs)
        else:
            sizes = self._known_where_read(input_, extra_inputs[0])
            sizes = row_check.fitting(self, sizes, input_.shape[:-1].numel())
            if sizes is not extra_inputs[0]:
                kwargs["basic_op_extra_inputs"] = [(sizes, *extra_inputs[1:])]
            recipe = basic_op_ctxs[0].te_offload_recipe = te_adapter.active_recipe()
            try:
                with te_adapter.OffloadSwitch(on=False):
                    result = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
            except RuntimeError as error:
                self._complain_of_shapes(recipe, sizes, error)
                raise
            if not self.keep_quantized_weight:
                self.say_that_it_keeps(te_adapter.let_go_of_weights(self, basic_op_ctxs[0]))
        self.declare(te_adapter.read_grouped_linear, basic_op_ctxs[0])
        return result

    def fuser_backward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], grad_output: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The `te.ops` backward, also for a gradient that is not contiguous (that of ``y.sum()``, say).

        Transformer Engine 2.20.2 hands such a gradient to its FP8 grouped kernels as it is, and they read past its end.
        """
        te_adapter.bring_carried(self, basic_op_ctxs[0])
        te_adapter.make_weights_again(basic_op_ctxs[0])
        if self.computes_on_cpu(grad_output):
            return self._cpu_backward(basic_op_ctxs[0], grad_output)
        if not te_adapter.is_grouped_tensor(grad_output):
            grad_output = grad_output.contiguous()
        recipe = getattr(basic_op_ctxs[0], "te_offload_recipe", None)
        sizes = (basic_op_ctxs[0].saved_tensors or (None,))[0]
        try:
            result: tuple[torch.Tensor | None, Any, Any] = super().fuser_backward(basic_op_ctxs, grad_output, **kwargs)
        except RuntimeError as error:
            self._complain_of_shapes(recipe, sizes, error)
            raise
        return result

    def backward_dw(self) -> None:
        """The weight gradients that a backward has left (``delay_wgrad_compute=True``), added to what ``.grad`` has.

        Transformer Engine 2.20.2 writes over that: without ``main_grad`` the last microbatch's alone are left.
        """
        weights = [] if self._accumulate_into_main_grad else self._weights()
        earlier = [(weight, weight.grad) for weight in weights if weight.grad is not None]
        super().backward_dw()
        for weight, before in earlier:
            if weight.grad is not before:
                weight.grad = before if weight.grad is None else before.add_(weight.grad)

    def say_that_it_keeps(self, why: str | None) -> None:
        """Warn, once, that a call keeps the quantized weights though it was not to.

        Args:
            why: it does; ``None``: it does not.
        """
        if why is None or self._said_that_it_keeps:
            return
        self._said_that_it_keeps = True
        warnings.warn(
            f"{type(self).__name__}: keep_quantized_weight=False, but {why}: quantized copies of {self.num_groups} x "
            f"{self.out_features} x {self.in_features} weights stay on the GPU from the forward to the backward.",
            stacklevel=2,
        )

    def _complain_of_shapes(self, recipe: Any, split_sizes: Any, error: RuntimeError) -> None:
        """Raise an `ArgumentError` from what Transformer Engine raised, if the recipe's format cannot hold the shapes."""
        if recipe is None:
            return
        rows, columns = te_adapter.shape_multiples(recipe)
        wrong = [
            f"{name}={size} is no multiple of {columns}"
            for name, size in (("in_features", self.in_features), ("out_features", self.out_features))
            if size % columns
        ]
        try:
            sizes: list[int] = split_sizes.tolist()
        except (AttributeError, RuntimeError):  # not saved, or the device has failed
            sizes = []
        uneven = [number for number, size in enumerate(sizes) if size % rows]
        if uneven:
            wrong.append(
                f"{len(uneven)} of {len(sizes)} experts have token counts that are no multiples of {rows}, the first "
                f"expert {uneven[0]} with {sizes[uneven[0]]}"
            )
        if wrong:
            raise ArgumentError(
                f"{type(self).__name__}: {type(recipe).__name__} cannot hold these shapes: {'; '.join(wrong)}. Pad them "
                f"with zeros (te.Fp8Padding pads token counts). Transformer Engine said: {error}"
            ) from error

    # Checks ----------------------------------------------------------------------------------------------------------

    def _known_where_read(self, input_: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """The split sizes; checked, and known on the host, if this path reads them there."""
        weight = self.weight if self.single_grouped_weight else self.weight0  # not all N, which takes the host 40 us
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else weight.dtype
        if sizes.is_cuda and te_adapter.takes_grouped_path(dtype):
            return sizes
        return split_sizes.answering(sizes, self.checked_splits(input_, sizes), weight.device)

    def checked_splits(self, input_: torch.Tensor, given: torch.Tensor) -> tuple[int, ...]:
        """The split sizes, read on the host, once a call of the pipeline.

        Raises:
            ArgumentError: not one an expert, a negative one, or they do not sum to the input's rows.
        """
        op = type(self).__name__
        sizes = split_sizes.read(given)
        tokens = input_.numel() // max(self.in_features, 1)
        if len(sizes) != self.num_groups:
            raise ArgumentError(
                f"{op}: got {len(sizes)} split sizes for {self.num_groups} experts; give one an expert."
            )
        if min(sizes) < 0:
            raise ArgumentError(
                f"{op}: split sizes must not be negative, but expert {sizes.index(min(sizes))} has {min(sizes)}."
            )
        if sum(sizes) != tokens:
            raise ArgumentError(
                f"{op}: the split sizes sum to {sum(sizes)} tokens, but its input of shape {tuple(input_.shape)} has "
                f"{tokens}. Give sizes that sum to the input's rows."
            )
        return sizes

    def _check_cpu_input(self, input_: torch.Tensor) -> None:
        op = type(self).__name__
        if te_adapter.quantization_enabled():
            raise UnsupportedError(
                f"{op}: te.autocast quantizes on a GPU, but the input is on the CPU. Leave te.autocast."
            )
        if te_adapter.is_grouped_tensor(input_):
            raise UnsupportedError(f"{op}: a GroupedTensor input needs a GPU; give a plain tensor on the CPU.")
        weight = self._weights()[0]
        if weight.device.type != "cpu":
            raise ArgumentError(f"{op}: its input is on the CPU, its weights are on {weight.device}. Move one of them.")
        if te_adapter.is_distributed_weight(weight):
            raise UnsupportedError(f"{op}: distributed weights need a GPU.")
        if input_.shape[-1] != self.in_features:
            raise ArgumentError(f"{op}: its input has {input_.shape[-1]} columns, but in_features={self.in_features}.")

    # CPU arithmetic --------------------------------------------------------------------------------------------------

    def _weights(self) -> list[torch.nn.Parameter]:
        """The weight parameters in the order of registration: one if single_grouped_weight, else N."""
        weights: list[torch.nn.Parameter] = self._get_weight_tensors()
        return weights

    def _dense_weights(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """N weights (F, H) in the dtype of the computation."""
        if self.single_grouped_weight:
            packed = self.weight.rowwise_data.view(self.num_groups, self.out_features, self.in_features)
            return list(packed.to(dtype).unbind(0))
        return [te_adapter.maybe_dequantize(weight, dtype) for weight in self._weights()]

    def _cpu_forward(
        self,
        basic_op_ctxs: list[te_adapter.OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        self._check_cpu_input(input_)
        ctx = basic_op_ctxs[0]
        weights = self._weights()
        if self._accumulate_into_main_grad:
            te_adapter.main_grad_of(weights[0])
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weights[0].dtype
        given = basic_op_extra_inputs[0][0]
        sizes = self.checked_splits(input_, given)
        scales = self._checked_bias_scales(input_, basic_op_extra_inputs[0][1]) if self._scale_bias else None

        x = te_adapter.maybe_dequantize(input_, dtype).reshape(-1, self.in_features)
        xs = x.split(sizes)
        dense = self._dense_weights(dtype)
        biases = list(self._get_packed_bias_tensor(dtype).unbind(0)) if self.has_bias else None
        out = te_adapter.validate_or_alloc_output(
            basic_op_kwargs[0].get(te_adapter.GROUPED_LINEAR_OUTPUT_KEY),
            [*input_.shape[:-1], self.out_features],
            dtype,
            input_.device,
        )
        scales_by_expert = None if scales is None else scales.reshape(-1).split(sizes)
        arithmetic.grouped_forward(xs, dense, biases, scales_by_expert, out.view(-1, self.out_features))

        # The tuple that Transformer Engine's own paths save: one input and one weight with a grouped weight (its
        # grouped path), else N of each (its split path).
        needs_weight_grad = ctx.requires_grad and weights[0].requires_grad
        saved: list[Any] = [given, None, None, None, None]
        saved += [] if scales is None else [scales]
        grouped = self.single_grouped_weight
        saved += [x if needs_weight_grad else None] if grouped else list(xs) if needs_weight_grad else [None] * len(xs)
        saved += [self.weight] if grouped else dense
        self.fuser_forward_save_ctx(
            basic_op_ctxs=basic_op_ctxs,
            input_=input_,
            tensors_to_save=[tuple(saved)],
            requires_grad=[ctx.requires_grad],
            basic_op_extra_inputs=basic_op_extra_inputs,
            basic_op_kwargs=basic_op_kwargs,
            use_grouped_tensor_path=grouped,
            **kwargs,
        )
        ctx.dtype = dtype
        return out, [()]

    def _checked_bias_scales(self, input_: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        op = type(self).__name__
        tokens = input_.numel() // max(self.in_features, 1)
        if not scales.is_floating_point() or scales.device != input_.device or scales.numel() != tokens:
            raise ArgumentError(
                f"{op}: the bias scales must be {tokens} floating-point numbers on {input_.device}, but are "
                f"{scales.numel()} of {scales.dtype} on {scales.device}."
            )
        return scales

    def _cpu_backward(
        self, ctx: te_adapter.OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Any, Any]:
        saved = list(ctx.saved_tensors)
        sizes = [int(size) for size in saved[0].tolist()]
        tail = saved[5:]
        scales = tail.pop(0).reshape(-1).split(sizes) if self._scale_bias else None
        if self.single_grouped_weight:
            xs = None if tail[0] is None else tail[0].split(sizes)
            dense: Sequence[torch.Tensor] = self._dense_weights(ctx.dtype)
        else:
            xs = None if tail[0] is None else tuple(tail[: self.num_groups])
            dense = tail[self.num_groups :]
        dy = te_adapter.maybe_dequantize(grad_output, ctx.dtype).reshape(-1, self.out_features)
        dys = dy.split(sizes)

        bias_grads, scale_grads = None, None
        if self.has_bias:
            biases = list(self._get_packed_bias_tensor(ctx.dtype).unbind(0))
            bias_grads, scale_grads = arithmetic.grouped_bias_grads(dys, biases, scales)
        grad_input = te_adapter.validate_or_alloc_output(
            ctx.dgrad_out, [*grad_output.shape[:-1], self.in_features], ctx.dtype, grad_output.device
        )
        arithmetic.grouped_dgrad(dys, dense, grad_input.view(-1, self.in_features))
        weight_grads = self._cpu_wgrad(ctx, xs, dys)

        # The order in which the parameters are registered
        params: list[torch.Tensor | None] = list(weight_grads)
        if bias_grads is not None:
            if self.single_grouped_bias:
                params = [*weight_grads, torch.stack(bias_grads)]
            else:
                params = [*bias_grads, *weight_grads] if self.single_grouped_weight else [*weight_grads, *bias_grads]
        extra = (None, scale_grads) if self._scale_bias else (None,)
        return grad_input, [params], [extra]

    def _cpu_wgrad(
        self, ctx: te_adapter.OperationContext, xs: Sequence[torch.Tensor] | None, dys: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        weights = self._weights()
        if not ctx.weight_requires_grad or xs is None:
            return [None] * len(weights)
        accumulate = False
        shape = (self.num_groups, self.out_features, self.in_features)
        if self._accumulate_into_main_grad:
            accumulate = te_adapter.accumulates_into_main_grad(weights[0])
            grads = [te_adapter.main_grad_of(weight) for weight in weights]
            if self.single_grouped_weight:
                grads = list(te_adapter.view_main_grad_as_grouped_buffer(grads[0], shape[0], shape[1:], label="weight"))
            results = te_adapter.dummy_grads(weights)
        else:
            packed = torch.empty(shape, dtype=ctx.dtype, device=dys[0].device)
            grads = list(packed)
            results = [packed] if self.single_grouped_weight else list(grads)
        wgrad = functools.partial(arithmetic.grouped_wgrad, accumulate=accumulate)
        if self.need_backward_dw():
            te_adapter.keep_after_backward(*xs)
            self.wgrad_store.put([list(xs), dys, grads], wgrad)
            return results if self._accumulate_into_main_grad else [None] * len(weights)
        wgrad(xs, dys, grads)
        return results
