"""From the marks of a step to its record.

In: a finished step. Out: its `StepRecord`. Keeps true: every time is between marks of the device's own clock; a wait is
counted once, where the compute stream stood. Does not: run in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_offload.offload.cargo import Cargo
from te_offload.offload.mover import Counts
from te_offload.offload.record import DevicePeak, Outcome, Residency, SharedMemory, SlotRecord, StepRecord, Window
from te_offload.offload.saved import SlotEntry
from te_offload.offload.timeline import Forecast
from te_offload.offload.transfer import Mark, Transfer, duration
from te_offload.offload.visit import LayerVisit
from te_offload.slots import Fate, SlotName

_LATE_MS = 0.005  # waits below this are the clock's own resolution


@dataclass(eq=False)
class FinishedStep:
    """A step whose record is not written yet; fields as in `StepRecord`, times as marks."""

    index: int
    visits: list[LayerVisit]
    reads: list[LayerVisit]
    counts: Counts
    waits_at_end: tuple[int, int]
    abandoned: int
    raised: bool
    planned: bool
    forecast: Forecast | None
    timed: bool
    began: Mark
    ended: Mark
    host_peak: int
    host_held: int
    host_allocations: int
    host_node: int | None
    host_nodes: tuple[int, ...]
    host_failure: str | None
    unseen: int
    device_peaks: tuple[DevicePeak, ...]
    device_reserved: int

    def is_over(self) -> bool:
        """Whether the device has passed all of its marks."""
        return all(mark.is_over() for mark in self._last_marks())

    def wait(self) -> None:
        """Block the host until the device has passed all of its marks."""
        for mark in self._last_marks():
            mark.wait()

    @property
    def saved_by_forward(self) -> dict[tuple[str, int], int]:
        """As `StepRecord.saved_by_forward`."""
        return {visit.key: sum([entry.nbytes for entry in visit.entries]) for visit in self.visits}

    def forget(self) -> None:
        """Nobody asked for its record in time."""
        for visit in self.visits:
            visit.forget()

    def _last_marks(self) -> list[Mark]:
        copies = [copy for visit in self.visits for cargo in visit.cargos for copy in (cargo.out, cargo.back) if copy]
        return [self.ended, *(copy.ended for copy in copies)]


def resolve(step: FinishedStep, transfer: Transfer) -> StepRecord:
    """The record of a step; waits until the device has passed it."""
    step.wait()
    clock = transfer if step.timed else None
    rows = tuple(row for visit in step.visits for row in _rows(visit, clock))
    copies = [cargo for visit in step.visits for cargo in visit.cargos]
    counts = step.counts
    record = StepRecord(
        index=step.index,
        rank=_rank(),
        slots=rows,
        windows=() if clock is None else _windows(step, clock),
        residency=tuple(Residency(*moment) for moment in counts.residency),
        bytes_out=counts.bytes_out,
        bytes_back=counts.bytes_back,
        copies_out=counts.copies_out,
        copies_back=counts.copies_back,
        peak_in_flight=counts.peak_in_flight,
        peak_ahead=counts.peak_ahead,
        host_peak=step.host_peak,
        host_held=step.host_held,
        host_allocations=step.host_allocations,
        host_node=step.host_node,
        host_nodes=step.host_nodes,
        host_failure=step.host_failure,
        unseen=step.unseen,
        exempt_bytes=sum(visit.exempt_bytes for visit in step.visits) if step.timed else 0,
        abandoned=step.abandoned,
        raised=step.raised,
        planned=step.planned,
        predicted_ms=step.forecast.step_ms if step.forecast else None,
        predicted_waiting_ms=step.forecast.waiting_ms if step.forecast else None,
        timed=step.timed,
        throttled_at_end_ms=0.0 if clock is None else _throttled(step, step.waits_at_end, clock),
        step_ms=0.0 if clock is None else clock.milliseconds(step.began, step.ended),
        out_ms=0.0 if clock is None else sum(duration(clock, cargo.out) for cargo in copies if cargo.out),
        back_ms=0.0 if clock is None else sum(duration(clock, cargo.back) for cargo in copies if cargo.back),
        device_peaks=step.device_peaks,
        device_reserved=step.device_reserved,
        shared_memory=tuple(
            SharedMemory(visit.layer, visit.forward, names, nbytes)
            for visit in step.visits
            for names, nbytes in visit.shared.items()
        ),
    )
    for visit in step.visits:  # the handles of a graph that lives on hold the visit, and need no more than its name
        visit.forget()
    return record


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _rows(visit: LayerVisit, clock: Transfer | None) -> list[SlotRecord]:
    """A row for each slot; tensors that nobody named share a row where their fate, reason and outcome are the same."""
    rows: dict[Any, SlotRecord] = {}
    for position, entry in enumerate(visit.entries):
        row = _row(entry, visit.forward, clock)
        key = position if entry.slot is not SlotName.OTHER else (row.fate, row.reason, row.outcome, row.part_of)
        rows[key] = _together(rows[key], row) if key in rows else row
    return list(rows.values())


def _row(entry: SlotEntry, forward: int, clock: Transfer | None) -> SlotRecord:
    cargo = entry.cargo
    out = back = None
    exposed = 0.0
    if clock is not None and cargo is not None and cargo.copied:
        share = entry.bytes_out / cargo.copied  # of the time of slots that go together
        out = share * duration(clock, cargo.out) if cargo.out else None
        back = share * duration(clock, cargo.back) if cargo.back else None
        exposed = share * _exposed(cargo, clock)
    outcome = Outcome.NONE
    if entry.fate is Fate.OFFLOADED and cargo is not None and cargo.out is not None:
        if cargo.recalled:
            outcome = Outcome.RECALLED
        elif not cargo.asked:
            outcome = Outcome.UNREAD
        elif clock is None:
            outcome = Outcome.BACK
        else:
            outcome = Outcome.LATE if exposed > _LATE_MS else Outcome.HIT
    return SlotRecord(
        layer=entry.visit.layer,
        op=entry.op,
        slot=entry.slot,
        forward=forward,
        nbytes=entry.nbytes,
        tensors=entry.tensors,
        fate=entry.fate,
        reason=entry.reason,
        bytes_out=entry.bytes_out,
        outcome=outcome,
        out_ms=out,
        back_ms=back,
        exposed_ms=exposed,
        format=entry.format,
        sizes=(entry.nbytes - entry.shared,),
        shared=entry.shared,
        part_of=entry.part_of,
    )


def _together(one: SlotRecord, other: SlotRecord) -> SlotRecord:
    def add(first: float | None, second: float | None) -> float | None:
        return second if first is None else first if second is None else first + second

    return SlotRecord(
        layer=one.layer,
        op=one.op,
        slot=one.slot,
        forward=one.forward,
        nbytes=one.nbytes + other.nbytes,
        tensors=one.tensors + other.tensors,
        fate=one.fate,
        reason=one.reason,
        bytes_out=one.bytes_out + other.bytes_out,
        outcome=one.outcome,
        out_ms=add(one.out_ms, other.out_ms),
        back_ms=add(one.back_ms, other.back_ms),
        exposed_ms=one.exposed_ms + other.exposed_ms,
        format=one.format if one.format == other.format else "several",
        sizes=one.sizes + other.sizes,
        shared=one.shared + other.shared,
        part_of=one.part_of,
    )


def _exposed(cargo: Cargo, transfer: Transfer) -> float:
    if cargo.needed is None or cargo.back is None:
        return 0.0
    return max(0.0, transfer.milliseconds(cargo.needed, cargo.back.ended))


def _windows(step: FinishedStep, transfer: Transfer) -> tuple[Window, ...]:
    backward: dict[int, tuple[int, float]] = {}
    for number, visit in enumerate(step.reads):
        assert visit.needed is not None
        following: Mark | None = step.ended
        waits = step.waits_at_end
        if number + 1 < len(step.reads):
            following, waits = step.reads[number + 1].needed, step.reads[number + 1].waits_before_backward
        waited = sum(_exposed(cargo, transfer) for cargo in visit.cargos) + _throttled(step, waits, transfer)
        assert following is not None
        backward[id(visit)] = (number, max(0.0, transfer.milliseconds(visit.needed, following) - waited))
    windows = []
    for visit in step.visits:
        if visit.began is None or visit.ended is None:
            continue  # it was left alone, or raised
        read, backward_ms = backward.get(id(visit), (None, None))
        windows.append(
            Window(
                layer=visit.layer,
                forward=visit.forward,
                begin_ms=transfer.milliseconds(step.began, visit.began),
                forward_ms=transfer.milliseconds(visit.began, visit.ended),
                throttled_ms=_throttled(step, visit.waits_after, transfer),
                needed_ms=None
                if read is None or visit.needed is None
                else transfer.milliseconds(step.began, visit.needed),
                backward_ms=backward_ms,
                read=read,
                throttled_before_ms=_throttled(step, visit.waits_before, transfer),
                throttled_before_backward_ms=_throttled(step, visit.waits_before_backward, transfer),
            )
        )
    return tuple(windows)


def _throttled(step: FinishedStep, which: tuple[int, int], transfer: Transfer) -> float:
    return sum(max(0.0, transfer.milliseconds(*wait)) for wait in step.counts.throttles[slice(*which)])
