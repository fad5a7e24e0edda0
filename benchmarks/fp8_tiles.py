"""Other tiles for the fused grouped MLP's products in FP8 on Hopper: those of a forward, and those of a backward.

    ./run benchmarks.fp8_tiles current fc1=208t@2x1,fc2=208t@2x1 wgrad=128 [--experts 64 --hidden 2048 --ffn 1408
        --tokens 32768 --json FILE]
    ./run benchmarks.fp8_tiles blocks fc1=128@2x1,fc2=128@2x1 dact=128@2x1,dgrad=128@2x1 --activation swiglu

The recipe is ``current`` (a scale a tensor; sums of the forward in the tensor cores, of the backward in float32) or
``blocks``. A way names products and their tiles: ``fc1``, ``fc2``, ``dact`` (FC2's dgrad with the activation's), ``dgrad``
(FC1's), ``wgrad`` (both); tiles as `benchmarks.tiles` has them. The first row is what is in use. Numbers are quantized
beforehand, once for all ways: a forward is the offsets, FC1 and FC2, a backward FC2's dgrad with its sums, both weight
gradients and FC1's dgrad. Rows, turns and routings as in `benchmarks.tiles`; `-`: the way changes nothing there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.grouped_mlp import Step, captured, milliseconds, split
from benchmarks.tiles import IN_USE, REST_S, parse_tile, random_split
from te_offload.fused import machine
from te_offload.fused.kernels import sm90_block_glu, sm90_blocks, sm90_fp8, sm90_fp8_glu, sm90_tiles
from te_offload.fused.kernels.interface import Gate, Gated, Orders, SquaredReLU, TileCount, TileOrder
from te_offload.fused.kernels.sm90_launch import Tile
from te_offload.ops.scaling import BlockFormat, BlockScaling, Scaling

E4M3, E5M2, BLOCKS = Scaling(torch.float8_e4m3fn), Scaling(torch.float8_e5m2), BlockScaling(BlockFormat.FP8)
FORWARD, BACKWARD = ("fc1", "fc2"), ("dact", "wgrad", "dgrad")
PARTS = {"forward": FORWARD, "backward": BACKWARD}

Way = dict[str, Tile]  # by product


def parse_way(text: str) -> Way:
    """What the head of this file says.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found: Way = {}
    for part in text.split(","):
        name, _, spec = part.rpartition("=")
        if name not in (*FORWARD, *BACKWARD):
            raise argparse.ArgumentTypeError(
                f"{part!r} names no product with a tile; fc2=208t@1x2 would, and there are {', '.join(FORWARD + BACKWARD)}."
            )
        found[name] = parse_tile(spec)
    return found


class CurrentCase:
    """Numbers in FP8 with a scale a tensor, and room for the results.

    Args:
        sizes: tokens of each expert. gated: SwiGLU, else squared ReLU.
    """

    def __init__(self, hidden: int, ffn: int, sizes: list[int], device: str = "cuda", *, gated: bool = False) -> None:
        torch.manual_seed(0)
        tokens, self.gated = sum(sizes), gated
        self.x, self.dy = (torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(2))
        self.router, self.sizes = torch.rand(tokens, device=device), torch.tensor(sizes, device=device)
        shapes = (len(sizes), 2 * ffn if gated else ffn, hidden), (len(sizes), hidden, ffn)
        self.weights = [(torch.randn(shape, device=device) * shape[2] ** -0.5).bfloat16() for shape in shapes]
        self.dweights = [torch.empty_like(one) for one in self.weights]
        self._quantize()

    def kernels(self, *tiles: Any) -> Any:
        """Those of the recipe. ``tiles``: as `Sm90Kernels` takes them."""
        if self.gated:
            return sm90_fp8_glu.Sm90Fp8GluKernels(Gated(Gate.SWIGLU), *tiles)
        return sm90_fp8.Sm90Fp8Kernels(SquaredReLU(), *tiles)

    def _quantize(self) -> None:
        kernels = self.kernels()
        offsets = self.offsets = kernels.offsets(self.sizes, torch.empty_like(self.x))[0]
        w1, w2 = self._w1, self._w2 = [
            kernels.quantize_weights(kernels.prepare(f"{place}", one), E4M3) for place, one in enumerate(self.weights)
        ]
        self._x = kernels.quantize(self.x, offsets, E4M3, weights=w1.inverses)
        given = self._x, w1, None, self.router, offsets, self.x.dtype
        self._act_input, magnitudes = kernels.fc1_fp8(*given, fast=True)
        of_act = {"magnitudes": magnitudes, "router": self.router}
        self._fc2_input = kernels.quantize(self._act_input, offsets, E4M3, weights=w2.inverses, **of_act)
        self._dy = kernels.quantize(self.dy, offsets, E5M2, weights=w2.inverses, by_column=True)
        self._dact = kernels.quantize(self._act_input, offsets, E5M2, weights=w1.inverses, by_column=True)
        self._rebuilt = kernels.rebuild(self._act_input, self.router, self._fc2_input, offsets, E4M3.dtype)
        self._turned = kernels.turn(self._x, offsets)

    def fc1(self, kernels: Any, count: TileCount | None) -> torch.Tensor:
        """FC1 with what its epilogue does."""
        given = self._x, self._w1, None, self.router, self.offsets, self.x.dtype
        return kernels.fc1_fp8(*given, fast=True, count=count)[0]  # type: ignore[no-any-return]

    def fc2(self, kernels: Any, out: torch.Tensor, count: TileCount | None) -> None:
        """FC2."""
        kernels.linear_fp8(self._fc2_input, self._w2.rows, out, self.offsets, fast=True, count=count)

    def dact(self, kernels: Any) -> tuple[torch.Tensor, Orders]:
        """FC2's dgrad with the activation's, and how what follows takes its tiles."""
        found = kernels.fc2_dgrad_fp8(self._dy, self._w2, self._act_input, self.router, self.offsets, fast=False)
        return found[0], found[-1]

    def dgrad(self, kernels: Any, out: torch.Tensor, count: TileCount | None) -> None:
        """FC1's."""
        kernels.linear_fp8(self._dact, self._w1.columns, out, self.offsets, fast=False, count=count)

    def wgrad(self, kernels: Any, of: int, out: Any, order: TileOrder | None) -> None:
        """FC1's, or FC2's."""
        dy, x = (self._dact, self._turned) if of == 1 else (self._dy, self._rebuilt)
        kernels.wgrad_fp8(dy, x, self.offsets, out, accumulate=False, fast=False, order=order)


