"""The choice of a plan: of one step's slots those that go, to meet the budgets with the least predicted waiting.

In: a record with times, a policy, the link's rates. Out: a frozen `Plan`. Keeps true: budgets are met, or a `BudgetError`
says by how many bytes not, and which slots would have to go; of the choices that meet them the one with the least predicted
waiting is taken; the same record gives the same plan. Does not: know when to plan, or move bytes.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence

from te_offload.errors import BudgetError
from te_offload.offload.device_budget import Choice, DeviceBudget, as_they_go, gates_of
from te_offload.offload.forecast import fewest_in_flight, work_of
from te_offload.offload.plan import Plan, PlannedSlot
from te_offload.offload.policy import Policy
from te_offload.offload.record import DevicePeak, Phase, StepRecord
from te_offload.offload.slot_bytes import SlotBytes, may_go
from te_offload.offload.timeline import (
    Bounds,
    Forecast,
    Foreseen,
    Key,
    Levels,
    Link,
    Parcel,
    departures_of,
    follow,
    pace_of,
    simulate,
)
from te_offload.slots import Reason
from te_offload.units import format_bytes

_BRUTE_FORCE = 12  # slots of a layer up to which all choices are tried
_FEWER = (0.75, 0.5, 0.25, 0.0)  # of the bytes in flight; with none there is one slot each way
_QUICKER = 1.05  # times as long a step is foreseen with a plan that there is as with another, and it stays
_ROOM_TAKES = 1.1  # times as long a step may be foreseen with room for the holes of what leaves late as without
_AS_QUICK = 1.01  # times as long as with the quickest plan a step may be foreseen with one that sends less
_KINDS = 4  # of slots, those of the most bytes, that may go first of all for a limit of the device


def given_bounds(out: float = math.inf, back: float = math.inf) -> Bounds:
    """As the engine has them: what has not left is read where it is, and bytes have their pace."""
    return Bounds(out, back, recall=True, paced=True)


# The choice ---------------------------------------------------------------------------------------------------------


def check_host_limit(limit: int, record: StepRecord) -> None:
    """Refuse a host limit under which nothing can ever go.

    Raises:
        BudgetError: it is smaller than every slot that may go.
    """
    rows = [row for row in record.slots if may_go(row)]
    if rows and all(row.reason is Reason.NO_ROOM for row in rows):
        smallest = min(rows, key=lambda row: row.nbytes)
        if smallest.nbytes > limit:
            raise BudgetError(
                f"host_limit is {format_bytes(limit)}, but the smallest slot that may go, {smallest.name}, has "
                f"{format_bytes(smallest.nbytes)}: {format_bytes(smallest.nbytes - limit)} too little for anything to go. "
                "Raise host_limit, or leave the session out."
            )


class _Steps:
    """Steps like a recorded one, with any slots going."""

    def __init__(self, record: StepRecord, link: Link, bounds: Bounds | None) -> None:
        self.record = record
        self.bytes = SlotBytes(record)
        self.slots = self.bytes.slots
        self._link = link
        self._given = bounds
        self._work = work_of(record)
        self._layers = self.bytes.layers

    @property
    def work_ms(self) -> float:
        """How long a step takes in which nobody waits."""
        return sum(item.ms + item.rest_ms for item in self._work)

    @property
    def bounds_are_given(self) -> bool:
        """Whether bytes in flight are the user's."""
        return self._given is not None

    def parcels(self, going: Choice, *, in_pieces: bool = False) -> dict[Key, list[Parcel]]:
        """Of a choice. ``in_pieces``: what nobody named not as one."""
        return self.bytes.parcels(going, in_pieces=in_pieces)

    def bounds(self, going: Choice) -> Bounds:
        """As few bytes in flight as a choice needs, unless they are given."""
        if self._given is not None:
            return self._given
        few = fewest_in_flight(self.record, self.parcels(going), self._link)
        return given_bounds() if few is None else given_bounds(few.out, few.back)

    def forecast(self, going: Choice, bounds: Bounds, *, in_pieces: bool = False) -> Forecast:
        """Of steps with a choice."""
        return simulate(self._work, self.parcels(going, in_pieces=in_pieces), self._link, bounds)

    def levels(self, going: Choice, bounds: Bounds) -> Levels:
        """What is on the device on the way."""
        parcels = {key: [Parcel(nbytes, False)] for key, nbytes in self.bytes.stuck.items()}
        for key, mine in self.parcels(going, in_pieces=True).items():
            groups = as_they_go(parcel.nbytes for parcel in mine if parcel.goes)
            kept = [parcel for parcel in mine if not parcel.goes]
            parcels[key] = parcels.get(key, []) + kept + [Parcel(group, True) for group in groups]
        return follow(self._work, parcels, self._link, bounds)[1]

    def foreseen(self, going: Choice, bounds: Bounds, spare: int, *, holes: bool) -> Foreseen:
        """How steps are to run that hold those levels, with so many bytes left."""
        of_these = self._work, self.parcels(going, in_pieces=True), self._link
        pairs = itertools.pairwise(self._work)
        lasts = frozenset(item.key for item, after in pairs if after.backward and not item.backward)
        departures = departures_of(*of_these, bounds.gates)
        return Foreseen(pace_of(*of_these), departures, bounds, lasts, max(0, spare), holes)

    def gates(self, budget: DeviceBudget, bounds: Bounds, *, holes: bool) -> tuple[tuple[Key, int], ...]:
        """What must have left where memory is short, and before."""
        handed_on = budget.handed_on if holes else None
        return gates_of(self._work, self.levels(Choice(), bounds), budget.room(), handed_on)

    def there_at(self, peak: DevicePeak) -> frozenset[tuple[str, int]]:
        """The slots that are on the device in a phase if nothing goes."""
        there: set[Key] = set()
        reached = (peak.layer, peak.forward), peak.phase is Phase.BACKWARD
        for item in self._work:
            if not item.backward:
                there.add(item.key)
            if (item.key, item.backward) == reached:
                break
            if item.backward:
                there.discard(item.key)
        return frozenset(key for key in self.slots if (self._layers[key], key[1]) in there)

    def fewest_bytes_of_the_quickest(self, choices: Sequence[tuple[Choice, Bounds]]) -> tuple[Choice, Bounds]:
        """What frees more than a limit needs is worth no time, and copies that are not there slow nothing down."""
        found = [(self.forecast(*choice, in_pieces=True).step_ms, choice) for choice in choices]
        enough = _AS_QUICK * min(step_ms for step_ms, _ in found)
        quick = [one for one in found if one[0] <= enough]
        return min(quick, key=lambda one: (self.bytes.moved(one[1][0]), one[0]))[1]

    def cost(self, going: Choice, bounds: Bounds) -> tuple[float, int, int, int]:
        """Of two choices the one that costs less is better."""
        found = self.forecast(going, bounds)
        looked_at = len({(self._layers[key], key[1]) for key in going})  # each takes the host longer than a slot does
        # Sums of times that wait for nothing are equal.
        return round(found.step_ms, 6), found.peak_bytes, looked_at, -len(going)


