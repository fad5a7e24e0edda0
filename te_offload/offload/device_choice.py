"""The choice of a plan that keeps the device's memory within a limit.

In: steps like a recorded one, a limit, the plan that the recorded step had. Out: a choice, what is foreseen with it, how
its steps are to run. Keeps true: what is foreseen meets the limit, or a `BudgetError` says by how many bytes not; a plan
that is there stays, unless it took too much or another one is quicker. Does not: know of host memory or other budgets.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from te_offload.offload.device_budget import Choice, DeviceBudget
from te_offload.offload.likely_steps import LikelySteps, orders_of
from te_offload.offload.plan import Plan
from te_offload.offload.timeline import Bounds, Forecast, Foreseen, Levels

_FEWER = (0.75, 0.5, 0.25, 0.0)  # of the bytes in flight; with none there is one slot each way
_QUICKER = 1.05  # times as long a step is foreseen with a plan that there is as with another, and it stays
_ROOM_TAKES = 1.1  # times as long a step may be foreseen with room for the holes of what leaves late as without
_KINDS = 4  # of slots, those of the most bytes, that may go first of all


def within_device(limit: int, steps: LikelySteps, before: Plan | None) -> tuple[Choice, Forecast, Foreseen | None]:
    """The slots that go, what is foreseen, and how steps are to run.

    Args:
        limit: bytes. steps: like a recorded one.
        before: the plan that it had, if there was one; then a limit that cannot be met is no error, and all goes.

    Raises:
        BudgetError: the limit cannot be met.
    """
    search = _Search(limit, steps, before)
    chosen = search.best()
    if chosen is None:
        everything = frozenset(steps.slots)
        least = search.budget_with(search.least)
        if before is None and min(search.took, least.peak(everything).nbytes) > limit:
            raise least.too_small(everything, in_flight_is_given=steps.bounds_are_given)
        chosen = search.ran or search.judged(everything, search.least, holes=False)
    if search.ran is not None and search.ran.forecast.step_ms <= _QUICKER * chosen.forecast.step_ms:
        chosen = search.ran
    peak = search.budget_with(chosen.bounds).peak(chosen.going).nbytes
    forecast = dataclasses.replace(chosen.forecast, device_bytes=peak)
    if not steps.slots:
        return chosen.going, forecast, None
    return chosen.going, forecast, steps.foreseen(chosen.going, chosen.bounds, limit - peak, holes=chosen.holes)


@dataclass(frozen=True)
class _Judged:
    """A choice, the bytes in flight with it, what is foreseen; whether there is room for the holes of what leaves late."""

    going: Choice
    bounds: Bounds
    forecast: Forecast
    holes: bool


class _Search:
    """For choices that meet a limit, with as many bytes in flight as all slots need, or fewer: those take memory too.

    Attributes:
        took: bytes that the recorded step had. ran: its plan, if that met the limit.
        least: after `best` has found none, the bounds that take least.
    """

    def __init__(self, limit: int, steps: LikelySteps, before: Plan | None) -> None:
        self._limit = limit
        self._steps = steps
        self._most = steps.bounds(frozenset(steps.slots))  # to look for those of each choice takes too long
        self.least = self._most
        peak = steps.record.device_peak
        self.took = 0 if peak is None else peak.nbytes
        self.ran: _Judged | None = None
        self._seen: Levels | None = None  # in the first steps copies have no pace yet
        foreseen = None if before is None else before.foreseen
        if before is not None and foreseen is not None:
            went = frozenset(key for key in steps.slots if before.goes(*key))
            self._seen = steps.levels(went, foreseen.bounds)  # what was foreseen for its own step tells how that errs
            if self.took <= limit:
                self.ran = self.judged(went, foreseen.bounds, holes=foreseen.holes)
        self._margin = 0
        self._there = steps.there_at(self.budget_with(self._most).peak(Choice()))
        # Where copies end a little sooner or later one more is under way, of each micro-batch that is there.
        self._margin = steps.bytes.largest * max(1, len({forward for _, forward in self._there}))

    def judged(self, going: Choice, bounds: Bounds, *, holes: bool) -> _Judged:
        """A choice with what is foreseen."""
        return _Judged(going, bounds, self._steps.forecast(going, bounds, in_pieces=True), holes)

    def budget_with(self, bounds: Bounds, *, holes: bool = False) -> DeviceBudget:
        """What choices hold with some bytes in flight."""
        steps = self._steps
        return DeviceBudget(
            self._limit,
            steps.record,
            lambda choice: steps.levels(choice, bounds),
            self._seen,
            margin=self._margin,
            holes=holes,
        )

    def best(self) -> _Judged | None:
        """Where what leaves late does not count as gone; or does, if that is too much or takes too long, but not after a
        plan for which it was neither.
        """
        roomy = self._best(holes=True)
        if roomy is not None and roomy.forecast.step_ms <= _ROOM_TAKES * self._steps.work_ms:
            return roomy
        if self.ran is not None and self.ran.holes:
            return roomy
        other = self._best(holes=False)
        if roomy is None or (other is not None and roomy.forecast.step_ms > _ROOM_TAKES * other.forecast.step_ms):
            return other
        return roomy

    def _best(self, *, holes: bool) -> _Judged | None:
        steps, most = self._steps, self._most
        found: list[tuple[Choice, Bounds]] = []
        gated = dataclasses.replace(most, gates=steps.gates(self.budget_with(most), most, holes=holes))
        fewer = [dataclasses.replace(most, out=share * most.out, back=share * most.back) for share in _FEWER]
        ways = (gated, most, *(() if steps.bounds_are_given or not steps.slots else fewer))
        for bounds in dict.fromkeys(ways):  # gates are none where memory is short in backwards alone
            self.least = bounds
            choices = self.budget_with(bounds, holes=holes).choices(orders_of(steps.slots, _KINDS, self._there))
            found += [(choice, bounds) for choice in choices]
            if any(not steps.forecast(choice, bounds, in_pieces=True).waiting_ms for choice in choices):
                break  # with fewer in flight nothing is quicker
        return self.judged(*steps.fewest_bytes_of_the_quickest(found), holes=holes) if found else None
