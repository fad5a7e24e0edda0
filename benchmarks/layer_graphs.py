"""Layers as graphs of their own, with offloading between them and without, beside eager ones: time and memory.

    ./run benchmarks.layer_graphs [--layers 24 --experts 8 --hidden 4096 --ffn 2048 --tokens 32768] [--fraction 0.25]
                                  [--recipe bf16|current|blocks] [--weights-made-again] [--main-grad]
                                  [--ways eager "layer graphs"] [--one-thread] [--rounds 10] [--max-in-flight 256MiB]
                                  [--json FILE]

A layer is a norm, a grouped MLP of te_offload and a residual; what comes before the first one has a parameter too, as an
embedding has, so that each layer's input requires a gradient. Gradients stay from step to step and are zeroed, as under a
distributed optimizer; with `--main-grad` wgrad itself adds the experts' to ``main_grad`` (of the weights' dtype), and not
autograd. With a recipe forwards stand inside ``te.autocast``, and `--weights-made-again` keeps no quantized weights between
forward and backward. Each way runs a few steps in a process of its own, where `least free` is the least
that `cudaMemGetInfo` said, sampled all the time from before the first step on; then all ways are timed in one process,
interleaved and in both orders: medians over the rounds, by events of the GPU, of two steps in a row with other inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

from benchmarks.grouped_mlp import split
from te_offload import OffloadSession, ops
from te_offload.fused import hopper
from te_offload.graphs import LayerGraphs, capture_layers
from te_offload.units import format_bytes

RECIPES = {"bf16": None, "current": Float8CurrentScaling(), "blocks": Float8BlockScaling()}
WAYS = ("eager", "eager, offload", "layer graphs", "layer graphs, offload")
STEPS = 6
WARM_UP = 24  # plan, capture, and rounds until memory that captures and the first steps took has gone back
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layer(torch.nn.Module):
    """A norm, experts, and a residual."""

    def __init__(self, experts: int, hidden: int, ffn: int, *, keep_weights: bool, main_grad: bool) -> None:
        super().__init__()
        size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        size["keep_quantized_weight"] = keep_weights
        size["accumulate_into_main_grad"] = main_grad
        self.norm = te.RMSNorm(hidden, device="cuda", dtype=torch.bfloat16)
        self.experts = te.ops.Sequential(
            ops.GroupedLinear(experts, hidden, ffn, **size),
            ops.ScaledSReLU(),
            ops.GroupedLinear(experts, ffn, hidden, **size),
        )

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """``x`` and what the experts make of it."""
        found: torch.Tensor = x + self.experts(self.norm(x), sizes, scales, sizes)
        return found


class Way:
    """One way to run a step.

    Args:
        name: of `WAYS`. arguments: of the command line. layers: to share the parameters of.
    """

    def __init__(self, name: str, arguments: argparse.Namespace, layers: torch.nn.ModuleList | None = None) -> None:
        self._name = name
        torch.manual_seed(0)
        size = arguments.experts, arguments.hidden, arguments.ffn
        kind = {"keep_weights": not arguments.weights_made_again, "main_grad": arguments.main_grad}
        self.layers = torch.nn.ModuleList(Layer(*size, **kind) for _ in range(arguments.layers))
        self._recipe = RECIPES[arguments.recipe]
        if layers is not None:
            for ours, theirs in zip(self.layers.parameters(), layers.parameters(), strict=True):
                ours.data = theirs.data
        self.before = torch.nn.Parameter(torch.ones(arguments.hidden, device="cuda", dtype=torch.bfloat16))
        self._grads: list[torch.Tensor] = []
        for title, parameter in (("before", self.before), *self.layers.named_parameters()):
            self._grads.append(torch.zeros_like(parameter))
            setattr(parameter, "main_grad" if arguments.main_grad and ".experts." in title else "grad", self._grads[-1])
        self.session: OffloadSession | None = None
        if "offload" in name:
            self.session = OffloadSession(
                self.layers,
                policy="planned",
                fraction=arguments.fraction,
                min_bytes="1MiB",
                max_in_flight=arguments.max_in_flight,
            )
        self.graphs: LayerGraphs | None = None
        if "graphs" in name:
            self.graphs = capture_layers(self.layers, session=self.session)

    def step(self, inputs: Inputs) -> None:
        """Forward and backward."""
        torch._foreach_zero_(self._grads)
        if self.session is None:
            self._pass(inputs)
        else:
            with self.session.step():
                self._pass(inputs)

    def _pass(self, inputs: Inputs) -> None:
        x, sizes, scales = inputs
        x = x * self.before
        with te.autocast(enabled=self._recipe is not None, recipe=self._recipe):
            for layer in self.layers:
                x = layer(x, sizes, scales)
        x.backward(torch.full_like(x, 1e-3))

    def check(self) -> None:
        """Stop if it does not run as it is named."""
        if "graphs" in self._name and (self.graphs is None or not self.graphs.captured):
            raise SystemExit(f"{self._name}: {self.graphs and self.graphs.report()}")
        if "offload" in self._name and not self.out():
            raise SystemExit(f"{self._name}: nothing went to the host")

    def out(self) -> int:
        """Bytes to the host in the last step."""
        return 0 if self.session is None else self.session.records[-1].bytes_out


def inputs_of(arguments: argparse.Namespace) -> list[Inputs]:
    """Two batches with one routing."""
    sizes = torch.tensor(split(arguments.experts, arguments.tokens, skew=None), device="cuda")
    return [
        (
            torch.randn(arguments.tokens, arguments.hidden, device="cuda", dtype=torch.bfloat16),
            sizes,
            torch.rand(arguments.tokens, device="cuda"),
        )
        for _ in range(2)
    ]


def memory_of(name: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Least free memory of a process that runs one way, and the most it had before."""
    way, inputs = Way(name, arguments), inputs_of(arguments)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(WARM_UP):
        way.step(inputs[0])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    least, done = [before], threading.Event()

    def sample() -> None:
        while not done.wait(5e-4):
            least[0] = min(least[0], torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=sample)
    thread.start()
    for number in range(STEPS):
        way.step(inputs[number % 2])
    torch.cuda.synchronize()
    least[0] = min(least[0], torch.cuda.mem_get_info()[0])
    done.set()
    thread.join()
    way.check()
    found = {"before": before, "least free": least[0], "out": way.out()}
    found["torch reserved"] = torch.cuda.memory_reserved()
    found["torch allocated, most"] = torch.cuda.max_memory_allocated()
    if way.graphs is not None:
        found["graphs hold"] = way.graphs.held_bytes
        print(way.graphs.report().splitlines()[-1], file=sys.stderr)
    return found


