"""From the record of a step to a forecast of steps like it.

In: a record. Out: its work and slots as `timeline` takes them, the bytes in flight that keep the link busy (for what went
or for another choice of slots), by when bytes have left, and when they should come back. Keeps true: the same record gives
the same answer. Does not: choose slots (planner.py does).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

from te_offload.offload.record import StepRecord
from te_offload.offload.timeline import (
    Bounds,
    Departures,
    Key,
    Link,
    Pace,
    Parcel,
    Work,
    departures_of,
    pace_of,
    simulate,
)
from te_offload.slots import Fate

MARGIN = 1.25  # of what was measured to be needed
_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)
_ENOUGH = 1.02  # of the time with the largest factor


def work_of(record: StepRecord) -> list[Work]:
    """The work of a step in the order of the compute stream, waits for copies taken out. What comes between a forward's end
    and the next work is that forward's rest.
    """
    # where work had ended, and where more began after waits, how long such waits in it were, and how long a forward takes
    moments: list[tuple[float, float, Key, bool, float, float]] = []
    exposed: collections.Counter[Key] = collections.Counter()
    for row in record.slots:
        exposed[row.layer, row.forward] += row.exposed_ms  # type: ignore[assignment]
    for window in record.windows:
        key = window.layer, window.forward
        begin, needed = window.begin_ms, window.needed_ms
        before = begin - window.throttled_before_ms
        moments.append((before, begin, key, False, window.throttled_ms, window.forward_ms))
        if needed is not None:
            before = needed - window.throttled_before_backward_ms
            moments.append((before, needed, key, True, exposed[key], math.inf))
    moments.sort(key=lambda moment: moment[0])
    ends = [moment[0] for moment in moments[1:]] + [record.step_ms - record.throttled_at_end_ms]
    work = []
    for (_, begin, key, backward, waited, longest), end in zip(moments, ends, strict=True):
        took = max(0.0, end - begin - waited)
        work.append(Work(key, backward, min(took, longest), max(0.0, took - longest)))
    return work


def parcels_of(record: StepRecord) -> dict[Key, list[Parcel]]:
    """The slots of each forward of a step, and which of them went."""
    parcels: dict[Key, list[Parcel]] = {}
    for row in record.slots:
        goes, parcels_here = row.fate is Fate.OFFLOADED, parcels.setdefault((row.layer, row.forward), [])
        if goes or row.fate is Fate.KEPT:  # else it is nowhere until the backward
            parcels_here.append(Parcel(row.bytes_out if goes else row.nbytes - row.shared, goes))
    stays = {(row.whole, row.forward) for row in record.slots if row.fate is Fate.KEPT and row.shared}
    for piece in record.shared_memory:  # if it went, it went with the first of its slots
        if any((name, piece.forward) in stays for name in piece.slots):
            parcels[piece.layer, piece.forward].append(Parcel(piece.nbytes, False))
    return parcels


def bounds_for(record: StepRecord) -> Bounds | None:
    """The bytes in flight for steps like a recorded one; ``None`` if nothing went."""
    link = _link_of(record)
    return None if link is None else fewest_in_flight(record, parcels_of(record), link)


def fewest_in_flight(record: StepRecord, parcels: Mapping[Key, Sequence[Parcel]], link: Link) -> Bounds | None:
    """The fewest bytes in flight each way with which a step takes no longer than with many more.

    At least what the link moves during the longest window of one layer, and one slot more; at most four times that. Each
    way has as many as it needs: bytes that are back too early are memory that was offloaded for nothing.

    Args:
        record: of a step with the same work. parcels: the slots, and which of them go. link: the link's rates.

    Returns:
        the bounds, or ``None`` if nothing goes.
    """
    going = [parcel.nbytes for group in parcels.values() for parcel in group if parcel.goes]
    if not going:
        return None
    layers = {key: sum(parcel.nbytes for parcel in group if parcel.goes) for key, group in parcels.items()}
    windows = [window for window in record.windows if layers.get((window.layer, window.forward))]
    last = max((window.read for window in record.windows if window.read is not None), default=None)
    forward = max((window.forward_ms for window in windows), default=0.0)
    backward = max(
        (window.backward_ms for window in record.windows if window.backward_ms is not None and window.read != last),
        default=0.0,
    )
    layer = max(layers.values())
    least_out = MARGIN * (min(link.out * forward, layer) + max(going))
    least_back = MARGIN * (min(link.back * backward, layer) + max(going))
    work = work_of(record)

    def step_ms(out: float, back: float) -> float:  # without recall: with it more is always quicker, since less leaves
        return simulate(work, parcels, link, Bounds(out * least_out, back * least_back)).step_ms

    most = _FACTORS[-1]
    enough = _ENOUGH * step_ms(most, most)
    few_back = next(factor for factor in _FACTORS if step_ms(most, factor) <= enough)
    few_out = next(factor for factor in _FACTORS if step_ms(factor, few_back) <= enough)
    return Bounds(few_out * least_out, few_back * least_back)


def pace_for(record: StepRecord) -> Pace | None:
    """When bytes should come back in steps like a recorded one; ``None`` if none went."""
    link = _link_of(record)
    return None if link is None else pace_of(work_of(record), parcels_of(record), link)


def departures_for(record: StepRecord) -> Departures | None:
    """By when copies out are over in steps like a recorded one; ``None`` if there were none."""
    link = _link_of(record)
    return None if link is None else departures_of(work_of(record), parcels_of(record), link)


def _link_of(record: StepRecord) -> Link | None:
    """The rates of the copies of a step; ``None`` if there were none out."""
    if not record.out_gbs:
        return None
    out, back = record.out_gbs * 1e6, (record.back_gbs or record.out_gbs) * 1e6  # bytes a millisecond
    return Link(out, back, out, back)