class BlockCase(CurrentCase):
    """The same by blocks."""

    def kernels(self, *tiles: Any) -> Any:
        """Those of the recipe."""
        if self.gated:
            return sm90_block_glu.Sm90BlockGluKernels(Gated(Gate.SWIGLU), *tiles)
        return sm90_blocks.Sm90BlockKernels(SquaredReLU(), *tiles)

    def _quantize(self) -> None:
        kernels = self.kernels()
        offsets = self.offsets = kernels.offsets(self.sizes, torch.empty_like(self.x))[0]
        self._w1, self._w2 = (self._quantized(one) for one in self.weights)
        self._x, self._turned = kernels.block_rows(self.x, offsets, BLOCKS, by_column=True)
        given = self._x, self._w1, None, self.router, (offsets, offsets), self.x.dtype, BLOCKS
        self._act_input, self._fc2_input = kernels.fc1_blocks(*given)
        self._dy, self._dy_turned = kernels.block_rows(self.dy, offsets, BLOCKS, by_column=True)
        self._dact, self._dact_turned = kernels.block_rows(self._act_input, offsets, BLOCKS, by_column=True)
        self._rebuilt = kernels.rebuild_blocks(self._act_input, self.router, offsets, BLOCKS)

    def _quantized(self, weights: torch.Tensor) -> Any:
        kernels = self.kernels()
        return kernels.block_weights(kernels.prepare("weights", weights), BLOCKS, by_column=True)

    def fc1(self, kernels: Any, count: TileCount | None) -> torch.Tensor:
        """FC1, without the quantizer after it."""
        out = torch.empty_like(self._act_input)
        kernels.fc1_linear_blocks(self._x, self._w1, None, out, self.offsets, count)
        return out

    def fc2(self, kernels: Any, out: torch.Tensor, count: TileCount | None) -> None:
        """FC2."""
        kernels.linear_blocks(self._fc2_input, self._w2.rows, out, self.offsets, count=count)

    def dact(self, kernels: Any) -> tuple[torch.Tensor, Orders]:
        """As above."""
        found = kernels.fc2_dgrad_blocks(self._dy, self._w2, self._act_input, self.router, self.offsets)
        return found[0], found[-1]

    def dgrad(self, kernels: Any, out: torch.Tensor, count: TileCount | None) -> None:
        """FC1's."""
        kernels.linear_blocks(self._dact, self._w1.columns, out, self.offsets, count=count)

    def wgrad(self, kernels: Any, of: int, out: Any, order: TileOrder | None) -> None:
        """FC1's, or FC2's."""
        dy, x = (self._dact_turned, self._turned) if of == 1 else (self._dy_turned, self._rebuilt)
        kernels.wgrad_blocks(dy, x, self.offsets, out, accumulate=False, order=order)


RECIPES = {"current": CurrentCase, "blocks": BlockCase}


