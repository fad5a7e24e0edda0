"""Moves slots to host memory and back, and keeps the record.

In: layers whose ops name their slots. Out: `OffloadSession`, `StepRecord`. Keeps true: bits do not change. Does not:
know what a GEMM is.
"""

from te_offload.offload.record import Residency, SlotRecord, StepRecord
from te_offload.offload.session import OffloadSession

__all__ = ["OffloadSession", "Residency", "SlotRecord", "StepRecord"]
