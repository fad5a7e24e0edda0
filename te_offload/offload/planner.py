"""Makes the plan: from the record of a step, a policy and the link's measured rates, which slots go.

In: records. Out: a frozen `Plan`, and the rules for the next step. Keeps true: budgets are met, or a `BudgetError` says by
how many bytes not, and which slots would have to go; of the choices that meet them the one with the least predicted
waiting is taken; the same records give the same plan. Does not: move bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from te_offload.errors import BudgetError, PlanError
from te_offload.offload.decide import Rules
from te_offload.offload.device_budget import Choice, DeviceBudget, as_they_go
from te_offload.offload.engine import Engine
from te_offload.offload.forecast import fewest_in_flight, foreseen, parcels_of, work_of
from te_offload.offload.link import probe_link
from te_offload.offload.plan import Plan, PlannedSlot
from te_offload.offload.policy import Policy
from te_offload.offload.record import SlotRecord, StepRecord
from te_offload.offload.timeline import Bounds, Forecast, Key, Levels, Link, Parcel, follow, simulate
from te_offload.slots import Fate, Reason
from te_offload.units import format_bytes

_MAY_GO = (Reason.NONE, Reason.PLAN, Reason.NO_ROOM)
_BRUTE_FORCE = 12  # slots of a layer up to which all choices are tried
_TOGETHER_EVERY = 64  # steps between the looks of ranks that plan together
_PACED = 3  # steps of a plan, after which its copies have their pace
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
        self._let_more_stay = False  # whether that was looked into

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
                self._plan_from(record, engine, strict=True)
        elif (over := self._over(engine)) is not None:
            self._plan_from(over, engine, strict=False)
        elif not self._drifts(record):
            if record.index >= self._looks_from and self._is_seen(record) and not self._lets_more_stay(record, engine):
                self._fits = record.saved_by_forward
        elif record.timed and self._tells(record):
            self._link = None  # other jobs may share it by now
            self._let_more_stay = False
            self._plan_from(record, engine, strict=False)
        elif not record.timed:
            engine.times_next = True

    def _plan_from(self, record: StepRecord, engine: Engine, *, strict: bool) -> None:
        plan = make_plan(self._policy, record, self._rates(engine), _given(engine), strict=strict)
        self._follow(plan, record, self._rates(engine), engine)

    def _follow(self, plan: Plan, record: StepRecord, link: Link, engine: Engine) -> None:
        self.plan, self._planned_at = plan, engine.steps
        if plan.bounds is not None:  # no step may take more, not even the first ones, which would tell
            engine.foreseen = foreseen(record, plan, link, plan.bounds)

    def _over(self, engine: Engine) -> StepRecord | None:
        """The last timed step, if that took more of the device than it may, and more could go."""
        record = None if self._policy.device_limit is None else engine.latest_timed_record()
        return record if record is not None and self._is_over(record) else None

    def _is_over(self, record: StepRecord) -> bool:
        if record.index < self._planned_at or self.plan is None or record.raised:
            return False
        limit, peak = self._policy.device_limit, record.device_peak
        over = limit is not None and peak is not None and peak.nbytes > limit
        return over and not all(slot.goes for slot in self.plan.slots)

    def _tells(self, record: StepRecord) -> bool:
        """Whether a plan can be made from a step."""
        return bool(record.windows and (self._policy.device_limit is None or record.device_peaks))

    def _is_seen(self, record: StepRecord) -> bool:
        """Whether a step tells if the plan is as it should be: of the device's memory only one of its own does, in which
        copies have their pace.
        """
        of_plan = record.index >= self._planned_at + _PACED and bool(record.device_peaks)
        return self._policy.device_limit is None or of_plan

    def _lets_more_stay(self, record: StepRecord, engine: Engine) -> bool:
        """Whether there is a plan that sends less, now that a step of this one was seen; looked into once."""
        assert self.plan is not None
        if self._policy.device_limit is None or self._let_more_stay:
            return False
        self._let_more_stay = True
        plan = make_plan(self._policy, record, self._rates(engine), _given(engine), strict=False)
        if plan.bytes_going < self.plan.bytes_going:
            self._follow(plan, record, self._rates(engine), engine)
            return True
        return False

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
            bounds = _bounds(*(max(getattr(one, way) for one in given) for way in ("out", "back")))
        first = self.plan is None
        if first or self._is_over(record) or self._drifts(record):
            plan = make_plan(self._policy, record, link, bounds, strict=first)
            self._follow(plan, record, link, engine)

    def _drifts(self, record: StepRecord) -> bool:
        return self.plan is not None and self.plan.drift(bytes_by_slot(record)) > self._policy.replan_drift

    def _rates(self, engine: Engine) -> Link:
        if self._link is None:
            self._link = probe_link(engine.device, engine.mover.transfer, engine.pool)
        return self._link


def _given(engine: Engine) -> Bounds | None:
    """The bounds of a session that was given one; else the engine comes to those that the plan needs."""
    return None if engine.adapts else _bounds(engine.mover.max_in_flight, engine.returns.max_ahead)


def _bounds(out: float = math.inf, back: float = math.inf) -> Bounds:
    return Bounds(out, back, recall=True, paced=True)


# From a record ------------------------------------------------------------------------------------------------------


def bytes_by_slot(record: StepRecord) -> dict[tuple[str, int], int]:
    """Bytes of every slot that may go, by name and forward; what nobody named is one slot of its forward."""
    found: dict[tuple[str, int], int] = {}
    for row in record.slots:
        if _may_go(row):
            found[row.name, row.forward] = found.get((row.name, row.forward), 0) + row.nbytes
    return found


def _may_go(row: SlotRecord) -> bool:
    return row.fate in (Fate.OFFLOADED, Fate.KEPT) and row.reason in _MAY_GO and row.nbytes > 0


def merge_records(records: Sequence[StepRecord]) -> StepRecord:
    """One record for several ranks: of each number the largest.

    Raises:
        PlanError: the ranks have other slots or forwards.
    """
    first = records[0]
    for other in records[1:]:
        same = [(r.name, r.forward) for r in other.slots] == [(r.name, r.forward) for r in first.slots]
        same = same and len(other.device_peaks) == len(first.device_peaks)
        if not same or len(other.windows) != len(first.windows):
            raise PlanError(
                f"Ranks {first.rank} and {other.rank} have other slots ({len(first.slots)} and {len(other.slots)}), so "
                "they cannot have the same plan. Give a process group of ranks with the same layers, or none."
            )

    def largest(rows: Iterable[Any], *names: str) -> Any:
        rows = list(rows)
        numbers = {name: max(getattr(row, name) or 0 for row in rows) for name in names}
        return dataclasses.replace(rows[0], **numbers)

    slots = [largest(rows, "nbytes", "bytes_out") for rows in zip(*(r.slots for r in records), strict=True)]
    peaks = [largest(rows, "nbytes") for rows in zip(*(r.device_peaks for r in records), strict=True)]
    return dataclasses.replace(first, slots=tuple(slots), device_peaks=tuple(peaks))


# The choice ---------------------------------------------------------------------------------------------------------


def check_host_limit(limit: int, record: StepRecord) -> None:
    """Refuse a host limit under which nothing can ever go.

    Raises:
        BudgetError: it is smaller than every slot that may go.
    """
    rows = [row for row in record.slots if _may_go(row)]
    if rows and all(row.reason is Reason.NO_ROOM for row in rows):
        smallest = min(rows, key=lambda row: row.nbytes)
        if smallest.nbytes > limit:
            raise BudgetError(
                f"host_limit is {format_bytes(limit)}, but the smallest slot that may go, {smallest.name}, has "
                f"{format_bytes(smallest.nbytes)}: {format_bytes(smallest.nbytes - limit)} too little for anything to go. "
                "Raise host_limit, or leave the session out."
            )


def make_plan(policy: Policy, record: StepRecord, link: Link, bounds: Bounds | None, *, strict: bool = True) -> Plan:
    """The plan for steps like a recorded one.

    Args:
        policy: what the user asks for. record: of a step, with times. link: the link's rates.
        bounds: bytes in flight; ``None``: as few as the choice needs.
        strict: whether a device's limit must be met; else all goes where it cannot be.

    Raises:
        BudgetError: the budgets cannot be met.
    """
    slots = bytes_by_slot(record)
    order = list(slots)
    work = work_of(record)
    layers = {key: key[0].split("/")[0] for key in order}

    def parcels_in(going: Choice) -> dict[Key, list[Parcel]]:
        parcels: dict[Key, list[Parcel]] = {}
        for key in order:
            parcels.setdefault((layers[key], key[1]), []).append(Parcel(slots[key], key in going))
        return parcels

    def bounds_of(going: Choice) -> Bounds:
        if bounds is not None:
            return bounds
        few = fewest_in_flight(record, parcels_in(going), link)
        return _bounds() if few is None else _bounds(few.out, few.back)

    def cost(choice: Choice) -> tuple[float, int, int, int]:
        found = simulate(work, parcels_in(choice), link, bounds_of(choice))
        looked_at = len({(layers[key], key[1]) for key in choice})  # each takes the host longer than a slot does
        # Sums of times that wait for nothing are equal.
        return round(found.step_ms, 6), found.peak_bytes, looked_at, -len(choice)

    budget = None
    if policy.device_limit is not None:
        bounds = bounds_of(frozenset(slots))  # to look for those of each choice takes too long

        def levels_of(parcels: Mapping[Key, Sequence[Parcel]]) -> Levels:
            assert bounds is not None
            return follow(work, as_they_go(parcels), link, bounds)[1]

        # What was foreseen for a plan's own step tells how it errs; in the first steps copies have no pace yet.
        seen = levels_of(parcels_of(record)) if record.planned else None
        budget = DeviceBudget(policy.device_limit, record, lambda choice: levels_of(parcels_in(choice)), seen)
        choices = budget.choices(_orders(slots), strict=strict)
    else:
        choices = _choices(policy, record, slots)
    going = min(choices, key=cost)
    chosen = bounds_of(going)

    def forecast(going: Choice) -> Forecast:
        return simulate(work, parcels_in(going), link, chosen)

    if policy.budget_per_layer is None and policy.fraction is None and budget is None:
        going = _keep_the_last(order, going, forecast)
    going = _keep_more(policy.keep_more, order, slots, going)
    if policy.host_limit is not None:
        going = _fit_host(policy, order, slots, going, forecast)
    planned = tuple(
        PlannedSlot(name, forward, slots[name, forward], (name, forward) in going) for name, forward in order
    )
    found = forecast(going)
    if budget is not None:
        found = dataclasses.replace(found, device_bytes=budget.peak(going).nbytes)
    return Plan(planned, found, None if budget is None else bounds)


def _choices(policy: Policy, record: StepRecord, slots: Mapping[tuple[str, int], int]) -> list[Choice]:
    """Choices that meet the budget, all with about the fewest bytes."""
    if policy.budget_per_layer is not None:
        return [_within_budget(policy.budget_per_layer, record, slots)]
    if policy.fraction is None:
        return [frozenset(slots)]
    wanted = policy.fraction * sum(slots.values())
    choices = []
    for order in _orders(slots):
        chosen: list[tuple[str, int]] = []
        total = 0
        for key in order:
            if total >= wanted:
                break
            chosen.append(key)
            total += slots[key]
        choices.append(frozenset(chosen))
    return choices


def _orders(slots: Iterable[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """That in which slots are saved, and for each kind of slot all layers' of it first, then the others."""
    kinds = dict.fromkeys(name.split("/", 1)[1] for name, _ in slots)
    orders = [list(slots)]
    for first in kinds:
        orders.append(sorted(slots, key=lambda key, first=first: key[0].split("/", 1)[1] != first))  # type: ignore[misc]
    return orders


