"""Products in FP8 with sums in float32 give the same bits in tiles of 192 columns as in those of 128; needs Hopper and
quack-kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")

from benchmarks.fp8_tiles import BLOCKS, RECIPES, Products
from benchmarks.tiles import parse_tile
from te_offload.fused.kernels.interface import Gate, Gated
from te_offload.fused.kernels.sm90_block_glu import Sm90BlockGluKernels
from te_offload.fused.kernels.sm90_launch import Tile
from tests.support.mlp import seeded

pytestmark = pytest.mark.gpu
SIZES = [300, 0, 1, 513, 128, 90]
HIDDEN, FFN = 448, 1152  # two tiles of 192 columns and a part; six of them, nine of 128
WIDE = {"current": {"dact", "dgrad", "wgrad"}, "blocks": {"fc1", "fc2", "dact", "dgrad"}}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")


def only(tile: Tile) -> Callable[..., Tile]:
    return lambda *shape: tile


@pytest.mark.parametrize("gated", [False, True], ids=["srelu", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tile", ["192a", "192a@1x2", "192", "192@1x2"])
def test_a_step_in_tiles_of_192_columns_has_the_bits_of_one_in_128(tile: str, recipe: str, *, gated: bool) -> None:
    case = RECIPES[recipe](HIDDEN, FFN, SIZES, gated=gated)
    results = []
    for name in ("128", tile):
        step = Products(case, dict.fromkeys(WIDE[recipe], parse_tile(name)))
        results.append([found.clone() for found in (*step.forward(), *step.backward())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scaled", [False, True])
def test_biases_by_blocks_are_added_alike_in_tiles_of_192_columns(*, scaled: bool) -> None:
    case: Any = RECIPES["blocks"](HIDDEN, FFN, SIZES)
    bias = seeded((len(SIZES), HIDDEN), 3, device="cuda", dtype=torch.bfloat16)
    found = []
    for tile in (Tile(128, 128, 1, 1, apart=True), Tile(128, 192, 1, 1, apart=True)):
        kernels, out = case.kernels(only(tile)), torch.full_like(case.x, torch.nan)
        scales = case.router if scaled else None
        kernels.linear_blocks(case._fc2_input, case._w2.rows, out, case.offsets, bias=bias, bias_scales=scales)
        found.append(out)
    assert torch.equal(*found) and not found[0].isnan().any()


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_in_float32_have_the_same_bits_in_tiles_of_192_columns(*, accumulate: bool) -> None:
    case: Any = RECIPES["current"](HIDDEN, FFN, SIZES)
    found = []
    for columns in (128, 192):
        kernels = case.kernels(only(Tile(128, columns, 1, 1, apart=True)))
        grads = seeded((len(SIZES), HIDDEN, FFN), 4, device="cuda")
        ways = {"accumulate": accumulate, "fast": False}
        kernels.wgrad_fp8(case._dy, case._rebuilt, case.offsets, kernels.prepare("grads", grads, written=True), **ways)
        found.append(grads)
    assert torch.equal(*found)
    changed = (found[0] != seeded((len(SIZES), HIDDEN, FFN), 4, device="cuda")).flatten(1).any(1).tolist()
    assert changed == [not accumulate or size > 0 for size in SIZES]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("interleave", [0, 1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("ffn", [1152, 192, 320, 64])
def test_pairs_by_blocks_have_the_same_bits_in_tiles_of_192_columns(ffn: int, interleave: int, *, biased: bool) -> None:
    """Halves of nine, one and a half, two and a half blocks, and of half a block."""
    weights = seeded((len(SIZES), 2 * ffn, HIDDEN), 1, device="cuda", dtype=torch.bfloat16)
    x = seeded((sum(SIZES), HIDDEN), 2, device="cuda", dtype=torch.bfloat16)
    bias = seeded((len(SIZES), 2 * ffn), 3, device="cuda", dtype=torch.bfloat16) if biased else None
    found = []
    for tile in (Tile(128, 128), *(parse_tile(name) for name in ("192a", "192a@1x2", "192"))):
        kernels: Any = Sm90BlockGluKernels(Gated(Gate.SWIGLU, (), interleave), only(tile))
        offsets, counts = kernels.offsets(torch.tensor(SIZES, device="cuda"), torch.empty_like(x))
        rows, _ = kernels.block_rows(x, offsets, BLOCKS, by_column=False)
        quantized = kernels.block_weights(kernels.prepare("weights", weights), BLOCKS, by_column=False)
        out = torch.full((x.shape[0], 2 * ffn), torch.nan, device="cuda", dtype=torch.bfloat16)
        kernels.fc1_linear_blocks(rows, quantized, bias, out, offsets, counts.fc1)
        found.append(out)
    assert all(torch.equal(found[0], other) for other in found[1:]) and not found[0].isnan().any()
