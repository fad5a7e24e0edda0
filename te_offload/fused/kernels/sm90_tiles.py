"""Which tile each of Hopper's grouped GEMMs is cut into.

In: the product, the tokens an expert, the shape of the result, whether the card's memory is quick. Out: a `Tile`. Keeps
true: the choice goes by numbers that the host knows, never by split sizes. Does not: know of kernels or of tensors.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence

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


_BESIDE = Tile(128, 192, 1, 2, pingpong=True)  # two warp groups in turns, of whole strips where weights are transposed
_SOME: Tiles = (
    (_BESIDE, 1.0),
    (Tile(128, 256, 1, 2), 1.045),
    (Tile(128, 208, 1, 2, pingpong=True), 1.05),
    (Tile(128, 256, 1, 1), 1.06),
)
_SOME_TURNED: Tiles = (
    (_BESIDE, 1.0),
    (Tile(128, 256, 1, 2), 1.043),
    (Tile(128, 192, pingpong=True), 1.044),
    (Tile(128, 256, 1, 1), 1.054),
)
_WGRAD = Tile(128, 192, 1, 1, pingpong=True, per_stage=32)
_WGRAD_ABOVE = _WGRAD._replace(cluster_rows=2)
_WGRAD_BESIDE = Tile(128, 256, 1, 2, per_stage=32)
_DEEP = 2560  # products a sum: of fewer, what is done with the sums takes long, and two warp groups should take turns
# Columns of a tile of FC1's with a gated activation hold whole blocks of 32 columns of each half; of two above each other
# each loads half of the columns, and holds them too (in two of 192 columns above each other the card stops).
_SINGLE_PAIRS: Tiles = ((Tile(128, 192, 1, 1, pingpong=True), 1.0),)
_SINGLE_DPAIRS: Tiles = ((Tile(128, 128, 1, 1, pingpong=True), 1.0),)
_SOME_DPAIRS: Tiles = ((Tile(128, 128, 1, 2, pingpong=True), 1.0), (Tile(128, 128, 1, 1, pingpong=True), 1.022))
# In FP8 with sums in float32 a tile of 128 columns has two sets of registers for products, one of 192 a single one
# (`sm90_sums`), and is quicker wherever experts have tokens enough; by blocks, whose loop has got shorter, two of 128
# beside each other are where 192 pad more, and with long sums where they pad as much. By blocks weight gradients have 128.
_SINGLE_BLOCK: Tiles = ((Tile(128, 128, 1, 1), 1.0),)
_SINGLE_APART: Tiles = ((Tile(128, 128, 1, 1, apart=True), 1.0),)
_APART_BESIDE = Tile(128, 128, 1, 2, apart=True)
_BLOCKS_APART: Tiles = (*_SINGLE_APART, (_APART_BESIDE, 0.96))
_WIDE: Tiles = ((Tile(128, 192, 1, 1, apart=True), 1.0),)
_WIDE_BESIDE = Tile(128, 192, 1, 2, apart=True)
_WIDE_SPLIT: Tiles = (*_WIDE, (_APART_BESIDE, 1.04), (_WIDE_BESIDE, 0.985))
# Measured on H200s and H100s (docs/results/): each tile with its time a padded element of the result, relative to the
# first one's. Weights that are read transposed want a tile of whole strips of 32 or 64 columns: others lie in shared memory
# in strips of 16 (in tiles of 208 FC1's dgrad took 1.65 ms, in tiles of 192 0.97).
# Weight gradients load 32 tokens at once: what a stage holds is there sooner, and an expert's last tokens fill more of it.
# A cluster of two tiles above each other loads its second operand once, but pads each expert's rows to 256; one of two side
# by side loads the first one once.
# Most factors are a fit to all tiles' times alone in 5 to 26 shapes, even and random routing, with and without a rest
# (`benchmarks.tile_sweep`).
_TILES: dict[tuple[str, Regime], Tiles] = {
    ("fc1", Regime.USUAL): (
        (_BESIDE, 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.005),
        (Tile(128, 208, 1, 1, pingpong=True), 1.026),
        (Tile(128, 160, 1, 2, pingpong=True), 1.019),
        (Tile(128, 176, 1, 2, pingpong=True), 1.024),
    ),
    ("fc1", Regime.MANY): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (Tile(128, 208, 1, 1, pingpong=True), 1.003),
        (Tile(128, 176, 1, 2, pingpong=True), 1.008),
        (_BESIDE, 1.016),
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
        (_BESIDE, 1.017),
        (Tile(128, 208, 1, 1, pingpong=True), 1.025),
        (Tile(128, 256, 1, 1), 1.04),
    ),
    ("fc2", Regime.MANY): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (_BESIDE, 1.006),
        (Tile(128, 208, 2, 1, pingpong=True), 1.008),
    ),
    ("fc2", Regime.FEW): ((_BESIDE, 1.0), (Tile(128, 192, 1, 1, pingpong=True), 1.07)),
    ("fc2", Regime.SOME): _SOME,
    ("fc2 deep", Regime.USUAL): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (Tile(128, 256, 1, 2), 1.015),
        (Tile(128, 256, 1, 1), 1.02),
    ),
    ("fc2 deep", Regime.MANY): (
        (Tile(128, 256, 1, 2), 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.011),
        (_BESIDE, 1.011),
        (Tile(128, 256), 1.029),
    ),
    ("dgrad", Regime.USUAL): (
        (_BESIDE, 1.0),
        (Tile(128, 256, 1, 2), 1.008),
        (Tile(128, 256, 1, 1), 1.011),
        (Tile(128, 192, 2, 1, pingpong=True), 1.02),
        (Tile(128, 192, 1, 1, pingpong=True), 1.044),
    ),
    ("dgrad", Regime.MANY): (
        (_BESIDE, 1.0),
        (Tile(128, 192, 2, 1, pingpong=True), 1.005),
        (Tile(128, 256, 1, 2), 1.023),
    ),
    ("dgrad", Regime.FEW): ((_BESIDE, 1.0), (Tile(128, 128, 1, 2, pingpong=True), 1.085)),
    ("dgrad", Regime.SOME): _SOME_TURNED,
    ("dgrad deep", Regime.USUAL): (
        (Tile(128, 256, 1, 2), 1.0),
        (Tile(128, 256, 1, 1), 1.005),
        (_BESIDE, 1.012),
        (Tile(128, 192, 2, 1, pingpong=True), 1.014),
    ),
    ("dgrad deep", Regime.MANY): (
        (Tile(128, 256, 1, 2), 1.0),
        (Tile(128, 256, 1, 1), 1.003),
        (_BESIDE, 1.034),
        (Tile(128, 192, pingpong=True), 1.04),
    ),
    ("wgrad", Regime.FEW): ((_WGRAD, 1.0),),
    ("wgrad", Regime.SOME): ((_WGRAD, 1.0),),
    ("wgrad", Regime.MODEST): ((_WGRAD_ABOVE, 1.0), (_WGRAD._replace(cluster_columns=2), 1.06), (_WGRAD, 1.095)),
    ("wgrad", Regime.USUAL): (
        (_WGRAD_ABOVE, 1.0),
        (_WGRAD._replace(cluster_columns=2), 1.082),
        (_WGRAD_BESIDE, 1.114),
        (_WGRAD, 1.139),
    ),
    ("wgrad", Regime.MANY): (
        (_WGRAD_ABOVE, 1.0),
        (_WGRAD_BESIDE._replace(cluster_rows=2, cluster_columns=1), 1.016),
        (_WGRAD_BESIDE, 1.065),
        (_WGRAD, 1.233),
    ),
    ("glu", Regime.FEW): ((Tile(128, 128, 1, 2, pingpong=True), 1.0),),
    ("glu", Regime.SOME): (
        (_BESIDE, 1.0),
        (Tile(128, 128, 1, 2, pingpong=True), 1.01),
    ),
    ("glu", Regime.USUAL): (
        (_BESIDE, 1.0),
        (Tile(128, 128, 1, 2, pingpong=True), 1.062),
        (Tile(128, 192, 1, 1, pingpong=True), 1.064),
        (Tile(128, 128, 1, 1, pingpong=True), 1.284),
    ),
    ("glu", Regime.MANY): (
        (_BESIDE, 1.0),
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
        (_BESIDE, 1.0),
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
        (_BESIDE, 1.0),
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
    ("fp8 split wgrad", Regime.SOME): (*_WIDE, (_WIDE_BESIDE, 0.98)),
    ("fp8 split wgrad", Regime.USUAL): (*_WIDE, (Tile(128, 128, 1, 1, apart=True), 1.025)),
    ("blocks", Regime.FEW): _BLOCKS_APART,
    ("blocks", Regime.USUAL): (*_WIDE, (_APART_BESIDE, 1.02)),
    ("blocks deep", Regime.FEW): _BLOCKS_APART,
    ("blocks deep", Regime.USUAL): (*_WIDE, (_APART_BESIDE, 0.98)),
    ("blocks pairs", Regime.USUAL): _BLOCKS_APART,
    ("blocks pairs deep", Regime.FEW): _BLOCKS_APART,
    ("blocks pairs deep", Regime.SOME): _BLOCKS_APART,
    ("blocks pairs deep", Regime.USUAL): ((Tile(128, 192, 1, 1), 1.0), (_APART_BESIDE, 0.99)),
    ("blocks dact", Regime.FEW): _SINGLE_BLOCK,
    ("blocks dact", Regime.USUAL): (*_WIDE, (_APART_BESIDE, 1.06)),
    ("blocks wgrad", Regime.USUAL): _SINGLE_APART,
    ("blocks wgrad", Regime.MANY): ((_APART_BESIDE, 1.0),),
}
# What an H200, whose memory gives 4.8 TB/s for an H100's 3.35, likes better: what a cluster does not load twice is worth
# less there, and what it pads as much. A product that is not here takes what is above.
_ABOVE = Tile(128, 192, 2, 1, pingpong=True)
_SINGLE = Tile(128, 192, 1, 1, pingpong=True)
_QUICK_DEEP_DGRAD: Tiles = (
    (_BESIDE, 1.0),
    (_SINGLE, 1.006),
    (Tile(128, 256, 1, 2), 1.019),
    (Tile(128, 256, 1, 1), 1.022),
    (_ABOVE, 1.023),
)
_QUICK_MEMORY: dict[tuple[str, Regime], Tiles] = {
    ("fc1", Regime.SOME): (
        (Tile(128, 176, 1, 2, pingpong=True), 1.0),
        (Tile(128, 160, 1, 2, pingpong=True), 1.031),
        (_BESIDE, 1.034),
        (Tile(128, 176, 1, 1, pingpong=True), 1.036),
        (Tile(128, 208, 1, 2, pingpong=True), 1.039),
        (Tile(128, 208, 1, 1, pingpong=True), 1.049),
    ),
    ("fc1", Regime.MODEST): (
        (_SINGLE, 1.0),
        (Tile(128, 176, 1, 1, pingpong=True), 1.002),
        (Tile(128, 208, 1, 2, pingpong=True), 1.005),
        (_BESIDE, 1.006),
        (Tile(128, 208, 1, 1, pingpong=True), 1.01),
        (Tile(128, 160, 1, 2, pingpong=True), 1.01),
    ),
    ("fc1", Regime.USUAL): (
        (_BESIDE, 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.005),
        (Tile(128, 176, 1, 1, pingpong=True), 1.009),
        (Tile(128, 208, 1, 1, pingpong=True), 1.009),
        (_SINGLE, 1.009),
        (Tile(128, 176, 1, 2, pingpong=True), 1.011),
    ),
    ("fc2", Regime.SOME): (
        (_BESIDE, 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.001),
        (_SINGLE, 1.011),
        (Tile(128, 208, 1, 1, pingpong=True), 1.017),
    ),
    ("fc2", Regime.USUAL): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (Tile(128, 208, 1, 1, pingpong=True), 1.004),
        (_BESIDE, 1.01),
        (_SINGLE, 1.014),
        (Tile(128, 176, 1, 2, pingpong=True), 1.025),
    ),
    ("fc2", Regime.MANY): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (Tile(128, 208, 1, 1, pingpong=True), 1.004),
        (_BESIDE, 1.009),
        (_SINGLE, 1.011),
        (Tile(128, 176, 1, 2, pingpong=True), 1.015),
    ),
    ("dact", Regime.SOME): (
        (_BESIDE, 1.0),
        (Tile(128, 160, 1, 2, pingpong=True), 1.002),
        (Tile(128, 128, 1, 2, pingpong=True), 1.018),
        (_SINGLE, 1.021),
    ),
    ("dact", Regime.MODEST): (
        (_BESIDE, 1.0),
        (_SINGLE, 1.008),
        (Tile(128, 160, 1, 2, pingpong=True), 1.025),
        (Tile(128, 128, 1, 2, pingpong=True), 1.063),
    ),
    ("dact", Regime.USUAL): (
        (_BESIDE, 1.0),
        (_SINGLE, 1.005),
        (_ABOVE, 1.014),
        (Tile(128, 160, 2, 1, pingpong=True), 1.023),
        (Tile(128, 160, 1, 2, pingpong=True), 1.028),
        (Tile(128, 128, 1, 2, pingpong=True), 1.05),
    ),
    ("dgrad", Regime.MODEST): ((_SINGLE, 1.0), (_BESIDE, 1.004), (Tile(128, 256, 1, 2), 1.045), (_ABOVE, 1.054)),
    ("dgrad", Regime.USUAL): ((_BESIDE, 1.0), (_SINGLE, 1.004), (_ABOVE, 1.031), (Tile(128, 256, 1, 2), 1.057)),
    ("dgrad", Regime.MANY): ((_SINGLE, 1.0), (_BESIDE, 1.001), (_ABOVE, 1.015), (Tile(128, 256, 1, 2), 1.054)),
    ("dgrad deep", Regime.SOME): _QUICK_DEEP_DGRAD,
    ("dgrad deep", Regime.MODEST): _QUICK_DEEP_DGRAD,
    ("dgrad deep", Regime.USUAL): _QUICK_DEEP_DGRAD,
    ("wgrad", Regime.FEW): (
        (_WGRAD._replace(cluster_columns=2), 1.0),
        (_WGRAD_BESIDE, 1.003),
        (_WGRAD_ABOVE, 1.01),
        (_WGRAD, 1.012),
    ),
    ("wgrad", Regime.MODEST): ((_WGRAD_ABOVE, 1.0), (_WGRAD, 1.01), (_WGRAD._replace(cluster_columns=2), 1.02)),
    ("wgrad", Regime.USUAL): ((_WGRAD_ABOVE, 1.0), (_WGRAD, 1.023), (_WGRAD._replace(cluster_columns=2), 1.03)),
    ("wgrad", Regime.MANY): (
        (_WGRAD_ABOVE, 1.0),
        (_WGRAD._replace(cluster_columns=2), 1.035),
        (_WGRAD, 1.036),
        (_WGRAD_BESIDE._replace(cluster_rows=2, cluster_columns=1), 1.051),
        (_WGRAD_BESIDE, 1.059),
    ),
}


def entry_of(product: str, depth: int) -> str:
    """The product's name in the lists: those with long sums may have tiles of their own."""
    deep = f"{product} deep"
    return deep if depth >= _DEEP and (deep, Regime.USUAL) in _TILES else product


