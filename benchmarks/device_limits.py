"""A model with attention and a large vocabulary within limits of the device's memory, and what a step then takes.

    ./run benchmarks.device_limits [--layers 8] [--experts 64] [--hidden 2048] [--ffn 1408] [--sequences 4] [--length 4096]
                                   [--vocabulary 50304] [--fp8] [--weights-made-again] [--rounds 20]
                                   [--limits 0.25 0.5 0.75] [--only TEXT ...] [--least-card] [--json FILE]

Blocks of norm, causal attention, norm and our grouped MLP (SwiGLU, fused; gradients go into float32 `main_grad`), a head,
and cross entropy over logits in float32: a step's peak is nobody's layer. Ways run one after the other on the same weights:
no offloading, first and last; a session that sends all; sessions with a ``device_limit`` as many shares of the way from the
first one's peak down to the second's; Transformer Engine's context (v2, ``retain_pinned_cpu_buffers=True``) around the same
blocks for every number of layers that it takes. Milliseconds are of the host's clock around a step that ends with a
synchronization, medians (least, most) of rounds after 12 steps. GiB are the most that torch had allocated in any step from
the third on, those reserved the most that its allocator had taken of the card by then; between two ways it gives back what
it can. For each limit the table says which number of layers of Transformer Engine's meets it soonest. With `--fp8` the
experts run in FP8 (`Float8CurrentScaling`), all else stays in bf16; with `--weights-made-again` too, no quantized weights
stay from a forward to its backward. With `--least-card` each way runs again on cards made smaller
(`torch.cuda.set_per_process_memory_fraction`): the least GiB, to an eighth, that torch's allocator had to have, how long
steps took then, and how often it had to give back what it held and ask again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from benchmarks.stack_runs import parser_of_sizes, setting
from te_offload import OffloadSession, ops

DEVICE = "cuda"
WARM_UP = 12  # steps: until a plan is made, seen and kept
SIZES = {
    "layers": 8,
    "experts": 64,
    "hidden": 2048,
    "ffn": 1408,
    "sequences": 4,
    "length": 4096,
    "vocabulary": 50304,
}
_HEAD = 128  # columns of a head of attention
_GIB = 2**30
_GRAIN = _GIB // 8  # of cards made smaller


class Block(torch.nn.Module):
    """Attention and experts, each behind a norm and with a residual."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
        hidden, ffn = sizes.hidden, sizes.ffn
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden, **like) for _ in range(2))
        # Three, since Transformer Engine's context takes contiguous tensors alone.
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False, **like) for _ in range(3))
        self.attention = te.DotProductAttention(
            hidden // _HEAD, _HEAD, attention_dropout=0.0, attn_mask_type="causal", qkv_format="bshd"
        )
        self.out = torch.nn.Linear(hidden, hidden, bias=False, **like)
        linear: dict[str, Any] = {"bias": False, "accumulate_into_main_grad": True, **like}
        linear["keep_quantized_weight"] = not sizes.weights_made_again
        self.experts = te.ops.Sequential(
            ops.GroupedLinear(sizes.experts, hidden, 2 * ffn, **linear),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(sizes.experts, ffn, hidden, **linear),
        )
        self.shape = sizes.sequences, sizes.length, hidden // _HEAD, _HEAD

    def forward(self, x: torch.Tensor, splits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """``x``: (T, hidden)."""
        normed = self.norms[0](x)
        mixed = self.attention(*(linear(normed).view(self.shape) for linear in self.qkv))
        x = x + self.out(mixed.reshape(x.shape))
        found: torch.Tensor = x + self.experts(self.norms[1](x), splits, scales, splits)
        return found


class Model(torch.nn.Module):
    """Blocks, a norm, a head and a loss. ``fp8``: what of it Transformer Engine runs so, runs in FP8."""

    def __init__(self, sizes: argparse.Namespace, *, fp8: bool = False) -> None:
        super().__init__()
        self.fp8 = fp8
        torch.manual_seed(0)
        like: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
        self.blocks = torch.nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = torch.nn.RMSNorm(sizes.hidden, **like)
        self.head = torch.nn.Linear(sizes.hidden, sizes.vocabulary, bias=False, **like)
        tokens = sizes.sequences * sizes.length
        self.x = torch.randn(tokens, sizes.hidden, **like).requires_grad_()
        self.targets = torch.randint(sizes.vocabulary, (tokens,), device=DEVICE)
        self.splits = torch.full((sizes.experts,), tokens // sizes.experts, dtype=torch.int64, device=DEVICE)
        self.scales = torch.rand(tokens, device=DEVICE)
        for block in self.blocks:
            for parameter in block.experts.parameters():  # type: ignore[union-attr]
                parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)  # type: ignore[union-attr]
        self.context: Any = None
        self.sync: Any = None

    def forward(self) -> torch.Tensor:
        """The loss."""
        x: torch.Tensor = self.x.clone()
        for block in self.blocks:
            recipe = te.autocast(recipe=Float8CurrentScaling()) if self.fp8 else contextlib.nullcontext()
            with recipe, self.context or contextlib.nullcontext():
                x = block(x, self.splits, self.scales)
            if self.context is not None:
                x = self.sync(x)
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits, self.targets)


