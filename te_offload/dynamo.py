"""What torch.compile makes of this package where it meets it in a model: nothing, it runs as it is.

In: nothing. Out: rules of TorchDynamo. Keeps true: around our code, a session's hooks above all, there is a break of the
graph, and what is traced on either side of it stays as it was; an eager call pays nothing for it. Does not: know pipelines
of te.ops; `te_adapter.pipeline` has those run as they are, Transformer Engine's part of them too.

Traced, a session's own bookkeeping would be compiled, a hundred frames of it, which is an error where it asks tensors for
their bytes.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch._dynamo import trace_rules

# The demo is a model like any other.
_ROOMS = ("errors", "fused", "graphs", "offload", "ops", "report", "slots", "units")


@functools.cache
def leave_alone() -> None:
    """Have TorchDynamo skip the code of these rooms. Does nothing the second time.

    Torch has decorators for that, which would cost each eager call of a hook microseconds; a rule by files costs none, but
    is none of torch's public functions: where it is missing a warning says so.
    """
    add = getattr(trace_rules, "add", None)
    if add is None:
        warnings.warn(
            f"torch {torch.__version__} has no rules by files for TorchDynamo, so torch.compile would trace te_offload and "
            "fail. Do not compile layers that hold its ops or belong to its sessions with this version.",
            stacklevel=2,
        )
        return
    for room in _ROOMS:
        add(f"te_offload.{room}")
