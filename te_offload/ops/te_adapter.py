"""The only place that knows Transformer Engine's private names and the order in which its ops save tensors.

In: ops of Transformer Engine and their contexts after a forward. Out: `SavedSlot` values, marks on tensors, answers
about the installed release. Keeps true: a release without a row in `RELEASES`, or a saved layout that does not look
as its row says, raises before anything is offloaded; positions are counted from the end of the saved tuple and every
entry's kind is checked on each forward. Does not: move bytes, or compute.

Note [Saved layouts], read from Transformer Engine 2.20.2 (`ops/basic/grouped_linear.py`, `ops/basic/activation.py`,
`ops/basic/swiglu.py`, `ops/fused/grouped_mlp.py`), with N = num_groups:

    unfused split    5 metadata, [router scales], N inputs, N weights
    unfused grouped  5 metadata, [router scales], 1 input, weights (N, or 1 if single_grouped_weight)
    scaled activ.    1 input, router scales
    Blackwell fused  7 metadata, fc1 input, fc1 weights, activation input, router scales, fc2 input, fc2 weights
                     (all on the context of FC1; the fc2 input is None where the backward recomputes it)
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch import cpu_offload, cpu_offload_v1
from transformer_engine.pytorch.distributed_weight import is_distributed_weight
from transformer_engine.pytorch.ops._common import (
    get_accumulate_flag_in_param,
    get_main_grad_from_param,
    maybe_dequantize,
    validate_or_alloc_output,
    view_main_grad_as_grouped_buffer,
)
from transformer_engine.pytorch.ops.basic import grouped_linear as te_grouped_linear
from transformer_engine.pytorch.ops.fused import grouped_mlp as te_grouped_mlp
from transformer_engine.pytorch.ops.fuser import OperationFuser
from transformer_engine.pytorch.ops.op import OperationContext
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_saved,
)
from transformer_engine.pytorch.tensor import GroupedTensor, GroupedTensorStorage

from te_offload.errors import UnknownLayoutError, UnsupportedReleaseError
from te_offload.slots import SavedSlot, SaveState, SlotName

__all__ = [
    "GROUPED_LINEAR_GRAD_INPUT_KEY",
    "GROUPED_LINEAR_OUTPUT_KEY",
    "OperationContext",
    "accumulates_into_main_grad",
    "is_distributed_weight",
    "keep_after_backward",
    "main_grad_of",
    "mark_exempt_and_kept",
    "maybe_dequantize",
    "offload_context_active",
    "quantization_enabled",
    "read_activation",
    "read_fused",
    "read_grouped_linear",
    "require_supported_release",
    "validate_or_alloc_output",
    "view_main_grad_as_grouped_buffer",
]

GROUPED_LINEAR_OUTPUT_KEY: str = te_grouped_linear.OUTPUT_BUFFER_KEY
GROUPED_LINEAR_GRAD_INPUT_KEY: str = te_grouped_linear.GRAD_INPUT_BUFFER_KEY


# Releases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """How one series of Transformer Engine releases lays out saved tensors; see Note [Saved layouts].

    Attributes:
        series: major and minor number, as in ``(2, 20)``.
        unfused_metadata: entries before the first tensor of an unfused GroupedLinear.
        fused_metadata: entries before the first tensor of the Blackwell fused grouped MLP.
    """

    series: tuple[int, int]
    unfused_metadata: int
    fused_metadata: int


RELEASES: tuple[Release, ...] = (Release(series=(2, 20), unfused_metadata=5, fused_metadata=7),)


@functools.cache
def installed_version() -> str:
    """Version of the installed Transformer Engine, such as ``"2.20.2"``."""
    return importlib.metadata.version("transformer-engine")


def require_supported_release(version: str | None = None) -> Release:
    """The row of `RELEASES` for a version (default: the installed one).

    Raises:
        UnsupportedReleaseError: no row covers it.
    """
    version = installed_version() if version is None else version
    series = tuple(int(part) if part.isdigit() else -1 for part in version.split(".")[:2])
    for release in RELEASES:
        if release.series == series:
            return release
    known = ", ".join(f"{row.series[0]}.{row.series[1]}.x" for row in RELEASES)
    raise UnsupportedReleaseError(
        f"Transformer Engine {version} is not supported: the order in which its ops save tensors is known for {known} "
        "alone. Install one of these, or add a row to RELEASES in te_offload/ops/te_adapter.py and its layout tests."
    )


# Saved layouts -------------------------------------------------------------------------------------------------------

Saved = Any  # torch.Tensor | QuantizedTensorStorage | GroupedTensorStorage | None: what a context's to_save may hold
_STORAGES = (QuantizedTensorStorage, GroupedTensorStorage)
_METADATA_DTYPES = (torch.int32, torch.int64)


def buffers_of(*entries: Saved) -> tuple[torch.Tensor, ...]:
    """The plain tensors of saved entries in the order in which they reach the hooks; quantized storages taken apart."""
    buffers, shells = prepare_for_saving(*entries)
    restore_from_saved(shells, buffers)  # prepare_for_saving empties a storage; this fills it again
    return tuple(buffer for buffer in buffers if buffer is not None)


def _layout_error(op: torch.nn.Module, path: str, saved: Sequence[Saved], expected: str) -> UnknownLayoutError:
    found = ", ".join(_describe(entry) for entry in saved[:16]) + (", ..." if len(saved) > 16 else "")
    return UnknownLayoutError(
        f"{type(op).__name__} of Transformer Engine {installed_version()} saved {len(saved)} tensors on its {path} path "
        f"in a layout that te_offload does not know. Expected {expected}; found [{found}]. Nothing was offloaded. "
        "Use a release listed in te_offload.ops.te_adapter.RELEASES."
    )


def _describe(entry: Saved) -> str:
    if isinstance(entry, torch.Tensor):
        return f"{type(entry).__name__}{tuple(entry.shape)} {str(entry.dtype).removeprefix('torch.')}"
    return "None" if entry is None else type(entry).__name__


def _is_metadata(entry: Saved) -> bool:
    return entry is None or (isinstance(entry, torch.Tensor) and not entry.is_floating_point())


def _is_values(entry: Saved, *, none: bool) -> bool:
    """A high-precision tensor or a quantized storage; or None, where ``none`` allows it."""
    if entry is None:
        return none
    if isinstance(entry, _STORAGES):
        return True
    return isinstance(entry, torch.Tensor) and entry.is_floating_point()


def _is_scales(entry: Saved) -> bool:
    return entry is None or (isinstance(entry, torch.Tensor) and entry.is_floating_point())


def _num_weights(linear: Any) -> int:
    return 1 if linear.single_grouped_weight else int(linear.num_groups)


def _slot(name: SlotName | None, entries: Sequence[Saved], exempt: Sequence[Saved], *, absent: SaveState) -> SavedSlot:
    parts = buffers_of(*entries)
    metadata = tuple(
        part for part in parts if part.dtype in _METADATA_DTYPES
    )  # first_dims, offsets of grouped storages
    buffers = tuple(part for part in parts if part.dtype not in _METADATA_DTYPES)
    state = SaveState.SAVED if any(entry is not None for entry in entries) else absent
    return SavedSlot(name, state, buffers, (*buffers_of(*exempt), *metadata))


def read_grouped_linear(op: Any, ctx: OperationContext) -> SavedSlot | None:
    """The slot of an unfused GroupedLinear after its forward, or ``None`` if no backward needs anything.

    Raises:
        UnknownLayoutError: the saved tuple is not the one of Note [Saved layouts].
    """
    saved = ctx.to_save
    if saved is None:
        return None
    release = require_supported_release()
    grouped = bool(getattr(ctx, "use_grouped_tensor_path", False))
    path = "unfused grouped" if grouped else "unfused split"
    inputs, weights = (1, _num_weights(op)) if grouped else (op.num_groups, op.num_groups)
    scales = 1 if op._scale_bias else 0
    expected = (
        f"{release.unfused_metadata} of metadata, {scales} of router scales, {inputs} of input, {weights} of weights"
    )
    end_of_input = len(saved) - weights
    end_of_scales = end_of_input - inputs
    end_of_metadata = end_of_scales - scales
    kinds_ok = (
        end_of_metadata == release.unfused_metadata
        and all(_is_metadata(entry) for entry in saved[:end_of_metadata])
        and all(_is_scales(entry) for entry in saved[end_of_metadata:end_of_scales])
        and all(_is_values(entry, none=True) for entry in saved[end_of_scales:])
    )
    if not kinds_ok:
        raise _layout_error(op, path, saved, expected)
    exempt = [*saved[:end_of_scales], *saved[end_of_input:]]
    return _slot(None, saved[end_of_scales:end_of_input], exempt, absent=SaveState.NOT_SAVED)


def read_activation(op: Any, ctx: OperationContext) -> SavedSlot | None:
    """The slot of an unfused scaled activation after its forward, or ``None`` if no backward needs anything.

    Raises:
        UnknownLayoutError: the saved tuple is not the one of Note [Saved layouts].
    """
    saved = ctx.to_save
    if saved is None:
        return None
    require_supported_release()
    if len(saved) != 2 or not _is_values(saved[0], none=False) or not _is_scales(saved[1]):
        raise _layout_error(op, "unfused", saved, "1 input, 1 of router scales")
    return _slot(SlotName.ACT_INPUT, saved[:1], saved[1:], absent=SaveState.NOT_SAVED)


def read_fused(
    basic_ops: Sequence[Any], ctxs: Sequence[OperationContext]
) -> tuple[SavedSlot, SavedSlot, SavedSlot] | None:
    """The slots of FC1, activation and FC2 after a forward of the Blackwell fused op, or ``None`` if nothing was saved.

    Raises:
        UnknownLayoutError: the saved tuple is not the one of Note [Saved layouts].
    """
    fc1, _, fc2 = basic_ops
    saved = ctxs[0].to_save
    if saved is None:
        return None
    release = require_supported_release()
    weights1, weights2 = _num_weights(fc1), _num_weights(fc2)
    expected = (
        f"{release.fused_metadata} of metadata, fc1 input, {weights1} of fc1 weights, activation input, router scales, "
        f"fc2 input or None, {weights2} of fc2 weights; nothing on the contexts of the other two ops"
    )
    at_fc2_input = len(saved) - weights2 - 1
    at_scales = at_fc2_input - 1
    at_act_input = at_scales - 1
    at_weights1 = at_act_input - weights1
    at_fc1_input = at_weights1 - 1
    kinds_ok = (
        at_fc1_input == release.fused_metadata
        and all(ctx.to_save is None for ctx in ctxs[1:])
        and all(_is_metadata(entry) for entry in saved[:at_fc1_input])
        and _is_values(saved[at_fc1_input], none=True)
        and all(_is_values(entry, none=True) for entry in saved[at_weights1:at_act_input])
        and isinstance(saved[at_act_input], torch.Tensor)
        and saved[at_act_input].is_floating_point()
        and _is_scales(saved[at_scales])
        and _is_values(saved[at_fc2_input], none=True)
        and all(_is_values(entry, none=True) for entry in saved[at_fc2_input + 1 :])
    )
    if not kinds_ok:
        raise _layout_error(fc1, "Blackwell fused", saved, expected)
    rebuilt = bool(getattr(ctxs[2], "recompute_input_from_dsrelu", False))
    metadata = saved[:at_fc1_input]
    return (
        _slot(
            SlotName.FC1_INPUT,
            saved[at_fc1_input:at_weights1],
            [*metadata, *saved[at_weights1:at_act_input]],
            absent=SaveState.NOT_SAVED,
        ),
        _slot(
            SlotName.ACT_INPUT, saved[at_act_input:at_scales], saved[at_scales:at_fc2_input], absent=SaveState.NOT_SAVED
        ),
        _slot(
            SlotName.FC2_INPUT,
            saved[at_fc2_input : at_fc2_input + 1],
            saved[at_fc2_input + 1 :],
            absent=SaveState.RECOMPUTED if rebuilt else SaveState.NOT_SAVED,
        ),
    )


# Marks and the switch of other engines -------------------------------------------------------------------------------


def mark_exempt_and_kept(slot: SavedSlot, *, keep_input: bool) -> None:
    """Mark what must stay on the GPU in the way that Transformer Engine's v2 context and Megatron's manager read.

    Weights, their quantized copies and metadata always; every buffer of the slot if ``keep_input``. The buffers are
    marked one by one because a mark on a quantized wrapper, or on a base, does not reach its parts. The attribute is the
    one that `mark_not_offload` sets; it is set here directly because that function would take the same storages apart
    again.
    """
    for tensor in slot.exempt:
        tensor._TE_do_not_offload = True  # type: ignore[attr-defined]
    for tensor in slot.buffers if keep_input else ():
        tensor._TE_do_not_offload = True  # type: ignore[attr-defined]


def is_marked_not_offload(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries the mark of `mark_not_offload`."""
    return bool(getattr(tensor, "_TE_do_not_offload", False))


