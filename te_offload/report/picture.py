"""The demo's picture: losses, resident bytes over a step with and without offloading, and the fate of each slot.

In: losses and `StepRecord` values. Out: a PNG file. Keeps true: it needs no display. Does not: compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from te_offload.offload.record import StepRecord
from te_offload.slots import Fate

_COLOURS = {Fate.OFFLOADED: "#2a9d8f", Fate.KEPT: "#e9c46a", Fate.RECOMPUTED: "#577590", Fate.NOT_SAVED: "#bbbbbb"}
_MIB = 2**20


def draw(path: Path, losses: Sequence[float], without: StepRecord, with_offload: StepRecord) -> None:
    """Write the picture to ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    loss_axes, bytes_axes, slot_axes = figure.subplots(1, 3)

    loss_axes.plot(losses, color="#264653")
    loss_axes.set(title="Loss, with offload", xlabel="step", ylabel="nats a byte")

    for record, label, colour in ((without, "without offload", "#e76f51"), (with_offload, "with offload", "#2a9d8f")):
        sizes = [moment.nbytes / _MIB for moment in record.residency]
        places = [index / max(len(sizes) - 1, 1) for index in range(len(sizes))]
        bytes_axes.step(
            places, sizes, where="post", label=f"{label}: at most {record.peak_resident / _MIB:.1f} MiB", color=colour
        )
    bytes_axes.set(
        title="Saved tensors on the device over one step", xlabel="events of the step, in order", ylabel="MiB"
    )
    bytes_axes.legend()

    rows = list(reversed(with_offload.slots))
    names = [f"{row.name} ({row.reason.value})" if row.reason.value else row.name for row in rows]
    slot_axes.barh(range(len(rows)), [row.nbytes / _MIB for row in rows], color=[_COLOURS[row.fate] for row in rows])
    slot_axes.set_yticks(range(len(rows)), names, fontsize=7)
    slot_axes.set(title="Slots: offloaded (green), kept (yellow)", xlabel="MiB")
    FigureCanvasAgg(figure).print_png(str(path))
