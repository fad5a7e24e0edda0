"""The only place that knows Transformer Engine's private names and the order in which its ops save tensors.

In: Transformer Engine. Out: what the rest of te_offload calls. Keeps true: nothing else imports a private name. Does not:
move bytes, or compute.
"""

from transformer_engine.pytorch.distributed_weight import is_distributed_weight
from transformer_engine.pytorch.ops._common import (
    maybe_dequantize,
    validate_or_alloc_output,
    view_main_grad_as_grouped_buffer,
)
from transformer_engine.pytorch.ops.op import OperationContext

from te_offload.ops.te_adapter.carry import Layout, bring_carried, buffers_of
from te_offload.ops.te_adapter.fusion import (
    GROUPED_LINEAR_GRAD_INPUT_KEY,
    GROUPED_LINEAR_OUTPUT_KEY,
    FusionFunction,
    accumulates_into_main_grad,
    cublaslt_version,
    dims_reason,
    dummy_grads,
    fuse_windows,
    fused_glu_activations,
    fused_glu_class,
    fused_unary_activations,
    fused_unary_class,
    grouped_path_supported,
    is_grouped_tensor,
    main_grad_of,
    put_together,
    quantization_enabled,
    recipe_reason,
    register_joint_fusion,
    take_apart,
    takes_grouped_path,
    tanh_srelu_supported,
    unfused_reason,
)
from te_offload.ops.te_adapter.layouts import (
    RELEASES,
    Release,
    installed_version,
    read_activation,
    read_fused,
    read_grouped_linear,
    require_supported_release,
)
from te_offload.ops.te_adapter.switches import (
    OffloadSwitch,
    any_marked_not_offload,
    is_marked_not_offload,
    keep_after_backward,
    mark_exempt_and_kept,
    offload_context_active,
    saved_tensor_hook_active,
    saved_tensor_hook_owner,
)

__all__ = [
    "GROUPED_LINEAR_GRAD_INPUT_KEY",
    "GROUPED_LINEAR_OUTPUT_KEY",
    "RELEASES",
    "FusionFunction",
    "Layout",
    "OffloadSwitch",
    "OperationContext",
    "Release",
    "accumulates_into_main_grad",
    "any_marked_not_offload",
    "bring_carried",
    "buffers_of",
    "cublaslt_version",
    "dims_reason",
    "dummy_grads",
    "fuse_windows",
    "fused_glu_activations",
    "fused_glu_class",
    "fused_unary_activations",
    "fused_unary_class",
    "grouped_path_supported",
    "installed_version",
    "is_distributed_weight",
    "is_grouped_tensor",
    "is_marked_not_offload",
    "keep_after_backward",
    "main_grad_of",
    "mark_exempt_and_kept",
    "maybe_dequantize",
    "offload_context_active",
    "put_together",
    "quantization_enabled",
    "read_activation",
    "read_fused",
    "read_grouped_linear",
    "recipe_reason",
    "register_joint_fusion",
    "require_supported_release",
    "saved_tensor_hook_active",
    "saved_tensor_hook_owner",
    "take_apart",
    "takes_grouped_path",
    "tanh_srelu_supported",
    "unfused_reason",
    "validate_or_alloc_output",
    "view_main_grad_as_grouped_buffer",
]
