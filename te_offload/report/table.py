"""A step as text.

In: a `StepRecord`. Out: a table for a terminal of any width. Keeps true: a row for each slot of each forward. Does not:
print.
"""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from te_offload.offload.record import StepRecord
from te_offload.slots import Fate
from te_offload.units import format_bytes

_COLOURS = {Fate.OFFLOADED: "green", Fate.KEPT: "yellow", Fate.RECOMPUTED: "cyan", Fate.NOT_SAVED: "dim"}


def slot_table(step: StepRecord) -> Table:
    """The slots of a step: bytes, fate, reason."""
    table = Table(title=f"Slots of step {step.index}", title_justify="left")
    table.add_column("slot", no_wrap=True)
    table.add_column("forward", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("fate: reason", overflow="fold", min_width=10)
    for row in step.slots:
        fate = f"{row.fate.value}: {row.reason.value}" if row.reason.value else row.fate.value
        size = format_bytes(row.nbytes)
        table.add_row(row.name, str(row.forward), size, str(row.tensors), Text(fate, style=_COLOURS[row.fate]))
    return table


def totals(step: StepRecord) -> str:
    """One line of totals."""
    return (
        f"{format_bytes(step.bytes_out)} out in {step.copies_out} copies, {format_bytes(step.bytes_back)} back in "
        f"{step.copies_back}; at most {format_bytes(step.peak_resident)} of saved tensors on the device, "
        f"{format_bytes(step.peak_in_flight)} waiting for copies out, {format_bytes(step.host_peak)} on the host "
        f"(of {format_bytes(step.host_held)} held after {step.host_allocations} allocations); "
        f"{format_bytes(step.exempt_bytes)} of weights and metadata never moved; {step.abandoned} chunks abandoned."
    )


def step_table(step: StepRecord, width: int = 120) -> str:
    """The table and the totals as plain text, ``width`` columns wide."""
    text = io.StringIO()
    console = Console(file=text, width=width, no_color=True)
    console.print(slot_table(step))
    console.print(totals(step), highlight=False, soft_wrap=True)
    return text.getvalue()
