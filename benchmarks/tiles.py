"""Other tiles for the fused grouped MLP's products on Hopper: a product alone and the whole step, in bf16.

    ./run benchmarks.tiles wgrad 192t/32 192t 160t@2x1 [--experts 64 --hidden 2048 --ffn 1408 --tokens 32768] [--json FILE]
    ./run benchmarks.tiles dgrad :start 192t@2x1 fc2=208t@2x1,dgrad=192t@2x1
    ./run benchmarks.tiles dact 160t 192t --activation swiglu

The product is ``fc1`` (with its activation), ``fc2``, ``dact`` (FC2's dgrad with the activation's and the sums after it),
``dgrad`` (FC1's), ``fc1_wgrad``, ``fc2_wgrad`` or ``wgrad`` (both); alone, it is timed with what sets its count to zero. A
tile is its columns, of 128 rows, or rows and columns (``256x192``); ``t``: two warp groups take turns, ``a``: they store
apart (`sm90_apart`); ``/32``: so many products of each sum a stage, for QuACK's 64; ``@2x1``: clusters of so many tiles
above and beside each other; ``:start``: given out from the start, not one by one, with or without another tile. Products
beside the first argument's are named. The first row is what is in use, which may be another tile for each of the two weight
gradients. FC1's weight gradient by itself does not begin beside its dgrad.

All ways run in one process on the same inputs, as graphs, in turns shuffled anew each time, with even and with random
routing. `hot` are rows of calls without a rest, at the card's sustained clock, `cool` rows of four after a rest; medians,
ms. `same bits` compares every result with those of the first row (the scales' gradients, which are summed in parts as wide
as a tile, are left out).
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.grouped_mlp import Step, captured, milliseconds, split
from te_offload.fused import machine
from te_offload.fused.kernels import sm90, sm90_glu, sm90_tiles
from te_offload.fused.kernels.interface import Counts, Gate, Gated, Orders, SquaredReLU
from te_offload.fused.kernels.sm90_launch import Tile

IN_USE = "in use"
PRODUCTS = ("fc1", "fc2", "dact", "wgrad", "fc1_wgrad", "fc2_wgrad", "dgrad")
REST_S = 0.02
_GATED = {"glu": "fc1", "dglu": "dact"}  # what `sm90_tiles` calls these with a gated activation
FROM_START = ":start"
_SPEC = re.compile(
    r"((?P<rows>\d+)x)?(?P<columns>\d+)(?P<way>[ta]?)(/(?P<per_stage>\d+))?(@(?P<above>\d)x(?P<beside>\d))?"
)


def parse_tile(text: str) -> Tile:
    """A tile from what the head of this file says.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found = _SPEC.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no tile; 192t/32@2x1 would be one, and 256.")
    above, beside = int(found["above"] or 1), int(found["beside"] or 1)
    per_stage = None if found["per_stage"] is None else int(found["per_stage"])
    return Tile(
        int(found["rows"] or 128),
        int(found["columns"]),
        above,
        beside,
        found["way"] == "t",
        per_stage,
        found["way"] == "a",
    )


class Choice(NamedTuple):
    """For one product: another tile, or ``None``; and whether its tiles are given out from the start."""

    tile: Tile | None = None
    from_start: bool = False


Way = dict[str, Choice]  # by product


