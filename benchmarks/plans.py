"""What plans say of a step, its time and its memory, beside the step that follows.

    ./run benchmarks.plans [--shape 64] [--shape 8] [--fp8] [--fused] [--one-thread] [--fractions 0.1 0.3 1.0]
                           [--rounds 10] [--json FILE]

A session for each fraction of the bytes (of `OffloadSession`), beside none, all in one process, interleaved, forwards
and backwards by turns. A plan is made once, in its session's first steps, and its forecast is of their times; the host may
be quicker later. Beside it are printed: the median of steps that come after those of which a session times every one, by
the host's clock around a step that ends with a synchronization; the waits for copies in the last step that the session
timed; the most saved tensors on the device in that step; torch's peak over one step, less what was there before.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.stack import Shape, Variant, Way, make_inputs
from benchmarks.stack_runs import parser_of, run
from te_offload.offload.engine import TIMED_FIRST

FRACTIONS = tuple(number / 10 for number in range(1, 11))


def measure(shape: Shape, fractions: Sequence[float], rounds: int) -> dict[str, Any]:
    """Run a session for each fraction; the rows as plain values, the first one's without a session."""
    inputs = make_inputs(shape)
    variants: list[Variant] = []
    rows: list[dict[str, Any]] = []
    reference: list[torch.Tensor] | None = None
    for fraction in (None, *fractions):
        engine = None if fraction is None else "te_offload"
        way = Way("", engine, shape.layers, fraction=fraction)
        variant = Variant(way, shape, inputs, variants[0].model if variants else None)
        while variant.steps < TIMED_FIRST:
            variant.step()
        grads = variant.gradients()
        reference = reference or [grad.clone() for grad in grads]
        same = all(torch.equal(one, other) for one, other in zip(reference, grads, strict=True))
        rows.append({"fraction": fraction, "same_bits": same, "peak_bytes": max(variant.peak_bytes()), "ms": []})
        variants.append(variant)
    del reference, grads
    gc.collect()
    gc.disable()  # as Megatron-LM (--manual-gc) and torchtitan train: garbage is collected between steps
    for number in range(rounds):
        gc.collect()
        pairs = list(zip(variants, rows, strict=True))
        for variant, row in pairs if number % 2 == 0 else reversed(pairs):
            torch.cuda.synchronize()
            start = time.perf_counter()
            variant.step()
            torch.cuda.synchronize()
            row["ms"].append(1e3 * (time.perf_counter() - start))
    gc.enable()
    for variant, row in zip(variants, rows, strict=True):
        if variant.session is None:
            continue
        plan, record = variant.session.plan, variant.session.timed_record
        assert plan is not None and plan.forecast is not None and record is not None
        row |= {
            "bytes_going": plan.bytes_going,
            "slots_going": [slot.name for slot in plan.slots if slot.goes],
            "bytes_back": record.bytes_back,
            "predicted_ms": plan.forecast.step_ms,
            "predicted_waiting_ms": plan.forecast.waiting_ms,
            "waiting_ms": record.exposed_ms + record.throttled_ms,
            "predicted_resident": plan.forecast.peak_bytes,
            "resident": record.peak_resident,
        }
    return {"shape": shape.title, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        f"{result['shape']}.",
        "",
        "| fraction | MiB going, back | ms predicted | ms, median (min, max) | waits predicted | waits | "
        "MiB saved, at most: predicted | measured | torch's peak | bits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ms = f"{statistics.median(row['ms']):.1f} ({min(row['ms']):.1f}, {max(row['ms']):.1f})"
        end = [f"{row['peak_bytes'] / 2**20:.0f}", "same" if row["same_bits"] else "DIFFER"]
        if row["fraction"] is None:
            cells = ["no session", "", "", ms, "", "", "", "", *end]
        else:
            cells = [
                f"{row['fraction']:g}",
                f"{row['bytes_going'] / 2**20:.0f}, {row['bytes_back'] / 2**20:.0f}",
                f"{row['predicted_ms']:.1f}",
                ms,
                f"{row['predicted_waiting_ms']:.1f}",
                f"{row['waiting_ms']:.1f}",
                f"{row['predicted_resident'] / 2**20:.0f}",
                f"{row['resident'] / 2**20:.0f}",
                *end,
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, print a table for each shape, write JSON if asked."""
    parser = parser_of(__doc__, rounds=10)
    parser.add_argument("--fused", action="store_true", help="layers run fused")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS, help="of the bytes that may go")
    arguments = parser.parse_args()
    run(
        arguments,
        functools.partial(Shape, fp8=arguments.fp8, fused=arguments.fused),
        lambda shape: measure(shape, arguments.fractions, arguments.rounds),
        table,
        schema="1.1",
    )


if __name__ == "__main__":
    main()
