"""How much of the host's time a session costs: for a slot of one tensor, for each further tensor, for a layer.

    ./run benchmarks.host_time [--device cpu] [--json FILE]

A layer here is an autograd function that saves some tensors, in one region, and does next to nothing else; its forward
and backward are timed with and without a session around it, over many layers, without a synchronization in between.
Medians over the rounds, with and without by turns, in microseconds of the host for forward and backward together.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from te_offload import OffloadSession

LAYERS = 32
COUNTS = (1, 2, 4, 16, 64)


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        return grad, *([None] * len(saved))


class Saver(torch.nn.Module):
    """Saves tensors for its backward, in a region or not."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1, device=tensors[0].device))
        self.tensors = tensors
        self.session: OffloadSession | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.session is None:
            y: torch.Tensor = _Save.apply(x, *self.tensors)  # type: ignore[no-untyped-call]
            return y
        with self.session.region("saved"):
            y = _Save.apply(x, *self.tensors)  # type: ignore[no-untyped-call]
        return y


def run(layers: list[Saver], x: torch.Tensor) -> float:
    """Microseconds of the host for one forward and backward of a layer."""
    start = time.perf_counter()
    y = x
    for layer in layers:
        y = layer(y)
    y.backward(torch.ones_like(y))
    return 1e6 * (time.perf_counter() - start) / len(layers)


def measure(device: torch.device, count: int, nbytes: int, rounds: int, min_bytes: int) -> float:
    """Microseconds that a session adds to a layer whose one slot has ``count`` tensors."""
    layers = [
        Saver([torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]) for _ in range(LAYERS)
    ]
    x = torch.zeros(1, device=device, requires_grad=True)
    session = OffloadSession(layers, min_bytes=min_bytes, max_in_flight="16GiB")
    without, with_session = [], []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for layer in layers:
            layer.session = None
        _sync(device)
        without.append(run(layers, x))
        for layer in layers:
            layer.session = session
        _sync(device)
        with session.step():
            with_session.append(run(layers, x))
        _sync(device)
    gc.enable()
    record = session.records[-1]
    assert (record.bytes_out > 0) == (min_bytes == 0)
    session.close()
    return statistics.median(with_session[4:]) - statistics.median(without[4:])


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nbytes", type=int, default=65536, help="of each tensor")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    place = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    rows = []
    for title, min_bytes in (("offloaded", 0), ("kept, too small", 1 << 40)):
        times = [measure(device, count, arguments.nbytes, arguments.rounds, min_bytes) for count in COUNTS]
        further = (times[-1] - times[0]) / (COUNTS[-1] - COUNTS[0])
        rows.append({"slot": title, "us": dict(zip(COUNTS, times, strict=True)), "us_per_further_tensor": further})
    print(f"Host time that a session adds to a layer with one slot, {place}, torch {torch.__version__}; us\n")
    print(f"| slot | {' | '.join(f'{count} tensors' for count in COUNTS)} | each further tensor |")
    print("|---" * (len(COUNTS) + 2) + "|")
    for row in rows:
        cells = " | ".join(f"{time:.1f}" for time in row["us"].values())  # type: ignore[attr-defined]
        print(f"| {row['slot']} | {cells} | {row['us_per_further_tensor']:.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "place": place, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