def parse_way(text: str, product: str) -> Way:
    """What the head of this file says; without a name it is for ``product``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found: Way = {}
    for part in text.split(","):
        name, _, spec = part.rpartition("=")
        name = name or product
        from_start = spec.endswith(FROM_START)
        tile = spec.removesuffix(FROM_START)
        if name not in PRODUCTS:
            raise argparse.ArgumentTypeError(f"{name!r} is no product; there are {', '.join(PRODUCTS)}.")
        if from_start and name == "dact":
            raise argparse.ArgumentTypeError("FC2's dgrad always takes its tiles one by one.")
        found[name] = Choice(None if from_start and not tile else parse_tile(tile), from_start)
    return found


def random_split(experts: int, tokens: int) -> list[int]:
    """Tokens of each expert, each token going to any."""
    generator = torch.Generator().manual_seed(0)
    return torch.bincount(torch.randint(experts, (tokens,), generator=generator), minlength=experts).tolist()


class Products:
    """The six products of a step, one after the other or each by itself, a way."""

    def __init__(self, case: Case, way: Way) -> None:
        in_use = sm90_tiles.tiles_of(quick_memory=machine.has_quick_memory())

        def tile_for(name: str, regime: sm90_tiles.Regime, rows: int | None, columns: int, depth: int = 0) -> Tile:
            choice = way.get(_GATED.get(name, name), Choice())
            if name == "wgrad":  # by its columns, which are FC1's or FC2's input's
                choice = way.get("fc1_wgrad" if columns == case.x.shape[1] else "fc2_wgrad", choice)
            return choice.tile or in_use(name, regime, rows, columns, depth)

        self._from_start = {name for name, choice in way.items() if choice.from_start}
        self._case = case
        if case.gated:
            self._kernels: sm90.Sm90Kernels = sm90_glu.Sm90GluKernels(Gated(Gate.SWIGLU), tile_for)
        else:
            self._kernels = sm90.Sm90Kernels(SquaredReLU(), tile_for)
        self._experts = {name: self._kernels.prepare(name, tensors) for name, tensors in case.experts.items()}
        self._offsets, _ = self._kernels.offsets(case.sizes, case.y)  # a graph's own hold nothing before it has run
        self._parts = torch.zeros(case.x.shape[0], 8, device=case.x.device)
        self.step()

    def step(self) -> tuple[torch.Tensor, ...]:
        """All of them; the results, without the gradients of the scales."""
        self.forward()
        self.dact()
        case, experts, orders = self._case, self._experts, self._chosen(self._orders)
        self._fc2_wgrad(orders)
        self._kernels.fc1_backward(
            self._dact,
            case.x,
            experts["w1"],
            self._offsets,
            case.dx,
            experts["dw1"],
            accumulate=False,
            order=orders.fc1_wgrad,
            count=orders.fc1_dgrad,
        )
        return case.y, case.dx, case.experts["dw1"], case.experts["dw2"], self._rebuilt

    def forward(self) -> None:
        """The offsets, FC1 and FC2."""
        found = self._kernels.offsets(self._case.sizes, self._case.y)
        self._fc1(*found)
        self._fc2(*found)

    def fc1(self) -> None:
        """FC1 and its activation, after the offsets, which set its count to zero."""
        self._fc1(*self._kernels.offsets(self._case.sizes, self._case.y))

    def _fc1(self, offsets: torch.Tensor, counts: Counts) -> None:
        case, weights, count = self._case, self._experts["w1"], None if "fc1" in self._from_start else counts.fc1
        found = self._kernels.fc1(case.x, weights, None, case.scales, offsets, count)
        self._act_input, self._fc2_input = found

    def fc2(self) -> None:
        """FC2, after the offsets."""
        self._fc2(*self._kernels.offsets(self._case.sizes, self._case.y))

    def _fc2(self, offsets: torch.Tensor, counts: Counts) -> None:
        count = None if "fc2" in self._from_start else counts.fc2
        self._kernels.fc2(self._fc2_input, self._experts["w2"], None, None, offsets, self._case.y, count)

    def dact(self) -> None:
        """FC2's dgrad with the activation's, and the sums after it."""
        case = self._case
        found = self._kernels.fc2_dgrad(case.dy, self._experts["w2"], self._act_input, case.scales, self._offsets)
        self._dact, self._rebuilt, self._dscales, self._orders = found

    def wgrad(self) -> None:
        """Both weight gradients, after sums that set their counts to zero."""
        orders = self._sums()
        self._fc2_wgrad(orders)
        self._fc1_wgrad(orders)

    def fc1_wgrad(self) -> None:
        """FC1's, after the sums, and not beside its dgrad."""
        self._fc1_wgrad(self._sums())

    def fc2_wgrad(self) -> None:
        """FC2's, after the sums."""
        self._fc2_wgrad(self._sums())

    def _fc1_wgrad(self, orders: Orders) -> None:
        x, out, order = self._case.x, self._experts["dw1"], orders.fc1_wgrad
        self._kernels.fc1_wgrad(self._dact, x, self._offsets, out, accumulate=False, order=order)

    def _fc2_wgrad(self, orders: Orders) -> None:
        dy, out, order = self._case.dy, self._experts["dw2"], orders.fc2_wgrad
        self._kernels.wgrad(dy, self._rebuilt, self._offsets, out, accumulate=False, order=order)

    def dgrad(self) -> None:
        """FC1's dgrad, after the sums."""
        count = self._sums().fc1_dgrad
        self._kernels.fc1_dgrad(self._dact, self._experts["w1"], self._offsets, self._case.dx, count)

    def _sums(self) -> Orders:
        kernels = self._kernels
        return self._chosen(kernels._sums(self._parts, self._offsets, kernels._backward_count(self._offsets))[1])

    def _chosen(self, orders: Orders) -> Orders:
        for name in ("fc1_wgrad", "fc2_wgrad"):
            if {"wgrad", name} & self._from_start:
                orders = orders._replace(**{name: None})
        return orders._replace(fc1_dgrad=None) if "dgrad" in self._from_start else orders


