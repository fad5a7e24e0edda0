"""Transformer Engine's pipelines around a fused op of ours: what passes autograd, and a shorter way where the op is all.

In: a class of joint fused ops; modules that are captured. Out: nothing; two methods of `OperationFuser` are replaced, once,
and pipelines pass other parameters where they are told to, or where their ops have others. Keeps true: results, gradients,
saved tensors and errors are those of Transformer Engine's own pipeline; its lists are put back after each call; a pipeline
that a checkpoint computes again without its recipe says so; torch.compile traces none of it. Does not: choose fusions, or
quantize.

Transformer Engine's autograd function handles any row of ops: their quantizers, extra outputs, channels between them. A
grouped MLP is mostly a Sequential of its own and has none of that; there `_OneOp` does what is left, under a recipe too.
"""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.ops.fuser import OperationFuser
from transformer_engine.pytorch.ops.op import OperationContext
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import prepare_for_saving, restore_from_func_ctx

from te_offload.errors import ArgumentError

STAND_INS = "_te_offload_stand_ins"  # where a basic op keeps them, and autograd's nodes of its parameters with them
_ALONE = "_te_offload_alone"  # where a pipeline keeps the fused op that is all of it, and under which recipe
_COMPUTED = "_te_offload_computed"  # and whether its parameters are other than leaves of autograd's graph
_CHECKED = "_te_offload_checked"  # and the names of its ops' parameters when they were found to be all there
_IS_LEAF = operator.attrgetter("is_leaf")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


