"""How long a step takes if given slots are offloaded: its work, two links, and what waits for what.

In: the work of a step in order, the slots of each forward, the link's rates. Out: a `Forecast`. Keeps true: copies out
run in the order in which they were produced, copies back in the order in which they are needed, one at a time each way,
each back after its own out; two that run at once share the link's duplex rate. Does not: know a device. The floor of
benchmarks/offload.py is this with no bounds, no pace and no recall.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from te_offload.offload.record import Phase

Key = tuple[str, int]  # layer, and number of its forward in the step
_SLOWER = 1.5  # than measured a copy back may be, and still end in time
_SLOWER_OUT = 1.1  # than measured a copy out may be, and still nobody waits for it
_MORE = 1.25  # times the bytes that a forward had, and its times still say something


@dataclass(frozen=True)
class Link:
    """Rates in bytes a millisecond: out and back alone, and each while both are busy."""

    out: float
    back: float
    out_duplex: float
    back_duplex: float


@dataclass(frozen=True)
class Work:
    """One forward or backward on the compute stream.

    Attributes:
        rest_ms: after ``ms``, what no layer does before the next one: a loss, say.
    """

    key: Key
    backward: bool
    ms: float
    rest_ms: float = 0.0


@dataclass(frozen=True)
class Parcel:
    """One slot: bytes, and whether it goes."""

    nbytes: int
    goes: bool


@dataclass(frozen=True)
class Bounds:
    """Bytes in flight each way, whether what has not left yet may be read where it is, and whether memory is let go of as
    `Departures` says and bytes come back no earlier than `Pace` does.

    Attributes:
        gates: forwards, and bytes: as one ends, so many of those that its step has sent and not read have left, the first
            ones, and the compute stream waits for that.
    """

    out: float = math.inf
    back: float = math.inf
    recall: bool = False
    paced: bool = False
    gates: tuple[tuple[Key, int], ...] = ()


@dataclass(frozen=True)
class Forecast:
    """A predicted step.

    Attributes:
        step_ms: its length. waiting_ms: how much of it the compute stream waits for copies.
        peak_bytes: most bytes of saved tensors on the device. host_bytes: most on the host.
        device_bytes: most that torch will have allocated on the device; ``None``: nobody asked.
    """

    step_ms: float
    waiting_ms: float
    peak_bytes: int
    host_bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True)
class Pace:
    """When what was offloaded may begin to come back, so that it is there in time and not much before.

    Attributes:
        number: of each forward, its backward's place in the order of the step's backwards, from 0.
        start: the number of the backward with whose begin its bytes may begin to come back.
    """

    number: Mapping[Key, int]
    start: Mapping[Key, int]

    def no_later_than(self, other: Pace | None) -> Pace | None:
        """What is due by either of two steps, since one of them may have stood still somewhere; ``None`` if they had other
        backwards.
        """
        if other is None or other.number != self.number:
            return None
        return Pace(self.number, {key: min(number, other.start[key]) for key, number in self.start.items()})


def pace_of(work: Sequence[Work], parcels: Mapping[Key, Sequence[Parcel]], link: Link) -> Pace:
    """The latest moments at which copies back may begin that run one after the other, each to end before its backward
    begins, and take half as long again as the link's rate says.

    Args:
        work: forwards and backwards in the order of the compute stream.
        parcels: the slots of each forward. link: the link's rates.
    """
    keys: list[Key] = []
    begins: list[float] = []
    saved: dict[Key, float] = {}  # when each forward is over: before that there is nothing to bring back
    now = 0.0
    for item in work:
        if item.backward:
            keys.append(item.key)
            begins.append(now)
        else:
            saved[item.key] = now + item.ms
        now += item.ms + item.rest_ms
    rate = min(link.back, link.back_duplex)
    latest = math.inf
    start: dict[Key, int] = {}
    for key, begin in zip(reversed(keys), reversed(begins), strict=True):
        nbytes = sum(parcel.nbytes for parcel in parcels.get(key, ()) if parcel.goes)
        latest = min(latest, begin) - _SLOWER * nbytes / rate
        start[key] = max(0, bisect.bisect_right(begins, latest) - 1)
        latest = max(latest, saved.get(key, 0.0))
    return Pace({key: number for number, key in enumerate(keys)}, start)


@dataclass(frozen=True)
class Departures:
    """By when copies out are over, so that the compute stream may wait for them at no cost: a host that is ahead of the
    device does not see that they are.

    Attributes:
        after: of each forward, the number of the work that follows it, in the order of the step, from 0.
        over: of each forward of which something goes, slot by slot: its bytes so far, and the number of the work before
            which their copies are over: when the one before it ends, and not only what follows that.
    """

    after: Mapping[Key, int]
    over: Mapping[Key, Sequence[tuple[int, int]]]

    def place(self, key: Key, nbytes: int) -> float:
        """The number of the work before which the first bytes of a forward have left; none, if it did not send any, or
        not nearly as many.
        """
        slots = self.over.get(key)
        if not slots or nbytes > _MORE * slots[-1][0]:
            return math.inf
        found = bisect.bisect_left(slots, nbytes, key=lambda slot: slot[0])
        return slots[min(found, len(slots) - 1)][1]  # of a few more bytes than it had then: with the last ones

    def no_earlier_than(self, other: Departures | None) -> Departures | None:
        """What has left by both of two steps, one of which may have stood still somewhere; ``None``: other work."""
        if other is None or other.after != self.after:
            return None
        both = {key: slots for key, slots in self.over.items() if len(other.over.get(key, ())) == len(slots)}
        return Departures(
            self.after,
            {
                key: tuple((mine[0], max(mine[1], its[1])) for mine, its in zip(slots, other.over[key], strict=True))
                for key, slots in both.items()
            },
        )


@dataclass(frozen=True)
class Foreseen:
    """How steps of a plan are to run, so that they hold what was predicted: when bytes come back and leave, and how many
    are in flight.

    Attributes:
        lasts: the forwards that a backward follows. spare: bytes that are foreseen to be left of the device's limit.
        holes: whether there is room for the holes too that what leaves late leaves behind, as `DeviceBudget` has it.
    """

    pace: Pace
    departures: Departures
    bounds: Bounds
    lasts: frozenset[Key] = frozenset()
    spare: int = 0
    holes: bool = False


def departures_of(
    work: Sequence[Work],
    parcels: Mapping[Key, Sequence[Parcel]],
    link: Link,
    gates: Sequence[tuple[Key, int]] = (),
) -> Departures:
    """When copies out are over that run one after the other, each after its forward, and take a tenth longer than the
    link's rate says, or are waited for at a gate.

    Args:
        work: forwards and backwards in the order of the compute stream.
        parcels: the slots of each forward. link: the link's rates. gates: as `Bounds` has them.
    """
    ends_of_work = [0.0]
    now = 0.0
    for item in work:
        ends_of_work.append(now + item.ms)
        now += item.ms + item.rest_ms
    rate = min(link.out, link.out_duplex) / _SLOWER_OUT
    ends = 0.0
    over: dict[Key, tuple[tuple[int, int], ...]] = {}
    for number, item in enumerate(work):
        sizes = [parcel.nbytes for parcel in parcels.get(item.key, ()) if parcel.goes and parcel.nbytes]
        if item.backward or not sizes:
            continue
        ends = max(ends, ends_of_work[number + 1])
        slots = []
        for nbytes in itertools.accumulate(sizes):
            slots.append((nbytes, bisect.bisect_left(ends_of_work, ends + nbytes / rate)))
        ends += sum(sizes) / rate
        over[item.key] = tuple(slots)
    after = {item.key: number + 1 for number, item in enumerate(work) if not item.backward}
    sent: list[Key] = []  # and not read
    seen = first = covered = 0  # of them all before the first one have left by the gate before: so many bytes
    for key, needed in gates:
        for item in work[seen : after[key]]:
            if not item.backward and item.key in over:
                sent.append(item.key)
            elif item.backward and item.key in sent:
                sent.remove(item.key)
                first = covered = 0
        seen = after[key]
        while first < len(sent) and covered < needed:
            over[sent[first]] = mine = _no_later_than(seen, over[sent[first]], needed - covered)
            if covered + mine[-1][0] > needed:
                break
            covered += mine[-1][0]
            first += 1
    return Departures(after, over)


def _no_later_than(place: int, slots: Sequence[tuple[int, int]], needed: int) -> tuple[tuple[int, int], ...]:
    """Departures of one forward of which the first bytes, so many, must have left by a place."""
    begins = [0, *(nbytes for nbytes, _ in slots)]
    return tuple(
        (nbytes, min(place, at) if begin < needed else at) for begin, (nbytes, at) in zip(begins, slots, strict=False)
    )


class _Trip:
    """One slot's way out and back."""

    __slots__ = (
        *("back_done", "held", "left_back", "left_out", "nbytes"),
        *("out_done", "place", "queued", "read", "ready", "recalled"),
    )

    def __init__(self, nbytes: int, ready: float, place: float | None) -> None:
        self.nbytes = nbytes
        self.ready = ready
        self.place = place  # the number of the work before which its memory is let go of; None: when its copy is over
        self.held = True  # until then, or until there is no room
        self.left_out = self.left_back = float(nbytes)
        self.out_done = self.back_done = math.inf
        self.queued = self.recalled = self.read = False

    def is_here(self, time: float) -> bool:
        """Whether its memory has not been let go of."""
        return self.out_done > time if self.place is None else self.held


