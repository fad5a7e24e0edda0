"""One training step of a stack of grouped MLPs: without offloading, with ours, with Transformer Engine's own context.

    ./run benchmarks.offload [--shape 64] [--shape 8] [--fp8] [--activation srelu|swiglu] [--asks [tolist|numbers_on_host]]
                             [--fused] [--one-thread] [--rounds 20] [--only TEXT ...] [--json FILE]

All ways run in one process, interleaved, forwards and backwards through the list by turns (A B B A); each time is the
median over the rounds, of the host's clock around a step that ends with a synchronization. Before that each has run the
steps of which a session times every one, so that the rounds are as in a long run, in which it times one of 16. Gradients of
every way are compared with the first one's, bit for bit, before anything is timed.

With `--fused` our ops run fused, which plain te.ops do not on Hopper; contexts of others are around plain te.ops too. Bits
are compared with those of the same ops without offloading, and the floor is that of fused layers. Without it all ways run
Transformer Engine's own ops, so that engines are compared and nothing else.

With `--asks` each layer first asks the GPU for its split sizes, in every way, as token dispatchers without a capacity do
(by `tolist`; or past the copies, by `te_offload.numbers_on_host`): what an engine has queued on the link must not make the
host wait.

Layers that are computed again are so by torch's checkpoints (``use_reentrant=False``), within the layers that an engine
sees: their inputs, which is what a checkpoint keeps, stay, or go. In the floor their backward begins with a forward. Where
FC1 alone is computed again (`recompute_act_input`, in fused layers), no floor is given: FC1 alone is not timed.

What a session costs that offloads nothing is measured by itself afterwards, in pairs of steps, with it and without.

`floor` is the makespan of the step's dependency graph with times measured in the same run: each layer's forward and
backward alone, each copy at the measured rate of the link (alone, or while both directions are busy) after its producer,
each backward after its slots; out in the order of production, back in the order of need, any number of bytes in flight.
What has not left the device when its backward comes may be read where it is; the floor moves it all the same. Layers are
timed in each round, and `/ floor` is the median of the rounds' ratios: a host that others use is slow in some rounds.

Peak memory is torch's over one step, less what was there before it. `terms` is computed window by window (a layer's
forward, an op's backward): what it needs beside saved tensors, as measured with a session that offloads nothing,
plus the saved tensors that the record of this very step says were on the device at the worst moment of the window (kept,
in flight, back ahead of the backward, and in use); the worst window counts.
"""

from __future__ import annotations

import functools
import gc
import operator
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.floor import floor_ms, time_layers, time_link
from benchmarks.stack import ASKS, Shape, Variant, Way, make_inputs
from benchmarks.stack_runs import parser_of, run
from te_offload import StepRecord
from te_offload.offload.engine import TIMED_EVERY, TIMED_FIRST
from te_offload.offload.timeline import Link

TE = "Transformer Engine's context"
COST_PAIRS = 32  # of steps with a session that offloads nothing and without; two of them are timed


