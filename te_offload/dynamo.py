"""What torch.compile makes of this package where it meets it in a model: nothing, it runs as it is.

In: nothing. Out: rules of TorchDynamo. Keeps true: around ops of ours, and around a session's hooks, there is a break of
the graph, and what is traced on either side of it stays as it was; an eager call pays nothing for it. Does not: trace ops.

Traced, a session's own bookkeeping would be compiled, a hundred frames of it, and a stand-in for parameters that is kept
for later forwards would be the result of one compiled graph, which can run backward once.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch._dynamo import trace_rules

_ROOMS = (
    "errors",
    "fused",
    "graphs",
    "offload",
    "ops",
    "report",
    "slots",
    "units",
)  # the demo is a model like any other


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