@functools.cache
def tile_for(
    product: str, regime: Regime, rows: int | None, columns: int, depth: int = 0, *, quick_memory: bool = False
) -> Tile:
    """The tile with the least time.

    Args:
        product: ``"fc1"``: FC1 with its activation; ``"fc2"``; ``"dact"``: FC2's dgrad with the activation's;
            ``"dgrad"``: FC1's; ``"wgrad"``. ``"glu"`` and ``"dglu"``: for ``"fc1"`` and ``"dact"`` with a gated
            activation. In FP8 with sums in the tensor cores ``"fp8 fast"``: FC1, FC2 and FC1's dgrad,
            ``"fp8 fast dact"`` and ``"fp8 fast wgrad"``; with sums in float32 the same with ``split`` for ``fast``; by
            blocks ``"blocks"``: all by row but ``"blocks dact"`` and gated FC1, ``"blocks pairs"``; and ``"blocks wgrad"``.
        regime: of the tokens an expert.
        rows, columns: of the result; rows ``None``: the same for all tiles. depth: products a sum, where
            they are as many for all tiles. quick_memory: of the card (`machine.has_quick_memory`).
    """
    product = entry_of(product, depth)
    own = _QUICK_MEMORY.get((product, regime)) if quick_memory else None
    tiles = own or _TILES.get((product, regime)) or _TILES[product, Regime.USUAL]
    return min(tiles, key=lambda entry: entry[0].padded(rows, columns) * entry[1])[0]


def tiles_of(*, quick_memory: bool) -> Callable[..., Tile]:
    """`tile_for`, for a card whose memory is quick or not."""
    return functools.partial(tile_for, quick_memory=True) if quick_memory else tile_for
