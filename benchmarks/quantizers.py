"""Quantizers of FP8 with current scaling on Hopper: weights, and rows of experts, from one reading of memory and from two.

    ./run benchmarks.quantizers [--experts 64 --hidden 2048 --ffn 1408 --tokens 32768 --rounds 6 --json FILE]

A row for FC1's weights and for FC2's, and one for FC1's input with even and with random routing and with an expert that
has half, each as it lies and both ways round. ``one reading`` is what `fp8_current` launches, ``two`` are the kernels of
`fp8` (rows alone), ``Transformer Engine`` is its quantizer, a call an expert. All as graphs of some calls, by turns and in
both orders, medians of GPU time a call; ``bytes``: one reading and the numbers at the measured rate of a copy. Inverse
scales and numbers must have the same bits in all ways, or it ends with an error.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex

from benchmarks.grouped_mlp import captured, milliseconds, split
from benchmarks.tiles import random_split
from te_offload.fused.kernels import fp8
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.fp8_current import CurrentQuantizers
from te_offload.fused.kernels.fp8_interface import QuantizedRows
from te_offload.ops.scaling import Scaling

_CALLS = 10
_SCALING = Scaling(torch.float8_e4m3fn)
OURS, TWICE, THEIRS = "one reading", "two", "Transformer Engine"

Numbers = list[torch.Tensor]  # inverse scales, then bytes as they lie, of each expert that has any


class Way(NamedTuple):
    """What is timed, and the numbers of what it returns."""

    run: Callable[[], Any]
    numbers: Callable[[Any], Numbers]


def theirs(parts: list[torch.Tensor], *, both: bool) -> Way:
    """Transformer Engine's quantizer, for one part after the other."""
    quantizer = te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device=parts[0].device, columnwise=both)
    return Way(
        lambda: [quantizer(part) for part in parts],
        lambda found: [torch.cat([one._scale_inv for one in found]), *[one._data for one in found]],
    )


def weight_ways(weights: list[torch.Tensor], *, both: bool) -> dict[str, Way]:
    """Of N weights (rows, columns)."""
    quantizers, experts = CurrentQuantizers(), Experts.of("weights", weights)
    ours = Way(
        lambda: quantizers.weights(experts, _SCALING, by_column=both),
        lambda found: [found.inverses, *found.rows.view.view(torch.uint8).unbind(0)],
    )
    return {OURS: ours, THEIRS: theirs(weights, both=both)}


def row_ways(x: torch.Tensor, sizes: list[int], *, both: bool) -> dict[str, Way]:
    """Of x (T, C), so many rows an expert."""
    quantizers = CurrentQuantizers()
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=x.device)
    weights = torch.ones(len(sizes), device=x.device)
    used = torch.tensor([place for place, size in enumerate(sizes) if size], device=x.device)

    def parts(rows: torch.Tensor) -> list[torch.Tensor]:
        return [part for part in rows.split(sizes) if part.shape[0]]

    def numbers(found: QuantizedRows) -> Numbers:
        assert found.rows is not None
        return [found.inverses[used], *parts(found.rows.view(torch.uint8))]

    once = Way(lambda: quantizers.rows(x, offsets, _SCALING, weights=weights, by_column=both), numbers)
    twice = Way(lambda: fp8.quantize(x, offsets, _SCALING, weights=weights, by_column=both), numbers)
    return {OURS: once, TWICE: twice, THEIRS: theirs(parts(x), both=both)}


def check(ways: dict[str, Way]) -> None:
    """Let each way run once.

    Raises:
        RuntimeError: two of them have not the same bits.
    """
    (first, way), *others = ways.items()
    expected = way.numbers(way.run())
    for name, other in others:
        for place, (one, two) in enumerate(zip(expected, other.numbers(other.run()), strict=True)):
            if not torch.equal(one, two):
                what = f"numbers of part {place - 1}" if place else "inverse scales"
                raise RuntimeError(f"{what} differ between {first!r} and {name!r}.")


def compare(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Milliseconds a call of each way."""
    check(ways)
    graphs = {name: captured(functools.partial(_some, way.run)) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(graphs)[:: 1 if number % 2 else -1]:
            times[name].append(milliseconds(graphs[name], 2) / _CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


def _some(run: Callable[[], Any]) -> Any:
    for _ in range(_CALLS):
        found = run()
    return found


def _copy_rate() -> float:
    """Bytes a millisecond, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("experts", 64), ("hidden", 2048), ("ffn", 1408), ("tokens", 32768), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    experts, hidden, ffn, tokens = arguments.experts, arguments.hidden, arguments.ffn, arguments.tokens
    torch.manual_seed(0)
    rate = _copy_rate()
    print(f"{torch.cuda.get_device_name()}; E{experts} H{hidden} F{ffn} T{tokens}; a copy {rate / 1e9:.2f} TB/s; ms\n")
    print(f"| | {OURS} | {TWICE} | {THEIRS} | bytes |\n|---|---|---|---|---|")
    results: dict[str, dict[str, float]] = {}

    def row(label: str, ways: dict[str, Way], size: int, *, both: bool) -> None:
        found = results[label] = compare(ways, arguments.rounds) | {"bytes": size * (4 if both else 3) / rate}
        cells = (f"{found[name]:.4f}" if name in found else "-" for name in (OURS, TWICE, THEIRS, "bytes"))
        print(f"| {label} | {' | '.join(cells)} |", flush=True)

    for both, how in ((True, "both ways round"), (False, "as they lie")):
        for name, shape in (("FC1", (ffn, hidden)), ("FC2", (hidden, ffn))):
            weights = [torch.randn(shape, device="cuda").bfloat16() for _ in range(experts)]
            row(f"{name}'s weights, {how}", weight_ways(weights, both=both), experts * hidden * ffn, both=both)
            del weights
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        routings = {
            "even": split(experts, tokens, skew=None),
            "random": random_split(experts, tokens),
            "one has half": split(experts, tokens, skew="first"),
        }
        for routing, sizes in routings.items():
            row(f"rows, {routing}, {how}", row_ways(x, sizes, both=both), x.numel(), both=both)
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
