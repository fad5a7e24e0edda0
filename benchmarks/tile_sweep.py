"""Every product of the fused grouped MLP on Hopper in many tiles, alone, at many shapes; and the factors that fit them.

    ./run benchmarks.tile_sweep 64,2048,1408,32768 128,2688,1856,65536 [--recipe bf16|current|blocks]
        [--activation srelu|swiglu] [--products fc1 dact] [--rounds 4] [--json FILE]
    ./run benchmarks.tile_sweep --fit FILE ... [--json FILE]

A shape is experts, hidden, ffn and tokens. Each product of a shape is timed in the tiles that are listed below, with even
and with random routing, as graphs in turns shuffled anew each time, without a rest (`hot`) and in rows of three after one
(`cool`); tiles are written as `benchmarks.tiles` has them. Printed is for each product what is in use and what is quickest.

`--fit` needs no GPU. A time is taken for a product of three numbers: one of the shape, one of the tile, and the elements
of the result in whole clusters of tiles; the tile's number, relative to the least, is what `sm90_tile_lists` has. The
fit is of logarithms, by least squares, a product and regime of tokens an expert at a time. It says beside that how much
longer than in the quickest tile the products take, on average and at most: with what is in use and with the fit.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import fp8_tiles, tiles
from benchmarks.grouped_mlp import Step, captured, milliseconds, split
from te_offload.fused import machine
from te_offload.fused.kernels.sm90_launch import Tile
from te_offload.fused.kernels.sm90_tiles import Regime, entry_of, tile_for

REST_S = 0.01
_WGRAD = "192t/32 192t/32@1x2 192t/32@2x1 256/32@1x2 256/32@2x1 128t/32@1x2 160t/32@1x2"
_BLOCKS = "128 128@1x2 128@2x1 128a 128a@1x2 128a@2x1"
_WIDE = f"{_BLOCKS} 192 192@1x2 192a 192a@1x2"
_FAST = "208t 208t@1x2 208t@2x1 192t 192t@1x2 192t@2x1 176t@1x2 160t@1x2"
_BF16 = {
    "fc1": "208t 208t@1x2 208t@2x1 192t 192t@1x2 192t@2x1 176t 176t@1x2 160t@1x2 256@1x2 256@2x1",
    "fc2": "208t 208t@1x2 208t@2x1 192t 192t@1x2 192t@2x1 176t@1x2 256 256@1x2 256@2x1",
    "dact": "192t 192t@1x2 192t@2x1 160t 160t@1x2 160t@2x1 128t@1x2 128t@2x1 256@1x2 256@2x1",
    "dgrad": "192t 192t@1x2 192t@2x1 160t@1x2 128t@1x2 256 256@1x2 256@2x1",
    "fc1_wgrad": _WGRAD,
    "fc2_wgrad": _WGRAD,
}
_GATED = {
    "fc1": "192t 192t@1x2 192t@2x1 128t 128t@1x2 128t@2x1 256@1x2 256@2x1",
    "dact": "128t 128t@1x2 128t@2x1 160t 160t@2x1 192t@2x1 96t@2x1",
}
CANDIDATES: dict[tuple[str, str], dict[str, str]] = {
    ("bf16", "srelu"): _BF16,
    ("bf16", "swiglu"): _BF16 | _GATED,
    ("current", "srelu"): {"fc1": _FAST, "fc2": _FAST, "dact": _WIDE, "dgrad": _WIDE, "wgrad": _WIDE},
    ("blocks", "srelu"): {**dict.fromkeys(("fc1", "fc2", "dact", "dgrad"), _WIDE), "wgrad": _BLOCKS},
}
CANDIDATES["current", "swiglu"] = CANDIDATES["current", "srelu"] | {"fc1": "192t 192t@1x2 192t@2x1 128t@1x2 256@1x2"}
CANDIDATES["blocks", "swiglu"] = CANDIDATES["blocks", "srelu"]
"""By recipe and activation, then by product; by blocks weight gradients take 128 columns alone."""


class Shape(NamedTuple):
    """Of a grouped MLP."""

    experts: int
    hidden: int
    ffn: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From four numbers with commas between.

        Raises:
            argparse.ArgumentTypeError: it is none.
        """
        try:
            return cls(*map(int, text.split(",")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r} is no shape; 64,2048,1408,32768 would be one.") from None


class Row(NamedTuple):
    """One tile's times, in ms.

    Attributes:
        recipe, activation: as asked for. shape: experts, hidden, ffn, tokens. routing: ``"even"`` or ``"random"``.
        product: of `CANDIDATES`. tile: as written there. hot, cool: see the head of this file. quick_memory: the card's
            (`machine.has_quick_memory`).
    """

    recipe: str
    activation: str
    shape: list[int]
    routing: str
    product: str
    tile: str
    hot: float
    cool: float
    quick_memory: bool = False


class Result(NamedTuple):
    """What a product's tiles cut up, as `sm90_tiles` is asked for them."""

    name: str
    regime: Regime
    rows: int | None
    columns: int
    depth: int
    quick_memory: bool

    @classmethod
    def of(cls, row: Row) -> Result:
        """Of a row's product."""
        shape, gated, fp8 = Shape(*row.shape), row.activation == "swiglu", row.recipe != "bf16"
        hidden, ffn = shape.hidden, shape.ffn
        wide = 2 * ffn if gated else ffn
        columns, depth = {
            "fc1": (wide, hidden),
            "fc2": (hidden, ffn),
            "dact": (ffn, hidden),
            "dgrad": (hidden, wide),
            "wgrad": (hidden, 0),
            "fc1_wgrad": (hidden, 0),
            "fc2_wgrad": (ffn, 0),
        }[row.product]
        rows = {"wgrad": wide, "fc1_wgrad": wide, "fc2_wgrad": hidden}.get(row.product)
        name = row.product.rpartition("_")[2]
        if gated:
            name = {"fc1": "glu", "dact": "dglu"}.get(name, name)
        if fp8:
            name = _name_in_fp8(row.recipe, name)
        return cls(name, Regime.of(shape.tokens, shape.experts), rows, columns, depth, row.quick_memory)

    @property
    def tile(self) -> Tile:
        """In use."""
        return tile_for(*self[:5], quick_memory=self.quick_memory)


def _name_in_fp8(recipe: str, name: str) -> str:
    if recipe == "blocks":
        named = {"glu": "blocks pairs", "dact": "blocks dact", "dglu": "blocks dact", "wgrad": "blocks wgrad"}
        return named.get(name, "blocks")
    sums = "fast" if name in ("fc1", "fc2", "glu") else "split"
    return f"fp8 {sums} {name}" if name in ("dact", "wgrad", "glu", "dglu") else f"fp8 {sums}"


def steps_of(recipe: str, case: Any, product: str, names: Iterable[str]) -> tuple[dict[str, Step], list[Any]]:
    """A product's graphs by tile; and what has to live as long as they."""
    steps: dict[str, Step] = {}
    kept: list[Any] = []
    for name in names:
        if recipe == "bf16":
            products = tiles.Products(case, {product: tiles.Choice(tiles.parse_tile(name))})
            run: Callable[[], object] = getattr(products, product)
        else:
            run = functools.partial(fp8_tiles.Products(case, {product: tiles.parse_tile(name)}).alone, product)
        steps[name] = captured(run)
        kept.append((run, dict(vars(products)) if recipe == "bf16" else None))
    return steps, kept


def timed(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Medians without a rest and after one, after a round to warm up."""
    shuffled, names = random.Random(0), list(steps)
    times: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for cool, calls, rest in ((False, 8, 0.0), (True, 3, REST_S)):
        for _ in range(rounds + 1):
            shuffled.shuffle(names)
            for name in names:
                time.sleep(rest)
                times[name, cool].append(milliseconds(steps[name], calls))
    return {name: tuple(statistics.median(times[name, cool][1:]) for cool in (False, True)) for name in steps}  # type: ignore[misc]


def sweep(recipe: str, activation: str, shape: Shape, products: Iterable[str], rounds: int) -> list[Row]:
    """All tiles of these products."""
    gated, quick, found = activation == "swiglu", machine.has_quick_memory(), []
    for routing, sizes in (
        ("even", split(shape.experts, shape.tokens, skew=None)),
        ("random", tiles.random_split(shape.experts, shape.tokens)),
    ):
        make = tiles.Case if recipe == "bf16" else fp8_tiles.RECIPES[recipe]
        case = make(shape.hidden, shape.ffn, sizes, gated=gated)
        for product in products:
            if product.endswith("_wgrad") and shape.hidden == shape.ffn:
                continue  # which of the two it is, their shapes tell
            steps, kept = steps_of(recipe, case, product, CANDIDATES[recipe, activation][product].split())
            rows = timed(steps, rounds)
            of = recipe, activation, [*shape], routing, product
            found += [Row(*of, name, *times, quick_memory=quick) for name, times in rows.items()]
            del steps, kept
            gc.collect()  # products and their kernels know each other
            torch.cuda.empty_cache()
    return found


class Cell(NamedTuple):
    """A product at one shape: times by tile, ms, and what is in use."""

    label: str
    result: Result
    times: dict[str, float]

    def excess(self, tile: str) -> float:
        """How much longer than in the quickest."""
        return self.times[tile] / min(self.times.values()) - 1

    @property
    def in_use(self) -> str | None:
        """Its name, if it was timed."""
        return next((name for name in self.times if tiles.parse_tile(name) == self.result.tile), None)

    def padded(self, tile: str) -> int:
        """Elements in whole clusters of tiles."""
        return tiles.parse_tile(tile).padded(self.result.rows, self.result.columns)


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    """Both routings and both kinds of rows weigh alike."""
    sums: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    results = {}
    for row in rows:
        key = _key(row)
        sums[key][row.tile] += row.hot, row.cool
        results[key] = Result.of(row)
    return [
        Cell(" ".join(map(str, key)), results[key], {tile: statistics.fmean(times) for tile, times in by_tile.items()})
        for key, by_tile in sums.items()
    ]


def fitted(cells: list[Cell]) -> dict[str, float]:
    """Each tile's time a padded element, relative to the least."""
    logs = {
        (number, tile): math.log(time / cell.padded(tile))
        for number, cell in enumerate(cells)
        for tile, time in cell.times.items()
    }
    of_shape, of_tile = dict.fromkeys(range(len(cells)), 0.0), {tile: 0.0 for _, tile in logs}
    for _ in range(100):  # each in turn the best for the others, which converges to least squares
        for number in of_shape:
            of_shape[number] = statistics.fmean(y - of_tile[tile] for (one, tile), y in logs.items() if one == number)
        for tile in of_tile:
            of_tile[tile] = statistics.fmean(y - of_shape[number] for (number, one), y in logs.items() if one == tile)
    least = min(of_tile.values())
    return {tile: math.exp(y - least) for tile, y in sorted(of_tile.items(), key=lambda entry: entry[1])}


def say_fit(cells: list[Cell]) -> None:
    """A line for each product and regime."""
    groups: dict[tuple[str, str, bool], list[Cell]] = defaultdict(list)
    for cell in cells:
        result = cell.result
        groups[entry_of(result.name, result.depth), result.regime.name, result.quick_memory].append(cell)
    print(
        "| product, tokens an expert | shapes | in use: mean, most | fitted: mean, most | factors |\n|---|---|---|---|---|"
    )
    for (name, regime, quick), group in groups.items():
        factors = fitted(group)
        chosen = [min(cell.times, key=lambda tile: cell.padded(tile) * factors[tile]) for cell in group]
        of_fit = [cell.excess(tile) for cell, tile in zip(group, chosen, strict=True)]
        of_use = [cell.excess(cell.in_use) for cell in group if cell.in_use]
        words = " ".join(f"{tile} {factor:.3f}" for tile, factor in [*factors.items()][:6])
        label = f"{name}, {regime.lower()}{', quick memory' if quick else ''}"
        print(f"| {label} | {len(group)} | {_both(of_use)} | {_both(of_fit)} | {words} |")


def _both(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1%}, {max(values):.1%}" if values else "-"


def read(paths: Iterable[Path]) -> list[Row]:
    """Rows of files of this benchmark's; a product at a shape that a later file has too is the later one's alone, since
    tiles can be compared within a run.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for path in paths:
        new: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in json.loads(path.read_text())["rows"]:
            new[_key(made := Row(**row))].append(made)
        found |= new
    return [row for rows in found.values() for row in rows]


def _key(row: Row) -> tuple[Any, ...]:
    return (row.recipe, row.activation, *row.shape, row.product, *(["quick memory"] if row.quick_memory else []))


def write(rows: Iterable[Row], path: Path | None) -> None:
    """If asked for, as `read` has it."""
    if path is not None:
        path.write_text(json.dumps({"schema": "1.1", "rows": [row._asdict() for row in rows]}) + "\n")


def main() -> None:
    """Run or fit, print, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", type=Shape.parse, metavar="E,H,F,T")
    parser.add_argument("--fit", nargs="+", type=Path, metavar="FILE", help="times of before")
    parser.add_argument("--recipe", choices=("bf16", *fp8_tiles.RECIPES), default="bf16")
    parser.add_argument("--activation", choices=("srelu", "swiglu"), default="srelu")
    parser.add_argument("--products", nargs="+", help="not all of them")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the times here")
    arguments = parser.parse_args()
    known = CANDIDATES[arguments.recipe, arguments.activation]
    if unknown := set(arguments.products or ()) - known.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no products of this recipe; there are {', '.join(known)}.")
    rows = read(arguments.fit or ())
    if not rows:
        print(torch.cuda.get_device_name())
    for shape in arguments.shapes:
        new = sweep(arguments.recipe, arguments.activation, shape, arguments.products or known, arguments.rounds)
        rows += new
        write(rows, arguments.json)  # a later shape may not be reached
        for cell in cells_of(new):
            best = min(cell.times, key=cell.excess)
            used = f"{cell.in_use} +{cell.excess(cell.in_use):.1%}" if cell.in_use else f"{cell.result.tile}"
            print(f"{cell.label}: {best} {cell.times[best]:.3f} ms; in use {used}", flush=True)
    if rows:
        say_fit(cells_of(rows))
    write(rows, arguments.json)


if __name__ == "__main__":
    main()