class Case:
    """Weights, inputs and room for the results; each weight has memory of its own.

    Args:
        sizes: tokens of each expert. gated: with SwiGLU, else squared ReLU.
    """

    def __init__(self, hidden: int, ffn: int, sizes: list[int], device: str = "cuda", *, gated: bool = False) -> None:
        torch.manual_seed(0)
        self.gated = gated
        wide = 2 * ffn if gated else ffn
        made = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        experts, tokens = len(sizes), sum(sizes)
        self.x, self.dy = made(tokens, hidden), made(tokens, hidden)
        self.y, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)
        self.scales = torch.rand(tokens, device=device)
        self.sizes = torch.tensor(sizes, device=device)
        self.experts: dict[str, Any] = {
            "w1": [made(wide, hidden) * hidden**-0.5 for _ in range(experts)],
            "w2": [made(hidden, ffn) * ffn**-0.5 for _ in range(experts)],
            "dw1": self.x.new_empty(experts, wide, hidden),
            "dw2": self.x.new_empty(experts, hidden, ffn),
        }


def compare(case: Case, product: str, ways: dict[str, Way], rounds: int) -> dict[str, dict[str, Any]]:
    """Each way's medians, and whether its bits are those of the first one. ``product``: is timed alone too."""
    first: list[torch.Tensor] = []
    steps: dict[str, dict[str, Step]] = {}
    found: dict[str, dict[str, Any]] = {}
    kept = []  # graphs read their tensors
    for label, way in ways.items():
        products = Products(case, way)
        results = [result.clone() for result in products.step()]
        first = first or results
        found[label] = {"same_bits": all(map(torch.equal, first, results))}
        del results
        kept.append((products, dict(vars(products))))  # also what the product reads by itself
        steps[label] = {"alone": captured(getattr(products, product)), "step": captured(products.step)}
    times: dict[tuple[str, str], list[float]] = {}
    shuffled, labels = random.Random(0), list(ways)
    for kind in ("alone", "step"):
        for name, calls, rest in ((f"{kind}_hot", 8, 0.0), (f"{kind}_cool", 4, REST_S)):
            for _ in range(rounds + 2):
                shuffled.shuffle(labels)
                for label in labels:
                    time.sleep(rest)
                    times.setdefault((label, name), []).append(milliseconds(steps[label][kind], calls))
    for (label, name), values in times.items():
        found[label][name] = statistics.median(values[2:])
    return found


def main() -> None:
    """Run, print a table a routing, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("product", choices=PRODUCTS)
    parser.add_argument("ways", nargs="+", metavar="WAY")
    for name, value in (("experts", 64), ("hidden", 2048), ("ffn", 1408), ("tokens", 32768), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--activation", choices=("srelu", "swiglu"), default="srelu")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    gated = arguments.activation == "swiglu"
    experts, tokens = arguments.experts, arguments.tokens
    ways: dict[str, Way] = {IN_USE: {}}
    for text in arguments.ways:
        try:
            ways[text] = parse_way(text, arguments.product)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    if arguments.hidden == arguments.ffn and any(name.endswith("_wgrad") for way in ways.values() for name in way):
        parser.error(
            "With --hidden and --ffn alike the weight gradients cannot be told from each other; name both: wgrad."
        )
    print(
        f"{torch.cuda.get_device_name()}; {arguments.product}; E{experts} H{arguments.hidden} F{arguments.ffn} T{tokens}"
        f"{' SwiGLU' if gated else ''}"
    )
    found: dict[str, Any] = {}
    for routing, sizes in (
        ("even", split(experts, tokens, skew=None)),
        ("random", random_split(experts, tokens)),
    ):
        case = Case(arguments.hidden, arguments.ffn, sizes, gated=gated)
        rows = found[routing] = compare(case, arguments.product, ways, arguments.rounds)
        print(f"\n| {routing} routing | alone, hot | cool | step, hot | cool | same bits |\n|---|---|---|---|---|---|")
        for label, row in rows.items():
            cells = (f"{row[name]:.4f}" for name in ("alone_hot", "alone_cool", "step_hot", "step_cool"))
            print(f"| {label} | {' | '.join(cells)} | {'yes' if row['same_bits'] else 'NO'} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.1", "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
