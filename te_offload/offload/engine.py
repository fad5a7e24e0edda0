"""The parts that offload, put together, and what a step is: forwards, their backwards, and a record at the end.

In: forwards that begin and end. Out: `StepRecord` values. Keeps true: between steps no tensor and no host byte is on
loan; times are read only after the device has passed their marks, so no step waits for its own record. Does not: know
how a forward is found (session.py and dropin.py do).
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time

import torch

from te_offload.offload import numa
from te_offload.offload.decide import Rules
from te_offload.offload.device_memory import Watermarks, fill_unused, give_back_unused
from te_offload.offload.forecast import bounds_for, departures_for, pace_for
from te_offload.offload.host_pool import HostPool
from te_offload.offload.measure import FinishedStep, resolve
from te_offload.offload.mover import Counts, Mover
from te_offload.offload.plan import Plan
from te_offload.offload.record import Phase, StepRecord
from te_offload.offload.returns import Returns
from te_offload.offload.timeline import Departures, Pace
from te_offload.offload.transfer import make_transfer
from te_offload.offload.verify import Verifier
from te_offload.offload.visit import LayerVisit
from te_offload.slots import Reason

HISTORY = 4  # steps whose records are kept; their events serve the steps after them
GROWTH_STEPS = 3  # steps with something to offload, in which host memory may be taken from the system
FIRST_BOUND = 256 << 20  # bytes in flight each way until something was measured
TIMED_FIRST = 8  # steps that are timed, and
TIMED_EVERY = 16  # from then on one in so many
_TIMED_AGAIN = 4  # steps that are timed after another plan was made: two that it takes, and a host that is ahead by two


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """Host memory of a session, in bytes.

    Attributes:
        limit: most bytes held; ``None``: no cap. reserve: bytes taken when the first step begins.
    """

    limit: int | None = None
    reserve: int = 0


@dataclasses.dataclass
class Delay:
    """What came of queuing copies out only after something else had been launched.

    Attributes:
        commits: forwards whose copies were. won: seconds of the host that the launch did not wait for.
        late: seconds from the end of those forwards to their copies being queued. forced: commits that nothing went before.
    """

    commits: int = 0
    won: float = 0.0
    late: float = 0.0
    forced: int = 0


class Engine:
    """Offloads what forwards save.

    Args:
        device: where they run. rules: what goes. host: host memory.
        max_in_flight: most bytes in flight each way; ``None``: what was measured to be needed.
        growth_steps: steps in which host memory may be taken from the system (`warm_steps`); ``None``: all.
        stream: who copies both ways; ``None``: a stream of its own for each way.
        verify: whether every restored slot is compared with what was saved.

    Attributes:
        visits: the forwards of this step, or of the last one.
        steps: how many are over. warm_steps: of them, from the first that used host memory on, those
            that saved something and did not raise.
        adapts: whether the bounds in flight are set to what was measured to be needed.
        times_next: whether the next one is timed in any case.
        owned_storages: of the parameters of layers, as far as looked up in this step.
        delays: whether copies out are queued by `commit_delayed`. delay: what that has won and lost.
        watermarks: of the device's memory, taken in timed steps; ``None``: nobody asks for them.
    """

    def __init__(
        self,
        device: torch.device,
        rules: Rules,
        host: HostSettings,
        max_in_flight: int | None,
        *,
        verify: bool = False,
        growth_steps: int | None = GROWTH_STEPS,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.device = device
        self.rules = rules
        transfer = make_transfer(device, stream)
        self.pool = HostPool(host.limit, pinned=device.type == "cuda", node=numa.node_of_gpu(device))
        bound = FIRST_BOUND if max_in_flight is None else max_in_flight
        self.mover = Mover(device, self.pool, transfer, bound)
        self.returns = Returns(self.mover, bound)
        self.verifier = Verifier(device) if verify else None
        self.visits: list[LayerVisit] = []
        self.owned_storages: dict[str, frozenset[int]] = {}
        self.steps = 0
        self.times_next = False
        self._nodes: tuple[int, ...] = ()  # where the pool's pages lie, and
        self._nodes_at = 0  # after which of its allocations that was looked up
        self.adapts = max_in_flight is None
        self._adapted_to = -1  # the step whose record the bounds are from
        self._last_pace: Pace | None = None  # by that record alone, and
        self._last_departures: Departures | None = None
        self._timed_plan: Plan | None = None  # what they are times of
        self._timed_until = TIMED_FIRST  # steps, all of them
        self._reserve = host.reserve
        self._growth_steps = growth_steps
        self.warm_steps = 0
        self._captured = False  # whether this step is
        self._last_timed: StepRecord | None = None  # of those that are no longer among the last steps
        self.delays = False
        self.delay = Delay()
        self._delayed: tuple[LayerVisit, float] | None = None
        self.watermarks: Watermarks | None = None
        self._fills = False  # whether this step is a plan's first one within a limit of the device, and
        self._filling: list[torch.Tensor] = []  # what lies in memory that it will need once more
        self._finished: collections.deque[FinishedStep | StepRecord] = collections.deque(maxlen=HISTORY)

    # Steps -----------------------------------------------------------------------------------------------------------

    def begin_step(self, *, captured: bool = False) -> None:
        """A step begins.

        Args:
            captured: in a CUDA graph. The device was idle when the capture began.
        """
        self._captured = captured
        self.mover.knows_ends = not captured
        if captured:
            self.pool.in_graph, self.pool.may_grow = True, False
            self.pool.forget_uses()
            self.mover.transfer.capture(on=True)
            self._begin()
            return
        if self._reserve:
            self.pool.reserve(self._reserve)
            self._reserve = 0
        self._adapt()
        plan = self.rules.plan
        if plan is not self._timed_plan:
            if plan is not None and not plan.holds_as(self._timed_plan):
                give_back_unused(self.device)
                self._fills = plan.foreseen is not None
            self._forget_times()
        elif plan is None and self.watermarks is not None and self.warm_steps == 1:
            give_back_unused(self.device)  # what the first step let go of after the loss had begun
        transfer = self.mover.transfer
        transfer.timed = self.times_next or self.steps < self._timed_until or self.steps % TIMED_EVERY == 0
        self.times_next = False
        self._begin()
        if self.watermarks is not None and transfer.timed:
            self.watermarks.begin()

    def _begin(self) -> None:
        self.mover.thread = threading.get_ident()
        self.mover.counts = Counts()
        self.pool.peak_bytes = self.pool.live_bytes
        self.visits = []
        self.owned_storages = {}
        self.returns.begin_step(self.visits)
        self._began = self.mover.transfer.mark()

    def open_visit(self, layer: str, module: torch.nn.Module | None, forward: int, stays: Reason) -> LayerVisit:
        """A forward begins; its hooks are not on yet."""
        self.mover.finish_use()  # of a backward before it
        throttles = self.mover.counts.throttles
        before = len(throttles)
        if self.mover.homes:  # where its graph writes, something that was read may still lie: it is not replayed then
            self.mover.settle_recalled(0)
        visit = LayerVisit(layer, module, forward, self, stays)
        visit.waits_before = before, len(throttles)
        self.visits.append(visit)
        if stays is Reason.NONE:
            self.enter(visit, Phase.FORWARD)
        return visit

    def enter(self, visit: LayerVisit, phase: Phase) -> None:
        """A phase of a forward begins, if that is one of this step."""
        if self.watermarks is None or visit not in self.visits[visit.number : visit.number + 1]:
            return
        self.watermarks.border(*visit.key, phase)
        self.watermarks.holds(self.mover.counts.resident)
        self._filling = []
        foreseen = self.rules.plan.foreseen if self._fills and self.rules.plan is not None else None
        if phase is Phase.AFTER and foreseen is not None and visit.key in foreseen.lasts:
            self._filling = fill_unused(self.device, foreseen.spare)
            self.watermarks.fills(sum(tensor.nbytes for tensor in self._filling))

    def end_visit(self, visit: LayerVisit) -> None:
        """A forward has ended: its copies out are queued, now or later."""
        self.commit_delayed()
        if self.delays:
            visit.close()
            self._delayed = visit, time.perf_counter()
        else:
            visit.commit()

    def commit_delayed(self, *, asked: bool = False) -> None:
        """Queue the copies out that were put off. ``asked``: by who has launched something in between."""
        if self._delayed is not None:
            (visit, ended), self._delayed = self._delayed, None
            began = time.perf_counter()
            visit.load()
            if asked:
                self.delay.commits += 1
                self.delay.won += time.perf_counter() - began
                self.delay.late += began - ended
            else:
                self.delay.forced += 1

    def end_step(self, *, unseen: int = 0, growth: float = 1.0, raised: bool = False) -> None:
        """The step is over: leave nothing behind, and keep what its record needs.

        Args:
            unseen: forwards that nobody looked at. If there are no others, the step has no record.
            growth: how much more host memory than this one a later step may need.
            raised: whether an error ended it.
        """
        self.commit_delayed()
        self._fills, self._filling = False, []
        peaks = () if self.watermarks is None else self.watermarks.end()
        raised = raised or any(visit.aborted for visit in self.visits)
        self.mover.finish_use()
        self.mover.release_unreachable()
        abandoned = sum(cargo.slots for visit in self.visits for cargo in visit.cargos if cargo.lease)
        for visit in self.visits:
            visit.release()
        before = len(self.mover.counts.throttles)
        self.mover.drain()
        ended = self.mover.transfer.mark()
        if self._captured:  # all copies have been waited for in the graph
            self.pool.forget_uses()
            self.mover.transfer.capture(on=False)
        leases = sum(len(visit.cargos) for visit in self.visits)  # each rounded up to 512 bytes
        self.pool.settle(int(self.pool.peak_bytes * growth) + 512 * leases if growth > 1 else 0)
        self._find_nodes()
        self.returns.end_step(complete=not unseen and not raised)
        if self.verifier is not None:
            self.verifier.forget()
        self._count_step(saved=bool(unseen) or any(visit.entries for visit in self.visits), raised=raised)
        if unseen and not self.visits:
            return
        oldest = self._finished[0] if len(self._finished) == HISTORY else None
        if isinstance(oldest, FinishedStep):
            if oldest.timed and not self._captured and oldest.is_over():
                oldest = resolve(oldest, self.mover.transfer)
            else:
                oldest.forget()
        if isinstance(oldest, StepRecord) and oldest.timed:
            self._last_timed = oldest
        self._finished.append(
            FinishedStep(
                index=self.steps - 1,
                visits=self.visits,
                reads=self.returns.reads,
                counts=self.mover.counts,
                waits_at_end=(before, len(self.mover.counts.throttles)),
                abandoned=abandoned,
                raised=raised,
                planned=self.rules.plan is not None,
                forecast=self.rules.plan.forecast if self.rules.plan is not None else None,
                timed=self.mover.transfer.timed,
                began=self._began,
                ended=ended,
                host_peak=self.pool.peak_bytes,
                host_held=self.pool.held_bytes,
                host_allocations=self.pool.allocations,
                host_node=self.pool.node,
                host_nodes=self._nodes,
                host_failure=self.pool.failure,
                unseen=unseen,
                device_peaks=peaks,
                device_reserved=self.watermarks.reserved if self.watermarks is not None and peaks else 0,
            )
        )

    def _find_nodes(self) -> None:
        if self.pool.node is not None and self._nodes_at != self.pool.allocations:
            self._nodes, self._nodes_at = tuple(sorted(self.pool.nodes)), self.pool.allocations

    def _count_step(self, *, saved: bool, raised: bool) -> None:
        self.steps += 1
        if not raised and (self.pool.peak_bytes or (saved and self.warm_steps)):
            self.warm_steps += 1
        if self._growth_steps is not None and self.warm_steps >= self._growth_steps:
            self.pool.may_grow = False

    @property
    def may_be_captured(self) -> bool:
        """Whether the steps are over in which host memory is taken, or as many in which nothing went."""
        return not self.pool.may_grow or (self.steps >= GROWTH_STEPS and not self.warm_steps)

    @property
    def times_are_disturbed(self) -> bool:
        """Whether page-locking disturbed the times of the last step with something to offload: it was the first."""
        return self.warm_steps == 1

    def close(self) -> None:
        """Give all host memory back."""
        self.mover.drain()
        self.pool.close()

    # Records ---------------------------------------------------------------------------------------------------------

    def records(self) -> tuple[StepRecord, ...]:
        """The records of the last steps, oldest first. Waits for the device to pass the end of the last one."""
        for position, step in enumerate(self._finished):
            if isinstance(step, FinishedStep):
                self._finished[position] = resolve(step, self.mover.transfer)
        return tuple(step for step in self._finished if isinstance(step, StepRecord))

    def latest_record(self, *, wait: bool, complete: bool = False) -> StepRecord | None:
        """The record of the last step; unless ``wait``, of the last one that the device has passed already.

        Args:
            wait: for the device. complete: of the steps in which all forwards were looked at, and none raised.
        """
        return self._latest(wait=wait, complete=complete)

    def latest_timed_record(self) -> StepRecord | None:
        """The record of the last timed step that the device has passed already."""
        return self._latest(wait=False, timed=True) or self._last_timed

    def latest_saved(self) -> dict[tuple[str, int], int] | None:
        """Bytes of the slots of each forward of the last step; ``None`` if not all were looked at, or one raised."""
        step = self._finished[-1] if self._finished else None
        return None if step is None or step.unseen or step.raised else step.saved_by_forward

    def _latest(self, *, wait: bool, timed: bool = False, complete: bool = False) -> StepRecord | None:
        for position in reversed(range(len(self._finished))):
            step = self._finished[position]
            if (timed and not step.timed) or (complete and (step.unseen or step.raised)):
                continue
            if isinstance(step, FinishedStep) and (wait or step.is_over()):
                step = self._finished[position] = resolve(step, self.mover.transfer)
            if isinstance(step, StepRecord):
                return step
        return None

    def _adapt(self) -> None:
        """Set both bounds, unless they were given, and when bytes have left and come back to what the last timed step shows
        to be needed (the latter: the last two), once the device has passed it. The first steps do not show it: in them host
        memory is page-locked, and what takes long needs few bytes in flight.
        """
        if not self.returns.looks_ahead:  # who begins copies by hand says when
            return
        if self._timed_plan is not None and self._timed_plan.foreseen is not None:  # steps hold to that
            return
        records = self._timed_since(self._adapted_to)
        if not records:
            return
        self._adapted_to = records[-1].index
        for record in records[-2:]:  # a host that is ahead sees the first of them all at once
            if record.raised:
                continue
            pace, departures = pace_for(record), departures_for(record)
            if pace is not None:
                self.returns.pace, self._last_pace = pace.no_later_than(self._last_pace), pace
            if departures is not None:
                self.mover.departures = departures.no_earlier_than(self._last_departures)
                self._last_departures = departures
        adapts = self.adapts and self.watermarks is None  # where memory is limited a plan says how many
        bounds = bounds_for(records[-1]) if adapts and not records[-1].raised else None
        if bounds is not None:
            self.mover.max_in_flight, self.returns.max_ahead = int(bounds.out), int(bounds.back)

    def _forget_times(self) -> None:
        """Another plan: what did not go has no times. The next steps are timed until there are some."""
        self._timed_plan = self.rules.plan
        self.returns.pace = self._last_pace = None
        self.mover.departures = self._last_departures = None
        given = None if self.rules.plan is None else self.rules.plan.foreseen
        self.mover.holds = given is not None
        if given is not None:
            self.returns.pace, self.mover.departures = given.pace, given.departures
            if self.adapts:
                self.mover.max_in_flight, self.returns.max_ahead = int(given.bounds.out), int(given.bounds.back)
        self._adapted_to = self.steps - 1  # of the plan before
        self._timed_until = max(self._timed_until, self.steps + _TIMED_AGAIN)

    def _timed_since(self, index: int) -> list[StepRecord]:
        """The records of timed steps after one that the device has passed already, oldest first."""
        found = [self._last_timed] if self._last_timed is not None and self._last_timed.index > index else []
        for position, step in enumerate(self._finished):
            if step.timed and step.index > index:
                if isinstance(step, FinishedStep) and step.is_over():
                    step = self._finished[position] = resolve(step, self.mover.transfer)
                if isinstance(step, StepRecord):
                    found.append(step)
        return found
