"""Weight gradients whose tiles are taken as clusters are done with others: only the time changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_offload.fused.kernels.interface import SquaredReLU
from tests.support.mlp import seeded

pytestmark = pytest.mark.gpu

SHAPES = {"single tiles": (264, 392), "clusters of two": (248, 472)}  # no multiples of a tile's
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


def wgrads(
    sizes: list[int], dtype: torch.dtype, *, accumulate: bool, shape: tuple[int, int] = SHAPES["single tiles"]
) -> Callable[..., torch.Tensor]:
    from te_offload.fused.kernels.sm90 import Sm90Kernels

    kernels, tokens = Sm90Kernels(SquaredReLU()), sum(sizes) + 5
    dy, x = [seeded((tokens, n), n, device="cuda", dtype=torch.bfloat16) for n in shape]
    before = seeded((len(sizes), *shape), 3, device="cuda", dtype=dtype)

    def launch(offsets: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        out = before.clone() if accumulate else torch.full_like(before, float("nan"))
        kernels.wgrad(dy, x, offsets, kernels.prepare("out", out), accumulate=accumulate, count=count)
        return out

    return launch


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bits_are_those_of_tiles_that_are_given_out_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    shape: tuple[int, int],
    dtype: torch.dtype,
    accumulate: bool,
) -> None:
    from te_offload.fused.kernels import sm90

    offsets, chosen = offsets_of(sizes), []
    real = sm90.tile_for

    def tile_for(*arguments: Any) -> Any:
        chosen.append(real(*arguments))
        return chosen[-1]

    monkeypatch.setattr(sm90, "tile_for", tile_for)
    launch = wgrads(sizes, dtype, accumulate=accumulate, shape=shape)
    found = [launch(offsets) for _ in range(2)]
    assert chosen[0].dynamic
    assert (chosen[0].cluster_rows == 2) == (shape == SHAPES["clusters of two"] and len(sizes) > 1)
    monkeypatch.setattr(sm90, "tile_for", lambda *_: chosen[0]._replace(dynamic=False))
    other = launch(offsets)
    for one in found:
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert bool(other.isfinite().all())


def test_two_gradients_at_once_count_their_own_tiles() -> None:
    launch, offsets = wgrads(SIZES["even"], torch.bfloat16, accumulate=False), offsets_of(SIZES["even"])
    alone = launch(offsets)
    streams, counts = [torch.cuda.Stream() for _ in range(2)], torch.zeros(2, dtype=torch.int32, device="cuda").unbind()
    torch.cuda.synchronize()
    found = []
    for stream, count in zip(streams, counts, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            found.append(launch(offsets, count))
    torch.cuda.synchronize()
    for one in found:
        assert torch.equal(one.view(torch.uint8), alone.view(torch.uint8))


def test_sums_before_the_gradients_set_the_counts_to_zero() -> None:
    from te_offload.fused.kernels.sm90 import Sm90Kernels

    offsets = offsets_of([300, 0, 5])
    parts = seeded((310, 3), 5, device="cuda", dtype=torch.float32)
    sums, counts = parts.new_full((310,), float("nan")), torch.full((2,), 7, dtype=torch.int32, device="cuda")
    Sm90Kernels(SquaredReLU())._rows("sums", torch.float32)(parts, offsets, sums, counts)
    assert counts.tolist() == [0, 0]
    assert torch.equal(sums[:305], parts[:305, 0] + parts[:305, 1] + parts[:305, 2])
    assert not sums[305:].any()


def test_a_graph_follows_new_split_sizes() -> None:
    sizes = [SIZES[name] for name in ("even", "one has half", "the last has all")]
    launch, offsets = wgrads(sizes[0], torch.bfloat16, accumulate=False), offsets_of(sizes[0])
    expected = [launch(offsets_of(one)) for one in sizes]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(offsets)
    for one, right in zip(sizes, expected, strict=True):
        offsets.copy_(offsets_of(one))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(torch.uint8), right.view(torch.uint8))