def _within_budget(budget: int, record: StepRecord, slots: Mapping[tuple[str, int], int]) -> Choice:
    going: set[tuple[str, int]] = set()
    for window in record.windows:
        rows = [row for row in record.slots if (row.layer, row.forward) == (window.layer, window.forward)]
        stuck = [row for row in rows if row.holds_memory and not _may_go(row)]
        staying = sum(row.nbytes for row in stuck)
        if staying > budget:
            names = ", ".join(f"{row.name} ({format_bytes(row.nbytes)}, {row.reason.value})" for row in stuck)
            raise BudgetError(
                f"budget_per_layer is {format_bytes(budget)}, but {format_bytes(staying)} of {window.layer} must stay, "
                f"{format_bytes(staying - budget)} too much. These would have to go: {names}. Raise the budget, or let "
                "them go."
            )
        mine = [key for key in slots if key[0].split("/")[0] == window.layer and key[1] == window.forward]
        going |= _fewest_bytes(mine, slots, staying + sum(slots[key] for key in mine) - budget)
    return frozenset(going)


def _fewest_bytes(
    keys: Sequence[tuple[str, int]], slots: Mapping[tuple[str, int], int], needed: int
) -> set[tuple[str, int]]:
    """Slots of at least ``needed`` bytes together, as few bytes as possible."""
    if needed <= 0:
        return set()
    if len(keys) <= _BRUTE_FORCE:
        groups = (group for size in range(1, len(keys) + 1) for group in itertools.combinations(keys, size))
        enough = [group for group in groups if sum(slots[key] for key in group) >= needed]
        return set(min(enough, key=lambda group: sum(slots[key] for key in group)))
    chosen: set[tuple[str, int]] = set()
    for key in sorted(keys, key=lambda key: -slots[key]):
        if sum(slots[other] for other in chosen) < needed:
            chosen.add(key)
    return chosen


