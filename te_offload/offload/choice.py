"""The choice of a plan: of one step's slots those that go, to meet the budgets with the least predicted waiting.

In: a record with times, a policy, the link's rates. Out: a frozen `Plan`. Keeps true: budgets are met, or a `BudgetError`
says by how many bytes not, and which slots would have to go; of the choices that meet them the one with the least predicted
waiting is taken; the same record gives the same plan. Does not: know when to plan, or move bytes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from te_offload.errors import BudgetError
from te_offload.offload.device_budget import Choice
from te_offload.offload.device_choice import within_device
from te_offload.offload.likely_steps import LikelySteps, orders_of
from te_offload.offload.plan import Plan, PlannedSlot
from te_offload.offload.policy import Policy
from te_offload.offload.record import StepRecord
from te_offload.offload.slot_bytes import SlotBytes, may_go
from te_offload.offload.timeline import Bounds, Forecast, Foreseen, Link
from te_offload.slots import Reason
from te_offload.units import format_bytes

_BRUTE_FORCE = 12  # slots of a layer up to which all choices are tried


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
    steps = LikelySteps(record, link, bounds)
    if policy.device_limit is not None:
        going, found, foreseen = within_device(policy.device_limit, steps, before)
        if policy.host_limit is not None:
            _fit_host(policy, list(steps.slots), going, lambda _: found)
        return _plan_of(steps, going, found, foreseen)
    order = list(steps.slots)
    going = min(_choices(policy, record, steps.bytes), key=lambda choice: steps.cost(choice, steps.bounds(choice)))
    chosen = steps.bounds(going)

    def forecast(going: Choice) -> Forecast:
        return steps.forecast(going, chosen)

    if policy.budget_per_layer is None and policy.fraction is None:
        going = _keep_the_last(order, going, forecast)
    going = _keep_more(policy.keep_more, order, steps.bytes, going)
    if policy.host_limit is not None:
        going = _fit_host(policy, order, going, forecast)
    return _plan_of(steps, going, forecast(going))


def _plan_of(steps: LikelySteps, going: Choice, forecast: Forecast, foreseen: Foreseen | None = None) -> Plan:
    planned = (PlannedSlot(*key, nbytes, key in going) for key, nbytes in steps.slots.items())
    return Plan(tuple(planned), forecast, foreseen)


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

    return [enough(order) for order in orders_of(of.slots)]


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
