"""Which tiles Hopper's grouped GEMMs are cut into."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("quack", reason="quack-kernels, whose tiles these are, is not installed here")

from te_offload.fused.kernels import sm90_tile_lists, sm90_tiles
from tests.support.together import all_together

if TYPE_CHECKING:
    from te_offload.fused.kernels.sm90_launch import Tile

TURNED = ("dact", "dgrad", "wgrad")  # read their second operand transposed
WIDTHS = range(64, 16384 + 64, 64)


@pytest.mark.parametrize("quick_memory", [False, True])
@pytest.mark.parametrize("regime", sm90_tiles.Regime)
@pytest.mark.parametrize("product", TURNED)
def test_operands_that_are_read_transposed_lie_in_strips_of_32_columns_or_more(
    product: str, regime: sm90_tiles.Regime, quick_memory: bool
) -> None:
    of = sm90_tiles.tiles_of(quick_memory=quick_memory)
    tiles = {of(product, regime, 1024, width, depth) for width in WIDTHS for depth in (1408, 14336)}
    assert tiles and all(tile.columns % 32 == 0 for tile in tiles)


@pytest.mark.parametrize("regime", [sm90_tiles.Regime.USUAL, sm90_tiles.Regime.MANY])
def test_warp_groups_take_turns_at_fc2_where_sums_are_short_and_share_a_tile_where_they_are_long(
    regime: sm90_tiles.Regime,
) -> None:
    def tile(depth: int) -> Tile:
        return sm90_tiles.tile_for("fc2", regime, None, 2048, depth)

    assert tile(1408).pingpong and not tile(14336).pingpong
    assert tile(14336)[2:4] == (1, 2)  # whose rows no expert pads to 256


@pytest.mark.parametrize("product", ["fc2", "dgrad"])
def test_warp_groups_share_a_tile_where_experts_have_some_tokens_and_take_turns_where_they_have_few(
    product: str,
) -> None:
    some, few = (sm90_tiles.tile_for(product, sm90_tiles.Regime[name], None, 2048, 1408) for name in ("SOME", "FEW"))
    assert few.pingpong and not some.pingpong


ENOUGH = set(sm90_tiles.Regime) - {
    sm90_tiles.Regime.FEW,
    sm90_tiles.Regime.SOME,
}  # tokens an expert for clusters to gain something


@pytest.mark.parametrize("regime", sm90_tiles.Regime)
@pytest.mark.parametrize("shape", [(1408, 2048), (2048, 1408), (1856, 2688), (4096, 14336)])
def test_gradients_of_weights_load_32_tokens_at_once(shape: tuple[int, int], regime: sm90_tiles.Regime) -> None:
    for quick in (False, True):
        assert sm90_tiles.tile_for("wgrad", regime, *shape, quick_memory=quick).per_stage == 32


@pytest.mark.parametrize("regime", sm90_tiles.Regime)
def test_gradients_share_operands_in_clusters_that_pad_little_where_experts_have_tokens_enough(
    regime: sm90_tiles.Regime,
) -> None:
    def cluster(rows: int, columns: int) -> tuple[int, int]:
        return sm90_tiles.tile_for("wgrad", regime, rows, columns)[2:4]

    clusters = [cluster(2048, 1408), cluster(1408, 2048)]  # of 16 rows of tiles; of 11, but four times 512 columns
    beside = (2, 1) if regime is sm90_tiles.Regime.MODEST else (1, 2)
    assert clusters == ([(2, 1), beside] if regime in ENOUGH else [(1, 1), (1, 1)])


def test_gradients_stay_in_single_tiles_on_an_h200_where_clusters_would_pad_them() -> None:
    def cluster(rows: int, columns: int, *, quick_memory: bool) -> tuple[int, int]:
        modest = sm90_tiles.Regime.MODEST
        return sm90_tiles.tile_for("wgrad", modest, rows, columns, quick_memory=quick_memory)[2:4]

    assert cluster(1408, 2048, quick_memory=True) == (1, 1) != cluster(1408, 2048, quick_memory=False)  # 11 of 128
    assert cluster(2048, 1408, quick_memory=True) == (2, 1)  # 16


@pytest.mark.parametrize(
    ("product", "regime", "shape", "h100", "h200"),
    [
        ("fp8 fast", "MODEST", (None, 2048, 1408), (208, 1, 2), (192, 1, 1)),
        ("fp8 split", "USUAL", (None, 4096, 3072), (192, 1, 2), (128, 1, 2)),
        ("glu", "MODEST", (None, 2816, 2048), (128, 1, 2), (192, 1, 1)),
        ("blocks pairs", "USUAL", (None, 3072, 4096), (128, 1, 2), (192, 1, 1)),
        ("blocks wgrad", "MODEST", (2048, 1408), (128, 1, 1), (128, 2, 1)),
        ("blocks wgrad", "MANY", (28672, 4096), (128, 1, 2), (128, 2, 1)),
        ("fp8 fast", "FEW", (None, 2048, 1408), (208, 1, 2), (192, 1, 1)),
        ("fp8 split", "FEW", (None, 2048, 2816), (128, 1, 1), (192, 1, 1)),
        ("fp8 split wgrad", "SOME", (None, 1408), (192, 1, 2), (128, 1, 1)),
        ("blocks", "FEW", (None, 1536, 1408), (128, 1, 2), (192, 1, 1)),
        ("glu", "SOME", (None, 2816, 2048), (128, 1, 2), (192, 1, 1)),
    ],
)
def test_an_h200_has_tiles_of_its_own_for_gated_activations_and_in_fp8(
    product: str, regime: str, shape: tuple[Any, ...], h100: tuple[int, int, int], h200: tuple[int, int, int]
) -> None:
    for quick, expected in ((False, h100), (True, h200)):
        assert sm90_tiles.tiles_of(quick_memory=quick)(product, sm90_tiles.Regime[regime], *shape)[1:4] == expected


@pytest.mark.parametrize(
    ("product", "regime"),
    [
        *itertools.product(("dglu", "blocks dact", "fp8 split dact"), sm90_tiles.Regime),
        *(("blocks", regime) for regime in sm90_tiles.Regime if regime.name != "FEW"),
        *(("fp8 split wgrad", regime) for regime in sm90_tiles.Regime if regime.name != "SOME"),
    ],
)
def test_what_gains_nothing_by_tiles_of_its_own_has_the_same_on_an_h200(
    product: str, regime: sm90_tiles.Regime
) -> None:
    of = sm90_tiles.tiles_of(quick_memory=True)
    for width in WIDTHS:
        assert of(product, regime, None, width, 2048) == sm90_tiles.tile_for(product, regime, None, width, 2048)


def test_gradients_stay_in_single_tiles_where_clusters_would_pad_much() -> None:
    assert sm90_tiles.tile_for("wgrad", sm90_tiles.Regime.USUAL, 2688, 1856)[2:4] == (2, 1)  # 22 rows of tiles for 21
    assert sm90_tiles.tile_for("wgrad", sm90_tiles.Regime.USUAL, 640, 192)[2:4] == (1, 1)  # 6 for 5
    assert sm90_tiles.tile_for("wgrad", sm90_tiles.Regime.MANY, 128, 192)[2:4] == (1, 1)


@pytest.mark.parametrize("regime", sm90_tiles.Regime)
def test_dgrad_of_fc1_takes_clusters_beside_each_other(regime: sm90_tiles.Regime) -> None:
    tiles = [sm90_tiles.tile_for("dgrad", regime, None, hidden, 1408) for hidden in (2048, 2688)]
    assert [tile[2:4] for tile in tiles] == [(1, 2), (1, 2)]  # of 512 columns, of few tokens 256; of 384


@pytest.mark.parametrize("quick_memory", [False, True])
@pytest.mark.parametrize("regime", sm90_tiles.Regime)
def test_tiles_of_gated_activations_hold_whole_blocks_of_32_columns_of_each_half(
    regime: sm90_tiles.Regime, quick_memory: bool
) -> None:
    of = sm90_tiles.tiles_of(quick_memory=quick_memory)
    tiles = {of("glu", regime, None, width, depth) for width in WIDTHS for depth in (1408, 14336)}
    assert tiles and all(tile.columns % 64 == 0 for tile in tiles)
    assert all(tile.columns // tile.cluster_rows % 64 == 0 for tile in tiles)  # what each of two above each other loads
    rows = {sm90_tiles.tile_for("wgrad", regime, width, 2048).rows for width in WIDTHS}
    assert rows == {128}


def test_rows_are_not_padded_by_what_fc1_and_fc2_share_with_usual_numbers_of_tokens() -> None:
    tiles = {
        sm90_tiles.tile_for(name, sm90_tiles.Regime.USUAL, None, width, 1408)
        for name in ("fc1", "fc2")
        for width in WIDTHS
    }
    assert {tile.cluster_columns for tile in tiles} == {1, 2}
    assert {tile.cluster_rows for tile in tiles} == {1}


def test_two_tiles_of_fc1_beside_each_other_share_rows_where_they_fill_the_columns() -> None:
    def tile(regime: sm90_tiles.Regime, columns: int) -> tuple[int, int, int]:
        return sm90_tiles.tile_for("fc1", regime, None, columns, 2048)[1:4]

    usual, many = sm90_tiles.Regime.USUAL, sm90_tiles.Regime.MANY
    assert tile(usual, 1408) == tile(many, 1408) == (176, 1, 2)  # four times 352
    assert tile(usual, 1856) == (192, 1, 2)  # 3% more; nine times 208 are 1% more
    assert tile(many, 14336) == (208, 1, 1)


@pytest.mark.parametrize(
    ("tokens", "experts", "regime"),
    [
        (199, 1, "FEW"),
        (200, 1, "SOME"),
        (383, 1, "SOME"),
        (384, 1, "MODEST"),
        (767, 1, "MODEST"),
        (768, 1, "USUAL"),
        (2047, 1, "USUAL"),
        (2048, 1, "MANY"),
        (4 * 2048 - 1, 4, "USUAL"),
    ],
)
def test_regime_goes_by_the_mean_of_tokens_an_expert(tokens: int, experts: int, regime: str) -> None:
    assert sm90_tiles.Regime.of(tokens, experts) is sm90_tiles.Regime[regime]


def test_fc2_dgrad_takes_128_columns_where_those_of_192_would_pad_much_and_experts_have_some_hundred_tokens() -> None:
    tiles = [
        sm90_tiles.tile_for("dact", sm90_tiles.Regime.MODEST, None, columns, 2048) for columns in (1408, 1536, 1856)
    ]
    assert [tile[1:4] for tile in tiles] == [
        (128, 2, 1),
        (192, 2, 1),
        (192, 2, 1),
    ]  # 11 times 128; eight and ten times 192


def test_least_padded_tile_wins_where_tiles_are_as_quick() -> None:
    assert sm90_tiles.tile_for("dgrad", sm90_tiles.Regime.USUAL, None, 2688, 1856).columns == 192  # 14 of them
    assert sm90_tiles.tile_for("dgrad", sm90_tiles.Regime.USUAL, None, 256, 1856).columns == 256
    assert sm90_tiles.tile_for("fc2", sm90_tiles.Regime.USUAL, None, 2688, 1856)[1:4] == (192, 1, 2)  # seven clusters
    assert sm90_tiles.tile_for("fc2", sm90_tiles.Regime.USUAL, None, 2048, 1408)[1:4] == (208, 1, 2)  # five


@pytest.mark.parametrize("product", ["fp8 fast", "fp8 split", "fp8 split dact", "blocks"])
@pytest.mark.parametrize("regime", set(sm90_tiles.Regime) - {sm90_tiles.Regime.MANY})
def test_rows_of_fp8_are_padded_to_one_tile_where_experts_do_not_have_many_tokens(
    product: str, regime: sm90_tiles.Regime
) -> None:
    tiles = {sm90_tiles.tile_for(product, regime, None, width, depth) for width in WIDTHS for depth in (1408, 14336)}
    assert {tile.cluster_rows for tile in tiles} == {1}


def test_fp8_shares_operands_in_clusters_whose_columns_fit() -> None:
    def tile(columns: int, regime: sm90_tiles.Regime = sm90_tiles.Regime.USUAL) -> tuple[int, ...]:
        return sm90_tiles.tile_for("fp8 fast", regime, None, columns)[1:4]

    assert [tile(columns) for columns in (2048, 1408, 2688)] == [(208, 1, 2), (176, 1, 2), (192, 1, 2)]
    assert tile(1664) == (208, 1, 2)  # four clusters
    many = sm90_tiles.Regime.MANY
    assert [tile(columns, many) for columns in (4096, 14336)] == [(208, 1, 2), (208, 2, 1)]  # 20; 69


SUMS_OF_FLOAT32 = ("blocks", "blocks dact", "fp8 split", "fp8 split dact", "fp8 split dglu", "fp8 split wgrad")


@pytest.mark.parametrize("regime", sm90_tiles.Regime)
def test_tiles_are_blocks_where_each_column_has_its_scale(regime: sm90_tiles.Regime) -> None:
    tiles = {sm90_tiles.tile_for("blocks wgrad", regime, 2048, width) for width in WIDTHS}
    assert {tile[:2] for tile in tiles} == {(128, 128)} and not any(tile.pingpong for tile in tiles)


@pytest.mark.parametrize("regime", sm90_tiles.Regime)
def test_pairs_by_blocks_take_192_columns_where_sums_are_long_and_experts_have_tokens_enough(
    regime: sm90_tiles.Regime,
) -> None:
    def columns(width: int, depth: int) -> int:
        tile = sm90_tiles.tile_for("blocks pairs", regime, None, width, depth)
        assert tile.rows == 128 and tile.cluster_rows == 1 and not tile.pingpong
        return tile.columns

    assert columns(5760, 2880) == (192 if regime in ENOUGH else 128)  # 30 tiles
    assert columns(5760, 2048) == 128  # short sums
    assert columns(4096, 7168) == 128  # 22 tiles of 192 would be 3% more


@pytest.mark.parametrize("regime", ENOUGH)
@pytest.mark.parametrize("product", SUMS_OF_FLOAT32)
def test_sums_of_float32_take_192_columns_where_experts_have_tokens_enough_and_they_pad_little(
    product: str, regime: sm90_tiles.Regime
) -> None:
    def columns(width: int) -> int:
        tile = sm90_tiles.tile_for(product, regime, 2048, width, 2048)
        assert tile.rows == 128 and not tile.pingpong
        return tile.columns

    assert {columns(width) for width in (2880, 2688, 7168)} == {192}
    assert columns(256) == 128  # a tile and a part would be 384


@pytest.mark.parametrize("regime", ENOUGH)
def test_long_sums_by_blocks_take_two_tiles_of_128_columns_beside_each_other_where_192_pad_no_less(
    regime: sm90_tiles.Regime,
) -> None:
    def tile(width: int, depth: int) -> tuple[int, ...]:
        return sm90_tiles.tile_for("blocks", regime, None, width, depth)[1:4]

    assert {tile(width, 4096) for width in (4096, 6144, 7168)} == {(128, 1, 2)}  # 192 pad 128, 0 and 128
    assert {tile(width, 4096) for width in (2688, 2880)} == {(192, 1, 1)}  # 21 or 22.5 of 128 would be 22 or 24
    assert tile(7168, 2048) == (192, 1, 1) and tile(4096, 2048) == (128, 1, 2)  # short sums: 1.8% and 3.1% more


def test_sums_of_float32_take_192_columns_with_some_tokens_an_expert_and_weight_gradients_with_few() -> None:
    def columns(product: str, regime: sm90_tiles.Regime) -> int:
        return sm90_tiles.tile_for(product, regime, 2688, 2688, 1856).columns

    some, few = sm90_tiles.Regime.SOME, sm90_tiles.Regime.FEW
    assert {columns(product, some) for product in SUMS_OF_FLOAT32} == {192}
    assert {product for product in SUMS_OF_FLOAT32 if columns(product, few) == 192} == {"fp8 split wgrad"}


@pytest.mark.parametrize("regime", sm90_tiles.Regime)
@pytest.mark.parametrize("product", ["blocks", "blocks pairs", "blocks wgrad", "fp8 split dact", "fp8 split wgrad"])
def test_warp_groups_store_apart_where_sums_are_of_float32(product: str, regime: sm90_tiles.Regime) -> None:
    assert sm90_tiles.tile_for(product, regime, 2048, 1408, 512).apart


def test_pairs_of_128_columns_are_stored_together_192_columns_apart_and_nothing_apart_by_turns() -> None:
    tiles = {
        (product, sm90_tiles.tile_for(product, regime, rows, width, depth))
        for product, _ in sm90_tile_lists.TILES
        for regime in sm90_tiles.Regime
        for rows in (None, 2048)
        for width in WIDTHS[:64]
        for depth in (1408, 14336)
    }
    assert not any(tile.apart and "glu" in product and tile.columns == 128 for product, tile in tiles)
    assert all(tile.apart for product, tile in tiles if tile.columns == 192 and product in SUMS_OF_FLOAT32)
    assert not any(tile.apart and tile.pingpong for _, tile in tiles)


@pytest.mark.parametrize("quick_memory", [False, True])
def test_tests_that_ask_for_it_have_no_tile_apart(monkeypatch: pytest.MonkeyPatch, quick_memory: bool) -> None:
    def apart() -> bool:
        return sm90_tiles.tiles_of(quick_memory=quick_memory)("blocks wgrad", sm90_tiles.Regime.USUAL, 2048, 1408).apart

    before = apart()
    with all_together(monkeypatch):
        assert (before, apart()) == (True, False)
    assert apart()
