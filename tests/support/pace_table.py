"""What the pace of copies back is worth, step by step, on a simulated device: times, waits and peaks with it and without.

    ./run tests.support.pace_table

In: nothing. Out: a table. Keeps true: a row's two sides draw the same times; the numbers are the same on every machine.
Does not: use a GPU.

Slots of 12,800, 8,800 and 8,800 bytes a layer take 30.4 ms of the link each way; the first layers go, bounds in flight are
measured; 40 steps, means of the last 30, and the highest peak of saved tensors in timed steps. `varies` is the deviation of
the logarithm of each op's time from step to step. A second table is the timeline's: layers of 64 experts (slots of 128, 88
and 88 MiB) with bounds of what a layer and a slot have, and a quarter more, and a link of an H200.
"""

from __future__ import annotations

import functools
import random
import statistics
from typing import NamedTuple

import pytest
import torch

from te_offload import OffloadSession, Plan, PlannedSlot
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.timeline import Bounds, Forecast, Link, Parcel, Work, simulate
from tests.support.simulated_device import SimulatedDevice, WorkingOp, stack

SLOTS = (12_800, 8_800, 8_800)
STEPS, SETTLED = 40, 10
Order = tuple[tuple[str, int], ...]  # forwards and backwards of micro-batches
ORDERS: dict[str, Order] = {
    "one micro-batch": (("F", 0), ("B", 0)),
    "four, one after the other": tuple((kind, number) for number in range(4) for kind in "FB"),
    "six, 1F1B": tuple(
        (name[0], int(name[1])) for name in ("F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "F5", "B3", "B4", "B5")
    ),
    "four, all forwards first": tuple((kind, number) for kind in "FB" for number in range(4)),
}


class Shape(NamedTuple):
    """Layers, how many of them go, and milliseconds of a layer's forward and backward."""

    layers: int
    going: int
    forward_ms: float
    backward_ms: float


WHOLE = (
    *(Shape(8, 1, 40.0, 80.0), Shape(8, 5, 40.0, 80.0), Shape(8, 6, 30.0, 60.0), Shape(8, 6, 30.0, 31.0)),
    *(Shape(8, 6, 11.0, 22.0), Shape(24, 12, 30.0, 50.0)),
)
PARTS = (Shape(4, 2, 40.0, 80.0), Shape(4, 3, 30.0, 60.0), Shape(4, 4, 40.0, 80.0), Shape(4, 3, 11.0, 22.0))


MIB = 1 << 20
EXPERTS_64 = (128 * MIB, 88 * MIB, 88 * MIB)
LINK = Link(out=55e6, back=55.2e6, out_duplex=50.5e6, back_duplex=51.6e6)  # bytes a millisecond
SLOW = {"forward_ms": 4.4, "backward_ms": 7.5}  # a layer, where the host is slow


class Found(NamedTuple):
    """Milliseconds of a step and of its waits, and bytes at the peak and back a step."""

    ms: float
    waits_ms: float
    peak: int
    back: int


def measure(shape: Shape, order: Order, varies: float, *, paced: bool) -> Found:
    """Run the steps."""
    with pytest.MonkeyPatch.context() as patch:
        device = SimulatedDevice(lockstep=True)
        patch.setattr(engine_module, "make_transfer", lambda *_: device)
        patch.setattr(session_module, "Rules", functools.partial(Rules, together=0))
        if not paced:
            patch.setattr(engine_module, "pace_for", lambda _: None)
        model = stack(device, shape.layers, SLOTS, shape.forward_ms, shape.backward_ms)
        ops = [(op, op.forward_ms, op.backward_ms) for op in model.modules() if isinstance(op, WorkingOp)]
        draw = random.Random(1)

        def step(session: OffloadSession) -> tuple[float, float]:
            began, waited = device.compute, device.waited
            outputs: dict[int, torch.Tensor] = {}
            with session.step():
                for kind, number in order:
                    for op, forward_ms, backward_ms in ops:
                        op.forward_ms = forward_ms * draw.lognormvariate(0.0, varies)
                        op.backward_ms = backward_ms * draw.lognormvariate(0.0, varies)
                    if kind == "F":
                        outputs[number] = model(torch.zeros(1, requires_grad=True))
                    else:
                        outputs.pop(number).backward()
            return device.compute - began, device.waited - waited

        with OffloadSession(list(model), min_bytes=0) as session:
            step(session)
            rows = session.records[-1].slots
        going = [f"layer{number}" for number in range(shape.going)]
        plan = Plan(tuple(PlannedSlot(row.name, row.forward, 0, row.layer in going) for row in rows))
        times, peaks, back = [], [], []
        with OffloadSession(list(model), min_bytes=0, plan=plan) as session:
            for number in range(STEPS):
                times.append(step(session))
                record = session.records[-1]
                back.append(record.bytes_back)
                if record.timed and number > 2:
                    peaks.append(record.peak_resident)
    ms, waits = (statistics.mean(each) for each in zip(*times[SETTLED:], strict=True))
    return Found(ms, waits, max(peaks), round(statistics.mean(back[SETTLED:])))


def forecast(shape: Shape, *, stays: int | None = None, out: float = 1.0, back: float = 1.0, paced: bool) -> Forecast:
    """A step by the timeline; ``stays``: the number of a slot that does not go; ``out``, ``back``: times the bounds."""
    keys = [(f"layer{number}", 0) for number in range(shape.layers)]
    work = [Work(key, False, shape.forward_ms) for key in keys]
    work += [Work(key, True, shape.backward_ms) for key in reversed(keys)]
    parcels = {
        key: [Parcel(nbytes, layer < shape.going and slot != stays) for slot, nbytes in enumerate(EXPERTS_64)]
        for layer, key in enumerate(keys)
    }
    going = [parcel.nbytes for parcel in parcels[keys[0]] if parcel.goes]
    least_out, least_back = (
        1.25 * (min(rate * ms, sum(going)) + max(going))
        for rate, ms in ((LINK.out, shape.forward_ms), (LINK.back, shape.backward_ms))
    )
    return simulate(work, parcels, LINK, Bounds(out * least_out, back * least_back, recall=True, paced=paced))


def main() -> None:
    """Print the tables."""
    print(
        "| micro-batches | layers going | ms, forward, backward | varies | at once: step ms, waits | peak, back | ",
        end="",
    )
    print("with the pace | peak, back |\n|---|---|---|---|---|---|---|---|")
    for name, order in ORDERS.items():
        for shape in WHOLE if len(order) == 2 else PARTS:
            for varies in (0.0, 0.15, 0.4):
                sides = [measure(shape, order, varies, paced=paced) for paced in (False, True)]
                cells = [f"{one.ms:.1f}, {one.waits_ms:.1f} | {one.peak:,}, {one.back:,}" for one in sides]
                times = f"{shape.forward_ms:g}, {shape.backward_ms:g}"
                print(
                    f"| {name} | {shape.going} of {shape.layers} | {times} | {varies} | {' | '.join(cells)} |",
                    flush=True,
                )
    print("\n| by the timeline | ms, peak MiB | then ms, peak MiB |\n|---|---|---|")
    slow = Shape(8, 6, **SLOW)
    many, way = forecast(slow, out=4, back=4, paced=False), forecast(slow, out=4, paced=False)
    rows = [("6 of 8, both bounds four times; the one out alone", many, way)]
    shapes = (("1 of 8", Shape(8, 1, **SLOW), None), ("6 of 8, act_input kept", slow, 1))
    for title, shape, stays in (*shapes, ("12 of 24", Shape(24, 12, **SLOW), None)):
        at_once, paced = (forecast(shape, stays=stays, paced=paced) for paced in (False, True))
        rows.append((f"{title}: at once; with the pace", at_once, paced))
    for title, *both in rows:
        cells = [f"{one.step_ms:.1f}, {one.peak_bytes / MIB:,.0f}" for one in both]
        print(f"| {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