def ways(layers: int, *, fused: bool = False, fp8: bool = False) -> list[Way]:
    """The rows of the table. ``fused``: our ops run fused, and others' engines have rows with what runs without us; what is
    slower than Transformer Engine's best is left out. ``fp8``: and of ours that keep no quantized weights.
    """
    some, most = layers - 2, layers - 1
    tail = ", plain te.ops" if fused else ""
    manager = Way(f"Megatron-core's manager, {most} of {layers}, its pinned pool{tail}", "megatron", most, plain=fused)
    plain = [
        Way(f"{TE}, {go} of {layers}, retained, plain te.ops", "te", go, retain=True, plain=True) for go in (most, some)
    ]
    slower = [
        Way(f"{TE}, {some} of {layers}, defaults", "te", some),
        Way(f"{TE} v1, {some} of {layers}", "te-v1", some),
    ]
    made = "quantized weights made again"
    again = [
        Way(f"our ops, no offload, {made}", keep_weights=False),
        Way(f"te_offload, {most} of {layers}, {made}", "te_offload", most, keep_weights=False),
        Way(
            f"te_offload, {most} of {layers}, {made}, max_in_flight 32 MiB",
            "te_offload",
            most,
            keep_weights=False,
            max_in_flight="32MiB",
        ),
    ]
    recomputed = f"{most} of {layers} computed again"
    inputs = f"{recomputed}, their inputs go"
    checkpoints = [
        Way(f"plain te.ops, {recomputed}", going=most, again=True, plain=True),
        Way(f"our ops, {recomputed}", going=most, again=True),
        Way(f"te_offload, {inputs}", "te_offload", most, again=True),
        Way(f"te_offload, {inputs}, max_in_flight 32 MiB", "te_offload", most, again=True, max_in_flight="32MiB"),
        Way(f"{TE}, {inputs}, retained buffers{tail}", "te", most, again=True, retain=True, plain=fused),
    ]
    fc1 = f"te_offload, {most} of {layers}, FC1 computed again"
    fc1_again = [
        Way("our ops, FC1 computed again", fc1_again=True),
        Way(fc1, "te_offload", most, fc1_again=True),
        Way(f"{fc1}, max_in_flight 32 MiB", "te_offload", most, fc1_again=True, max_in_flight="32MiB"),
    ]
    both = Way(f"{fc1}, {made}", "te_offload", most, fc1_again=True, keep_weights=False)
    return [
        Way("plain te.ops, no offload", plain=True),
        Way("our ops, no offload"),
        Way("te_offload, nothing to offload (min_bytes 1 TiB)", "te_offload", layers, min_bytes="1024GiB"),
        Way("te_offload, all layers", "te_offload", layers),
        Way(f"te_offload, {most} of {layers}", "te_offload", most),
        Way(f"{TE}, {most} of {layers}, retained buffers", "te", most, retain=True),
        *(plain[:1] if fused else ()),
        manager,
        Way(f"te_offload, {most} of {layers}, max_in_flight 32 MiB", "te_offload", most, max_in_flight="32MiB"),
        Way(f"te_offload, {some} of {layers}", "te_offload", some),
        Way(f"te_offload, {some} of {layers}, max_in_flight 32 MiB", "te_offload", some, max_in_flight="32MiB"),
        Way(f"te_offload's get_cpu_offload_context, {some} of {layers}", "drop-in", some),
        Way(f"{TE}, {some} of {layers}, retained buffers", "te", some, retain=True),
        *(() if fused else slower),
        plain[1],
        Way(f"te_offload, {some} of {layers}, act_input kept", "te_offload", some, keep_act=True),
        Way("te_offload, a plan for a tenth of the bytes", "te_offload", layers, fraction=0.1),
        *(again if fp8 else ()),
        *checkpoints,
        *(fc1_again if fused else ()),
        *((both,) if fused and fp8 else ()),
    ]