class _Links:
    """Both directions of the link, up to a moment."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.now = 0.0
        self.out: collections.deque[_Trip] = collections.deque()
        self.back: collections.deque[_Trip] = collections.deque()

    def advance(self, to: float) -> None:
        """Copy until the moment ``to``."""
        while self.now < to and self._step(to):
            pass
        self.now = max(self.now, to)

    def finish(self, trip: _Trip, *, back: bool) -> float:
        """Copy until one trip is out, or back; that moment."""
        while (trip.back_done if back else trip.out_done) == math.inf:
            if not self._step(math.inf):
                raise AssertionError("a trip that nobody asked for")
        return trip.back_done if back else trip.out_done

    def _step(self, to: float) -> bool:
        out = self.out[0] if self.out and self.out[0].ready <= self.now else None
        back = self.back[0] if self.back and self.back[0].out_done <= self.now else None
        both = out is not None and back is not None
        rate_out = self.link.out_duplex if both else self.link.out
        rate_back = self.link.back_duplex if both else self.link.back
        out_end = math.inf if out is None else self.now + out.left_out / rate_out
        back_end = math.inf if back is None else self.now + back.left_back / rate_back
        next_ready = self.out[0].ready if self.out and out is None else math.inf
        until = min(to, out_end, back_end, next_ready)
        if until == math.inf:
            return False
        passed = until - self.now
        if out is not None:
            out.left_out -= passed * rate_out
            if out_end <= until:
                out.out_done = until
                self.out.popleft()
        if back is not None:
            back.left_back -= passed * rate_back
            if back_end <= until:
                back.back_done = until
                self.back.popleft()
        self.now = until
        return True


Levels = dict[tuple[Key, Phase], int]
"""Bytes of saved tensors on the device as each phase begins, also of those that are back early; in a backward, with those
that come back as it does.
"""


def simulate(work: Sequence[Work], parcels: Mapping[Key, Sequence[Parcel]], link: Link, bounds: Bounds) -> Forecast:
    """The step in which the parcels that go are offloaded.

    Args:
        work: forwards and backwards in the order of the compute stream.
        parcels: the slots of each forward, in the order in which they are saved.
        link: the link's rates. bounds: bytes in flight.
    """
    return follow(work, parcels, link, bounds)[0]


def follow(
    work: Sequence[Work], parcels: Mapping[Key, Sequence[Parcel]], link: Link, bounds: Bounds
) -> tuple[Forecast, Levels]:
    """`simulate`, and what it holds on the way."""
    levels: Levels = {}
    links = _Links(link)
    time = waiting = 0.0
    trips: dict[Key, list[_Trip]] = {}
    resident = peak = host = host_peak = 0
    in_flight: collections.deque[_Trip] = collections.deque()
    begun: list[_Trip] = []
    backwards = [item.key for item in work if item.backward]
    pace = pace_of(work, parcels, link) if bounds.paced else None
    departures = departures_of(work, parcels, link, bounds.gates) if bounds.paced else None
    done_backwards = 0
    for number, item in enumerate(work):
        slots = parcels.get(item.key, ())
        kept = sum(slot.nbytes for slot in slots if not slot.goes)
        if not item.backward:
            back = sum(trip.nbytes for each in trips.values() for trip in each if trip.queued)  # of forwards before it
            levels[item.key, Phase.FORWARD] = resident + back + _leaving(in_flight, time)
            time += item.ms
            links.advance(time)
            sizes = [slot.nbytes for slot in slots if slot.goes and slot.nbytes]
            ends = itertools.accumulate(sizes)
            trips[item.key] = [
                _Trip(nbytes, time, None if departures is None else departures.place(item.key, end))
                for nbytes, end in zip(sizes, ends, strict=True)
            ]
            links.out.extend(trips[item.key])
            begun += trips[item.key]
            in_flight.extend(trips[item.key])
            host += sum(trip.nbytes for trip in trips[item.key])
            host_peak = max(host_peak, host)
            resident += kept
            in_flight = collections.deque(trip for trip in in_flight if trip.is_here(time))
            peak = max(peak, resident + back + _leaving(in_flight, time))
            while in_flight:
                trip = in_flight[0]
                gone = trip.place is not None and trip.place <= number + 1
                if not gone and (len(in_flight) == 1 or sum(trip.nbytes for trip in in_flight) <= bounds.out):
                    break
                in_flight.popleft().held = False
                until = max(time, links.finish(trip, back=False))
                waiting, time = waiting + until - time, until
            levels[item.key, Phase.AFTER] = resident + back + _leaving(in_flight, time)
            time += item.rest_ms
            links.advance(time)
            continue
        done_backwards += 1
        mine = trips.get(item.key, [])
        coming = sum(trip.nbytes for trip in mine if not (trip.recalled or (bounds.recall and trip.is_here(time))))
        until = _make_room(in_flight, links, time, bounds.out - coming)
        waiting, time = waiting + until - time, until
        _queue(links, [mine], time, math.inf, bounds.recall)
        following = [
            trips[key]
            for key in backwards[done_backwards:]
            if key in trips and (pace is None or pace.start[key] < done_backwards)
        ]
        _queue(links, following, time, bounds.back, bounds.recall)
        until = max([time, *(links.finish(trip, back=True) for trip in mine)])
        waiting, time = waiting + until - time, until
        back = sum(trip.nbytes for each in (mine, *following) for trip in each if trip.queued)
        levels[item.key, Phase.BACKWARD] = resident + back + _leaving(in_flight, time)
        peak = max(peak, levels[item.key, Phase.BACKWARD])
        time += item.ms + item.rest_ms
        links.advance(time)
        resident -= kept
        host -= sum(trip.nbytes for trip in mine)
        for trip in trips.pop(item.key, ()):
            trip.read = True
    # The step ends after the last copy out, also of what was recalled or is not read.
    end = max([time, *(links.finish(trip, back=False) for trip in begun)])
    return Forecast(end, waiting + end - time, peak, host_peak), levels


def _leaving(in_flight: Iterable[_Trip], time: float) -> int:
    """Bytes that wait for nothing but the end of their copy out."""
    return sum(trip.nbytes for trip in in_flight if trip.is_here(time) and (trip.read or not trip.queued))


def _make_room(in_flight: collections.deque[_Trip], links: _Links, time: float, room: float) -> float:
    """Let go of the oldest of what was recalled and read, until there are no more bytes of it than there is room for; when
    the last of their copies out is over.
    """
    read = [trip for trip in in_flight if trip.read and trip.is_here(time)]
    held = sum(trip.nbytes for trip in read)
    for trip in read:
        if held <= room:
            break
        time = max(time, links.finish(trip, back=False))
        in_flight.remove(trip)
        held -= trip.nbytes
    return time


def _queue(links: _Links, groups: Sequence[Sequence[_Trip]], time: float, room: float, recall: bool) -> None:
    """Ask for trips back, in the order of the groups, the last one of each first, while there is room: what is recalled
    was there all the time, and takes none.
    """
    ahead = sum(trip.nbytes for group in groups for trip in group if trip.queued and not trip.recalled)
    for group in groups:
        for trip in reversed(group):
            if trip.queued:
                continue
            if recall and trip.is_here(time):
                trip.queued = trip.recalled = True
                trip.back_done = time
                continue
            if ahead and ahead + trip.nbytes > room:
                return
            trip.queued = True
            ahead += trip.nbytes
            links.back.append(trip)
