"""FC1's weight gradient begins while its dgrad, of which it needs nothing, still runs: only time changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from te_offload.fused.kernels.interface import Orders, SquaredReLU, TileOrder
from tests.support.mlp import seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
from te_offload.fused.kernels import sm90_device  # noqa: E402 (needs quack)
from te_offload.fused.kernels.sm90 import Sm90Kernels  # noqa: E402
from te_offload.fused.kernels.sm90_launch import Tile  # noqa: E402
from te_offload.fused.kernels.sm90_tiles import tile_for  # noqa: E402
from tests.support.late import copy_late  # noqa: E402

HIDDEN, FFN = 520, 392  # no multiples of a tile's
SIZES = {
    "even": [256] * 8,
    "ragged": [16, 1024, 0, 1, 250, 260, 254, 244],
    "the last has all": [0] * 7 + [2048],
    "fewer tiles than SMs": [300],
    "many experts, few tokens": [60 if number % 3 == 0 else number % 7 for number in range(300)],
}
BEYOND = 5  # rows of no expert
CLUSTERS = {
    "as in use": tile_for,
    "one tile above another": lambda *_: Tile(128, 192, 2, 1, pingpong=True),
    "one tile beside another": lambda *_: Tile(128, 256, 1, 2),
}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return seeded(shape, len(shape), device="cuda", dtype=dtype)


class Layer:
    """FC1's backward of one routing; the gradients by its weights are added to some that are there, or not."""

    def __init__(
        self,
        sizes: list[int],
        dtype: torch.dtype = torch.bfloat16,
        *,
        accumulate: bool = False,
        tiles: Callable[..., Tile] = tile_for,
    ) -> None:
        self.kernels, self.accumulate = Sm90Kernels(SquaredReLU(), tiles), accumulate
        tokens, experts = sum(sizes) + BEYOND, len(sizes)
        self.x, self.dy = random(tokens, HIDDEN, dtype=dtype), random(tokens, FFN, dtype=dtype)
        self.weights = self.kernels.prepare("weights", random(experts, FFN, HIDDEN, dtype=dtype))
        self.offsets = torch.tensor([0, *sizes], device="cuda").cumsum(0).to(torch.int32)
        self.dx = torch.empty_like(self.x)
        self.dweights = random(experts, FFN, HIDDEN, dtype=torch.float32 if accumulate else dtype)
        self.there = self.dweights.clone()
        self.grads = self.kernels.prepare("gradients", self.dweights)

    def orders(self) -> Orders:
        count = self.kernels._backward_count(self.offsets)
        orders: Orders = self.kernels._sums(torch.zeros(300, 3, device="cuda"), self.offsets, count)[1]
        return orders

    def poison(self) -> None:
        self.dx.fill_(float("nan"))
        if self.accumulate:
            self.dweights.copy_(self.there)
        else:
            self.dweights.fill_(float("nan"))

    def results(self) -> list[torch.Tensor]:
        return [self.dx.clone(), self.dweights.clone()]

    def apart(self) -> list[torch.Tensor]:
        self.poison()
        self.kernels.fc1_dgrad(self.dy, self.weights, self.offsets, self.dx)
        self.kernels.wgrad(self.dy, self.x, self.offsets, self.grads, accumulate=self.accumulate)
        return self.results()

    def together(self, *, ordered: bool) -> None:
        orders = self.orders() if ordered else Orders()
        self.kernels.fc1_backward(
            self.dy,
            self.x,
            self.weights,
            self.offsets,
            self.dx,
            self.grads,
            accumulate=self.accumulate,
            order=orders.fc1_wgrad,
            count=orders.fc1_dgrad,
        )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_dgrad_and_wgrad_at_once_give_the_bits_of_one_after_the_other(
    sizes: list[int], dtype: torch.dtype, accumulate: bool
) -> None:
    layer = Layer(sizes, dtype, accumulate=accumulate)
    expected = layer.apart()
    for ordered in (True, False):
        for _ in range(20):
            layer.poison()
            layer.together(ordered=ordered)
            for one, other in zip(layer.results(), expected, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("tiles", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_both_at_once_give_the_bits_of_single_tiles_in_clusters_too(
    sizes: list[int], tiles: Callable[..., Tile]
) -> None:
    expected = Layer(sizes, tiles=lambda *_: Tile(128, 192, 1, 1, pingpong=True)).apart()
    layer = Layer(sizes, tiles=tiles)
    for _ in range(20):
        layer.poison()
        layer.together(ordered=True)
        for one, other in zip(layer.results(), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("accumulate", [False, True])
def test_graph_of_both_gives_the_same_bits_each_time_under_new_split_sizes(accumulate: bool) -> None:
    layer = Layer(SIZES["ragged"], accumulate=accumulate)
    layer.together(ordered=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.together(ordered=True)
    ends = torch.tensor([[0, *sizes] for sizes in (SIZES["ragged"], SIZES["even"], SIZES["the last has all"])])
    for offsets in ends.cumsum(1).to("cuda", torch.int32):
        layer.offsets.copy_(offsets)
        expected = layer.apart()
        for _ in range(20):
            layer.poison()
            graph.replay()
            for one, other in zip(layer.results(), expected, strict=True):
                assert torch.equal(one, other)


def late_copy_and_wgrad(source: torch.Tensor, target: torch.Tensor, layer: Layer, order: TileOrder | None) -> None:
    """Launch a wgrad right after a kernel that lets it begin at once, and copies a millisecond later."""
    copy_late(source, target)
    kernel = sm90_device.BesideWgradGemm
    layer.kernels._wgrad(kernel, layer.dy, layer.x, layer.offsets, layer.grads, order)


def compiled(layer: Layer) -> None:
    words = torch.zeros(64, device="cuda")
    late_copy_and_wgrad(words, torch.empty_like(words), layer, layer.orders().fc1_wgrad)


def test_wgrad_is_done_before_a_kernel_ahead_of_it_that_takes_long() -> None:
    layer = Layer(SIZES["even"])
    _, expected = layer.apart()
    compiled(layer)
    layer.poison()
    seen, order = torch.zeros_like(layer.dweights), layer.orders().fc1_wgrad
    late_copy_and_wgrad(layer.dweights, seen, layer, order)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("captured", [False, True])
def test_what_comes_after_the_wgrad_waits_for_the_kernel_ahead_of_it_too(captured: bool) -> None:
    layer = Layer(SIZES["even"])
    source, target = random(64, 1024), torch.zeros(64, 1024, dtype=torch.bfloat16, device="cuda")
    compiled(layer)
    order = layer.orders().fc1_wgrad
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            late_copy_and_wgrad(source, target, layer, order)
            found = target.clone()
        graph.replay()
    else:
        late_copy_and_wgrad(source, target, layer, order)
        found = target.clone()
    assert torch.equal(found, source)