def make_plan(
    policy: Policy,
    record: StepRecord,
    link: Link,
    bounds: Bounds | None,
    *,
    before: Plan | None = None,
) -> Plan:
    """The plan for steps like a recorded one.

    Args:
        policy: what the user asks for. record: of a step, with times. link: the link's rates.
        bounds: bytes in flight; ``None``: as few as the choice needs.
        before: the plan that the recorded step had, if there was one. Then a device's limit that cannot be met is no error
            any more: all goes.

    Raises:
        BudgetError: the budgets cannot be met.
    """
    steps = _Steps(record, link, bounds)
    if policy.device_limit is not None:
        return _within_device(policy, steps, before)
    order = list(steps.slots)
    going = min(_choices(policy, record, steps.bytes), key=lambda choice: steps.cost(choice, steps.bounds(choice)))
    chosen = steps.bounds(going)

    def forecast(going: Choice) -> Forecast:
        return steps.forecast(going, chosen)

    if policy.budget_per_layer is None and policy.fraction is None:
        going = _keep_the_last(order, going, forecast)
    going = _keep_more(policy.keep_more, order, steps.bytes, going)
    if policy.host_limit is not None:
        going = _fit_host(policy, order, steps.slots, going, forecast)
    return _plan_of(steps, going, forecast(going))


def _plan_of(steps: _Steps, going: Choice, forecast: Forecast, foreseen: Foreseen | None = None) -> Plan:
    planned = (PlannedSlot(*key, nbytes, key in going) for key, nbytes in steps.slots.items())
    return Plan(tuple(planned), forecast, foreseen)