class Products:
    """The products of a forward, and of a backward, a way."""

    def __init__(self, case: CurrentCase, way: Way) -> None:
        in_use = sm90_tiles.tiles_of(quick_memory=machine.has_quick_memory())

        def tile_for(product: str, *shape: Any) -> Tile:
            return way.get(self._now) or in_use(product, *shape)

        self._case, self._now = case, ""
        self._kernels = case.kernels(tile_for)
        self._out = [self._kernels.prepare(f"{place}", one) for place, one in enumerate(case.dweights)]
        self._y, self._dx = torch.empty_like(case.x), torch.empty_like(case.x)
        self._parts = torch.zeros(case.x.shape[0], 8, device=case.x.device)

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The offsets, FC1 and FC2."""
        case, kernels = self._case, self._kernels
        _, counts = kernels.offsets(case.sizes, self._y)
        self._now = "fc1"
        act_input = case.fc1(kernels, counts.fc1)
        self._now = "fc2"
        case.fc2(kernels, self._y, counts.fc2)
        return act_input, self._y

    def backward(self) -> tuple[torch.Tensor, ...]:
        """FC2's dgrad with its sums, both weight gradients, FC1's dgrad."""
        case, kernels = self._case, self._kernels
        self._now = "dact"
        dact, orders = case.dact(kernels)
        self._now = "wgrad"
        case.wgrad(kernels, 2, self._out[1], orders.fc2_wgrad)
        self._now = "dgrad"
        case.dgrad(kernels, self._dx, orders.fc1_dgrad)
        self._now = "wgrad"
        case.wgrad(kernels, 1, self._out[0], orders.fc1_wgrad)
        return dact, self._dx, *case.dweights

    def alone(self, product: str) -> None:
        """One of them, after what sets its count to zero; ``"wgrad"`` is both."""
        case, kernels, self._now = self._case, self._kernels, product
        if product == "dact":
            case.dact(kernels)
        elif product in FORWARD:
            _, counts = kernels.offsets(case.sizes, self._y)
            if product == "fc1":
                case.fc1(kernels, counts.fc1)
            else:
                case.fc2(kernels, self._y, counts.fc2)
        else:
            orders = kernels._sums(self._parts, case.offsets, kernels._backward_count(case.offsets))[1]
            if product == "dgrad":
                case.dgrad(kernels, self._dx, orders.fc1_dgrad)
            else:
                case.wgrad(kernels, 2, self._out[1], orders.fc2_wgrad)
                case.wgrad(kernels, 1, self._out[0], orders.fc1_wgrad)


def compare(case: CurrentCase, ways: dict[str, Way], rounds: int) -> dict[str, dict[str, Any]]:
    """Each way's medians, and whether its bits are those of the first one."""
    first: list[torch.Tensor] = []
    steps: dict[str, dict[str, Step]] = {part: {} for part in PARTS}
    found: dict[str, dict[str, Any]] = {}
    kept = []  # graphs read their tensors
    for label, way in ways.items():
        products = Products(case, way)
        kept.append(products)
        results = [result.clone() for result in (*products.forward(), *products.backward())]
        first = first or results
        found[label] = {"same_bits": all(map(torch.equal, first, results))}
        del results
        for part, named in PARTS.items():
            if not way or set(named) & way.keys():
                steps[part][label] = captured(getattr(products, part))
    shuffled = random.Random(0)
    for part, each in steps.items():
        labels = list(each)
        for name, calls, rest in ((f"{part}_hot", 8, 0.0), (f"{part}_cool", 4, REST_S)):
            times: dict[str, list[float]] = {}
            for _ in range(rounds + 2):
                shuffled.shuffle(labels)
                for label in labels:
                    time.sleep(rest)
                    times.setdefault(label, []).append(milliseconds(each[label], calls))
            for label, values in times.items():
                found[label][name] = statistics.median(values[2:])
    return found


def main() -> None:
    """Run, print a table a routing, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("ways", nargs="+", metavar="WAY")
    for name, value in (("experts", 64), ("hidden", 2048), ("ffn", 1408), ("tokens", 32768), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--activation", choices=("srelu", "swiglu"), default="srelu")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    gated = arguments.activation == "swiglu"
    experts, hidden, ffn, tokens = arguments.experts, arguments.hidden, arguments.ffn, arguments.tokens
    ways: dict[str, Way] = {IN_USE: {}}
    for text in arguments.ways:
        try:
            ways[text] = parse_way(text)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    shape = f"E{experts} H{hidden} F{ffn} T{tokens}{' SwiGLU' if gated else ''}"
    print(f"{torch.cuda.get_device_name()}; FP8, {arguments.recipe}; {shape}; ms")
    found: dict[str, Any] = {}
    for routing, sizes in (("even", split(experts, tokens, skew=None)), ("random", random_split(experts, tokens))):
        case = RECIPES[arguments.recipe](hidden, ffn, sizes, gated=gated)
        rows = found[routing] = compare(case, ways, arguments.rounds)
        print(
            f"\n| {routing} routing | forward, hot | cool | backward, hot | cool | same bits |\n|---|---|---|---|---|---|"
        )
        for label, row in rows.items():
            times = (row.get(f"{part}_{name}") for part in PARTS for name in ("hot", "cool"))
            cells = ("-" if one is None else f"{one:.4f}" for one in times)
            print(f"| {label} | {' | '.join(cells)} | {'yes' if row['same_bits'] else 'NO'} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
