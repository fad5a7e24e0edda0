"""The benchmark of tiles: what it takes for a tile, and that it runs all products with it, by torch's arithmetic."""

from __future__ import annotations

import argparse
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("quack", reason="quack-kernels, whose tiles these are, is not installed here")

from benchmarks import tiles
from te_offload.fused.kernels import sm90, sm90_glu, sm90_tiles
from te_offload.fused.kernels.interface import Counts, Orders, SquaredReLU, TileCount, TileOrder
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.fused.kernels.sm90_launch import Tile


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("256", Tile(128, 256, 1, 1)),
        ("192t/32", Tile(128, 192, 1, 1, pingpong=True, per_stage=32)),
        ("160t@2x1", Tile(128, 160, 2, 1, pingpong=True)),
        ("192t/32@1x2", Tile(128, 192, 1, 2, pingpong=True, per_stage=32)),
        ("128a@1x2", Tile(128, 128, 1, 2, apart=True)),
        ("256x192/32@2x1", Tile(256, 192, 2, 1, per_stage=32)),
    ],
)
def test_a_tile_is_its_rows_if_not_128_its_columns_how_warp_groups_share_it_products_a_stage_and_cluster(
    text: str, tile: Tile
) -> None:
    assert tiles.parse_tile(text) == tile


@pytest.mark.parametrize("text", ["", "t", "192x", "x192", "192@2", "192/", "-192"])
def test_what_is_no_tile_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="192t/32@2x1"):
        tiles.parse_tile(text)


def test_a_way_names_products_beside_the_first_and_says_whose_tiles_are_given_out_from_the_start() -> None:
    two, one = tiles.parse_tile("192t@2x1"), tiles.parse_tile("256")
    assert tiles.parse_way("192t@2x1", "dgrad") == {"dgrad": (two, False)}
    assert tiles.parse_way(":start", "dgrad") == {"dgrad": (None, True)}
    found = tiles.parse_way("fc2=256:start,192t@2x1", "dgrad")
    assert found == {"fc2": (one, True), "dgrad": (two, False)}


@pytest.mark.parametrize(
    ("text", "named"), [("fc3=256", "fc1, fc2"), ("dact=:start", "always"), ("fc2=", "192t/32@2x1")]
)
def test_what_is_no_way_is_refused(text: str, named: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=named):
        tiles.parse_way(text, "dgrad")


def test_random_routing_gives_out_every_token_and_is_the_same_each_time() -> None:
    sizes = tiles.random_split(16, 1000)
    assert len(sizes) == 16 and sum(sizes) == 1000 and len(set(sizes)) > 1
    assert tiles.random_split(16, 1000) == sizes


HIDDEN, FFN = 16, 24


class AskedKernels(ReferenceKernels):
    """Torch's arithmetic; asks for tiles as the kernels do."""

    asked: dict[str, set[int]]
    counted: set[bool]

    def __init__(self, activation: SquaredReLU, tile_for: Any) -> None:
        super().__init__(activation)
        self._tile_for = tile_for

    def _ask(self, product: str, columns: int = 64, label: str = "") -> None:
        tile = self._tile_for(product, sm90_tiles.Regime.FEW, 64, columns)
        self.asked.setdefault(label or product, set()).add(tile.columns)

    def fc1(self, *args: Any) -> Any:
        self._ask("fc1")
        self.counted.add(args[-1] is not None)
        return super().fc1(*args)

    def offsets(self, split_sizes: torch.Tensor, out: torch.Tensor) -> Any:
        return super().offsets(split_sizes, out)[0], Counts(TileCount(split_sizes, 0), None)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._ask("wgrad", x.shape[1], "fc1_wgrad" if x.shape[1] == HIDDEN else "fc2_wgrad")
        super().wgrad(dy, x, *args, **kwargs)

    def _backward_count(self, offsets: torch.Tensor) -> None:
        return None

    def _sums(self, parts: torch.Tensor, offsets: torch.Tensor, count: None) -> Any:
        return parts.sum(1), Orders()


