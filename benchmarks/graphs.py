"""A training step of grouped MLPs as a CUDA graph, with offloading inside and without, beside the same step run eagerly.

    ./run benchmarks.graphs [--layers 8 --experts 64 --hidden 2048 --ffn 1408 --tokens 32768] [--unfused] [--rounds 20]
                            [--gradients stay|new] [--fraction 0.3] [--max-in-flight 256MiB] [--apart] [--json FILE]

All ways have the same weights, and gradients of their own; each call brings another input, whose copy into the graph's
buffer is part of its time. Gradients stay from step to step and are zeroed, as under a distributed optimizer; `new` ones
are made in each step, in the graph's memory, where they take the place of what the backward has done with. Ways are
interleaved and in both orders; medians over the rounds, by events of the GPU, of two calls in a row. `pool` is what the
allocator reserves for the graph while it is captured, `out` the bytes that leave the device in a step. With few tokens
(`--tokens 1024`) the step is bound by launches, which is what a graph saves. ``--apart`` runs each way in a process of its
own, one after the other, there and back: copies of a captured step were seen to be slower after another session in the
process.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te

from benchmarks.grouped_mlp import split
from te_offload import OffloadSession, ops
from te_offload.fused import hopper
from te_offload.graphs import capture
from te_offload.ops import te_adapter
from te_offload.units import format_bytes

CALLS = 2
WAYS = ("eager", "eager, offload", "graph", "graph, offload")
WARM_UP = 8  # runs, in which a plan is made
Step = Callable[..., torch.Tensor]


class Stack(torch.nn.Module):
    """Grouped MLPs with residuals."""

    def __init__(self, layers: int, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.layers = torch.nn.ModuleList(
            te.ops.Sequential(
                ops.GroupedLinear(experts, hidden, ffn, **size),
                ops.ScaledSReLU(),
                ops.GroupedLinear(experts, ffn, hidden, **size),
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """``x`` and what each layer makes of it."""
        for layer in self.layers:
            x = x + layer(x, sizes, scales, sizes)
        return x


def step_of(model: Stack, *, stay: bool) -> Step:
    """Forward and backward, into gradients that stay or with new ones."""
    parameters = list(model.parameters())
    gradients = [torch.zeros_like(parameter) for parameter in parameters] if stay else []
    for parameter, gradient in zip(parameters, gradients, strict=stay):
        parameter.grad = gradient

    def step(x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if stay:
            torch._foreach_zero_(gradients)
        else:
            for parameter in parameters:
                parameter.grad = None
        loss: torch.Tensor = model(x, sizes, scales).float().square().mean()
        loss.backward()
        return loss.detach()

    return step


def with_session(step: Step, session: OffloadSession) -> Step:
    """Each call is a step of a session."""

    def stepped(*inputs: torch.Tensor) -> torch.Tensor:
        with session.step():
            return step(*inputs)

    return stepped


def milliseconds(step: Step, inputs: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """GPU time of one of a few calls, each with another input."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for call in range(CALLS):
        step(*inputs[call % len(inputs)])
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / CALLS


def measured(
    names: Sequence[str], arguments: argparse.Namespace, inputs: Sequence[tuple[torch.Tensor, ...]]
) -> dict[str, dict[str, Any]]:
    """Ways interleaved in this process."""
    size = arguments.layers, arguments.experts, arguments.hidden, arguments.ffn
    first = Stack(*size)
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        model = Stack(*size)
        for ours, theirs in zip(model.parameters(), first.parameters(), strict=True):
            ours.data = theirs.data
        row: dict[str, Any] = {"pool": None, "out": 0}
        session = None
        if "offload" in name:
            session = OffloadSession(
                model.layers, min_bytes="1MiB", max_in_flight=arguments.max_in_flight, fraction=arguments.fraction
            )
        step = step_of(model, stay=arguments.gradients == "stay")
        if "graph" in name:
            replay = capture(step, inputs[0], session=session, modules=[model], warmup=WARM_UP)
            for _ in range(WARM_UP):
                replay(*inputs[0])
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            replay.record()
            row["pool"] = torch.cuda.memory_reserved() - before
            if replay.reason is not None:
                raise SystemExit(f"{name}: not captured: {replay.reason}")
            steps[name] = replay
        else:
            steps[name] = step if session is None else with_session(step, session)
        for _ in range(WARM_UP):
            steps[name](*inputs[0])
        if session is not None:
            record = session.records[-1]  # of a captured session: of its capture, whose order the graph keeps
            row["out"] = record.bytes_out
            row["in flight"] = record.peak_in_flight
            row["saved"] = sum(slot.nbytes for slot in record.slots)
            row["resident"] = record.peak_resident
        rows[name] = row
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(steps):
            times[name].append(milliseconds(steps[name], inputs))
    for name, row in rows.items():
        row["ms"] = statistics.median(times[name])
    return rows