def saved_tensor_hook_active() -> bool:
    """Whether a saved-tensor hook of anyone will see what is saved now; without one no mark can have an effect."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def offload_context_active() -> str | None:
    """The name of Transformer Engine's own offloading context if the caller stands inside one, else ``None``."""
    if cpu_offload.OFFLOAD_SYNCHRONIZER is not None:
        return "transformer_engine.pytorch.get_cpu_offload_context (v2)"
    if cpu_offload_v1.is_cpu_offload_enabled():
        return "transformer_engine.pytorch.get_cpu_offload_context (v1)"
    return None


def keep_after_backward(*tensors: torch.Tensor | None) -> None:
    """Stop Transformer Engine from emptying tensors after backward; on the CPU its way to do so needs a driver."""
    for tensor in tensors:
        if tensor is not None:
            tensor._do_not_clear = True  # type: ignore[attr-defined]


# Quantization, gradients, fusion -------------------------------------------------------------------------------------


def holds_saved_tensors(node: Any) -> bool | None:
    """Whether a node of te.ops in the autograd graph can still run its backward; ``None`` for a node of others."""
    return node.tensor_objects is not None if hasattr(node, "tensor_objects") else None


def quantization_enabled() -> bool:
    """Whether the caller stands inside an enabled ``te.autocast``."""
    return bool(FP8GlobalStateManager.is_fp8_enabled())