@functools.cache
def use_stand_ins(fused: type[Any]) -> None:
    """Have Transformer Engine's pipelines ask fused ops of a class, in each call, what passes autograd in place of the
    parameters of their basic ops; ``None``: the parameters do. Does nothing the second time. A pipeline that is one such op
    runs by `_OneOp` where that is enough.

    And have pipelines pass the parameters that their ops have now. Transformer Engine passes those of the first call, which
    get the gradients ever after: where parameters were registered anew since (``load_state_dict(assign=True)``,
    `torch.func.functional_call`), those that are trained get none, and nothing says so.

    Args:
        fused: of joint fused ops, with methods ``stand_ins`` and ``begin_call`` (see `HopperGroupedMLP`). Basic ops may
            have a method ``check_parameters``, called in training when parameters have other names than before.
    """
    fuse, call = OperationFuser.maybe_fuse_ops, OperationFuser.__call__

    @functools.wraps(fuse)
    def maybe_fuse_ops(
        fuser: Any,
        is_grad_enabled: bool,
        recipe: Any,
        input_: torch.Tensor,
        extra_inputs: Sequence[Sequence[torch.Tensor | None]],
    ) -> None:
        if recipe is None and fuser.recipe_type not in (None, type(None)):
            _look_for_a_lost_recipe(fuser)
        if is_grad_enabled:
            _check_parameters(fuser)
        _follow_parameters(fuser)
        fuse(fuser, is_grad_enabled, recipe, input_, extra_inputs)
        fuser.__dict__[_ALONE] = _only_op(fuser, fused, recipe)
        passed: list[Sequence[torch.Tensor]] | None = None
        for op, places in fuser._forward_ops:
            if isinstance(op, fused):
                found = op.stand_ins(
                    None if places[0] else input_,
                    [extra_inputs[place] for place in places],
                    [place >= fuser.first_op_requiring_backward for place in places],
                )
                if found is not None:
                    passed = passed or list(fuser._basic_op_params)
                    for place, tensors in zip(places, found, strict=True):
                        passed[place] = tensors
        if is_grad_enabled:
            for place, basic in enumerate(fuser._basic_ops):
                if passed is None or passed[place] is fuser._basic_op_params[place]:
                    basic.__dict__.pop(STAND_INS, None)
        if passed is not None:
            fuser._te_offload_params = fuser._basic_op_num_params, fuser._flat_basic_op_params
            fuser._basic_op_num_params = list(map(len, passed))
            fuser._flat_basic_op_params = list(itertools.chain.from_iterable(passed))

    @functools.wraps(call)
    def call_and_put_back(
        fuser: Any, input_: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: Any = None
    ) -> Any:
        alone = fuser.__dict__.get(_ALONE)
        if (
            alone is not None
            and input_.requires_grad
            and torch.is_grad_enabled()
            and len(extra_inputs) == fuser.num_extra_inputs
            and _is_up_to_date(fuser, alone[1])
        ):
            op = alone[0]
            inputs: list[list[Any]] = [[None] * basic.num_extra_inputs for basic in fuser._basic_ops]
            for tensor, (place, number) in zip(extra_inputs, fuser._external_extra_input_slots, strict=True):
                inputs[place][number] = tensor
            passed = op.stand_ins(input_, inputs, [True] * len(inputs))
            if passed is not None:
                return _run_alone(fuser, op, input_, extra_inputs, inputs, basic_op_kwargs, passed)
        try:
            return call(fuser, input_, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        finally:
            own = fuser.__dict__.pop("_te_offload_params", None)
            if own is not None:
                fuser._basic_op_num_params, fuser._flat_basic_op_params = own
            if fuser.__dict__.get(_COMPUTED):  # for this call; the next one looks anew
                for params in (*fuser._basic_op_params, fuser._flat_basic_op_params):
                    params.clear()

    OperationFuser.maybe_fuse_ops = maybe_fuse_ops
    # Traced, a stand-in that is kept would be the result of one compiled graph, which can run backward once; and on a GPU
    # Transformer Engine's GroupedLinear is an error inside of TorchDynamo.
    OperationFuser.__call__ = torch.compiler.disable(call_and_put_back, reason="te.ops run as they are")


def put_parameters(module: torch.nn.Module, others: Mapping[int, torch.nn.Parameter]) -> None:
    """Have the pipelines of a module's Sequentials pass other parameters, by the identities of those that they pass now."""
    for part in module.modules():
        if not isinstance(part, te.ops.Sequential):
            continue
        for fuser in part._module_groups or ():
            if isinstance(fuser, OperationFuser):
                for params in (*fuser._basic_op_params, fuser._flat_basic_op_params):
                    params[:] = [others.get(id(param), param) for param in params]


def missing_parameter(op: Any, name: str) -> ArgumentError:
    """The error for an op that has a weight or bias, but not among its parameters."""
    return ArgumentError(
        f"{type(op).__name__}: {name} is not among its parameters, so nobody would get its gradient. Under torch's "
        "FullyShardedDataParallel give use_orig_params=True, or use fully_shard. torch's parametrizations and pruning keep "
        "what is trained elsewhere too; torch.func.functional_call with what they compute works."
    )


def _check_parameters(fuser: Any) -> None:
    names = [tuple(op._parameters) for op in fuser._basic_ops]
    if names == fuser.__dict__.get(_CHECKED):
        return
    for op in fuser._basic_ops:
        check = getattr(op, "check_parameters", None)
        if check is not None:
            check()
    fuser.__dict__[_CHECKED] = names


def _follow_parameters(fuser: Any) -> None:
    changed = False
    for op, params in zip(fuser._basic_ops, fuser._basic_op_params, strict=True):
        now = (
            list(op.parameters()) if op._modules else [param for param in op._parameters.values() if param is not None]
        )
        if params and len(now) != len(params):  # of some its backward knows nothing
            continue
        if now and (not params or False in map(operator.is_, now, params)):
            params[:] = now
            changed = True
    if changed:
        fuser._basic_op_num_params = list(map(len, fuser._basic_op_params))
        fuser._flat_basic_op_params[:] = itertools.chain.from_iterable(fuser._basic_op_params)
    if changed or _COMPUTED not in fuser.__dict__:
        fuser.__dict__[_COMPUTED] = False in map(_IS_LEAF, fuser._flat_basic_op_params)


def _look_for_a_lost_recipe(fuser: Any) -> None:
    """Warn where a pipeline that ran under a recipe runs without one in a backward, as a checkpoint's. Transformer Engine
    2.20.2's `checkpoint` takes a module of its ops for one of torch's, and has torch compute it again.
    """
    if torch._C._current_graph_task_id() == -1 or not any(op.num_quantizers("forward") for op in fuser._basic_ops):
        return
    warnings.warn(
        f"{' - '.join(type(op).__name__ for op in fuser._basic_ops)}: its forward ran under {fuser.recipe_type.__name__}, "
        "and in the backward it is computed again without a recipe, so its gradients are not those of that forward. "
        "te.checkpoint does this to a module of te.ops: give it a function that calls the module; or enter te.autocast "
        "inside of what is checkpointed.",
        stacklevel=2,
    )


def _only_op(fuser: Any, fused: type[Any], recipe: Any) -> tuple[Any, Any] | None:
    """The fused op of a class that is all of a pipeline, forward and backward, in a call that asks for all gradients, if
    there is one; and of which of the pipeline's fusions: see `_fusions`.
    """
    key = _fusions(recipe)
    ways = fuser._fused_ops_cache.get(key)
    if ways is None or len(ways[0]) != 1 or not isinstance(ways[0][0][0], fused) or ways[1][0][0] is not ways[0][0][0]:
        return None
    channels = any(source is not None for sources in fuser._basic_op_extra_input_sources for source in sources)
    return None if channels or fuser._public_extra_output_slots else (ways[0][0][0], key)


def _fusions(recipe: Any) -> tuple[type[Any], int, str | None]:
    """Transformer Engine's key of a pipeline's fusions: recipe, first op with a backward, override."""
    return type(recipe), 0, None if recipe is None else recipe.backward_override


def _is_up_to_date(fuser: Any, key: tuple[type[Any], int, str | None]) -> bool:
    """Whether a call here and now has the fusions of a key, and the ops of the pipeline have the state of its recipe, as
    `OperationFuser.maybe_fuse_ops` sees to.
    """
    recipe = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None
    if _fusions(recipe) != key:
        return False
    return recipe is None or not recipe.delayed() or fuser._last_amax_history_len == recipe.amax_history_len


def _run_alone(
    fuser: Any,
    op: Any,
    input_: torch.Tensor,
    extra_inputs: Sequence[torch.Tensor],
    inputs: list[list[Any]],
    basic_op_kwargs: Any,
    passed: Sequence[Sequence[torch.Tensor]],
) -> torch.Tensor:
    op.begin_call()
    kwargs = [{}] * len(inputs) if basic_op_kwargs is None else basic_op_kwargs
    call = op, inputs, kwargs, fuser._external_extra_input_slots
    params = itertools.chain.from_iterable(passed)
    if torch._C._are_functorch_transforms_active():
        y: torch.Tensor = _OneOp.apply(input_, call, *params, *extra_inputs)  # type: ignore[no-untyped-call]
    else:  # what `apply` does then, without looking at each parameter in Python
        input_, *extra_inputs = map(torch._C._functorch.unwrap_if_dead, (input_, *extra_inputs))
        y = _apply_at_once(input_, call, *params, *extra_inputs)
    return y


class _OneOp(torch.autograd.Function):
    """A pipeline that is one joint fused op, every basic op of which needs a backward.

    It takes the input; the op, its basic ops' extra inputs and keywords, and where each given extra input belongs; what
    passes for parameters; the extra inputs.
    """

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, call: tuple[Any, ...], *tensors: torch.Tensor) -> torch.Tensor:
        op, inputs, kwargs, slots = call
        for tensor in (input_, *tensors):  # whoever frees saved tensors leaves the caller's alone
            tensor._do_not_clear = True  # type: ignore[attr-defined]
        contexts = [OperationContext() for _ in inputs]
        for context in contexts:
            context.requires_grad = True
        y, _ = op.fuser_forward(
            contexts,
            input_,
            basic_op_extra_inputs=inputs,
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=kwargs,
        )
        saved: list[Any] = []
        begins = [0]
        for context in contexts:
            saved += context.to_save or ()
            context.to_save = None
            begins.append(len(saved))
        if _PLAIN.issuperset(map(type, saved)):  # what `prepare_for_saving` would find out one by one
            ctx.save_for_backward(*saved)
            ctx.tensor_objects = [None] * len(saved)
        else:
            kept, ctx.tensor_objects = prepare_for_saving(*saved)
            ctx.save_for_backward(*kept)
        updates = FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.is_first_fp8_module()
        ctx.call = op, contexts, begins, slots, updates
        y._do_not_clear = True
        result: torch.Tensor = y.requires_grad_(True)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        op, contexts, begins, slots, updates = ctx.call
        saved = restore_from_func_ctx(ctx)
        for context, (begin, end) in zip(contexts, itertools.pairwise(begins), strict=True):
            context.saved_tensors = saved[begin:end]
        del saved
        dx, params, extras = op.fuser_backward(contexts, grad, basic_op_grad_extra_outputs=[[] for _ in contexts])
        for context in contexts:
            context.saved_tensors = None
        if updates and not is_graph_capturing():  # whoever ran first has all scales of the backward follow its amaxes
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return (
            dx,
            None,
            *itertools.chain.from_iterable(params),
            *[extras[place][number] for place, number in slots],
        )


_apply_at_once: Any = super(torch.autograd.Function, _OneOp).apply