def _within_device(policy: Policy, steps: _Steps, before: Plan | None) -> Plan:
    """With as many bytes in flight as all slots need, or fewer: those take memory too. The plan before stays, unless it
    took too much or another one is quicker.
    """
    limit, record, everything = policy.device_limit, steps.record, frozenset(steps.slots)
    assert limit is not None
    most = steps.bounds(everything)  # to look for those of each choice takes too long
    took = 0 if record.device_peak is None else record.device_peak.nbytes
    seen = None  # in the first steps copies have no pace yet
    chosen: tuple[Forecast, Choice, Bounds, bool] | None = None
    stays: tuple[Choice, Bounds] | None = None
    ran = None if before is None else before.foreseen
    if before is not None and ran is not None:
        went = frozenset(key for key in steps.slots if before.goes(*key))
        seen = steps.levels(went, ran.bounds)  # what was foreseen for its own step tells how that errs
        if took <= limit:
            stays = went, ran.bounds

    there = steps.there_at(DeviceBudget(limit, record, lambda choice: steps.levels(choice, most), seen).peak(Choice()))
    # Where copies end a little sooner or later one more is under way, of each micro-batch that is there.
    margin = steps.bytes.largest * max(1, len({forward for _, forward in there}))

    def budget_with(bounds: Bounds, *, holes: bool = False) -> DeviceBudget:
        return DeviceBudget(
            limit,
            record,
            lambda choice: steps.levels(choice, bounds),
            seen,
            margin=margin,
            holes=holes,
        )

    fewer = [dataclasses.replace(most, out=share * most.out, back=share * most.back) for share in _FEWER]
    has_room = stays is not None and ran is not None and ran.holes
    # Where what leaves late must not count as gone; or may, if that is too much, also for a plan that there is.
    for holes in (True,) if has_room else (True, False):
        found: list[tuple[Choice, Bounds]] = []
        gated = dataclasses.replace(most, gates=steps.gates(budget_with(most), most, holes=holes))
        ways = (gated, most, *(() if steps.bounds_are_given or not everything else fewer))
        for bounds in dict.fromkeys(ways):  # gates are none where memory is short in backwards alone
            choices = budget_with(bounds, holes=holes).choices(_orders(steps.slots, _KINDS, there))
            found += [(choice, bounds) for choice in choices]
            if any(not steps.forecast(choice, bounds, in_pieces=True).waiting_ms for choice in choices):
                break  # with fewer in flight nothing is quicker
        if found:
            best = steps.fewest_bytes_of_the_quickest(found)
            forecast = steps.forecast(*best, in_pieces=True)
            if chosen is None or chosen[0].step_ms > _ROOM_TAKES * forecast.step_ms:
                chosen = forecast, *best, holes
        if chosen is not None and chosen[0].step_ms <= _ROOM_TAKES * steps.work_ms:
            break
    least = budget_with(bounds)
    if chosen is None and before is None and min(took, least.peak(everything).nbytes) > limit:
        raise least.too_small(everything, in_flight_is_given=steps.bounds_are_given)
    if chosen is None:
        last = stays or (everything, bounds)
        chosen = steps.forecast(*last, in_pieces=True), *last, False
    forecast, going, bounds, holes = chosen
    if stays is not None:
        as_before = steps.forecast(*stays, in_pieces=True)
        if as_before.step_ms <= _QUICKER * forecast.step_ms:
            (going, bounds), forecast, holes = stays, as_before, has_room
    peak = budget_with(bounds).peak(going).nbytes
    forecast = dataclasses.replace(forecast, device_bytes=peak)
    if policy.host_limit is not None:
        _fit_host(policy, list(steps.slots), steps.slots, going, lambda _: forecast)
    foreseen = steps.foreseen(going, bounds, limit - peak, holes=holes) if everything else None
    return _plan_of(steps, going, forecast, foreseen)


def _choices(policy: Policy, record: StepRecord, of: SlotBytes) -> list[Choice]:
    """Choices that meet the budget, all with about the fewest bytes."""
    if policy.budget_per_layer is not None:
        return [_within_budget(policy.budget_per_layer, record, of)]
    if policy.fraction is None:
        return [frozenset(of.slots)]
    wanted = policy.fraction * of.moved(of.slots)

    def enough(order: Sequence[tuple[str, int]]) -> Choice:
        count = bisect.bisect_left(range(len(order)), True, key=lambda count: of.moved(order[:count]) >= wanted)
        return frozenset(order[:count])

    return [enough(order) for order in _orders(of.slots)]