def measure(shape: Shape, rounds: int, only: Sequence[str] | None) -> dict[str, Any]:
    """Run every way, or the first three and those with one of ``only`` in their name; the rows as plain values."""
    inputs = make_inputs(shape)
    rows: list[dict[str, Any]] = []
    variants: list[Variant] = []
    references: dict[bool, list[torch.Tensor]] = {}  # by whether layers run fused, which has bits of its own
    beside: list[int] | None = None
    for number, way in enumerate(ways(shape.layers, fused=shape.fused, fp8=shape.fp8)):
        if only is not None and number > 2 and not any(text in way.name for text in only):
            continue
        try:
            variant = Variant(way, shape, inputs, variants[0].model if variants else None)
        except ImportError as error:
            print(f"{way.name}: left out, {error}", flush=True)
            continue
        for _ in range(TIMED_FIRST // 2):
            variant.step()
        grads = variant.gradients()
        fused = shape.fused and not way.plain
        reference = references.get(fused) or references.setdefault(fused, [grad.clone() for grad in grads])
        same = all(torch.equal(one, other) for one, other in zip(reference, grads, strict=True))
        peaks = variant.peak_bytes()
        assert variant.session is None or variant.was_timed()  # other steps leave layers alone of which nothing goes
        rows.append({"name": way.name, "same_bits": same, "peaks": peaks, "peak_bytes": max(peaks), "ms": []})
        # Of other ways other things are beside what is saved.
        if variant.session is not None and way.keep_weights and not (way.again or way.fc1_again):
            looked = variant.session.records[-1]
            if beside is None:
                beside = [peak - most for peak, most in zip(peaks, resident(looked, fused=fused), strict=True)]
            rows[-1]["terms_bytes"] = terms(looked, beside, fused=fused)
        while variant.steps < TIMED_FIRST:
            variant.step()
        variants.append(variant)
    del references, reference, grads
    alone: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()  # as Megatron-LM (--manual-gc) and torchtitan train: garbage is collected between steps
    for number in range(rounds):
        gc.collect()
        variants[0].step()  # else the round's first way pays for what the collector has thrown out of the caches
        pairs = list(zip(variants, rows, strict=True))
        for variant, row in pairs if number % 2 == 0 else reversed(pairs):
            if variant is variants[2]:
                alone.append(time_layers(variants[1].model, inputs, shape))
            row["ms"].append(step_ms(variant))
    rows[2]["cost"] = cost_of_looking(*time_looking(variants[1], variants[2], max(COST_PAIRS, rounds)))
    gc.enable()
    times = statistics.median(forward for forward, _ in alone), statistics.median(backward for _, backward in alone)
    link = time_link()
    for variant, row in zip(variants, rows, strict=True):
        if variant.session is None:
            continue
        record = variant.session.timed_record
        assert record is not None
        row |= {
            "bytes_out": record.bytes_out,
            "bytes_back": record.bytes_back,
            "copies_out": record.copies_out,
            "out_gbs": record.out_gbs,
            "back_gbs": record.back_gbs,
            "exposed_ms": record.exposed_ms,
            "throttled_ms": record.throttled_ms,
            "peak_in_flight": record.peak_in_flight,
            "peak_ahead": record.peak_ahead,
            "host_held": record.host_held,
            "host_peak": record.host_peak,
            "floors_ms": []
            if variant.way.fc1_again
            else [floor_ms(record, layer, link, variant.again) for layer in alone],
            "peak_resident": record.peak_resident,
            "predicted_ms": record.predicted_ms,
        }
    return {"shape": shape.title, "link": vars_of(link), "layer_ms": times, "layer_ms_by_round": alone, "rows": rows}


def step_ms(variant: Variant) -> float:
    """One step, by the host's clock."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    variant.step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def time_looking(without: Variant, with_session: Variant, pairs: int) -> tuple[list[float], list[float], list[bool]]:
    """Milliseconds of steps without and with a session that offloads nothing, in pairs and both orders by turns, and
    whether the session timed its step. One without comes before each pair: others leave the card cooler, and so quicker.
    """
    before, after, timed = list[float](), list[float](), list[bool]()
    for number in range(pairs):
        gc.collect()
        without.step()
        for variant in (without, with_session) if number % 2 == 0 else (with_session, without):
            (before if variant is without else after).append(step_ms(variant))
        timed.append(with_session.was_timed())
    return before, after, timed


def cost_of_looking(without: list[float], with_session: list[float], timed: list[bool]) -> float | None:
    """What a session that offloads nothing adds to a step, as a share of it: the medians of the differences to the step of
    the same pair without a session, of timed steps and of others, weighted as they occur in a long run.
    """
    pairs = list(zip(without, with_session, timed, strict=True))
    medians = []
    for kind in (True, False):
        differences = [after - before for before, after, was_timed in pairs if was_timed is kind]
        if not differences:
            return None
        medians.append(statistics.median(differences))
    share = 1 / TIMED_EVERY
    return (share * medians[0] + (1 - share) * medians[1]) / statistics.median(without)


def resident(record: StepRecord, *, fused: bool = False) -> list[int]:
    """Most bytes of saved tensors on the device in each window of a step, as `Variant.peak_bytes` divides it."""
    windows, taken = [[0]], 0
    for moment in record.residency:
        if moment.label == "taken":
            if not fused or taken % 2 == 0:  # a fused layer's backward takes its two slots in one window
                windows.append([])
            taken += 1
        windows[-1].append(moment.nbytes)
        if moment.label.endswith(" saved"):
            windows.append([moment.nbytes])
    return [max(window) for window in windows]


def terms(record: StepRecord, beside: list[int], *, fused: bool = False) -> int:
    """What the peak should be, from the saved tensors on the device and what each window needs ``beside`` them."""
    return max(most + extra for most, extra in zip(resident(record, fused=fused), beside, strict=True))


def vars_of(link: Link) -> dict[str, float]:
    """The link's rates in GB/s."""
    return {name: getattr(link, name) / 1e6 for name in ("out", "back", "out_duplex", "back_duplex")}


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in result["link"].items())
    lines = [
        f"{result['shape']}. Link, GB/s: {rates}. One layer alone: forward {result['layer_ms'][0]:.2f} ms, backward "
        f"{result['layer_ms'][1]:.2f} ms.",
        "",
        "| way | ms, median (min, max) | / floor | peak MiB (terms) | MiB out | copies | GB/s out, back | "
        "exposed + throttled ms | bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        middle = statistics.median(row["ms"])
        cells = [row["name"], f"{middle:.2f} ({min(row['ms']):.2f}, {max(row['ms']):.2f})"]
        peak = f"{row['peak_bytes'] / 2**20:.0f}"
        if "floors_ms" in row:
            rates = ", ".join("-" if row[key] is None else f"{row[key]:.1f}" for key in ("out_gbs", "back_gbs"))
            cells += [
                f"{statistics.median(map(operator.truediv, row['ms'], row['floors_ms'])):.3f}"
                if row["floors_ms"]
                else "",
                f"{peak} ({row['terms_bytes'] / 2**20:.0f})" if "terms_bytes" in row else peak,
                f"{row['bytes_out'] / 2**20:.0f}",
                str(row["copies_out"]),
                rates,
                f"{row['exposed_ms']:.1f} + {row['throttled_ms']:.1f}",
            ]
        else:
            cells += ["", peak, "", "", "", ""]
        lines.append(f"| {' | '.join(cells)} | {'same' if row['same_bits'] else 'DIFFER'} |")
    for row in result["rows"]:
        if row.get("cost") is not None:
            lines += [
                "",
                f"{row['name']}: {row['cost']:+.2%} of a step, by {max(COST_PAIRS, len(row['ms']))} pairs of steps.",
            ]
    return "\n".join(lines)


def main() -> None:
    """Run, print a table for each shape, write JSON if asked."""
    parser = parser_of(__doc__, rounds=20)
    parser.add_argument("--activation", choices=("srelu", "swiglu"), default="srelu")
    parser.add_argument(
        "--asks", nargs="?", const="tolist", choices=tuple(ASKS), help="split sizes are asked for so before each layer"
    )
    parser.add_argument("--fused", action="store_true", help="our ops run fused; with others' engines plain te.ops too")
    parser.add_argument(
        "--only", nargs="+", help="the first three ways, and those with one of these texts in their names"
    )
    arguments = parser.parse_args()
    gated = arguments.activation == "swiglu"
    run(
        arguments,
        functools.partial(Shape, fp8=arguments.fp8, gated=gated, asks=arguments.asks, fused=arguments.fused),
        lambda shape: measure(shape, arguments.rounds, arguments.only),
        table,
        schema="3.1",
    )


if __name__ == "__main__":
    main()