def _keep_the_last(order: Sequence[tuple[str, int]], going: Choice, forecast: Any) -> Choice:
    """Keep the slots saved last whose leaving would free nothing at the peak, and whose staying costs no time."""
    best = forecast(going)
    for key in reversed(order):
        fewer = going - {key}
        found = forecast(fewer)
        if found.peak_bytes > best.peak_bytes or found.step_ms > best.step_ms * (1 + 1e-9):
            break
        going, best = fewer, found
    return going


def _keep_more(
    nbytes: int, order: Sequence[tuple[str, int]], slots: Mapping[tuple[str, int], int], going: Choice
) -> Choice:
    kept = 0
    for key in reversed(order):
        if key in going and kept + slots[key] <= nbytes:
            going, kept = going - {key}, kept + slots[key]
    return going


def _fit_host(
    policy: Policy,
    order: Sequence[tuple[str, int]],
    slots: Mapping[tuple[str, int], int],
    going: Choice,
    forecast: Any,
) -> Choice:
    assert policy.host_limit is not None
    needed = forecast(going).host_bytes
    if needed <= policy.host_limit:
        return going
    if policy.budget_per_layer is not None or policy.fraction is not None or policy.device_limit is not None:
        names = ", ".join(dict.fromkeys(key[0] for key in order if key in going))
        what = "budget_per_layer" if policy.fraction is None else f"fraction={policy.fraction:g}"
        if policy.device_limit is not None:
            what = f"device_limit={format_bytes(policy.device_limit)}"
        raise BudgetError(
            f"{what} sends {format_bytes(needed)} to the host, but host_limit is {format_bytes(policy.host_limit)}, "
            f"{format_bytes(needed - policy.host_limit)} less. These would have to go: {names}. Raise host_limit, or let "
            "more stay on the device."
        )
    for key in reversed(order):
        if forecast(going).host_bytes <= policy.host_limit:
            break
        going -= {key}
    return going
