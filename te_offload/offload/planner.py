"""Plans at the right time: from the records of steps, alone or with other ranks.

In: records, and what a user asks for. Out: the rules for the next step, with its plan. Keeps true: a plan is made from a
step that was timed and did not raise, and made anew when the bytes of slots, or of the device, are no longer those it was
made for; ranks that plan together have the same plan from the same step on. Does not: choose slots (choice.py does).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from te_offload.errors import PlanError
from te_offload.offload.choice import check_host_limit, make_plan
from te_offload.offload.decide import Rules
from te_offload.offload.engine import Engine
from te_offload.offload.likely_steps import given_bounds
from te_offload.offload.link import probe_link
from te_offload.offload.plan import Plan
from te_offload.offload.policy import Policy
from te_offload.offload.record import DevicePeak, SharedMemory, StepRecord
from te_offload.offload.slot_bytes import bytes_by_slot
from te_offload.offload.timeline import Bounds, Link

_TOGETHER_EVERY = 64  # steps between the looks of ranks that plan together
_SETTLED = 3  # steps of a plan, after which the host is as far ahead as ever
_LOOKS_AGAIN = 6  # steps, after which ranks that plan together see what of the device their first plan takes


class Planner:
    """Decides before each step what goes.

    Args:
        policy: what the user asks for. given: a plan to follow instead. group: ranks that shall have the same plan.
    """

    def __init__(self, policy: Policy, given: Plan | None, group: Any) -> None:
        self.plan = given
        self._policy = policy
        self._given = given is not None
        self._checks_host_limit = policy.host_limit is not None  # with the first step that has slots
        self._group = group
        self._link: Link | None = None
        # Bytes of each forward for which the plan was seen to fit; if there are none, records are looked at until that of
        # this step, or of a later one, says so.
        self._fits: dict[tuple[str, int], int] | None = None
        self._looks_from = 0
        self._planned_at = 0  # the first step of the plan
        self._looked_for_better = False

    def rules_for_next_step(self, rules: Rules, engine: Engine) -> Rules:
        """The session's rules with the plan for the step that begins now.

        Raises:
            BudgetError: the budgets cannot be met. PlanError: ranks that shall plan together have other slots.
        """
        if self._checks_host_limit and engine.steps:
            record = engine.latest_record(wait=engine.steps == 1)
            if record is not None and bytes_by_slot(record):
                assert self._policy.host_limit is not None
                check_host_limit(self._policy.host_limit, record)
                self._checks_host_limit = False
        if not self._given and self._policy.name == "planned":
            if self._group is not None:
                self._plan_together(engine)
            else:
                self._plan_alone(engine)
        return rules if rules.plan is self.plan else dataclasses.replace(rules, plan=self.plan)

    def _plan_alone(self, engine: Engine) -> None:
        if engine.steps == 0:
            return
        if self._fits is not None:
            saved = engine.latest_saved()
            fits = saved is None or saved == self._fits
            if fits and not self._over(engine):  # to write a record takes the host milliseconds
                return
            self._fits, self._looks_from = None, engine.steps - 1
        record = engine.latest_record(wait=self.plan is None, complete=self.plan is not None)
        if record is None or not record.slots or record.unseen or record.raised:
            return
        # A step without times has no windows, nor has one of which others' hooks took all.
        if self.plan is None:
            if record.index > 0 and self._tells(record) and not engine.times_are_disturbed:
                self._plan_from(record, engine)
        elif (over := self._over(engine)) is not None:
            self._plan_from(over, engine)
        elif not self._drifts(record):
            if record.index >= self._looks_from and self._is_seen(record) and not self._finds_better(record, engine):
                self._fits = record.saved_by_forward
        elif record.timed and self._tells(record):
            self._link = None  # other jobs may share it by now
            self._looked_for_better = False
            self._plan_from(record, engine)
        elif not record.timed:
            engine.times_next = True

    def _plan_from(self, record: StepRecord, engine: Engine) -> None:
        self.plan = make_plan(self._policy, record, self._rates(engine), _given(engine), before=self.plan)
        self._planned_at = engine.steps

    def _over(self, engine: Engine) -> StepRecord | None:
        """The last timed step, if that took more of the device than it may, and less is possible."""
        record = None if self._policy.device_limit is None else engine.latest_timed_record()
        return record if record is not None and self._is_over(record, engine) else None

    def _is_over(self, record: StepRecord, engine: Engine) -> bool:
        limit, peak, plan = self._policy.device_limit, record.device_peak, self.plan
        if limit is None or peak is None or plan is None or record.raised or record.index < self._planned_at:
            return False
        fewer_in_flight = engine.adapts and plan.foreseen is not None and plan.foreseen.bounds.out > 0
        return peak.nbytes > limit and (fewer_in_flight or not all(slot.goes for slot in plan.slots))

    def _tells(self, record: StepRecord) -> bool:
        """Whether a plan can be made from a step."""
        return bool(record.windows and (self._policy.device_limit is None or record.device_peaks))

    def _is_seen(self, record: StepRecord) -> bool:
        """Whether a step tells if the plan is as it should be: of the device's memory only one of its own does."""
        of_plan = record.index >= self._planned_at + _SETTLED and bool(record.device_peaks)
        return self._policy.device_limit is None or of_plan

    def _finds_better(self, record: StepRecord, engine: Engine) -> bool:
        """Whether another plan is quicker, now that a step of this one was seen; looked into once."""
        if self._policy.device_limit is None or self._looked_for_better:
            return False
        self._looked_for_better = True
        before = self.plan
        self._plan_from(record, engine)
        assert before is not None and self.plan is not None
        return [slot.goes for slot in self.plan.slots] != [slot.goes for slot in before.slots]

    def _plan_together(self, engine: Engine) -> None:
        """The same steps on every rank: one collective, and none at other steps."""
        due = engine.steps == 2 or (engine.steps > 2 and engine.steps % _TOGETHER_EVERY == 1)  # after a timed step
        looks_again = engine.steps == _LOOKS_AGAIN and self._policy.device_limit is not None
        if not due and not looks_again:
            return
        record = engine.latest_record(wait=True)
        assert record is not None and record.timed
        mine = (record, self._rates(engine), _given(engine))
        everyone: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(everyone, mine, group=self._group)
        records = [record for record, *_ in everyone]
        if any(record.raised or not self._tells(record) for record in records):
            return  # on every rank
        record = merge_records(records)
        link = Link(*(min(dataclasses.astuple(rates)[i] for _, rates, _ in everyone) for i in range(4)))
        given = [bounds for *_, bounds in everyone if bounds is not None]
        bounds = None  # where a rank has none
        if len(given) == len(everyone):
            bounds = given_bounds(*(max(getattr(one, way) for one in given) for way in ("out", "back")))
        if self.plan is None or self._is_over(record, engine) or self._drifts(record):
            self.plan = make_plan(self._policy, record, link, bounds, before=self.plan)
            self._planned_at = engine.steps

    def _drifts(self, record: StepRecord) -> bool:
        return self.plan is not None and self.plan.drift(bytes_by_slot(record)) > self._policy.replan_drift

    def _rates(self, engine: Engine) -> Link:
        if self._link is None:
            self._link = probe_link(engine.device, engine.mover.transfer, engine.pool)
        return self._link


