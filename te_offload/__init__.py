"""te_offload: grouped-MLP operators beside Transformer Engine whose activations can be offloaded selectively.

In: layers built from `te_offload.ops` (or anything else). Out: `OffloadSession`, which offloads and reports. Keeps
true: importing it needs no GPU, and registers the fusions of `te_offload.fused` once. Does not: change Transformer
Engine.
"""

import torch  # noqa: F401  Transformer Engine's libraries are found only once torch is loaded

from te_offload import errors

try:
    import transformer_engine.pytorch  # noqa: F401
except Exception as error:  # by what is missing, or built for another torch, an ImportError, OSError or RuntimeError
    raise errors.NotInstalledError(
        f"te_offload runs beside Transformer Engine, whose PyTorch package cannot be imported: {type(error).__name__}: "
        f"{error}. Install it for the torch in use, by pip install --no-build-isolation "
        "'transformer-engine[pytorch]==2.20.2', or have ./run in te_offload's repository set up an environment with both."
    ) from error

from te_offload import dynamo, fused, ops
from te_offload.offload import (
    DevicePeak,
    OffloadSession,
    Outcome,
    Phase,
    Plan,
    PlannedSlot,
    Residency,
    SharedMemory,
    SlotRecord,
    StepRecord,
    Window,
    get_cpu_offload_context,
)
from te_offload.ops.host_numbers import numbers_on_host
from te_offload.slots import Fate, Reason, SlotName

__all__ = [
    "DevicePeak",
    "Fate",
    "OffloadSession",
    "Outcome",
    "Phase",
    "Plan",
    "PlannedSlot",
    "Reason",
    "Residency",
    "SharedMemory",
    "SlotName",
    "SlotRecord",
    "StepRecord",
    "Window",
    "errors",
    "fused",
    "get_cpu_offload_context",
    "numbers_on_host",
    "ops",
]

__version__ = "0.1.0"

dynamo.leave_alone()
