"""Moves slots to host memory and back, and keeps the record.

In: layers whose ops name their slots. Out: `OffloadSession`, `Plan`, `StepRecord`. Keeps true: bits do not change. Does
not: know what a GEMM is.
"""

from te_offload.offload.dropin import get_cpu_offload_context
from te_offload.offload.plan import Plan, PlannedSlot
from te_offload.offload.record import (
    DevicePeak,
    Outcome,
    Phase,
    Residency,
    SharedMemory,
    SlotRecord,
    StepRecord,
    Window,
)
from te_offload.offload.session import OffloadSession

__all__ = [
    "DevicePeak",
    "OffloadSession",
    "Outcome",
    "Phase",
    "Plan",
    "PlannedSlot",
    "Residency",
    "SharedMemory",
    "SlotRecord",
    "StepRecord",
    "Window",
    "get_cpu_offload_context",
]
