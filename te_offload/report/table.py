"""A step as text.

In: a `StepRecord`, and how grouped MLPs ran. Out: a table for a terminal of any width. Keeps true: a row for each slot of
each forward. Does not: print.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from te_offload.fused.calls import Fusion
from te_offload.offload.record import Outcome, SlotRecord, StepRecord
from te_offload.slots import Fate
from te_offload.units import format_bytes

_COLOURS = {Fate.OFFLOADED: "green", Fate.KEPT: "yellow", Fate.RECOMPUTED: "cyan", Fate.NOT_SAVED: "dim"}


_TIMES_FROM = 110  # columns of a terminal from which the times are shown
_FORMATS_FROM = 140  # and the formats


def slot_table(step: StepRecord, width: int) -> Table:
    """The slots of a step: bytes, fate, reason, and times where ``width`` columns have room for them."""
    table = Table(title=f"Slots of step {step.index}", title_justify="left")
    table.add_column("slot", no_wrap=True)
    table.add_column("forward", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("fate: reason", overflow="fold", min_width=10)
    formats = width >= _FORMATS_FROM
    if formats:
        table.add_column("format", no_wrap=True)
    times = width >= _TIMES_FROM
    if times:
        table.add_column("out ms", justify="right", no_wrap=True)
        table.add_column("back ms", justify="right", no_wrap=True)
        table.add_column("came back", overflow="fold", min_width=6)
    for row in step.slots:
        fate = f"{row.fate.value}: {row.reason.value}" if row.reason.value else row.fate.value
        size = format_bytes(row.nbytes)
        late = f"late, {row.exposed_ms:.2f} ms" if row.outcome is Outcome.LATE else row.outcome.value
        cells: list[str] = [row.format] if formats else []
        cells += [_milliseconds(row.out_ms), _milliseconds(row.back_ms), late] if times else []
        table.add_row(row.name, str(row.forward), size, str(row.tensors), Text(fate, style=_COLOURS[row.fate]), *cells)
    return table


def _milliseconds(time: float | None) -> str:
    return "" if time is None else f"{time:.2f}"


def totals(step: StepRecord) -> str:
    """A few lines of totals."""
    host = f"{format_bytes(step.host_peak)} on the host (of {format_bytes(step.host_held)} held after "
    lines = [
        f"{format_bytes(step.bytes_out)} out in {step.copies_out} copies{_rate(step.out_gbs)}, "
        f"{format_bytes(step.bytes_back)} back in {step.copies_back}{_rate(step.back_gbs)}; "
        f"{step.abandoned} slots abandoned.",
        f"At most {format_bytes(step.peak_resident)} of saved tensors on the device, of these "
        f"{format_bytes(step.peak_in_flight)} waiting for copies out, {format_bytes(step.peak_ahead)} back ahead of the "
        f"backward; {host}{step.host_allocations} allocations); {format_bytes(step.exempt_bytes)} of weights and metadata "
        "never moved.",
        f"{step.step_ms:.2f} ms, of these {step.throttled_ms:.2f} waiting for copies out and {step.exposed_ms:.2f} for "
        f"copies back{', chosen by a plan' if step.planned else ''}; rank {step.rank}.",
    ]
    by_format = step.bytes_by_format
    if by_format:
        lines.append(
            "Out: " + ", ".join(f"{format_bytes(n)} {name or 'of others'}" for name, n in by_format.items()) + "."
        )
    if step.predicted_ms is not None and step.predicted_waiting_ms is not None:
        lines.append(f"The plan foresaw {step.predicted_ms:.2f} ms, {step.predicted_waiting_ms:.2f} of them waiting.")
    if not step.timed:
        lines[2] = f"No times were taken in this step; rank {step.rank}."
    if step.raised:
        lines.append("The step, or a forward in it, raised.")
    elif step.timed and not step.slots and not step.windows:
        lines.append(
            "None of the layers ran in this step, as far as their hooks tell: what torch.compile traced before the session "
            "was there calls none, nor does a schedule that runs their parts by themselves (Megatron-core's "
            "overlap_moe_expert_parallel_comm). Make the session first, or compile each layer by itself; make it around "
            "those parts."
        )
    if step.unseen:
        lines.append(
            f"{step.unseen} forwards were not looked at: nothing of them went the last time, and nothing changed."
        )
    if step.host_node is not None:
        found = ", ".join(map(str, step.host_nodes)) or "unknown"
        wrong = set(step.host_nodes) - {step.host_node}
        advice = " Copies over the other socket are slow: start the process with numactl --membind." if wrong else ""
        lines.append(f"Host memory is on NUMA node {found}; the GPU's is {step.host_node}.{advice}")
    if step.host_failure is not None:
        lines.append(f"The system refused host memory: {step.host_failure}. Lower host_limit, or raise ulimit -l.")
    return "\n".join(lines)


def _rate(gbs: float | None) -> str:
    return "" if gbs is None else f" at {gbs:.1f} GB/s"


def step_table(step: StepRecord, width: int = 120) -> str:
    """The table and the totals as plain text, ``width`` columns wide."""
    text = io.StringIO()
    console = Console(file=text, width=width, no_color=True)
    console.print(slot_table(step, width))
    console.print(totals(step), highlight=False, soft_wrap=True)
    return text.getvalue()


def budget_lines(step: StepRecord, budget: int | None) -> str:
    """Which forwards kept more than a budget, counted as in a plan; empty if none did.

    Args:
        budget: bytes of each forward that may stay on the device; ``None``: there is none.
    """
    kept: dict[tuple[str, int], list[SlotRecord]] = {}
    for row in step.slots:
        if row.holds_memory:
            kept.setdefault((row.layer, row.forward), []).append(row)
    lines = []
    held = step.bytes_of(lambda row: row.holds_memory)
    for (layer, forward), rows in kept.items():
        nbytes = held[layer, forward]
        if budget is not None and nbytes > budget:
            names = ", ".join(f"{row.name} ({format_bytes(row.nbytes)}, {row.reason.value})" for row in rows)
            lines.append(
                f"  {layer}, forward {forward}: {format_bytes(nbytes - budget)} more than budget_per_layer, "
                f"{format_bytes(budget)}: {names}\n"
            )
    return "The budget was not met:\n" + "".join(lines) if lines else ""


def device_lines(step: StepRecord, limit: int | None) -> str:
    """What torch had allocated on the device at the most, and where; empty if nobody asked.

    Args:
        limit: bytes; ``None``: there is none.
    """
    peak = step.device_peak
    if limit is None or peak is None:
        return ""
    more = peak.nbytes - limit
    found = f"{format_bytes(more)} more than" if more > 0 else "within"
    taken = (
        f" Its allocator had taken up to {format_bytes(step.device_reserved)} of the device."
        if step.device_reserved
        else ""
    )
    return (
        f"Torch had at most {format_bytes(peak.nbytes)} allocated on the device ({peak.name}): {found} device_limit, "
        f"{format_bytes(limit)}.{taken}\n"
    )


def fusion_lines(fusions: Sequence[tuple[str, Fusion]]) -> str:
    """How many grouped MLPs ran fused, a line for each that did not always, with the reason, and how many bytes of
    quantized weights stay, if any do; empty without grouped MLPs.

    Args:
        fusions: each with the name of its layer.
    """
    if not fusions:
        return ""
    always = sum(1 for _, fusion in fusions if not fusion.reason)
    lines = [f"Grouped MLPs that ran fused: {always} of {len(fusions)}."]
    for layer, fusion in fusions:
        calls = fusion.fused + fusion.handed_over
        some = f"{fusion.handed_over} of {calls} forwards op by op" if fusion.fused else "op by op"
        if fusion.reason:
            lines.append(f"  {layer}/{fusion.name}: {some}: {fusion.reason}")
    kept = sum(fusion.kept_weight_bytes for _, fusion in fusions)
    if kept:
        lines.append(
            f"  {format_bytes(kept)} of quantized weights stay on the GPU from their forwards to their backwards; with "
            "GroupedLinear(keep_quantized_weight=False) the backwards make them again, bit for bit."
        )
    return "\n".join(lines) + "\n"
