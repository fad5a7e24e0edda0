"""Training steps of a stack on a simulated device.

In: how many layers, their slots and times, the order of forwards and backwards, what of the engine is left out. Out: a
step's milliseconds; plans. Keeps true: two stacks with one seed draw the same times. Does not: judge.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from te_offload import OffloadSession, Plan, PlannedSlot
from te_offload.offload import engine as engine_module
from te_offload.offload import planner as planner_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.timeline import Link
from tests.support.simulated_device import RATE, SimulatedDevice, WorkingOp, stack

Order = Sequence[tuple[str, int]]  # forwards and backwards of micro-batches
ONE: Order = (("F", 0), ("B", 0))


@contextlib.contextmanager
def engine_on(device: SimulatedDevice, *, paced: bool = True, departs: bool = True) -> Iterator[None]:
    """Sessions offload on the device, each slot by itself.

    Args:
        device: which. paced: whether bytes come back in time and not at once. departs: whether memory is let go of where
            copies out are over by what timed steps show, or only where the host sees that they are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "make_transfer", lambda *_: device)
        patch.setattr(session_module, "Rules", functools.partial(Rules, together=0))
        patch.setattr(planner_module, "probe_link", lambda *_: Link(RATE, RATE, RATE, RATE))
        for on, name in ((paced, "pace_for"), (departs, "departures_for")):
            if not on:
                patch.setattr(engine_module, name, lambda _: None)
        yield


class Training:
    """A stack of layers whose slots share their times.

    Args:
        device: where. layers: how many. slots: bytes of each of a layer's. forward_ms, backward_ms: a layer's.
        loss_ms: what follows the last layer's forward takes, before another forward or a backward.
        varies: how far the times of ops move from step to step, the deviation of their logarithm. seed: of that.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        layers: int,
        slots: Sequence[int],
        forward_ms: float,
        backward_ms: float,
        *,
        loss_ms: float = 0.0,
        varies: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.device = device
        self.model = stack(device, layers, slots, forward_ms, backward_ms)
        self._ops = [(op, op.forward_ms, op.backward_ms) for op in self.model.modules() if isinstance(op, WorkingOp)]
        self._loss_ms = loss_ms
        self._varies = varies
        self._draw = random.Random(seed)

    def session(self, **arguments: Any) -> OffloadSession:
        """Of all layers, with no least bytes."""
        return OffloadSession(list(self.model), min_bytes=0, **arguments)

    def step(self, session: OffloadSession, order: Order = ONE, *, waits: bool = True) -> float:
        """One step; its milliseconds. ``waits``: the host does, before, for the end of the one before."""
        if waits:
            self.device.synchronize()
        began = self.device.compute
        outputs: dict[int, torch.Tensor] = {}
        with session.step():
            for kind, number in order:
                self._vary()
                if kind == "F":
                    outputs[number] = self.model(torch.zeros(1, requires_grad=True))
                    self.device.compute += self._loss_ms
                else:
                    outputs.pop(number).backward()
        return self.device.compute - began

    def _vary(self) -> None:
        for op, forward_ms, backward_ms in self._ops:
            op.forward_ms = forward_ms * self._draw.lognormvariate(0.0, self._varies)
            op.backward_ms = backward_ms * self._draw.lognormvariate(0.0, self._varies)

    def plan(self, going: int, order: Order = ONE) -> Plan:
        """That of so many layers, from the first one on; a step is run for the names of the slots."""
        with self.session(max_in_flight=1 << 20) as session:
            self.step(session, order)
            rows = session.records[-1].slots
        names = {f"layer{number}" for number in range(going)}
        return Plan(tuple(PlannedSlot(row.name, row.forward, 0, row.layer in names) for row in rows))
