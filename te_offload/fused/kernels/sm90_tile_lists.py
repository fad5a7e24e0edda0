"""Times of Hopper's grouped GEMMs in tiles, as measured: what `sm90_tiles` chooses by.

In: nothing. Out: `TILES`, lists by product and `Regime`; names of tiles that `sm90_quick_tiles` has too. Keeps true:
each number is a fit to times in `docs/results/data` or was measured there. Does not: choose.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from te_offload.fused.kernels.sm90_launch import Tile

Tiles = Sequence[tuple[Tile, float]]


class Regime(enum.Enum):
    """How many tokens an expert has, on average; where a product has no tiles for one of them, it has those of `USUAL`."""

    FEW = enum.auto()
    SOME = enum.auto()
    MODEST = enum.auto()
    USUAL = enum.auto()
    MANY = enum.auto()

    @classmethod
    def of(cls, tokens: int, experts: int) -> Regime:
        """For so many tokens and experts."""
        if tokens < 200 * experts:
            return cls.FEW
        if tokens < 384 * experts:
            return cls.SOME
        if tokens < 768 * experts:
            return cls.MODEST
        return cls.MANY if tokens >= 2048 * experts else cls.USUAL


BESIDE = Tile(128, 192, 1, 2, pingpong=True)  # two warp groups in turns, of whole strips where weights are transposed
_SOME: Tiles = (
    (BESIDE, 1.0),
    (Tile(128, 256, 1, 2), 1.045),
    (Tile(128, 208, 1, 2, pingpong=True), 1.05),
    (Tile(128, 256, 1, 1), 1.06),
)
_SOME_TURNED: Tiles = (
    (BESIDE, 1.0),
    (Tile(128, 256, 1, 2), 1.043),
    (Tile(128, 192, pingpong=True), 1.044),
    (Tile(128, 256, 1, 1), 1.054),
)
WGRAD = Tile(128, 192, 1, 1, pingpong=True, per_stage=32)
WGRAD_ABOVE = WGRAD._replace(cluster_rows=2)
WGRAD_BESIDE = Tile(128, 256, 1, 2, per_stage=32)
# Columns of a tile of FC1's with a gated activation hold whole blocks of 32 columns of each half; of two above each other
# each loads half of the columns, and holds them too (in two of 192 columns above each other the card stops).
_SINGLE_PAIRS: Tiles = ((Tile(128, 192, 1, 1, pingpong=True), 1.0),)
_SINGLE_DPAIRS: Tiles = ((Tile(128, 128, 1, 1, pingpong=True), 1.0),)
_SOME_DPAIRS: Tiles = ((Tile(128, 128, 1, 2, pingpong=True), 1.0), (Tile(128, 128, 1, 1, pingpong=True), 1.022))
# In FP8 with sums in float32 a tile of 128 columns has two sets of registers for products, one of 192 a single one
# (`sm90_sums`), and is quicker wherever experts have tokens enough; by blocks, whose loop has got shorter, two of 128
# beside each other are where 192 pad more, and with long sums where they pad as much. By blocks weight gradients have 128.
_SINGLE_BLOCK: Tiles = ((Tile(128, 128, 1, 1), 1.0),)
APART = Tile(128, 128, 1, 1, apart=True)
APART_BESIDE = APART._replace(cluster_columns=2)
_SINGLE_APART: Tiles = ((APART, 1.0),)
_BLOCKS_APART: Tiles = (*_SINGLE_APART, (APART_BESIDE, 0.96))
WIDE = Tile(128, 192, 1, 1, apart=True)
WIDE_BESIDE = WIDE._replace(cluster_columns=2)
_WIDE: Tiles = ((WIDE, 1.0),)
_WIDE_SPLIT: Tiles = (*_WIDE, (APART_BESIDE, 1.04), (WIDE_BESIDE, 0.985))
# Measured on H200s and H100s (docs/results/): each tile with its time a padded element of the result, relative to the
# first one's. Weights that are read transposed want a tile of whole strips of 32 or 64 columns: others lie in shared memory
# in strips of 16 (in tiles of 208 FC1's dgrad took 1.65 ms, in tiles of 192 0.97).
# Weight gradients load 32 tokens at once: what a stage holds is there sooner, and an expert's last tokens fill more of it.
# A cluster of two tiles above each other loads its second operand once, but pads each expert's rows to 256; one of two side
# by side loads the first one once.
# Most factors are a fit to all tiles' times alone in 5 to 26 shapes, even and random routing, with and without a rest
# (`benchmarks.tile_sweep`).
TILES: dict[tuple[str, Regime], Tiles] = {
    ("fc1", Regime.USUAL): (
        (BESIDE, 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.005),
        (Tile(128, 208, 1, 1, pingpong=True), 1.026),
        (Tile(128, 160, 1, 2, pingpong=True), 1.019),
        (Tile(128, 176, 1, 2, pingpong=True), 1.024),
    ),
    ("fc1", Regime.MANY): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (Tile(128, 208, 1, 1, pingpong=True), 1.003),
        (Tile(128, 176, 1, 2, pingpong=True), 1.008),
        (BESIDE, 1.016),
    ),
    ("dact", Regime.MODEST): ((Tile(128, 192, pingpong=True), 1.0), (Tile(128, 128, pingpong=True), 1.07)),
    ("dact", Regime.USUAL): (
        (Tile(128, 192, pingpong=True), 1.0),
        (Tile(128, 160, pingpong=True), 1.045),
        (Tile(128, 256), 1.04),
    ),
    ("dact", Regime.FEW): ((Tile(128, 128, 1, 2, pingpong=True), 1.0),),
    ("fc2", Regime.USUAL): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (BESIDE, 1.017),
        (Tile(128, 208, 1, 1, pingpong=True), 1.025),
        (Tile(128, 256, 1, 1), 1.04),
    ),
    ("fc2", Regime.MANY): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (BESIDE, 1.006),
        (Tile(128, 208, 2, 1, pingpong=True), 1.008),
    ),
    ("fc2", Regime.FEW): ((BESIDE, 1.0), (Tile(128, 192, 1, 1, pingpong=True), 1.07)),
    ("fc2", Regime.SOME): _SOME,
    ("fc2 deep", Regime.USUAL): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (Tile(128, 256, 1, 2), 1.015),
        (Tile(128, 256, 1, 1), 1.02),
    ),
    ("fc2 deep", Regime.MANY): (
        (Tile(128, 256, 1, 2), 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.011),
        (BESIDE, 1.011),
        (Tile(128, 256), 1.029),
    ),
    ("dgrad", Regime.USUAL): (
        (BESIDE, 1.0),
        (Tile(128, 256, 1, 2), 1.008),
        (Tile(128, 256, 1, 1), 1.011),
        (Tile(128, 192, 2, 1, pingpong=True), 1.02),
        (Tile(128, 192, 1, 1, pingpong=True), 1.044),
    ),
    ("dgrad", Regime.MANY): (
        (BESIDE, 1.0),
        (Tile(128, 192, 2, 1, pingpong=True), 1.005),
        (Tile(128, 256, 1, 2), 1.023),
    ),
    ("dgrad", Regime.FEW): ((BESIDE, 1.0), (Tile(128, 128, 1, 2, pingpong=True), 1.085)),
    ("dgrad", Regime.SOME): _SOME_TURNED,
    ("dgrad deep", Regime.USUAL): (
        (Tile(128, 256, 1, 2), 1.0),
        (Tile(128, 256, 1, 1), 1.005),
        (BESIDE, 1.012),
        (Tile(128, 192, 2, 1, pingpong=True), 1.014),
    ),
    ("dgrad deep", Regime.MANY): (
        (Tile(128, 256, 1, 2), 1.0),
        (Tile(128, 256, 1, 1), 1.003),
        (BESIDE, 1.034),
        (Tile(128, 192, pingpong=True), 1.04),
    ),
    ("wgrad", Regime.FEW): ((WGRAD, 1.0),),
    ("wgrad", Regime.SOME): ((WGRAD, 1.0),),
    ("wgrad", Regime.MODEST): ((WGRAD_ABOVE, 1.0), (WGRAD._replace(cluster_columns=2), 1.06), (WGRAD, 1.095)),
    ("wgrad", Regime.USUAL): (
        (WGRAD_ABOVE, 1.0),
        (WGRAD._replace(cluster_columns=2), 1.082),
        (WGRAD_BESIDE, 1.114),
        (WGRAD, 1.139),
    ),
    ("wgrad", Regime.MANY): (
        (WGRAD_ABOVE, 1.0),
        (WGRAD_BESIDE._replace(cluster_rows=2, cluster_columns=1), 1.016),
        (WGRAD_BESIDE, 1.065),
        (WGRAD, 1.233),
    ),
    ("glu", Regime.FEW): ((Tile(128, 128, 1, 2, pingpong=True), 1.0),),
    ("glu", Regime.SOME): (
        (BESIDE, 1.0),
        (Tile(128, 128, 1, 2, pingpong=True), 1.01),
    ),
    ("glu", Regime.USUAL): (
        (BESIDE, 1.0),
        (Tile(128, 128, 1, 2, pingpong=True), 1.062),
        (Tile(128, 192, 1, 1, pingpong=True), 1.064),
        (Tile(128, 128, 1, 1, pingpong=True), 1.284),
    ),
    ("glu", Regime.MANY): (
        (BESIDE, 1.0),
        (Tile(128, 128, 1, 2, pingpong=True), 1.03),
        (Tile(128, 192, 1, 1, pingpong=True), 1.036),
    ),
    ("dglu", Regime.USUAL): ((Tile(128, 128, 1, 1, pingpong=True), 1.0), (Tile(128, 160, pingpong=True), 1.01)),
    ("dglu deep", Regime.FEW): _SINGLE_DPAIRS,
    ("dglu deep", Regime.SOME): _SOME_DPAIRS,
    ("dglu deep", Regime.USUAL): (
        (Tile(128, 160, pingpong=True), 1.0),
        (Tile(128, 128, pingpong=True), 1.048),
        (Tile(128, 128, 1, 1, pingpong=True), 1.094),
    ),
    ("dglu", Regime.FEW): _SINGLE_DPAIRS,
    ("dglu", Regime.SOME): _SOME_DPAIRS,
    ("dglu", Regime.MANY): ((Tile(128, 160, pingpong=True), 1.0), (Tile(128, 128, pingpong=True), 1.031)),
    ("fp8 fast", Regime.USUAL): (
        (BESIDE, 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.015),
        (Tile(128, 160, 1, 2, pingpong=True), 1.023),
        (Tile(128, 176, 1, 2, pingpong=True), 1.03),
        (Tile(128, 208, 1, 1, pingpong=True), 1.037),
    ),
    ("fp8 fast", Regime.MANY): (
        (Tile(128, 208, pingpong=True), 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 0.99),
    ),
    ("fp8 fast glu", Regime.FEW): _SINGLE_PAIRS,
    ("fp8 fast glu", Regime.SOME): _SINGLE_PAIRS,
    ("fp8 fast glu", Regime.USUAL): (
        (BESIDE, 1.0),
        (Tile(128, 192, 1, 1, pingpong=True), 1.054),
        (Tile(128, 128, 1, 2, pingpong=True), 1.07),
    ),
    ("fp8 fast dglu", Regime.USUAL): _SINGLE_BLOCK,
    ("fp8 split glu", Regime.USUAL): _SINGLE_BLOCK,
    ("fp8 split dglu", Regime.FEW): _SINGLE_BLOCK,
    ("fp8 split dglu", Regime.USUAL): (*_WIDE, (Tile(128, 128, 1, 2), 1.06)),
    ("fp8 fast dact", Regime.USUAL): ((Tile(128, 208, pingpong=True), 1.0),),
    ("fp8 fast wgrad", Regime.USUAL): ((Tile(128, 208, pingpong=True), 1.0),),
    ("fp8 split", Regime.FEW): _SINGLE_BLOCK,
    ("fp8 split", Regime.USUAL): _WIDE_SPLIT,
    ("fp8 split dact", Regime.FEW): _SINGLE_APART,
    ("fp8 split dact", Regime.USUAL): _WIDE_SPLIT,
    ("fp8 split wgrad", Regime.FEW): _WIDE,
    ("fp8 split wgrad", Regime.SOME): (*_WIDE, (WIDE_BESIDE, 0.98)),
    ("fp8 split wgrad", Regime.USUAL): (*_WIDE, (APART, 1.025)),
    ("blocks", Regime.FEW): _BLOCKS_APART,
    ("blocks", Regime.USUAL): (*_WIDE, (APART_BESIDE, 1.02)),
    ("blocks deep", Regime.FEW): _BLOCKS_APART,
    ("blocks deep", Regime.USUAL): (*_WIDE, (APART_BESIDE, 0.98)),
    ("blocks pairs", Regime.USUAL): _BLOCKS_APART,
    ("blocks pairs deep", Regime.FEW): _BLOCKS_APART,
    ("blocks pairs deep", Regime.SOME): _BLOCKS_APART,
    ("blocks pairs deep", Regime.USUAL): ((Tile(128, 192, 1, 1), 1.0), (APART_BESIDE, 0.99)),
    ("blocks dact", Regime.FEW): _SINGLE_BLOCK,
    ("blocks dact", Regime.USUAL): (*_WIDE, (APART_BESIDE, 1.06)),
    ("blocks wgrad", Regime.USUAL): _SINGLE_APART,
    ("blocks wgrad", Regime.MANY): ((APART_BESIDE, 1.0),),
}