def _given(engine: Engine) -> Bounds | None:
    """The bounds of a session that was given one; else the engine comes to those that the plan needs."""
    return None if engine.adapts else given_bounds(engine.mover.max_in_flight, engine.returns.max_ahead)


def merge_records(records: Sequence[StepRecord]) -> StepRecord:
    """One record for several ranks: of each number the largest.

    Raises:
        PlanError: the ranks have other slots or forwards.
    """
    first = records[0]
    for other in records[1:]:
        same = [(r.name, r.forward) for r in other.slots] == [(r.name, r.forward) for r in first.slots]
        same = same and [peak.name for peak in other.device_peaks] == [peak.name for peak in first.device_peaks]
        if not same or len(other.windows) != len(first.windows):
            raise PlanError(
                f"Ranks {first.rank} and {other.rank} have other slots ({len(first.slots)} and {len(other.slots)}), so "
                "they cannot have the same plan. Give a process group of ranks with the same layers, or none."
            )

    def largest(rows: Iterable[Any], *names: str) -> Any:
        rows = list(rows)
        numbers = {name: max(getattr(row, name) or 0 for row in rows) for name in names}
        return dataclasses.replace(rows[0], **numbers)

    slots = [
        dataclasses.replace(largest(rows, "bytes_out"), nbytes=most.nbytes, sizes=most.sizes, shared=most.shared)
        for rows in zip(*(r.slots for r in records), strict=True)
        for most in (max(rows, key=lambda row: row.nbytes),)
    ]
    peaks = [_largest_peak(rows) for rows in zip(*(r.device_peaks for r in records), strict=True)]
    shared: dict[tuple[str, int, tuple[str, ...]], SharedMemory] = {}
    for piece in itertools.chain.from_iterable(record.shared_memory for record in records):
        key = piece.layer, piece.forward, piece.slots
        shared[key] = max(piece, shared.get(key, piece), key=lambda piece: piece.nbytes)
    return dataclasses.replace(
        first,
        slots=tuple(slots),
        device_peaks=tuple(peaks),
        device_reserved=max(record.device_reserved for record in records),
        shared_memory=tuple(shared.values()),
    )


def _largest_peak(peaks: Sequence[DevicePeak]) -> DevicePeak:
    """Of one phase: the most, and as much beside saved tensors as any rank has."""
    nbytes, beside = max(peak.nbytes for peak in peaks), max(peak.nbytes - peak.held for peak in peaks)
    return dataclasses.replace(peaks[0], nbytes=nbytes, held=nbytes - beside)
