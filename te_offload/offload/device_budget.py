"""Which slots must go so that torch has no more than a limit allocated on the device: whatever else there is.

In: the peaks of a step's phases, how many bytes of saved tensors choices of slots hold in each. Out: choices. Keeps true:
the choice of a plan whose step was seen takes what was seen; of the slots in an order as few go, from the first one on, as
meet the limit. Does not: predict times, or choose between orders.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from te_offload.errors import BudgetError
from te_offload.offload.decide import Rules
from te_offload.offload.record import DevicePeak, Phase, StepRecord
from te_offload.offload.timeline import Key, Levels, Work
from te_offload.units import format_bytes

Choice = frozenset[tuple[str, int]]  # names of slots, and their forwards


def as_they_go(sizes: Iterable[int]) -> list[int]:
    """Bytes that go as one: of a forward's slots small ones together, as `Rules` has it."""
    groups, small = [], 0
    for nbytes in sizes:
        if nbytes >= Rules.together:
            groups.append(nbytes)
            continue
        if small + nbytes > Rules.most_together:
            groups.append(small)
            small = 0
        small += nbytes
    return [*groups, small] if small else groups


def gates_of(
    work: Sequence[Work],
    held: Levels,
    room: Mapping[tuple[Key, Phase], int],
    handed_on: Mapping[Key, int] | None = None,
) -> tuple[tuple[Key, int], ...]:
    """What must have left by the end of each forward, for whatever comes before a backward: where that is more than at the
    one before.

    Args:
        work: of the step. held: in phases, if nothing goes. room: for that.
        handed_on: where what leaves later than before the next forward saves its own leaves a hole, as `DeviceBudget` has
            it, the bytes that forwards hand on to the next one; ``None``: there are no holes.

    Returns:
        as `Bounds.gates`.
    """
    pairs = list(itertools.pairwise(work))
    phases = [
        ((item.key, Phase.AFTER), (following.key, Phase.BACKWARD if following.backward else Phase.FORWARD))
        for item, following in pairs
    ]
    rooms: list[float] = []  # from each work to the next backward
    for (item, _), here in zip(reversed(pairs), reversed(phases), strict=True):
        later = math.inf if item.backward or not rooms else rooms[-1]
        rooms.append(math.inf if item.backward else min([later, *(room[phase] for phase in here if phase in room)]))
    rooms.reverse()
    found = []
    most = 0.0
    for number, ((item, following), here) in enumerate(zip(pairs, phases, strict=True)):
        if item.backward:
            most = 0.0
            continue
        needed = max(held.get(phase, 0) for phase in here) - rooms[number]
        if handed_on is not None and not following.backward and number + 1 < len(pairs):
            ends = held.get((following.key, Phase.AFTER), 0) + handed_on.get(following.key, 0)
            needed = max(needed, ends - rooms[number + 1])
        if needed > most:
            found.append((item.key, int(needed)))
            most = needed
    return tuple(found)


def _key(peak: DevicePeak) -> Key:
    return peak.layer, peak.forward


