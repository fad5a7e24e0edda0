"""Quantized wrappers, and the fusions of Transformer Engine.

In: ops, tensors, recipes. Out: what Transformer Engine would do with them. Keeps true: a fusion is registered once. Does
not: know saved layouts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch.ops.basic import grouped_linear as te_grouped_linear
from transformer_engine.pytorch.ops.fused import grouped_mlp as te_grouped_mlp
from transformer_engine.pytorch.ops.fuser import OperationFuser
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_align_size_for_quantization
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor import GroupedTensor

GROUPED_LINEAR_OUTPUT_KEY: str = te_grouped_linear.OUTPUT_BUFFER_KEY
GROUPED_LINEAR_GRAD_INPUT_KEY: str = te_grouped_linear.GRAD_INPUT_BUFFER_KEY


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


def takes_grouped_path(dtype: torch.dtype) -> bool:
    """Whether Transformer Engine's unfused GroupedLinear takes the grouped path here, under the current recipe."""
    return bool(te_grouped_linear.is_op_fuser_grouped_tensor_path_supported(active_recipe(), dtype))


def active_recipe() -> Any:
    """The recipe under which ops are called now; ``None``: nothing is quantized."""
    return FP8GlobalStateManager.get_fp8_recipe() if quantization_enabled() else None


def recipe_key(recipe: Any) -> str | None:
    """All that a recipe says, to compare with what another one says, or it itself later; ``None``: there is none."""
    if recipe is None:
        return None
    said = sorted(item for item in vars(recipe).items() if not item[0].startswith("_"))
    return f"{type(recipe).__name__}({said})"


def reason_against_replays(recipe: Any) -> str | None:
    """Why a call under a recipe cannot be replayed as it was captured, whatever ran in between; ``None`` if it can."""
    if recipe is None or recipe.float8_current_scaling() or recipe.float8_block_scaling() or recipe.mxfp8():
        return None
    name = type(recipe).__name__
    if recipe.delayed():
        return f"{name}: its scales change where te.autocast ends, outside of the layers' graphs"
    if recipe.nvfp4() and recipe.disable_stochastic_rounding:
        return None
    if recipe.nvfp4():
        return (
            f"{name} rounds gradients at random, in a graph each time alike (disable_stochastic_rounding=True does not)"
        )
    return f"{name} may have state that graphs of layers do not know"


def shape_multiples(recipe: Any) -> tuple[int, int]:
    """Of what an expert's tokens, and of what columns, must be multiples under a recipe."""
    return int(get_align_size_for_quantization(recipe)), 32 if recipe.mxfp8() else 16


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


def clamped_numbers(op: Any) -> tuple[float, float, float]:
    """Limit, alpha and offset of a ScaledClampedQGeGLU."""
    clamped = op._clamped
    return clamped.limit, clamped.alpha, clamped.glu_linear_offset


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


def forget_fusions(sequential: Any) -> None:
    """Have a Sequential look for fusions again at its next call."""
    sequential._module_groups = None


def register_joint_fusion(function: FusionFunction) -> None:
    """Put a joint forward-backward fusion before Transformer Engine's own, once per process."""
    functions = OperationFuser.forward_backward_fusion_functions
    if function not in functions:
        te.ops.register_forward_backward_fusion(function, prepend=True)
