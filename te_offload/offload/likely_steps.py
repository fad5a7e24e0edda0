"""Steps like a recorded one, with any of its slots going.

In: a record with times, the link's rates, choices of slots. Out: forecasts, what is on the device on the way, how steps are
to run so; orders in which slots may go. Keeps true: the same record gives the same answers. Does not: know what a user asks
for, or choose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence

from te_offload.offload.device_budget import Choice, DeviceBudget, as_they_go, gates_of
from te_offload.offload.forecast import fewest_in_flight, work_of
from te_offload.offload.record import DevicePeak, Phase, StepRecord
from te_offload.offload.slot_bytes import SlotBytes
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

_AS_QUICK = 1.01  # times as long as with the quickest choice a step may be foreseen with one that sends less


def given_bounds(out: float = math.inf, back: float = math.inf) -> Bounds:
    """As the engine has them: what has not left is read where it is, and bytes have their pace."""
    return Bounds(out, back, recall=True, paced=True)


class LikelySteps:
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


def orders_of(
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
