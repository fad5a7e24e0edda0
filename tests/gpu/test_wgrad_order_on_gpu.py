"""Weight gradients whose tiles are taken as clusters are done, the longest experts first: only the time changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_offload.fused.kernels.interface import SquaredReLU
from tests.support.mlp import seeded

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 264, 392  # no multiples of a tile's
SIZES = {
    "even": [256] * 8,
    "one has half": [16, 1024, 0, 0, 250, 260, 254, 244],
    "the last has all": [0] * 7 + [2048],
    "one expert": [2304],
    "more experts than a block has threads": [600 if number % 3 == 0 else number % 7 for number in range(300)],
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")


def offsets_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes], device="cuda").cumsum(0).to(torch.int32)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_experts_with_the_most_rows_come_first_and_the_counter_is_zero(sizes: list[int]) -> None:
    from te_offload.fused.kernels.sm90 import Sm90Kernels

    offsets = offsets_of(sizes)
    order = torch.full_like(offsets, -1)
    Sm90Kernels(SquaredReLU())._rows("order", torch.int32)(offsets, order)
    assert order.tolist() == [*sorted(range(len(sizes)), key=lambda expert: -sizes[expert]), 0]


def wgrads(sizes: list[int], dtype: torch.dtype, *, accumulate: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    from te_offload.fused.kernels.sm90 import Sm90Kernels

    kernels, tokens = Sm90Kernels(SquaredReLU()), sum(sizes) + 5
    dy, x = [seeded((tokens, n), n, device="cuda", dtype=torch.bfloat16) for n in (ROWS, COLUMNS)]
    before = seeded((len(sizes), ROWS, COLUMNS), 3, device="cuda", dtype=dtype)

    def launch(offsets: torch.Tensor) -> torch.Tensor:
        out = before.clone() if accumulate else torch.full_like(before, float("nan"))
        kernels.wgrad(dy, x, offsets, kernels.prepare("out", out), accumulate=accumulate)
        return out

    return launch


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bits_are_those_of_tiles_that_are_given_out_from_the_start(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], dtype: torch.dtype, accumulate: bool
) -> None:
    from te_offload.fused.kernels import sm90

    offsets, chosen = offsets_of(sizes), []
    real = sm90.tile_for

    def tile_for(*arguments: Any) -> Any:
        chosen.append(real(*arguments))
        return chosen[-1]

    monkeypatch.setattr(sm90, "tile_for", tile_for)
    found = [wgrads(sizes, dtype, accumulate=accumulate)(offsets) for _ in range(2)]
    assert chosen[0].dynamic == (sum(sizes) + 5 >= 2048 * len(sizes))
    monkeypatch.setattr(sm90, "tile_for", lambda *_: chosen[0]._replace(dynamic=not chosen[0].dynamic))
    other = wgrads(sizes, dtype, accumulate=accumulate)(offsets)
    for one in found:
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert bool(found[0].isfinite().all())


def test_a_graph_follows_new_split_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_offload.fused.kernels import sm90
    from te_offload.fused.kernels.sm90_launch import Tile

    first, *others = SIZES["even"], SIZES["one has half"], SIZES["the last has all"]
    monkeypatch.setattr(sm90, "tile_for", lambda *_: Tile(128, 192, 1, 1, pingpong=True, dynamic=True))
    launch, offsets = wgrads(first, torch.bfloat16, accumulate=False), offsets_of(first)
    expected = [launch(offsets_of(sizes)) for sizes in (first, *others)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(offsets)
    for sizes, right in zip((first, *others), expected, strict=True):
        offsets.copy_(offsets_of(sizes))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(torch.uint8), right.view(torch.uint8))
