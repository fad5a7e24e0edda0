"""Which tiles Hopper's grouped GEMMs are cut into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("quack", reason="quack-kernels, whose tiles these are, is not installed here")

from te_offload.fused.kernels import sm90

if TYPE_CHECKING:
    from te_offload.fused.kernels.sm90_launch import Tile

TURNED = ("dact", "dgrad", "wgrad")  # read their second operand transposed
WIDTHS = range(64, 16384 + 64, 64)


@pytest.mark.parametrize("regime", sm90.Regime)
@pytest.mark.parametrize("product", TURNED)
def test_operands_that_are_read_transposed_lie_in_strips_of_32_columns_or_more(
    product: str, regime: sm90.Regime
) -> None:
    tiles = {sm90.tile_for(product, regime, 1024, width, depth) for width in WIDTHS for depth in (1408, 14336)}
    assert tiles and all(tile.columns % 32 == 0 for tile in tiles)


@pytest.mark.parametrize("product", ["fc2", "dgrad"])
@pytest.mark.parametrize("regime", [sm90.Regime.USUAL, sm90.Regime.MANY])
def test_warp_groups_take_turns_where_sums_are_short_and_share_a_tile_where_they_are_long(
    product: str, regime: sm90.Regime
) -> None:
    def tile(depth: int) -> Tile:
        return sm90.tile_for(product, regime, None, 2048, depth)

    assert tile(1408).pingpong and not tile(14336).pingpong
    assert [tile(depth).cluster_rows for depth in (1408, 14336)] == [1, 2 if regime is sm90.Regime.MANY else 1]


@pytest.mark.parametrize("product", ["fc2", "dgrad"])
@pytest.mark.parametrize("regime", [sm90.Regime.FEW, sm90.Regime.SOME])
def test_warp_groups_share_a_tile_where_experts_have_few_tokens(product: str, regime: sm90.Regime) -> None:
    assert not sm90.tile_for(product, regime, None, 2048, 1408).pingpong


@pytest.mark.parametrize("regime", sm90.Regime)
def test_gradients_of_weights_load_32_tokens_at_once(regime: sm90.Regime) -> None:
    tile = sm90.tile_for("wgrad", regime, 1408, 2048)
    assert (tile.columns, tile.per_stage, tile.cluster_rows) == (192, 32, 1)


def test_gradients_of_1408_columns_are_cut_so_that_fewer_are_padded_where_experts_have_tokens_enough() -> None:
    columns = {regime: sm90.tile_for("wgrad", regime, 2048, 1408).columns for regime in sm90.Regime}
    assert columns == dict.fromkeys(sm90.Regime, 192) | {sm90.Regime.USUAL: 160}


@pytest.mark.parametrize(
    ("tokens", "experts", "regime"),
    [
        (199, 1, "FEW"),
        (200, 1, "SOME"),
        (383, 1, "SOME"),
        (384, 1, "USUAL"),
        (2047, 1, "USUAL"),
        (2048, 1, "MANY"),
        (4 * 2048 - 1, 4, "USUAL"),
    ],
)
def test_regime_goes_by_the_mean_of_tokens_an_expert(tokens: int, experts: int, regime: str) -> None:
    assert sm90.Regime.of(tokens, experts) is sm90.Regime[regime]


def test_least_padded_tile_wins_where_tiles_are_as_quick() -> None:
    assert sm90.tile_for("dgrad", sm90.Regime.USUAL, None, 2688, 1856).columns == 192  # 14 of them
    assert sm90.tile_for("dgrad", sm90.Regime.USUAL, None, 256, 1856).columns == 256
    assert (
        sm90.tile_for("fc2", sm90.Regime.USUAL, None, 2688, 1856).columns == 208
    )  # 13 of them: 0.6% more, and 1% quicker