def take_apart(tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor | None]] | None:
    """A quantized wrapper tensor as (shell, buffers), or ``None`` for any other tensor. The wrapper stays whole."""
    if not isinstance(tensor, QuantizedTensor):
        return None
    shell = tensor.detach()  # prepare_for_saving empties what it is called on
    buffers, shell = shell.prepare_for_saving()
    return shell, list(buffers)


def put_together(shell: Any, buffers: list[torch.Tensor | None]) -> torch.Tensor:
    """The wrapper tensor that `take_apart` took apart, around new buffers."""
    shell.restore_from_saved(buffers)
    wrapper: torch.Tensor = shell
    return wrapper


def is_grouped_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a GroupedTensor wrapper (which is no QuantizedTensor)."""
    return isinstance(tensor, GroupedTensor)


def main_grad_of(weight: torch.nn.Parameter) -> torch.Tensor:
    """``main_grad`` of a weight, refreshed from FSDP where that applies. Raises RuntimeError where there is none."""
    main_grad: torch.Tensor = get_main_grad_from_param(weight, op_label="GroupedLinear")
    return main_grad


def accumulates_into_main_grad(weight: torch.nn.Parameter) -> bool:
    """Whether wgrad adds to ``main_grad``; ``False`` where the weight says ``overwrite_main_grad``."""
    return bool(get_accumulate_flag_in_param(weight))


def takes_grouped_path(dtype: torch.dtype) -> bool:
    """Whether Transformer Engine's unfused GroupedLinear takes the grouped path here, under the current recipe."""
    recipe = FP8GlobalStateManager.get_fp8_recipe() if quantization_enabled() else None
    return bool(te_grouped_linear.is_op_fuser_grouped_tensor_path_supported(recipe, dtype))


