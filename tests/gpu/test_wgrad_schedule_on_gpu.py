"""Weight gradients whose tiles are taken as clusters are done with others, busiest experts first: only time changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from te_offload.fused.kernels.interface import Orders, SquaredReLU, TileOrder
from tests.support.mlp import seeded

if TYPE_CHECKING:
    from te_offload.fused.kernels.sm90_launch import Tile

pytestmark = pytest.mark.gpu

SHAPES = {"ragged": (264, 392), "less than a cluster's": (120, 136)}  # no multiples of a tile's
SIZES = {
    "even": [256] * 8,
    "one has half": [16, 1024, 0, 0, 250, 260, 254, 244],
    "the last has all": [0] * 7 + [2048],
    "fewer tiles than clusters": [2304],
    "many experts, few tokens": [60 if number % 3 == 0 else number % 7 for number in range(300)],
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")


def offsets_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes], device="cuda").cumsum(0).to(torch.int32)


def orders_of(offsets: torch.Tensor) -> tuple[TileOrder | None, TileOrder | None]:
    """As the sums before the gradients write them."""
    from te_offload.fused.kernels.sm90 import Sm90Kernels

    kernels = Sm90Kernels(SquaredReLU())
    parts = torch.zeros(300, 3, device="cuda")
    orders: Orders = kernels._sums(parts, offsets, kernels._backward_count(offsets))[1]
    return orders.fc2_wgrad, orders.fc1_wgrad


def wgrads(
    sizes: list[int],
    dtype: torch.dtype,
    *,
    accumulate: bool,
    shape: tuple[int, int] = SHAPES["ragged"],
    tile: Tile | None = None,
) -> Callable[..., torch.Tensor]:
    """A function of offsets and an order; in tiles of the choice in use, or in this one."""
    from te_offload.fused.kernels.sm90 import Sm90Kernels
    from te_offload.fused.kernels.sm90_tiles import tile_for

    kernels = Sm90Kernels(SquaredReLU(), tile_for if tile is None else lambda *_: tile)
    tokens = sum(sizes) + 5
    dy, x = [seeded((tokens, n), n, device="cuda", dtype=torch.bfloat16) for n in shape]
    before = seeded((len(sizes), *shape), 3, device="cuda", dtype=dtype)

    def launch(offsets: torch.Tensor, order: TileOrder | None = None) -> torch.Tensor:
        out = before.clone() if accumulate else torch.full_like(before, float("nan"))
        kernels.wgrad(dy, x, offsets, kernels.prepare("out", out), accumulate=accumulate, order=order)
        return out

    return launch


def tiles_in_use() -> list[Tile]:
    """Single ones first."""
    from te_offload.fused.kernels.sm90_tile_lists import TILES, Regime

    tiles = {tile for regime in Regime for tile, _ in TILES["wgrad", regime]}
    return sorted(tiles, key=lambda tile: (tile.cluster_rows * tile.cluster_columns, tile))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", range(5))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bits_are_those_of_single_tiles_that_are_given_out_from_the_start(
    sizes: list[int], tile: int, dtype: torch.dtype, accumulate: bool
) -> None:
    tiles = tiles_in_use()
    assert len(tiles) == 5 and tiles[0].cluster_rows == tiles[0].cluster_columns == 1
    offsets = offsets_of(sizes)
    for shape in SHAPES.values():
        expected = wgrads(sizes, dtype, accumulate=accumulate, shape=shape, tile=tiles[0])(offsets)
        launch = wgrads(sizes, dtype, accumulate=accumulate, shape=shape, tile=tiles[tile])
        for order in orders_of(offsets):
            assert torch.equal(launch(offsets, order).view(torch.uint8), expected.view(torch.uint8))
        assert bool(expected.isfinite().all())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bits_are_those_of_twice_as_many_tokens_loaded_at_once(sizes: list[int]) -> None:
    tile = tiles_in_use()[0]
    assert tile.per_stage == 32
    offsets, tiles = offsets_of(sizes), (tile, tile._replace(per_stage=64))
    found = [wgrads(sizes, torch.bfloat16, accumulate=False, tile=one)(offsets) for one in tiles]
    assert torch.equal(*[one.view(torch.int16) for one in found]) and bool(found[0].isfinite().all())


def test_two_gradients_at_once_count_their_own_tiles() -> None:
    launch, offsets = wgrads(SIZES["even"], torch.bfloat16, accumulate=False), offsets_of(SIZES["even"])
    alone = launch(offsets)
    streams, orders = [torch.cuda.Stream() for _ in range(2)], orders_of(offsets)
    torch.cuda.synchronize()
    found = []
    for stream, order in zip(streams, orders, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            found.append(launch(offsets, order))
    torch.cuda.synchronize()
    for one in found:
        assert torch.equal(one.view(torch.uint8), alone.view(torch.uint8))


@pytest.mark.parametrize("sizes", [[300, 0, 5, 5, 0], [3] * 70, [number % 7 for number in range(300)], [5]], ids=len)
def test_sums_before_the_gradients_order_experts_by_tokens_and_leave_the_counts_alone(sizes: list[int]) -> None:
    from te_offload.fused.kernels.sm90 import Sm90Kernels

    offsets, tokens, experts = offsets_of(sizes), sum(sizes), len(sizes)
    parts = seeded((tokens + 5, 3), 5, device="cuda", dtype=torch.float32)
    sums = parts.new_full((tokens + 5,), float("nan"))
    work = torch.full((experts + 2,), 7, dtype=torch.int32, device="cuda")
    Sm90Kernels(SquaredReLU())._rows("sums", torch.float32)(parts, offsets, sums, work)
    assert work[:experts].tolist() == sorted(range(experts), key=lambda expert: -sizes[expert])
    assert work[experts:].tolist() == [7, 7]
    assert torch.equal(sums[:tokens], parts[:tokens, 0] + parts[:tokens, 1] + parts[:tokens, 2])
    assert not sums[tokens:].any()


def test_a_graph_follows_new_split_sizes() -> None:
    sizes = [SIZES[name] for name in ("even", "one has half", "the last has all")]
    launch, offsets = wgrads(sizes[0], torch.bfloat16, accumulate=False), offsets_of(sizes[0])
    expected = [launch(offsets_of(one)) for one in sizes]
    launch(offsets, orders_of(offsets)[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(offsets, orders_of(offsets)[0])
    for one, right in zip(sizes, expected, strict=True):
        offsets.copy_(offsets_of(one))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(torch.uint8), right.view(torch.uint8))