@pytest.mark.parametrize("product", tiles.PRODUCTS)
def test_one_product_takes_other_tiles_and_all_is_timed_alone_and_as_a_step(
    monkeypatch: pytest.MonkeyPatch, product: str
) -> None:
    AskedKernels.asked, AskedKernels.counted, calls = {}, set(), []

    def milliseconds(step: Callable[[], object], count: int) -> float:
        step()
        calls.append(count)
        return count

    monkeypatch.setattr(sm90, "Sm90Kernels", AskedKernels)
    monkeypatch.setattr(tiles, "captured", lambda run: run)
    monkeypatch.setattr(tiles, "milliseconds", milliseconds)
    monkeypatch.setattr(tiles, "REST_S", 0.0)
    case = tiles.Case(HIDDEN, FFN, [5, 0, 7, 4], device="cpu")
    found = tiles.compare(case, product, {tiles.IN_USE: {}, "other": tiles.parse_way("48", product)}, rounds=1)
    assert AskedKernels.counted == {True}
    row = {"same_bits": True, "alone_hot": 8, "alone_cool": 4, "step_hot": 8, "step_cool": 4}
    assert found == {tiles.IN_USE: row, "other": row}
    assert len(calls) == 4 * 3 * 2  # rows of a round after two to warm up
    assert {"fc1", "fc1_wgrad", "fc2_wgrad"} <= AskedKernels.asked.keys()
    for name, columns in AskedKernels.asked.items():
        assert (48 in columns) == (name in (product, f"fc1_{product}", f"fc2_{product}"))


def test_a_step_with_swiglu_takes_the_tiles_named_for_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    AskedKernels.asked, AskedKernels.counted = {}, set()

    class GatedKernels(AskedKernels):
        def fc1(self, *args: Any) -> Any:
            self._ask("glu")
            return super().fc1(*args)

        def fc2_dgrad(self, *args: Any) -> Any:
            self._ask("dglu")
            return super().fc2_dgrad(*args)

    monkeypatch.setattr(sm90_glu, "Sm90GluKernels", GatedKernels)
    case = tiles.Case(HIDDEN, FFN, [5, 0, 7, 4], device="cpu", gated=True)
    results = tiles.Products(case, tiles.parse_way("48,dact=96", "fc1")).step()
    assert AskedKernels.asked["glu"] == {48} and AskedKernels.asked["dglu"] == {96}
    assert results[2].shape == (4, 2 * FFN, HIDDEN) and all(result.isfinite().all() for result in results)


def test_tiles_from_the_start_are_counted_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    AskedKernels.asked, AskedKernels.counted = {}, set()
    monkeypatch.setattr(sm90, "Sm90Kernels", AskedKernels)
    case = tiles.Case(HIDDEN, FFN, [5, 0, 7, 4], device="cpu")
    products = tiles.Products(case, tiles.parse_way("fc1=:start,wgrad=:start", "fc1"))
    products.fc1()
    assert AskedKernels.counted == {False}
    count = TileCount(case.sizes, 0)
    orders = Orders(TileOrder(*count), TileOrder(*count), count)
    assert products._chosen(orders) == Orders(None, None, count)
    products = tiles.Products(case, tiles.parse_way(":start", "fc1_wgrad"))
    assert products._chosen(orders) == orders._replace(fc1_wgrad=None)


def test_weight_gradients_of_one_shape_cannot_be_named_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tiles", "fc2_wgrad", "256", "--hidden", "64", "--ffn", "64"])
    with pytest.raises(SystemExit):
        tiles.main()
    assert "name both: wgrad" in capsys.readouterr().err


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda kernels: pickle.loads(pickle.dumps(kernels))], ids=["copied", "pickled"]
)
def test_kernels_keep_their_choice_of_tiles(again: Any) -> None:
    for choice in (sm90_tiles.tile_for, only_256):
        kernels = again(sm90.Sm90Kernels(SquaredReLU(), choice))
        assert kernels._tile_for is choice


def only_256(*_: object) -> Tile:
    return Tile(128, 256)
