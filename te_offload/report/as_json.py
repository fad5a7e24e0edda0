"""Records as JSON.

In: a `StepRecord`. Out: dictionaries of plain types. Keeps true: `SCHEMA` grows when a field is added, and changes its
first number when one goes or changes meaning; sizes are whole bytes. Does not: write files.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from te_offload.offload.record import StepRecord

SCHEMA = "1.1"


def step_as_dict(step: StepRecord) -> dict[str, Any]:
    """A step with its slots and its resident bytes over time."""
    values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    values["peak_resident"] = step.peak_resident
    values["slots"] = [
        {
            "name": row.name,
            **{field.name: getattr(row, field.name) for field in dataclasses.fields(row)},
            "slot": row.slot.value,
            "fate": row.fate.value,
            "reason": row.reason.value,
        }
        for row in step.slots
    ]
    values["residency"] = [{"label": moment.label, "nbytes": moment.nbytes} for moment in step.residency]
    return values