class DeviceBudget:
    """See the module.

    Args:
        limit: bytes. record: of a step, with its device's peaks. levels_of: what one with some choice is foreseen to hold.
        seen: what that step was foreseen to hold; ``None``: what its record says.
        margin: bytes below the limit that a choice must be foreseen to leave, if anything goes.
        holes: whether what has left since the last backward leaves a hole where it was, in which nothing lies that comes
            between forwards, or after the last one: a loss, say, allocates larger blocks. Torch's allocator gives the
            device such holes if it must, but then cuts what the next step's forwards save from the largest blocks that are
            free, those of the loss, and cannot give back these.

    Attributes:
        handed_on: what is there between one forward and the next, and not anyhow: the latter saves it, or uses it.
    """

    def __init__(
        self,
        limit: int,
        record: StepRecord,
        levels_of: Callable[[Choice], Levels],
        seen: Levels | None = None,
        margin: int = 0,
        *,
        holes: bool = False,
    ) -> None:
        self._limit = limit
        self._holes = holes
        self._record = record
        self._margin = margin
        self._levels_of = levels_of
        # Torch's peak less saved tensors is what the phase itself takes, and all that is there anyhow.
        held = [peak.held if seen is None else seen.get((_key(peak), peak.phase), 0) for peak in record.device_peaks]
        nothing = levels_of(Choice()) if holes else {}
        self._saves = {
            key: nbytes - nothing[key, Phase.FORWARD]
            for (key, phase), nbytes in nothing.items()
            if phase is Phase.AFTER
        }
        self._others = [(peak, peak.nbytes - had) for peak, had in zip(record.device_peaks, held, strict=True)]
        anyhow = self._others[0][1] if self._others else 0
        least: dict[str, int] = {}  # of a layer's forwards: gradients of micro-batches before are handed on by none
        for (peak, others), (following, _) in itertools.pairwise(self._others):
            if peak.phase is Phase.AFTER and following.phase is Phase.FORWARD:
                least[peak.layer] = max(0, min(others - anyhow, least.get(peak.layer, others)))
        self.handed_on = {
            _key(peak): least.get(peak.layer, 0) if following.phase is Phase.FORWARD else 0
            for (peak, _), (following, _) in itertools.pairwise(self._others)
            if peak.phase is Phase.AFTER
        }

    def peak(self, choice: Choice) -> DevicePeak:
        """The largest, with some slots going."""
        return max(self._peaks(choice), key=lambda peak: peak.nbytes)

    def _peaks(self, choice: Choice) -> list[DevicePeak]:
        levels = self._levels_of(choice)
        most = 0  # since the last backward
        found = []
        for peak, others in self._others:
            held, key = levels.get((_key(peak), peak.phase), 0), _key(peak)
            if self._holes and peak.phase is Phase.AFTER:
                ends = levels.get((key, Phase.FORWARD), 0) + self._saves.get(key, 0)
                held = max(held, most, ends)
                most = max(held, ends + self.handed_on.get(key, 0))
            elif peak.phase is Phase.BACKWARD:
                most = 0
            found.append(dataclasses.replace(peak, nbytes=others + held, held=held))
        return found

    def room(self) -> dict[tuple[Key, Phase], int]:
        """Bytes of saved tensors that each phase may hold within the limit less the margin."""
        return {(_key(peak), peak.phase): self._limit - self._margin - others for peak, others in self._others}

    def choices(self, orders: Iterable[Sequence[tuple[str, int]]]) -> list[Choice]:
        """Of each order the fewest slots that must go, if all suffice."""
        nothing = Choice()
        if self.peak(nothing).nbytes <= self._limit:
            return [nothing]
        found = []
        for order in orders:

            def meets(count: int, order: Sequence[tuple[str, int]] = order) -> bool:
                return self.peak(frozenset(order[:count])).nbytes <= self._limit - self._margin

            count = bisect.bisect_left(range(1, len(order) + 1), True, key=meets) + 1
            if count <= len(order):
                found.append(frozenset(order[:count]))
        return found

    def too_small(self, everything: Choice, *, in_flight_is_given: bool) -> BudgetError:
        """That not even all slots suffice. ``in_flight_is_given``: by the user, who could have fewer."""
        peak, record = self.peak(everything), self._record
        staying = sorted((row for row in record.slots if row.holds_memory), key=lambda row: -row.nbytes)
        total = format_bytes(sum(record.bytes_of(lambda row: row.holds_memory).values()))
        names = ", ".join(f"{row.name} ({format_bytes(row.nbytes)}, {row.reason.value})" for row in staying[:3])
        in_flight = (
            f"lower max_in_flight (up to {format_bytes(record.peak_in_flight)} wait for copies out, "
            f"{format_bytes(record.peak_ahead)} are back early), "
        )
        return BudgetError(
            f"device_limit is {format_bytes(self._limit)}, but torch has {format_bytes(peak.nbytes)} allocated "
            f"({peak.name}) with all slots that may go offloaded, {format_bytes(peak.nbytes - self._limit)} too much. Of "
            f"saved tensors {total} stay{f', such as {names}' if names else ''}. Raise device_limit, let those go, "
            f"{in_flight if in_flight_is_given else ''}or compute more again."
        )
