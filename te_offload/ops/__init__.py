"""`te.ops` operations with one more keyword: `no_offload_activation`.

In: the arguments of the `te.ops` classes of the same names. Out: ops for `te.ops.Sequential`, or to be used alone.
Keeps true: same parameters, state-dict keys and results; the slot of an op that says `no_offload_activation=True` stays
on the GPU in every path, and weights, their quantized copies and metadata always do. Does not: offload anything; an
`OffloadSession`, Transformer Engine's context or Megatron's manager does.
"""

from te_offload.ops.grouped_linear import GroupedLinear
from te_offload.ops.scaled_activations import (
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
)

__all__ = [
    "GroupedLinear",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
]