def _orders(
    slots: Mapping[tuple[str, int], int], most: int | None = None, there: Container[tuple[str, int]] = ()
) -> list[list[tuple[str, int]]]:
    """That in which slots are saved, and for each kind of slot all layers' of it first, then the others.

    Args:
        most: kinds, those of the most bytes; ``None``: all.
        there: slots to begin with, in orders beside these, where a step has others too; and all micro-batches of each slot
            one after the other.
    """
    kinds: dict[str, int] = {}
    for (name, _), nbytes in slots.items():
        kind = name.split("/", 1)[1]
        kinds[kind] = kinds.get(kind, 0) + nbytes
    if most is not None:
        kinds = dict(sorted(kinds.items(), key=lambda kind: -kind[1])[:most])
    orders = [list(slots)]
    for first in kinds:
        orders.append(sorted(slots, key=lambda key, first=first: key[0].split("/", 1)[1] != first))  # type: ignore[misc]
    if there:
        orders += [sorted(order, key=lambda key: key not in there) for order in orders]
        names = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in slots))}
        orders.append(sorted(slots, key=lambda key: names[key[0]]))
    return [list(order) for order in dict.fromkeys(map(tuple, orders))]


def _within_budget(budget: int, record: StepRecord, of: SlotBytes) -> Choice:
    going: set[tuple[str, int]] = set()
    held = record.bytes_of(lambda row: row.holds_memory and not may_go(row))
    for window in record.windows:
        staying = held.get((window.layer, window.forward), 0)
        if staying > budget:
            rows = [row for row in record.slots if (row.layer, row.forward) == (window.layer, window.forward)]
            stuck = [row for row in rows if row.holds_memory and not may_go(row)]
            names = ", ".join(f"{row.name} ({format_bytes(row.nbytes)}, {row.reason.value})" for row in stuck)
            raise BudgetError(
                f"budget_per_layer is {format_bytes(budget)}, but {format_bytes(staying)} of {window.layer} must stay, "
                f"{format_bytes(staying - budget)} too much. These would have to go: {names}. Raise the budget, or let "
                "them go."
            )
        mine = [key for key in of.slots if of.layers[key] == window.layer and key[1] == window.forward]
        going |= _fewest_bytes(mine, of, staying + of.moved(mine) - budget)
    return frozenset(going)


def _fewest_bytes(keys: Sequence[tuple[str, int]], of: SlotBytes, needed: int) -> set[tuple[str, int]]:
    """Slots of at least ``needed`` bytes together, as few bytes as possible."""
    if needed <= 0:
        return set()
    if len(keys) <= _BRUTE_FORCE:
        groups = (group for size in range(1, len(keys) + 1) for group in itertools.combinations(keys, size))
        enough = [(moved, group) for group in groups if (moved := of.moved(group)) >= needed]
        return set(min(enough, key=lambda one: one[0])[1])
    chosen: set[tuple[str, int]] = set()
    for key in sorted(keys, key=lambda key: -of.slots[key]):
        if of.moved(chosen) < needed:
            chosen.add(key)
    return chosen


def _keep_the_last(order: Sequence[tuple[str, int]], going: Choice, forecast: Callable[[Choice], Forecast]) -> Choice:
    """Keep the slots saved last whose leaving would free nothing at the peak, and whose staying costs no time."""
    best = forecast(going)
    for key in reversed(order):
        fewer = going - {key}
        found = forecast(fewer)
        if found.peak_bytes > best.peak_bytes or found.step_ms > best.step_ms * (1 + 1e-9):
            break
        going, best = fewer, found
    return going


def _keep_more(nbytes: int, order: Sequence[tuple[str, int]], of: SlotBytes, going: Choice) -> Choice:
    kept = 0
    for key in reversed(order):
        if key in going and kept + (more := of.freed_by(key, going)) <= nbytes:
            going, kept = going - {key}, kept + more
    return going


def _fit_host(
    policy: Policy,
    order: Sequence[tuple[str, int]],
    slots: Mapping[tuple[str, int], int],
    going: Choice,
    forecast: Callable[[Choice], Forecast],
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