@dataclass(frozen=True)
class Way:
    """One way to run the step: a session that sends all, or has a limit (bytes); or Transformer Engine's context around so
    many layers.
    """

    name: str
    session: bool = False
    limit: int | None = None
    layers: int = 0


def run(way: Way, model: Model, rounds: int) -> dict[str, Any]:
    """A way's row, as plain values."""
    session = None
    if way.session:
        session = OffloadSession(model.blocks, device_limit=way.limit)
    if way.layers:
        model.context, model.sync = te.get_cpu_offload_context(
            enabled=True, num_layers=way.layers, model_layers=len(model.blocks), retain_pinned_cpu_buffers=True
        )
    try:
        return _steps(way, model, rounds, session)
    finally:
        gc.enable()
        if session is not None:
            session.close()
        model.context = model.sync = None


def _steps(way: Way, model: Model, rounds: int, session: OffloadSession | None) -> dict[str, Any]:
    peaks: list[int] = []
    reserved: list[int] = []
    times: list[float] = []
    gc.collect()
    torch.cuda.empty_cache()
    retries = [_retries()]
    gc.disable()
    for number in range(WARM_UP + rounds):
        model.zero_grad(set_to_none=True)
        model.x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        if session is None:
            model().backward()
        else:
            with session.step():
                model().backward()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
        peaks.append(_peak(session, number))
        reserved.append(torch.cuda.max_memory_reserved())
        retries.append(_retries())
    row: dict[str, Any] = {
        "name": way.name,
        "limit": way.limit,
        "ms": times[WARM_UP:],
        "peak_bytes": max(peaks[2:]),
        "reserved_bytes": max(reserved),
        "warm_up_ms": times[:WARM_UP],
        "retries": [later - sooner for sooner, later in itertools.pairwise(retries)],
        "bytes_out": None,
    }
    if session is not None:
        record, plan = session.timed_record, session.plan
        assert record is not None
        row["bytes_out"] = record.bytes_out
        row["waiting_ms"] = record.exposed_ms + record.throttled_ms
        row["peak_in"] = record.device_peak.name if record.device_peak else None
        if plan is not None and plan.forecast is not None:
            row["predicted_ms"], row["predicted_bytes"] = plan.forecast.step_ms, plan.forecast.device_bytes
    return row


def _retries() -> int:
    """How often the allocator has given back what it held and asked again, so far."""
    found: int = torch.cuda.memory_stats()["num_alloc_retries"]
    return found


def _peak(session: OffloadSession | None, step: int) -> int:
    """Of a step: of all its parts, where a session has reset torch's statistics between them."""
    parts = [torch.cuda.max_memory_allocated()]
    record = None if session is None else session.timed_record
    if record is not None and record.index == step and record.device_peak is not None:
        parts.append(record.device_peak.nbytes)
    return max(parts)


