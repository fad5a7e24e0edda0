"""The fused grouped MLP from 8 to 512 experts at the same number of tokens: launches, host time, and the step's bound.

    ./run benchmarks.expert_counts [--hidden 2048 --ffn 1408 --tokens 32768] [--counts 8,64,512] [--json FILE]

`launches` are the kernels of one forward and backward, as the profiler sees them. `host` is what a forward takes the host,
with one weight an expert and with one grouped weight. `bound` is the larger of two times: that of the step's FLOP, with
each expert's rows padded to whole tiles of 128, at the rate of a large dense bf16 GEMM; and that of reading all weights
twice and writing their gradients once, at the rate at which a copy reads and writes. Both rates are measured in this run.
`by launch` is stricter: the six products run one after the other, so each takes the larger of its two times, and its rows
are read and written too.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.grouped_mlp import Case, captured, host_milliseconds, milliseconds, split
from te_offload.fused import hopper

TILE = 128


def median(measure: Callable[[], float], rounds: int) -> float:
    """Of a few measurements after a warm-up."""
    measure()
    return statistics.median(measure() for _ in range(rounds))


def dense_rate(rounds: int) -> float:
    """FLOP a millisecond of a bf16 GEMM of 8192 cubed."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median(lambda: milliseconds(lambda: a @ b), rounds)


def copy_rate(rounds: int) -> float:
    """Bytes a millisecond of memory traffic in a copy of 1 GiB."""
    source = torch.zeros(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(lambda: milliseconds(lambda: target.copy_(source)), rounds)


def launches(step: Callable[[], Any]) -> int:
    """Kernels of one call."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return len([event for event in profile.events() or () if event.device_type.name == "CUDA"])


def bound(experts: int, hidden: int, ffn: int, tokens: int, rates: tuple[float, float]) -> float:
    """Milliseconds; see the head of this file."""
    padded = sum(-(-size // TILE) * TILE for size in split(experts, tokens, skew=None))
    flop = 2 * hidden * ffn * (4 * padded + 2 * tokens)
    nbytes = 3 * 2 * experts * hidden * ffn * 2
    return max(flop / rates[0], nbytes / rates[1])


def bound_by_launch(experts: int, hidden: int, ffn: int, tokens: int, rates: tuple[float, float]) -> float:
    """Milliseconds; see the head of this file."""
    padded = sum(-(-size // TILE) * TILE for size in split(experts, tokens, skew=None))
    weights = experts * hidden * ffn
    # Of each product: rows that it multiplies, and rows of hidden and of ffn that it reads or writes. FC1 writes its input
    # to the activation and FC2's; FC2's dgrad reads the former, and writes its gradient and the latter again.
    products = (padded, 1, 2), (padded, 1, 1), (padded, 1, 3), (padded, 1, 1), (tokens, 1, 1), (tokens, 1, 1)
    times = [
        max(2 * rows * hidden * ffn / rates[0], 2 * (weights + tokens * (wide * hidden + narrow * ffn)) / rates[1])
        for rows, wide, narrow in products
    ]
    return sum(times)


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 2048), ("ffn", 1408), ("tokens", 32768), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--counts", default="8,16,32,64,128,256,512", help="numbers of experts")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    os.environ |= {hopper.SWITCH: "1", "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
    size = arguments.hidden, arguments.ffn, arguments.tokens
    rates = dense_rate(arguments.rounds), copy_rate(arguments.rounds)
    rows: list[dict[str, Any]] = []
    for experts in map(int, arguments.counts.split(",")):
        row: dict[str, Any] = {"experts": experts, "bound_ms": bound(experts, *size, rates)}
        row["bound_by_launch_ms"] = bound_by_launch(experts, *size, rates)
        for name, single in (("separate", False), ("grouped", True)):
            case = Case(experts, *size, skew=None, single=single)
            step, forward = case.step_of(case.fused), case.forward_of(case.fused)
            row[f"{name}_launches"] = launches(step)
            row[f"{name}_host_ms"] = median(functools.partial(host_milliseconds, forward), arguments.rounds)
            if not single:
                replay = captured(step)
                row["graph_ms"] = median(functools.partial(milliseconds, replay), arguments.rounds)
                del replay
            del case, step, forward
            gc.collect()
            torch.cuda.empty_cache()
        rows.append(row)
    print(
        f"{torch.cuda.get_device_name()}; H{size[0]} F{size[1]} T{size[2]} bf16; dense GEMM {rates[0] / 1e9:.0f} TFLOP/s,"
    )
    print(f"copy {rates[1] / 1e9:.2f} TB/s; {arguments.rounds} rounds\n")
    print(
        "| experts | launches | host, forward: separate weights | one grouped weight | graph ms | bound ms | ratio "
        "| by launch ms | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['experts']} | {row['separate_launches']} / {row['grouped_launches']} | {row['separate_host_ms']:.3f} "
            f"| {row['grouped_host_ms']:.3f} | {row['graph_ms']:.3f} | {row['bound_ms']:.3f} "
            f"| {row['graph_ms'] / row['bound_ms']:.2f} | {row['bound_by_launch_ms']:.3f} "
            f"| {row['graph_ms'] / row['bound_by_launch_ms']:.2f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "rates": rates, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
