"""The benchmark of FP8's tiles: what it takes for a way, and that each product has its tile, by torch's arithmetic."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("quack", reason="quack-kernels, whose tiles these are, is not installed here")

from benchmarks import fp8_tiles
from benchmarks.tiles import IN_USE
from te_offload.fused.kernels import sm90_tiles
from te_offload.fused.kernels.interface import Activation, Gate, Gated, Orders, SquaredReLU
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.fused.kernels.reference_fp8 import ReferenceFp8Kernels
from te_offload.fused.kernels.sm90_launch import Tile

HIDDEN, FFN = 128, 256
OTHER = Tile(128, 48, 1, 1)
PRODUCTS = fp8_tiles.FORWARD + fp8_tiles.BACKWARD
Asked = list[bool]  # of each call that multiplies, whether it was given the other tile


def test_a_way_names_products_and_their_tiles() -> None:
    found = fp8_tiles.parse_way("fc1=208t@2x1,wgrad=128")
    assert found == {"fc1": Tile(128, 208, 2, 1, pingpong=True), "wgrad": Tile(128, 128, 1, 1)}


@pytest.mark.parametrize(
    ("text", "named"), [("fc3=128", "fc1, fc2, dact"), ("128", "fc2=208t@1x2"), ("fc2=x", "192t/32@2x1")]
)
def test_what_is_no_way_is_refused_with_one_that_is(text: str, named: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=named):
        fp8_tiles.parse_way(text)


def asking(base: type[Any], asked: Asked, activation: Activation) -> type[Any]:
    """Torch's arithmetic; asks for a tile with each product, as the kernels do."""

    def tile_for(*_: object) -> Tile:
        return sm90_tiles.tile_for("blocks", sm90_tiles.Regime.USUAL, None, 128)

    class Asking(base):
        def __init__(self, tiles: Callable[..., Tile] = tile_for) -> None:
            super().__init__(activation)
            self._tile_for = tiles

        def __getattribute__(self, name: str) -> Any:
            if name.split("_")[0] in ("fc1", "fc2", "wgrad", "linear"):
                asked.append(self._tile_for("blocks", sm90_tiles.Regime.USUAL, None, 128) is OTHER)
            return super().__getattribute__(name)

        def _backward_count(self, offsets: torch.Tensor) -> None:
            return None

        def _sums(self, parts: torch.Tensor, offsets: torch.Tensor, count: None) -> Any:
            return parts.sum(1), Orders()

    return Asking


def case_of(
    monkeypatch: pytest.MonkeyPatch, recipe: str, asked: Asked, *, gated: bool = False
) -> fp8_tiles.CurrentCase:
    activation = Gated(Gate.SWIGLU) if gated else SquaredReLU()
    base = {"current": ReferenceFp8Kernels, "blocks": ReferenceBlockKernels}[recipe]
    room = fp8_tiles.RECIPES[recipe]
    monkeypatch.setattr(room, "kernels", lambda _, *tiles: asking(base, asked, activation)(*tiles))
    case = room(HIDDEN, FFN, [5, 0, 7, 4], device="cpu", gated=gated)
    asked.clear()
    return case


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("recipe", fp8_tiles.RECIPES)
@pytest.mark.parametrize("gated", [False, True], ids=["squared ReLU", "SwiGLU"])
def test_a_way_gives_its_tile_to_the_product_that_it_names_and_to_no_other(
    monkeypatch: pytest.MonkeyPatch, recipe: str, product: str, gated: bool
) -> None:
    asked: Asked = []
    products = fp8_tiles.Products(case_of(monkeypatch, recipe, asked, gated=gated), {product: OTHER})
    results = [*products.forward(), *products.backward()]
    order = ("fc1", "fc2", "dact", "wgrad", "dgrad", "wgrad")
    assert [other for other, _ in itertools.groupby(asked)] == [
        named for named, _ in itertools.groupby(name == product for name in order)
    ]
    assert len(results) == 6 and all(result.isfinite().all() and result.any() for result in results)


@pytest.mark.parametrize("recipe", fp8_tiles.RECIPES)
def test_each_way_is_timed_in_the_parts_that_it_changes(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    case = case_of(monkeypatch, recipe, [])

    def milliseconds(step: Callable[[], object], count: int) -> float:
        step()
        return count

    monkeypatch.setattr(fp8_tiles, "captured", lambda run: run)
    monkeypatch.setattr(fp8_tiles, "milliseconds", milliseconds)
    monkeypatch.setattr(fp8_tiles, "REST_S", 0.0)
    ways = {IN_USE: {}, "one": {"fc2": OTHER}, "other": {"wgrad": OTHER}}
    found = fp8_tiles.compare(case, ways, rounds=1)
    forward, backward = ({f"{part}_hot": 8, f"{part}_cool": 4} for part in fp8_tiles.PARTS)
    same = {"same_bits": True}
    assert found == {IN_USE: same | forward | backward, "one": same | forward, "other": same | backward}


def test_other_bits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(monkeypatch, "current", [])
    real, calls = fp8_tiles.Products.forward, []

    def forward(products: fp8_tiles.Products) -> tuple[torch.Tensor, ...]:
        first, *others = real(products)
        calls.append(1)
        return (first + len(calls), *others)

    monkeypatch.setattr(fp8_tiles.Products, "forward", forward)
    monkeypatch.setattr(fp8_tiles, "captured", lambda run: run)
    monkeypatch.setattr(fp8_tiles, "milliseconds", lambda *_: 1.0)
    monkeypatch.setattr(fp8_tiles, "REST_S", 0.0)
    found = fp8_tiles.compare(case, {IN_USE: {}, "other": {"fc1": OTHER}}, rounds=1)
    assert [row["same_bits"] for row in found.values()] == [True, False]