def grouped_path_supported(recipe: Any, dtype: torch.dtype) -> bool:
    """The same for a recipe (``None``: no quantization). Needs a GPU."""
    return bool(te_grouped_linear.is_op_fuser_grouped_tensor_path_supported(recipe, dtype))


def cublaslt_version() -> int:
    """Version of the cuBLASLt in use, such as 130400 for 13.4."""
    return int(tex.get_cublasLt_version())


def fused_unary_class() -> type[Any]:
    """Transformer Engine's fused grouped MLP with a unary activation (Blackwell)."""
    cls: type[Any] = te_grouped_mlp.GroupedMLP_CuTeGEMMUnary
    return cls


def fused_glu_class() -> type[Any]:
    """Transformer Engine's fused grouped MLP with a gated activation (Blackwell)."""
    cls: type[Any] = te_grouped_mlp.GroupedMLP_CuTeGEMMGLU
    return cls


def fuse_windows(
    ops: list[Any], *, recipe: Any, fused_class: type[Any], activations: tuple[type[Any], ...]
) -> list[Any]:
    """Transformer Engine's own window scan of its Blackwell fused grouped MLP, with another class to build."""
    fused: list[Any] = te_grouped_mlp.fuse_grouped_mlp_ops(
        ops, recipe=recipe, fused_op_cls=fused_class, activation_op_types=activations
    )
    return fused