def least_card(row_on: Callable[[int], dict[str, Any] | None], row: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The smallest card a way runs on, of those ``_GRAIN`` apart from what it allocated to what its allocator reserved, and
    its row there; by halving.

    Args:
        row_on: on a card of so many bytes; ``None``: out of memory.
        row: with room for all.
    """
    low, high = -(-row["peak_bytes"] // _GRAIN), -(-row["reserved_bytes"] // _GRAIN)
    while low < high:  # it runs on high
        middle = (low + high) // 2
        there = row_on(middle * _GRAIN)
        if there is None:
            low = middle + 1
        else:
            high, row = middle, there
    return high * _GRAIN, row


def on_card(way: Way, model: Model, rounds: int, nbytes: int, at_rest: int) -> dict[str, Any] | None:
    """The way's row where torch's allocator may have ``nbytes``; ``None``: they are too few. ``at_rest``: bytes allocated
    between ways; more than those were left behind by a way that ran out of memory, and do not count.
    """
    left = _at_rest(model) - at_rest
    torch.cuda.set_per_process_memory_fraction((nbytes + left) / torch.cuda.get_device_properties(0).total_memory)
    try:
        row = run(way, model, rounds)
    except torch.OutOfMemoryError:
        row = None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    took = "out of memory" if row is None else f"{statistics.median(row['ms']):.1f} ms"
    more = _at_rest(model) - at_rest - left
    after = f"; it left {_gib(more)} GiB behind" if more > _GRAIN else ""
    print(f"{way.name}, on {_gib(nbytes)} GiB: {took}{after}", flush=True)
    return row


def _at_rest(model: Model) -> int:
    """Bytes allocated between ways."""
    model.zero_grad(set_to_none=True)
    model.x.grad = None
    gc.collect()
    return torch.cuda.memory_allocated()


def table_of_cards(found: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """The smallest cards as Markdown, beside what each way took with room for all."""
    lines = [
        "| | limit GiB | GiB | reserved | least card | ms on it, median (least, most) | retries a step | in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for least, row in zip(found, rows, strict=True):
        limit = "" if row["limit"] is None else _gib(row["limit"])
        there = least["row"]
        ms = f"{statistics.median(there['ms']):.1f} ({min(there['ms']):.1f}, {max(there['ms']):.1f})"
        often = f"{statistics.mean(there['retries'][WARM_UP:]):.1f}", str(sum(there["retries"]))
        sizes = (_gib(nbytes) for nbytes in (row["peak_bytes"], row["reserved_bytes"], least["card_bytes"]))
        cells = [row["name"], limit, *sizes, ms, *often]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ways_of(shares: Sequence[float], layers: int, most: int, least: int) -> Iterator[Way]:
    """Those that follow the first two. ``most``, ``least``: bytes, their peaks."""
    for share in shares:
        limit = int(most - share * (most - least))
        yield Way(f"device_limit at {share:.0%} of the way", session=True, limit=limit)
    for number in range(1, layers):
        yield Way(f"Transformer Engine's context, {number} of {layers} layers", layers=number)
    yield Way("no offloading, again")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, and for each limit what meets it of Transformer Engine's."""
    lines = [
        "| | limit GiB | ms foreseen | ms, median (least, most) | GiB foreseen | GiB | reserved | MiB out | "
        "ms waiting |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ms = f"{statistics.median(row['ms']):.1f} ({min(row['ms']):.1f}, {max(row['ms']):.1f})"
        foreseen = "" if row.get("predicted_ms") is None else f"{row['predicted_ms']:.1f}"
        room = "" if row.get("predicted_bytes") is None else _gib(row["predicted_bytes"])
        out = "" if row["bytes_out"] is None else f"{row['bytes_out'] / 2**20:.0f}"
        waiting = f"{row['waiting_ms']:.1f}" if "waiting_ms" in row else ""
        limit = "" if row["limit"] is None else _gib(row["limit"])
        taken = _gib(row["peak_bytes"]), _gib(row["reserved_bytes"])
        cells = [row["name"], limit, foreseen, ms, room, *taken, out, waiting]
        lines.append(f"| {' | '.join(cells)} |")
    theirs = [row for row in rows if row["name"].startswith("Transformer")]
    lines.append("")
    for row in rows:
        if row["limit"] is None or not theirs:
            continue
        fitting = [other for other in theirs if other["peak_bytes"] <= row["limit"]]
        best = min(fitting, key=lambda other: statistics.median(other["ms"]), default=None)
        found = (
            "none does" if best is None else f"{best['name']}, {statistics.median(best['ms']):.1f} ms, is the quickest"
        )
        lines.append(
            f"Within {_gib(row['limit'])} GiB: ours {statistics.median(row['ms']):.1f} ms "
            f"(peak in {row['peak_in']}); of theirs {found}."
        )
    return "\n".join(lines)


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f}"


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = parser_of_sizes(__doc__, "no offloading, and a session that sends all", SIZES)
    parser.add_argument("--limits", type=float, nargs="+", default=(0.25, 0.5, 0.75), help="shares of the way down")
    parser.add_argument("--fp8", action="store_true", help="under te.autocast with Float8CurrentScaling")
    parser.add_argument("--weights-made-again", action="store_true", help="keep_quantized_weight=False")
    parser.add_argument("--least-card", action="store_true", help="run each way again on smaller and smaller cards")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device; torch sees none here.")
    head = setting(arguments.rounds)
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    form = "experts in FP8" if arguments.fp8 else "bf16"
    if arguments.weights_made_again:
        form += ", weights made again"
    print(", ".join([*(f"{name} {getattr(arguments, name)}" for name in SIZES), form]), flush=True)
    model = Model(arguments, fp8=arguments.fp8)
    at_rest = _at_rest(model)
    ways, rows, cards = [], [], []

    def measure(way: Way) -> None:
        ways.append(way)
        rows.append(run(way, model, arguments.rounds))
        print(f"{way.name}: {statistics.median(rows[-1]['ms']):.1f} ms", flush=True)

    measure(Way("no offloading"))
    measure(Way("a session that sends all", session=True))
    for way in ways_of(arguments.limits, arguments.layers, *(row["peak_bytes"] for row in rows)):
        if not arguments.only or any(text in way.name for text in arguments.only):
            measure(way)
    print(table(rows), flush=True)
    if arguments.least_card:
        for way, row in zip(ways, rows, strict=True):
            try_on = functools.partial(on_card, way, model, arguments.rounds, at_rest=at_rest)
            card, there = least_card(try_on, row)
            cards.append({"name": way.name, "card_bytes": card, "row": there})
        print("\n" + table_of_cards(cards, rows))
    if arguments.json:
        sizes = {name: getattr(arguments, name) for name in SIZES}
        how = {"fp8": arguments.fp8, "weights_made_again": arguments.weights_made_again}
        result = {"schema": "1.4", **head, "sizes": sizes, **how, "rows": rows, "least_cards": cards}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
