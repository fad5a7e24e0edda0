"""When cargos come back: before the backward asks for them, but no more bytes ahead of it than a bound.

In: the forwards of a step, and which of them the backward reads. Out: copies back, started. Keeps true: all of a
forward's cargos are on their way before its first tensor is handed out; at most `max_ahead` bytes of forwards that the
backward has not reached are back on the device, but for one cargo. Does not: copy (mover.py does).

The order is that of the step before, where that step had the same forwards (1F1B and interleaved pipelines read neither
first in, first out nor last in, first out); else the last unread forward is next.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from te_offload.offload.states import SlotState

if TYPE_CHECKING:
    from te_offload.offload.cargo import Cargo
    from te_offload.offload.mover import Mover
    from te_offload.offload.visit import LayerVisit


class Returns:
    """Brings the cargos of one session's steps back.

    Args:
        mover: who copies. max_ahead: bytes that may be back before the backward reaches their forward.
    """

    def __init__(self, mover: Mover, max_ahead: int) -> None:
        self.max_ahead = max_ahead
        self.reads: list[LayerVisit] = []
        self._mover = mover
        self._visits: list[LayerVisit] = []
        self._next: dict[tuple[str, int], tuple[str, int]] = {}

    def begin_step(self, visits: list[LayerVisit]) -> None:
        """A step begins. ``visits``: its forwards, to which more will be added."""
        self._visits = visits
        self.reads = []

    def end_step(self) -> None:
        """The step is over: remember the order in which its forwards were read."""
        keys = [visit.key for visit in self.reads]
        self._next = dict(itertools.pairwise(keys))
        self._visits = []

    def read(self, visit: LayerVisit) -> None:
        """The backward reads the first tensor of a forward: bring all of it back, then what comes after it."""
        self.reads.append(visit)
        free = self._mover.transfer.mark()
        visit.needed = free
        for cargo in reversed(visit.cargos):
            self._mover.start_back(cargo, free)
        ahead = sum(
            cargo.nbytes for other in self._visits if not other.read for cargo in other.cargos if _is_back(cargo)
        )
        following = self._following(visit)
        seen = {visit.key}
        while following is not None and following.key not in seen:
            seen.add(following.key)
            for cargo in reversed(following.cargos):
                if cargo.state is not SlotState.ON_HOST and cargo.state is not SlotState.LEAVING:
                    continue
                if ahead and ahead + cargo.nbytes > self.max_ahead:
                    following = None
                    break
                self._mover.start_back(cargo, free)
                ahead += cargo.nbytes
            following = self._following(following) if following is not None else None
        self._mover.counts.peak_ahead = max(self._mover.counts.peak_ahead, ahead)

    def _following(self, visit: LayerVisit) -> LayerVisit | None:
        """The forward that the backward will read after this one, as far as one can tell."""
        key = self._next.get(visit.key)
        if key is not None:
            return next((other for other in self._visits if other.key == key and not other.read), None)
        before = self._visits[: self._visits.index(visit)] if visit in self._visits else []
        return next((other for other in reversed(before) if not other.read and other.cargos), None)


def _is_back(cargo: Cargo) -> bool:
    returned = cargo.state is SlotState.RETURNING or cargo.state is SlotState.RETURNED
    return returned and not cargo.recalled
