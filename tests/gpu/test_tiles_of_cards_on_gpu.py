"""The tiles of an H200 and of an H100 give the same bits, whichever card runs them; needs Hopper and quack-kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_offload.fused.kernels.interface import SquaredReLU
from tests.support.mlp import seeded

pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")

from benchmarks import fp8_tiles, tiles
from te_offload.fused import machine
from te_offload.fused.kernels import sm90_tiles
from te_offload.fused.kernels.sm90_tiles import Regime, tile_for, tiles_of

if TYPE_CHECKING:
    from te_offload.fused.kernels.sm90_launch import Tile

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, FFN, BEYOND = 6, 1152, 896, 5
TOKENS = {"FEW": 100, "SOME": 300, "MODEST": 500, "USUAL": 1000, "MANY": 2100}  # an expert


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")


def random(*shape: int) -> torch.Tensor:
    return seeded(shape, len(shape), device="cuda", dtype=torch.bfloat16)


def products(
    sizes: list[int], hidden: int, ffn: int, *, quick_memory: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What all products write, without the rows of no expert; and the gradient of the scales."""
    from te_offload.fused.kernels.sm90 import Sm90Kernels

    kernels, tokens = Sm90Kernels(SquaredReLU(), tiles_of(quick_memory=quick_memory)), sum(sizes) + BEYOND
    x, dy = random(tokens, hidden), random(tokens, hidden)
    scales = seeded((tokens,), 1, device="cuda")
    w1, w2 = (
        kernels.prepare(name, random(EXPERTS, *shape)) for name, shape in (("w1", (ffn, hidden)), ("w2", (hidden, ffn)))
    )
    y, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    offsets, counts = kernels.offsets(torch.tensor(sizes, device="cuda"), y)
    act_input, fc2_input = kernels.fc1(x, w1, None, scales, offsets, counts.fc1)
    kernels.fc2(fc2_input, w2, None, None, offsets, y, counts.fc2)
    dact_input, rebuilt, dscales, orders = kernels.fc2_dgrad(dy, w2, act_input, scales, offsets)
    dw1, dw2 = (
        torch.full((EXPERTS, *shape), float("nan"), device="cuda").bfloat16()
        for shape in ((ffn, hidden), (hidden, ffn))
    )
    kernels.wgrad(dy, rebuilt, offsets, kernels.prepare("dw2", dw2), accumulate=False, order=orders.fc2_wgrad)
    order, count = orders.fc1_wgrad, orders.fc1_dgrad
    out = kernels.prepare("dw1", dw1)
    kernels.fc1_backward(dact_input, x, w1, offsets, dx, out, accumulate=False, order=order, count=count)
    rows = {"act_input": act_input, "y": y, "dact_input": dact_input, "fc2_input": rebuilt, "dx": dx}
    return {name: one[: sum(sizes)] for name, one in rows.items()} | {"dw1": dw1, "dw2": dw2}, dscales[: sum(sizes)]


@pytest.mark.parametrize(("hidden", "ffn"), [(HIDDEN, FFN), (512, 2816)], ids=["short sums", "long ones"])
@pytest.mark.parametrize("regime", TOKENS)
def test_tiles_of_either_card_give_the_same_bits(regime: str, hidden: int, ffn: int) -> None:
    sizes = [TOKENS[regime] + extra for extra in (-77, 0, 77, 13, -13, 0)]
    assert Regime.of(sum(sizes) + BEYOND, EXPERTS) is Regime[regime]
    (expected, dscales), (found, other) = (products(sizes, hidden, ffn, quick_memory=quick) for quick in (False, True))
    for name, one in expected.items():
        assert bool(one.isfinite().all()), name
        assert torch.equal(one.view(torch.int16), found[name].view(torch.int16)), name
    far = (dscales - other).abs().max() / dscales.abs().max()  # some rows' sums nearly cancel
    assert far < 1e-6  # summed in parts as wide as a tile


@pytest.mark.parametrize(
    ("regime", "hidden", "ffn"),
    [("FEW", 2816, 1536), ("SOME", 2880, 1408), ("MODEST", 2816, 1408), ("USUAL", 2816, 1536), ("MANY", 2816, 1408)],
)
@pytest.mark.parametrize("recipe", ["bf16", *fp8_tiles.RECIPES])
def test_with_gated_activations_and_in_fp8_too(
    recipe: str, regime: str, hidden: int, ffn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, found = [TOKENS[regime] + extra for extra in (-77, 0, 77, 13, -13, 0)], []
    chosen: list[list[Tile]] = []

    def noting(*, quick_memory: bool) -> Callable[..., Tile]:
        def tile(*asked: Any) -> Tile:
            chosen[-1].append(one := tiles_of(quick_memory=quick_memory)(*asked))
            return one

        return tile

    monkeypatch.setattr(sm90_tiles, "tiles_of", noting)
    for quick in (False, True):
        chosen.append([])
        monkeypatch.setattr(machine, "has_quick_memory", lambda quick=quick: quick)
        if recipe == "bf16":
            results = tiles.Products(tiles.Case(hidden, ffn, sizes, gated=True), {}).step()
        else:
            products = fp8_tiles.Products(fp8_tiles.RECIPES[recipe](hidden, ffn, sizes, gated=True), {})
            results = *products.forward(), *products.backward()
        found.append([result.clone() for result in results])
    assert chosen[0] != chosen[1]
    for one, other in zip(*found, strict=True):
        assert bool(one.isfinite().all()) and one.any()
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_the_two_cards_have_different_tiles_here() -> None:
    chosen = [
        [
            tile_for(product, regime, None, width, depth, quick_memory=quick)
            for product in ("fc1", "fc2", "dact", "dgrad")
            for regime in Regime
            for width, depth in ((FFN, HIDDEN), (HIDDEN, FFN), (2816, 512), (512, 2816))
        ]
        for quick in (False, True)
    ]
    assert sum(one != other for one, other in zip(*chosen, strict=True)) >= 8
