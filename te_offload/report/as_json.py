"""Records as JSON.

In: a `StepRecord`. Out: dictionaries of plain types. Keeps true: `SCHEMA` grows when a field is added, and changes its
first number when one goes or changes meaning; sizes are whole bytes. Does not: write files.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from te_offload.offload.record import StepRecord

SCHEMA = "2.9"


def step_as_dict(step: StepRecord) -> dict[str, Any]:
    """A step with its slots, its windows and its resident bytes over time; times in milliseconds, rates in GB/s."""
    values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    for name in ("peak_resident", "exposed_ms", "throttled_ms", "out_gbs", "back_gbs", "bytes_by_format"):
        values[name] = getattr(step, name)
    values["slots"] = [
        {
            "name": row.name,
            **dataclasses.asdict(row),
            "slot": row.slot.value,
            "fate": row.fate.value,
            "reason": row.reason.value,
            "outcome": row.outcome.value,
            "out_gbs": row.out_gbs,
            "back_gbs": row.back_gbs,
        }
        for row in step.slots
    ]
    values["windows"] = [dataclasses.asdict(window) for window in step.windows]
    values["device_peaks"] = [{**dataclasses.asdict(peak), "phase": peak.phase.value} for peak in step.device_peaks]
    values["shared_memory"] = [dataclasses.asdict(piece) for piece in step.shared_memory]
    values["residency"] = [dataclasses.asdict(moment) for moment in step.residency]
    return values
