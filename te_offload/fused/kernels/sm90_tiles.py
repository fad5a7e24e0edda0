"""Which tile each of Hopper's grouped GEMMs is cut into.

In: the product, the tokens an expert, the shape of the result, whether the card's memory is quick. Out: a `Tile`. Keeps
true: the choice goes by numbers that the host knows, never by split sizes. Does not: know of kernels or of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from te_offload.fused.kernels.sm90_launch import Tile
from te_offload.fused.kernels.sm90_quick_tiles import QUICK_MEMORY
from te_offload.fused.kernels.sm90_tile_lists import TILES
from te_offload.fused.kernels.sm90_tile_lists import Regime as Regime

_DEEP = 2560  # products a sum: of fewer, what is done with the sums takes long, and two warp groups should take turns


def entry_of(product: str, depth: int) -> str:
    """The product's name in the lists: those with long sums may have tiles of their own."""
    deep = f"{product} deep"
    return deep if depth >= _DEEP and (deep, Regime.USUAL) in TILES else product


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
    own = QUICK_MEMORY.get((product, regime)) if quick_memory else None
    tiles = own or TILES.get((product, regime)) or TILES[product, Regime.USUAL]
    return min(tiles, key=lambda entry: entry[0].padded(rows, columns) * entry[1])[0]


def tiles_of(*, quick_memory: bool) -> Callable[..., Tile]:
    """`tile_for`, for a card whose memory is quick or not."""
    return functools.partial(tile_for, quick_memory=True) if quick_memory else tile_for
