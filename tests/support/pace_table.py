"""What it is worth to know by when copies are over, and when they must begin, step by step, on a simulated device.

    ./run tests.support.pace_table

In: nothing. Out: tables. Keeps true: a row's two sides draw the same times; the numbers are the same on every machine.
Does not: use a GPU.

The first table has a host that is where the device is: what is offloaded comes back as early as there is room, or with the
pace. The second has a host that is ahead of the device in a step: memory is let go of where the host sees that a copy out
is over, or by what timed steps show.

Slots of 12,800, 8,800 and 8,800 bytes a layer take 30.4 ms of the link each way; the first layers go, bounds in flight are
measured; 40 steps, means of the last 30, and the highest peak of saved tensors in timed steps of those. `varies` is the
deviation of the logarithm of each op's time from step to step. A third table is the timeline's: layers of 64 experts (slots
of 128, 88 and 88 MiB) with bounds of what a layer and a slot have, and a quarter more, and a link of an H200.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from te_offload.offload.timeline import Bounds, Forecast, Link, Parcel, Work, simulate
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import ONE, Order, Training, engine_on

SLOTS = (12_800, 8_800, 8_800)
STEPS, SETTLED = 40, 10
ORDERS: dict[str, Order] = {
    "one micro-batch": ONE,
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


def measure(
    shape: Shape, order: Order, varies: float, *, ahead: bool = False, paced: bool = True, departs: bool = True
) -> Found:
    """Run the steps; ``ahead``: by a host that is ahead of the device."""
    device = SimulatedDevice(lockstep=not ahead)
    with engine_on(device, paced=paced, departs=departs):
        times = shape.forward_ms, shape.backward_ms
        training = Training(device, shape.layers, SLOTS, *times, varies=varies, seed=1)
        ms, waits, peaks, back = [], [], [], []
        with training.session(plan=training.plan(shape.going, order)) as session:
            for number in range(STEPS):
                waited = device.waited
                ms.append(training.step(session, order))
                waits.append(device.waited - waited)
                record = session.records[-1]
                back.append(record.bytes_back)
                if record.timed and number > SETTLED:
                    peaks.append(record.peak_resident)
    means = [statistics.mean(each[SETTLED:]) for each in (ms, waits, back)]
    return Found(means[0], means[1], max(peaks), round(means[2]))


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


def _rows(ahead: bool) -> Iterator[str]:
    """A table's: both sides, without what the module's first paragraph says, and with it."""
    for name, order in ORDERS.items():
        for shape in WHOLE if len(order) == 2 else PARTS:
            for varies in (0.0, 0.15, 0.4):
                left_out = {"departs": False} if ahead else {"paced": False}
                sides = [measure(shape, order, varies, ahead=ahead, **each) for each in (left_out, {})]
                cells = [f"{one.ms:.1f}, {one.waits_ms:.1f} | {one.peak:,}, {one.back:,}" for one in sides]
                times = f"{shape.forward_ms:g}, {shape.backward_ms:g}"
                yield f"| {name} | {shape.going} of {shape.layers} | {times} | {varies} | {' | '.join(cells)} |"


def main() -> None:
    """Print the tables."""
    for ahead, titles in (
        (False, ("at once", "with the pace")),
        (True, ("where the host sees that copies are over", "by what timed steps show")),
    ):
        heads = [f"{title}: step ms, waits | peak, back" for title in titles]
        print(f"| micro-batches | layers going | ms, forward, backward | varies | {' | '.join(heads)} |")
        print("|---|---|---|---|---|---|---|---|")
        for row in _rows(ahead):
            print(row, flush=True)
        print()
    print("| by the timeline | ms, peak MiB | then ms, peak MiB |\n|---|---|---|")
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
