"""The sweep of tiles: what it times, what it fits, and that the tiles in use are among the quickest that it has seen."""

from __future__ import annotations

import argparse
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("quack", reason="quack-kernels, whose tiles these are, is not installed here")

from benchmarks import fp8_tiles, tile_sweep, tiles
from te_offload.fused import machine
from te_offload.fused.kernels import sm90, sm90_quick_tiles, sm90_tile_lists, sm90_tiles
from tests.fused.test_fp8_tiles_benchmark import OTHER, case_of
from tests.fused.test_tiles_benchmark import FFN, HIDDEN, AskedKernels

DATA = Path(__file__).parents[2] / "docs/results/data"
SHAPE = tile_sweep.Shape(4, HIDDEN, FFN, 16)
SWEPT = sorted(DATA.glob("*-tile-sweep-*.json"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In place of the GPU's: as many milliseconds as calls in a row, which it collects."""
    calls: list[int] = []

    def milliseconds(step: Callable[[], object], count: int) -> float:
        step()
        calls.append(count)
        return count

    monkeypatch.setattr(tile_sweep, "captured", lambda run: run)
    monkeypatch.setattr(tile_sweep, "milliseconds", milliseconds)
    monkeypatch.setattr(tile_sweep, "REST_S", 0.0)
    return calls


@pytest.mark.parametrize("product", ["fc1", "fc2", "dact", "dgrad", "fc1_wgrad", "fc2_wgrad"])
def test_a_product_is_timed_in_all_its_tiles_with_both_routings(
    monkeypatch: pytest.MonkeyPatch, clock: list[int], product: str
) -> None:
    AskedKernels.asked, AskedKernels.counted = {}, set()
    monkeypatch.setattr(sm90, "Sm90Kernels", AskedKernels)
    monkeypatch.setattr(tiles, "Case", functools.partial(tiles.Case, device="cpu"))
    monkeypatch.setitem(tile_sweep.CANDIDATES["bf16", "srelu"], product, "48t 96@1x2")
    rows = tile_sweep.sweep("bf16", "srelu", SHAPE, [product], rounds=2)
    assert [(row.routing, row.tile, row.hot, row.cool) for row in rows] == [
        (routing, tile, 8, 3) for routing in ("even", "random") for tile in ("48t", "96@1x2")
    ]
    assert len(clock) == 2 * 2 * 2 * (2 + 1)  # routings, tiles, kinds of rows, and a round to warm up
    if product in AskedKernels.asked:
        assert {48, 96} <= AskedKernels.asked[product]


@pytest.mark.parametrize("product", ["fc1", "fc2", "dact", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe", fp8_tiles.RECIPES)
def test_a_product_in_fp8_takes_the_tile_by_itself(
    monkeypatch: pytest.MonkeyPatch, clock: list[int], recipe: str, product: str
) -> None:
    asked: list[bool] = []
    case = case_of(monkeypatch, recipe, asked)
    monkeypatch.setattr(tiles, "parse_tile", {"48": OTHER}.get)
    steps, _ = tile_sweep.steps_of(recipe, case, product, ["48"])
    steps["48"]()
    assert asked and all(asked)


def test_weight_gradients_of_one_shape_are_left_out(monkeypatch: pytest.MonkeyPatch, clock: list[int]) -> None:
    monkeypatch.setattr(tiles, "Case", functools.partial(tiles.Case, device="cpu"))
    shape = tile_sweep.Shape(4, HIDDEN, HIDDEN, 16)
    assert tile_sweep.sweep("bf16", "srelu", shape, ["fc1_wgrad", "fc2_wgrad"], rounds=1) == []


@pytest.mark.parametrize("text", ["", "64,2048", "64,2048,1408,x"])
def test_what_is_no_shape_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="64,2048,1408,32768"):
        tile_sweep.Shape.parse(text)


def test_fit_finds_the_factors_that_times_were_made_of() -> None:
    factors = {"208t": 1.0, "192t@1x2": 1.05, "256@2x1": 1.2}
    rows = [
        tile_sweep.Row("bf16", "srelu", [64, 2048, ffn, 32768], "even", "fc1", tile, time, time)
        for ffn, slow in ((768, 2.0), (1408, 3.0), (2816, 5.0))
        for tile, factor in factors.items()
        for time in [slow * factor * tiles.parse_tile(tile).padded(None, ffn)]
    ]
    cells = tile_sweep.cells_of(rows)
    assert tile_sweep.fitted(cells) == pytest.approx(factors)
    assert [cell.excess("208t") == 0 for cell in cells] == [False, True, True]  # 768 columns are twice 384


@pytest.mark.parametrize("recipe", ["bf16", *fp8_tiles.RECIPES])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_products_are_looked_up_under_the_names_that_the_kernels_use(recipe: str, activation: str) -> None:
    names = {
        tile_sweep.Result.of(tile_sweep.Row(recipe, activation, [*SHAPE], "even", product, "128", 1.0, 1.0)).name
        for product in tile_sweep.CANDIDATES[recipe, activation]
    }
    known = {name for name, _ in sm90_tile_lists.TILES}
    assert names <= known
    prefix = {"bf16": "", "current": "fp8", "blocks": "blocks"}[recipe]
    assert all(name.startswith(prefix) for name in names)


def test_each_tile_that_an_h200_likes_better_was_timed_for_its_product_there() -> None:
    timed: dict[str, set[str]] = defaultdict(set)
    for cell in tile_sweep.cells_of(tile_sweep.read(SWEPT)):
        if cell.result.quick_memory:
            timed[sm90_tiles.entry_of(cell.result.name, cell.result.depth)] |= cell.times.keys()
    again: dict[str, set[str]] = defaultdict(set)  # by the benchmark as it is
    for (recipe, activation), products in tile_sweep.CANDIDATES.items():
        for product, names in products.items():
            row = tile_sweep.Row(recipe, activation, [*SHAPE], "even", product, "128", 1.0, 1.0)
            again[tile_sweep.Result.of(row).name] |= {*names.split()}
    for (product, _), entries in sm90_quick_tiles.QUICK_MEMORY.items():
        for known in (timed[product], again[product.removesuffix(" deep")]):
            assert {tile for tile, _ in entries} <= {*map(tiles.parse_tile, known)}, product


def test_a_product_that_was_swept_again_is_compared_within_its_last_run(tmp_path: Path) -> None:
    shape = [64, 2048, 1408, 32768]

    def row(product: str, tile: str, time: float) -> tile_sweep.Row:
        return tile_sweep.Row("bf16", "srelu", shape, "even", product, tile, time, time)

    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    tile_sweep.write([row("fc1", "208t", 1.0), row("fc1", "192t", 1.5), row("fc2", "208t", 2.0)], paths[0])
    tile_sweep.write([row("fc1", "208t", 3.0), row("fc1", "160t", 2.5)], paths[1])
    cells = tile_sweep.cells_of(tile_sweep.read(paths))
    assert [cell.times for cell in cells] == [{"208t": 3.0, "160t": 2.5}, {"208t": 2.0}]


def test_a_card_with_quick_memory_is_swept_and_fitted_apart(
    monkeypatch: pytest.MonkeyPatch, clock: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiles, "Case", functools.partial(tiles.Case, device="cpu"))
    monkeypatch.setattr(sm90, "Sm90Kernels", AskedKernels)
    monkeypatch.setitem(tile_sweep.CANDIDATES["bf16", "srelu"], "fc2", "48t")
    rows = []
    for quick in (False, True):
        monkeypatch.setattr(machine, "has_quick_memory", lambda quick=quick: quick)
        rows += tile_sweep.sweep("bf16", "srelu", SHAPE, ["fc2"], rounds=1)
    cells = tile_sweep.cells_of(rows)
    assert [cell.result.quick_memory for cell in cells] == [False, True]
    tile_sweep.say_fit(cells)
    labels = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert labels == ["| fc2, few", "| fc2, few, quick memory"]


def test_times_of_shapes_that_were_swept_are_kept_when_a_later_one_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = tile_sweep.Row("bf16", "srelu", [64, 2048, 1408, 32768], "even", "fc1", "208t", 1.0, 1.0)
    found: list[list[tile_sweep.Row]] = [[row]]

    def sweep(*_: object) -> list[tile_sweep.Row]:
        return found.pop()  # an IndexError for the second shape

    path = tmp_path / "times.json"
    monkeypatch.setattr(tile_sweep, "sweep", sweep)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr("sys.argv", ["tile_sweep", "64,2048,1408,32768", "8,4096,14336,16384", "--json", str(path)])
    with pytest.raises(IndexError):
        tile_sweep.main()
    assert tile_sweep.read([path]) == [row]


def test_tiles_in_use_are_among_the_quickest_of_every_sweep() -> None:
    groups: dict[Any, list[float]] = defaultdict(list)
    cells = tile_sweep.cells_of(tile_sweep.read(SWEPT))
    for cell in cells:
        assert cell.in_use is not None, f"{cell.label}: the tile in use was not timed"
        groups[cell.result.name, cell.result.regime, cell.result.quick_memory].append(cell.excess(cell.in_use))
    assert {quick for *_, quick in groups} == {False, True}
    assert len(SWEPT) >= 2 and sum(map(len, groups.values())) > 200
    for group, excess in groups.items():
        assert statistics.fmean(excess) < 0.03 and max(excess) < 0.06, group
