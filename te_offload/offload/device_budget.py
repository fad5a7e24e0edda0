"""Which slots must go so that torch has no more than a limit allocated on the device: whatever else there is.

In: the peaks of a step's phases, how many bytes of saved tensors choices of slots hold in each. Out: choices. Keeps true:
the choice of a plan whose step was seen takes what was seen; of the slots in an order as few go, from the first one on, as
meet the limit. Does not: predict times, or choose between orders.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
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


def gates_of(work: Sequence[Work], excess: Mapping[tuple[Key, Phase], int]) -> tuple[tuple[Key, int], ...]:
    """What must have left by the end of each forward, for what comes next: where that is more than at the one before.

    Args:
        work: of the step. excess: bytes that are too many in phases, if nothing goes.

    Returns:
        as `Bounds.gates`.
    """
    found = []
    most = 0
    for item, following in itertools.pairwise(work):
        if item.backward:
            most = 0
            continue
        begins = Phase.BACKWARD if following.backward else Phase.FORWARD
        needed = max(excess.get(phase, 0) for phase in ((item.key, Phase.AFTER), (following.key, begins)))
        if needed > most:
            found.append((item.key, needed))
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
    """

    def __init__(
        self,
        limit: int,
        record: StepRecord,
        levels_of: Callable[[Choice], Levels],
        seen: Levels | None = None,
        margin: int = 0,
    ) -> None:
        self._limit = limit
        self._record = record
        self._margin = margin
        self._levels_of = levels_of
        # Torch's peak less saved tensors is what the phase itself takes, and all that is there anyhow.
        held = [peak.held if seen is None else seen.get((_key(peak), peak.phase), 0) for peak in record.device_peaks]
        self._others = [(peak, peak.nbytes - had) for peak, had in zip(record.device_peaks, held, strict=True)]

    def peak(self, choice: Choice) -> DevicePeak:
        """The largest, with some slots going."""
        return max(self._peaks(choice), key=lambda peak: peak.nbytes)

    def _peaks(self, choice: Choice) -> list[DevicePeak]:
        levels = self._levels_of(choice)
        return [
            dataclasses.replace(peak, nbytes=others + held, held=held)
            for peak, others in self._others
            for held in (levels.get((_key(peak), peak.phase), 0),)
        ]

    def excess(self) -> dict[tuple[Key, Phase], int]:
        """By how many bytes each phase would pass the limit less the margin if nothing went, where it would."""
        most = self._limit - self._margin
        return {(_key(peak), peak.phase): peak.nbytes - most for peak in self._peaks(Choice()) if peak.nbytes > most}

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
        total = format_bytes(sum(row.nbytes for row in staying))
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