def milliseconds(step: Callable[[Inputs], None], inputs: list[Inputs]) -> float:
    """GPU time of one of two steps in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for batch in inputs:
        step(batch)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / len(inputs)


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = ("layers", 24), ("experts", 8), ("hidden", 4096), ("ffn", 2048), ("tokens", 32768), ("rounds", 10)
    for flag, value in numbers:
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--fraction", type=float, default=0.25, help="of the bytes that may go")
    parser.add_argument("--recipe", choices=RECIPES, default="bf16")
    parser.add_argument("--weights-made-again", action="store_true", help="keep_quantized_weight=False")
    parser.add_argument("--main-grad", action="store_true", help="accumulate_into_main_grad")
    parser.add_argument("--one-thread", action="store_true", help="autograd works in the calling thread, in all ways")
    parser.add_argument("--max-in-flight", default="256MiB", help="of the sessions")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="which; the first is compared with")
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    os.environ[hopper.SWITCH] = "1"
    torch.autograd.set_multithreading_enabled(not arguments.one_thread)
    if arguments.memory_of:
        print(json.dumps(memory_of(arguments.memory_of, arguments)))
        return
    rows: dict[str, dict[str, Any]] = {}
    names: tuple[str, ...] = tuple(arguments.ways)
    for name in names:
        command = [sys.executable, "-m", "benchmarks.layer_graphs", *sys.argv[1:], "--memory-of", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, rows[name], file=sys.stderr, flush=True)
    ways: dict[str, Way] = {}
    for name in names:
        ways[name] = Way(name, arguments, ways[names[0]].layers if ways else None)
    inputs = inputs_of(arguments)
    for way in ways.values():
        for _ in range(8):
            way.step(inputs[0])
        way.check()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            times[name].append(milliseconds(ways[name].step, inputs))
    for name, row in rows.items():
        row["ms"] = statistics.median(times[name])
        row["out in the timing"] = ways[name].out()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; L{arguments.layers} E{arguments.experts} "
        f"H{arguments.hidden} F{arguments.ffn} T{arguments.tokens} {arguments.recipe}"
        f"{', weights made again' if arguments.weights_made_again else ''}{', main_grad' if arguments.main_grad else ''}"
        f"{', backward in the calling thread' if arguments.one_thread else ''}, "
        f"fused, fraction {arguments.fraction}; "
        f"{arguments.rounds} rounds\n"
    )
    print(
        "| way | ms | out | least free (driver) | more than the first | share of what went out |\n|---|---|---|---|---|---|"
    )
    for name, row in rows.items():
        more = row["least free"] - rows[names[0]]["least free"]
        share = f"{more / row['out']:.0%}" if row["out"] else ""
        print(
            f"| {name} | {row['ms']:.2f} | {format_bytes(row['out'])} | {format_bytes(row['least free'])} | "
            f"{'-' if more < 0 else ''}{format_bytes(abs(more))} | {share} |"
        )
    if arguments.json:
        result = {
            "schema": "1.3",
            "shape": [arguments.layers, arguments.experts, arguments.hidden, arguments.ffn, arguments.tokens],
            "recipe": arguments.recipe,
            "weights_made_again": arguments.weights_made_again,
            "main_grad": arguments.main_grad,
            "one_thread": arguments.one_thread,
            "fraction": arguments.fraction,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
