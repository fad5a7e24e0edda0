"""When cargos come back: before the backward asks for them, but no more bytes ahead of it than a bound.

In: the forwards of a step, and which of them the backward reads. Out: copies back, started. Keeps true: all of a
forward's cargos are on their way before its first tensor is handed out; at most `max_ahead` bytes of forwards that the
backward has not reached are back on the device, but for one cargo; nothing comes back earlier than the pace says, once
there is one: memory is shortest where the backward begins. Does not: copy (mover.py does).

The order is that of the step before, where that step had the same forwards (1F1B and interleaved pipelines read neither
first in, first out nor last in, first out); else the last unread forward is next.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from te_offload.offload.record import BACKWARD_BEGINS
from te_offload.offload.states import LEAVING, ON_HOST, RETURNING

if TYPE_CHECKING:
    from te_offload.offload.cargo import Cargo
    from te_offload.offload.mover import Mover
    from te_offload.offload.timeline import Pace
    from te_offload.offload.transfer import Mark
    from te_offload.offload.visit import LayerVisit


class Returns:
    """Brings the cargos of one session's steps back.

    Args:
        mover: who copies. max_ahead: bytes that may be back before the backward reaches their forward.

    Attributes:
        looks_ahead: whether anything comes back before the backward reads of its forward.
        pace: when it should; ``None``: as early as there is room.
    """

    def __init__(self, mover: Mover, max_ahead: int) -> None:
        self.max_ahead = max_ahead
        self.looks_ahead = True
        self.pace: Pace | None = None
        self.reads: list[LayerVisit] = []
        self._mover = mover
        self._visits: list[LayerVisit] = []
        self._reached: LayerVisit | None = None  # up to here everything is back or on its way
        self._ahead = 0  # bytes back of forwards that were not read yet
        self._now = 0  # the number of the backward that is under way, in the pace's order
        self._by_key: dict[tuple[str, int], LayerVisit] = {}
        self._next: dict[tuple[str, int], tuple[str, int]] = {}
        # The forward before which nothing was away, and the copies out by then: else each read would ask all before it.
        self._nothing_before: tuple[LayerVisit, int] | None = None

    def begin_step(self, visits: list[LayerVisit]) -> None:
        """A step begins. ``visits``: its forwards, to which more will be added."""
        self._visits = visits
        self._by_key = {}
        self.reads = []
        self._reached = None
        self._ahead = self._now = 0

    def end_step(self, *, complete: bool) -> None:
        """The step is over: remember the order in which its forwards were read, if ``complete``: if all were looked at,
        and none raised.
        """
        if complete and self.reads:  # an evaluation reads nothing, and says nothing of the order
            self._next = dict(itertools.pairwise([visit.key for visit in self.reads]))
        self._visits = []
        self._by_key = {}
        self._nothing_before = None

    def approach(self, key: tuple[str, int]) -> None:
        """The backward has come to a forward that was not looked at: what comes after it may come back."""
        self._come_to(key)
        if self.looks_ahead:
            following = self._after(key) if self._reached is None else self._following(self._reached)
            if following is not None and not self._is_early(following) and self._has_room(following):
                self._look_ahead(following, self._mover.transfer.mark())

    def _come_to(self, key: tuple[str, int]) -> None:
        """The backward has come to a forward. In another order than the pace's, those that it has read count."""
        if self.pace is not None:
            self._now = max(self._now, self.pace.number.get(key, 0), len(self.reads))

    def _is_early(self, visit: LayerVisit) -> bool:
        return self.pace is not None and self.pace.start.get(visit.key, 0) > self._now

    def _has_room(self, visit: LayerVisit) -> bool:
        """Whether the first of a forward's cargos that is not back may come."""
        away = (cargo for cargo in reversed(visit.cargos) if cargo.state is ON_HOST or cargo.state is LEAVING)
        first = next(away, None)
        return first is None or self._fits(first)

    def _fits(self, cargo: Cargo) -> bool:
        return not self._ahead or self._ahead + cargo.nbytes <= self.max_ahead

    def read(self, visit: LayerVisit) -> None:
        """The backward reads the first tensor of a forward: bring all of it back, then what comes after it. A forward of a
        step that is over has nothing away, and no place in this one's order, where it could have another's key.
        """
        self._mover.finish_use()  # of the forward that was read before
        if self._visits[visit.number : visit.number + 1] != [visit]:
            return
        self._come_to(visit.key)
        if not self.reads:
            self._mover.note(BACKWARD_BEGINS)
        back = sum([cargo.copied for cargo in visit.cargos if cargo.state is ON_HOST or cargo.state is RETURNING])
        throttles = self._mover.counts.throttles
        before = len(throttles)
        self._mover.settle_recalled(self._mover.max_in_flight - back if self._mover.knows_ends else 0)
        visit.waits_before_backward = before, len(throttles)
        visit.needed = free = self._mover.transfer.mark()
        self.reads.append(visit)
        self._ahead -= visit.ahead
        visit.ahead = 0
        for cargo in reversed(visit.cargos):
            if cargo.state is ON_HOST or cargo.state is LEAVING:
                self._mover.start_back(cargo, free)
        if self._reached is None or self._reached.read:
            self._reached = visit
        if self.looks_ahead:
            self._look_ahead(self._following(self._reached), free)

    def _look_ahead(self, following: LayerVisit | None, free: Mark) -> None:
        """Bring back a forward and those after it, while there is room and they are due."""
        while following is not None and not self._is_early(following) and self._bring(following, free):
            self._reached = following
            following = self._following(following)
        self._mover.counts.peak_ahead = max(self._mover.counts.peak_ahead, self._ahead)

    def _bring(self, visit: LayerVisit, free: Mark) -> bool:
        """Start what of a forward is not back, while there is room; whether there was."""
        for cargo in reversed(visit.cargos):
            if cargo.state is ON_HOST or cargo.state is LEAVING:
                if not self._fits(cargo):
                    return False
                self._mover.start_back(cargo, free)
                if not cargo.recalled:
                    visit.ahead += cargo.nbytes
                    self._ahead += cargo.nbytes
        return True

    def _following(self, visit: LayerVisit) -> LayerVisit | None:
        """The forward that the backward will read after this one, as far as one can tell."""
        if visit.key in self._next:
            return self._after(visit.key)
        now = visit, self._mover.counts.copies_out
        if self._nothing_before == now:
            return None
        before = reversed(self._visits[: visit.number])
        following = next((other for other in before if not other.read and _is_away(other)), None)
        self._nothing_before = now if following is None else None
        return following

    def _after(self, key: tuple[str, int]) -> LayerVisit | None:
        """The next forward in the order of the step before that this step has too: it did not look at all of them."""
        for visit in self._visits[len(self._by_key) :]:
            self._by_key[visit.key] = visit
        following = self._next.get(key)
        while following is not None and following not in self._by_key:
            following = self._next.get(following)
        visit_after = self._by_key.get(following) if following is not None else None
        return None if visit_after is None or visit_after.read else visit_after


def _is_away(visit: LayerVisit) -> bool:
    """Whether something of a forward would have to come back. From one of which nothing would, the order of the step before
    could lead to one that was looked at already, and so on without an end.
    """
    return any(cargo.state is ON_HOST or cargo.state is LEAVING for cargo in visit.cargos)