def unfused_reason(window: Sequence[Any], recipe: Any) -> str | None:
    """Why Transformer Engine's Blackwell fused op would not take a structurally right window; ``None`` if it would."""
    fc1, activation, fc2 = window
    if int(os.environ.get("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0")) <= 0:
        return "NVTE_CUTEDSL_FUSED_GROUPED_MLP is not set to 1"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability[0] != 10:
        return f"compute capability {capability[0]}.{capability[1]} is not 10.x (Blackwell)"
    unary = not te_grouped_mlp.is_glu_activation(activation)
    fused_class = fused_unary_class() if unary else fused_glu_class()
    if not fused_class.is_supported():
        return "the installed nvidia-cudnn-frontend lacks the kernels"
    if not isinstance(activation, fused_unary_activations() if unary else fused_glu_activations()):
        return f"no kernel for {type(activation).__name__} on this card with the installed nvidia-cudnn-frontend"
    return recipe_reason(recipe) or dims_reason(fc1, activation, fc2)


def recipe_reason(recipe: Any) -> str | None:
    """Why the Blackwell fused op does not take a recipe; ``None`` if it does."""
    if recipe is None:
        return "no quantization recipe is active (it takes MXFP8 and NVFP4)"
    if not (recipe.mxfp8() or recipe.nvfp4()):
        return f"recipe {type(recipe).__name__} is neither MXFP8 nor NVFP4"
    if recipe.nvfp4() and recipe.disable_rht:
        return "NVFP4 without the random Hadamard transform"
    if recipe.mxfp8() and te_grouped_mlp.get_fp8_torch_dtype(recipe, fprop_tensor=False) != torch.float8_e4m3fn:
        return f"MXFP8 with gradients in another format than E4M3 (fp8_format={recipe.fp8_format})"
    return None


def dims_reason(fc1: Any, activation: Any, fc2: Any) -> str | None:
    """Why the Blackwell fused op does not take a window's dimensions; ``None`` if it does."""
    try:
        te_grouped_mlp.validate_grouped_mlp_dims(fc1, activation, fc2)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def tanh_srelu_supported() -> bool:
    """Whether the Blackwell fused op has a kernel for ScaledTanhSReLU here."""
    return bool(te_grouped_mlp._cudnn_frontend_supports_grouped_gemm_srelu_tanh())


def fused_unary_activations() -> tuple[type[Any], ...]:
    """The unary activations that the Blackwell fused op has kernels for here."""
    return (te.ops.ScaledSReLU, te.ops.ScaledTanhSReLU) if tanh_srelu_supported() else (te.ops.ScaledSReLU,)


def fused_glu_activations() -> tuple[type[Any], ...]:
    """The gated activations that the Blackwell fused op has kernels for here; the rules of TE's `fuse_glu_ops`."""
    major, minor = torch.cuda.get_device_capability()
    if major != 10:
        return ()
    if minor < 7:
        situ = te_grouped_mlp._cudnn_frontend_supports_grouped_gemm_situglu()
        return (te.ops.ScaledSwiGLU, te.ops.ScaledClampedQGeGLU, *((te.ops.ScaledSiTUGLU,) if situ else ()))
    clamped = te_grouped_mlp._cudnn_frontend_version_at_least("1.30.0")
    return (te.ops.ScaledSwiGLU, te.ops.ScaledClampedQGeGLU) if clamped else (te.ops.ScaledSwiGLU,)


FusionFunction = Callable[..., list[Any]]


def register_joint_fusion(function: FusionFunction) -> None:
    """Put a joint forward-backward fusion before Transformer Engine's own, once per process."""
    functions = OperationFuser.forward_backward_fusion_functions
    if function not in functions:
        te.ops.register_forward_backward_fusion(function, prepend=True)