def measured_apart(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each way in two processes of its own, there and back; the mean of their medians."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in [*names, *reversed(names)]:
        rest = [one for one in sys.argv[1:] if one != "--apart"]
        command = [sys.executable, "-m", "benchmarks.graphs", *rest, "--way", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {name: rows[0] | {"ms": statistics.fmean(row["ms"] for row in rows)} for name, rows in found.items()}


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = ("layers", 8), ("experts", 64), ("hidden", 2048), ("ffn", 1408), ("tokens", 32768), ("rounds", 20)
    for name, value in numbers:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--unfused", action="store_true", help="Transformer Engine's grouped path")
    parser.add_argument("--gradients", choices=("stay", "new"), default="stay", help="where gradients are")
    parser.add_argument("--fraction", type=float, help="of the bytes that may go, chosen by a plan; default: all go")
    parser.add_argument("--max-in-flight", default="256MiB", help="of the sessions")
    parser.add_argument("--apart", action="store_true", help="each way in a process of its own")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    os.environ[hopper.SWITCH] = "0" if arguments.unfused else "1"
    size = arguments.layers, arguments.experts, arguments.hidden, arguments.ffn
    sizes = torch.tensor(split(arguments.experts, arguments.tokens, skew=None), device="cuda")
    inputs = []
    for _ in range(2):
        x = torch.randn(arguments.tokens, arguments.hidden, device="cuda", dtype=torch.bfloat16)
        inputs.append((x, sizes, torch.rand(arguments.tokens, device="cuda")))
    names: tuple[str, ...] = (arguments.way,) if arguments.way else WAYS
    rows = measured_apart(names) if arguments.apart else measured(names, arguments, inputs)
    if arguments.way:
        print(json.dumps(rows[arguments.way]))
        return
    number = te_adapter.cublaslt_version()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cublaslt {number // 10000}.{number // 100 % 100}; "
        f"L{size[0]} E{size[1]} H{size[2]} F{size[3]} T{arguments.tokens} bf16, "
        f"{'unfused' if arguments.unfused else 'fused'}, fraction {arguments.fraction}, gradients {arguments.gradients}; "
        f"{arguments.rounds} rounds{', a process each' if arguments.apart else ''}\n"
    )
    print("| way | ms | pool | out |\n|---|---|---|---|")
    for name, row in rows.items():
        pool = "" if row["pool"] is None else format_bytes(row["pool"])
        print(f"| {name} | {row['ms']:.3f} | {pool} | {format_bytes(row['out'])} |")
    ratio = functools.partial(_ratio, rows)
    print(
        f"\neager / graph: {ratio('eager', 'graph'):.2f}; with offloading: {ratio('eager, offload', 'graph, offload'):.2f}"
    )
    smaller = rows["graph"]["pool"] - rows["graph, offload"]["pool"]
    offloads = rows["graph, offload"]
    asked = offloads["out"] - offloads["in flight"]
    share = f" ({smaller / asked:.2f} times as much)" if asked > 0 else ""
    print(
        f"The pool is smaller by {format_bytes(smaller)}. What goes less what is in flight at the most: "
        f"{format_bytes(asked)}{share}. Of {format_bytes(offloads['saved'])} saved, "
        f"{format_bytes(offloads['resident'])} are on the GPU at the most."
    )
    if arguments.json:
        result = {
            "schema": "1.0",
            "shape": size,
            "tokens": arguments.tokens,
            "fused": not arguments.unfused,
            "fraction": arguments.fraction,
            "gradients": arguments.gradients,
            "apart": arguments.apart,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def _ratio(rows: dict[str, dict[str, Any]], one: str, other: str) -> float:
    return float(rows[one]["ms"] / rows[other]["ms"])


if __name__ == "__main__":
    main()
