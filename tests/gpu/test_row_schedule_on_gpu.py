"""Clusters that take the tiles of a product by rows one by one change no bit of it; needs Hopper and quack-kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from te_offload.fused.kernels.interface import Orders, SquaredReLU, TileCount
from te_offload.ops.scaling import BlockFormat, BlockScaling, Scaling
from tests.support.mlp import seeded

pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernels are Hopper's (compute capability 9.0)", allow_module_level=True)

from te_offload.fused.kernels.sm90 import Sm90Kernels
from te_offload.fused.kernels.sm90_launch import Tile
from te_offload.fused.kernels.sm90_tiles import tile_for, tiles_of

EXPERTS, HIDDEN, FFN, BEYOND = 12, 1152, 896, 5
SIZES = {
    "even": [512] * EXPERTS,
    "ragged": [1, 700, 0, 129, 3, 256, 900, 0, 127, 2, 640, 77],
    "one has all": [0] * (EXPERTS - 1) + [4000],
    "a token": [0, 1] + [0] * (EXPERTS - 2),
    "nothing": [0] * EXPERTS,
}
TILES = {
    "in use": tile_for,
    "in use on an H200": tiles_of(quick_memory=True),
    "one above another": lambda *_: Tile(128, 192, 2, 1, pingpong=True),
    "one beside another": lambda *_: Tile(128, 176, 1, 2, pingpong=True),
    "shared, beside another": lambda *_: Tile(128, 256, 1, 2),
}
PRODUCTS = ("fc1", "fc2", "fc1_dgrad")


def random(*shape: int) -> torch.Tensor:
    return seeded(shape, len(shape), device="cuda", dtype=torch.bfloat16)


class Products:
    """Of one routing, whose offsets can be written anew."""

    def __init__(self, sizes: list[int], tiles: Callable[..., Tile]) -> None:
        self._kernels = Sm90Kernels(SquaredReLU(), tiles)
        tokens = sum(sizes) + BEYOND
        self.x, self.hidden = random(tokens, HIDDEN), random(tokens, FFN)
        self.w1 = self._kernels.prepare("w1", random(EXPERTS, FFN, HIDDEN))
        self.w2 = self._kernels.prepare("w2", random(EXPERTS, HIDDEN, FFN))
        self.scales = torch.rand(tokens, device="cuda")
        self.sizes = torch.tensor(sizes, device="cuda")

    def run(self, product: str, *, counted: bool) -> list[torch.Tensor]:
        """The results; rows of no expert hold anything."""
        kernels, out = self._kernels, torch.full_like(self.x, float("nan"))
        offsets, counts = kernels.offsets(self.sizes, torch.empty_like(self.x))
        if product == "fc1":
            return list(kernels.fc1(self.x, self.w1, None, self.scales, offsets, counts.fc1 if counted else None))
        if product == "fc2":
            kernels.fc2(self.hidden, self.w2, None, None, offsets, out, counts.fc2 if counted else None)
        else:
            parts = torch.zeros(300, 3, device="cuda")
            orders: Orders = kernels._sums(parts, offsets, kernels._backward_count(offsets))[1]
            kernels.fc1_dgrad(self.hidden, self.w1, offsets, out, orders.fc1_dgrad if counted else None)
        return [out]


def same(found: list[torch.Tensor], expected: list[torch.Tensor], rows: int) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(one[:rows].view(torch.int16), other[:rows].view(torch.int16)) for one, other in pairs)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bits_are_those_of_tiles_that_are_given_out_from_the_start(
    sizes: list[int], tiles: Callable[..., Tile], product: str
) -> None:
    products = Products(sizes, tiles)
    expected = products.run(product, counted=False)
    for _ in range(5):
        assert same(products.run(product, counted=True), expected, sum(sizes))


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_graph_counts_anew_each_time_and_follows_new_split_sizes(product: str) -> None:
    products = Products(SIZES["even"], tile_for)
    products.run(product, counted=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products.run(product, counted=True)
    for sizes in (SIZES["even"], SIZES["ragged"], SIZES["one has all"]):
        products.sizes.copy_(torch.tensor(sizes))
        expected = products.run(product, counted=False)
        for _ in range(5):
            for one in found:
                one.fill_(float("nan"))
            graph.replay()
            assert same(found, expected, sum(sizes))


def test_a_launch_begins_with_the_tile_that_its_count_says() -> None:
    """So the count is what gives tiles out: from a later one, tiles stay as they were."""
    products = Products(SIZES["even"], tile_for)
    kernels, out = products._kernels, torch.full_like(products.x, float("nan"))
    offsets, counts = kernels.offsets(products.sizes, out)
    assert isinstance(counts.fc2, TileCount)
    counts.fc2.work[counts.fc2.place] = 1 << 20
    kernels.fc2(products.hidden, products.w2, None, None, offsets, out, counts.fc2)
    clusters = torch.cuda.get_device_properties(0).multi_processor_count
    written = int((~out[: sum(SIZES["even"])].isnan()).sum())
    assert 0 < written <= clusters * 128 * 256 < out.numel()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_fp8_keeps_its_bits_too(sizes: list[int]) -> None:
    from te_offload.fused.kernels.sm90_fp8 import Sm90Fp8Kernels

    kernels, scaling, tokens = Sm90Fp8Kernels(SquaredReLU()), Scaling(torch.float8_e4m3fn), sum(sizes)
    x, router = random(tokens + BEYOND, HIDDEN), torch.rand(tokens + BEYOND, device="cuda")
    w1 = kernels.quantize_weights(kernels.prepare("w1", random(EXPERTS, FFN, HIDDEN)), scaling)
    found = []
    for counted in (False, True):
        y = torch.zeros_like(x)
        offsets, counts = kernels.offsets(torch.tensor(sizes, device="cuda"), y)
        one, other = counts if counted else (None, None)
        rows = kernels.quantize(x, offsets, scaling, weights=w1.inverses)
        act_input, magnitudes = kernels.fc1_fp8(rows, w1, None, router, offsets, x.dtype, fast=True, count=one)
        hidden = kernels.quantize(act_input, offsets, scaling, weights=w1.inverses)
        kernels.linear_fp8(hidden, w1.columns, y, offsets, fast=False, count=other)
        found.append([act_input, magnitudes, y])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[:tokens], other[:tokens])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_fp8_by_blocks_keeps_its_bits_too(sizes: list[int]) -> None:
    from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels

    kernels, scaling, tokens = Sm90BlockKernels(SquaredReLU()), BlockScaling(BlockFormat.FP8), sum(sizes)
    x = random(tokens + BEYOND, HIDDEN)
    weights = kernels.block_weights(kernels.prepare("w1", random(EXPERTS, FFN, HIDDEN)), scaling, by_column=False).rows
    found = []
    for counted in (False, True):
        y = torch.zeros(tokens + BEYOND, FFN, device="cuda", dtype=x.dtype)
        offsets, counts = kernels.offsets(torch.tensor(sizes, device="cuda"), y)
        rows, _ = kernels.block_rows(x, offsets, scaling, by_column=False)
        kernels.linear_blocks(rows, weights, y, offsets, count=counts.fc1 if counted else None)
        found.append(y)
    assert torch.equal(*found) and (not tokens or bool(found[0].any()))
