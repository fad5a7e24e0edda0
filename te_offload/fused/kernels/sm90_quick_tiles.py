"""The same of cards whose memory is quick, where their tiles are others.

In: nothing. Out: `QUICK_MEMORY`, as `sm90_tile_lists.TILES` is; a product that is not in it takes what is there. Keeps
true: as there. Does not: know which card it is (`machine.has_quick_memory`).
"""

from __future__ import annotations

from te_offload.fused.kernels.sm90_launch import Tile
from te_offload.fused.kernels.sm90_tile_lists import (
    APART,
    APART_BESIDE,
    BESIDE,
    WGRAD,
    WGRAD_ABOVE,
    WGRAD_BESIDE,
    WIDE,
    WIDE_BESIDE,
    Regime,
    Tiles,
)

# An H200's memory gives 4.8 TB/s for an H100's 3.35: what a cluster does not load twice is worth less there, and what it
# pads as much. Factors are a fit, but for gated FC1 and weight gradients by blocks with a modest number of tokens: whole
# steps, and a shape that the fit would take 6% longer, decide the order of their first two.
_ABOVE = Tile(128, 192, 2, 1, pingpong=True)
_SINGLE = Tile(128, 192, 1, 1, pingpong=True)
_APART_ABOVE = APART._replace(cluster_rows=2)
_QUICK_DEEP_DGRAD: Tiles = (
    (BESIDE, 1.0),
    (_SINGLE, 1.006),
    (Tile(128, 256, 1, 2), 1.019),
    (Tile(128, 256, 1, 1), 1.022),
    (_ABOVE, 1.023),
)
QUICK_MEMORY: dict[tuple[str, Regime], Tiles] = {
    ("fc1", Regime.SOME): (
        (Tile(128, 176, 1, 2, pingpong=True), 1.0),
        (Tile(128, 160, 1, 2, pingpong=True), 1.031),
        (BESIDE, 1.034),
        (Tile(128, 176, 1, 1, pingpong=True), 1.036),
        (Tile(128, 208, 1, 2, pingpong=True), 1.039),
        (Tile(128, 208, 1, 1, pingpong=True), 1.049),
    ),
    ("fc1", Regime.MODEST): (
        (_SINGLE, 1.0),
        (Tile(128, 176, 1, 1, pingpong=True), 1.002),
        (Tile(128, 208, 1, 2, pingpong=True), 1.005),
        (BESIDE, 1.006),
        (Tile(128, 208, 1, 1, pingpong=True), 1.01),
        (Tile(128, 160, 1, 2, pingpong=True), 1.01),
    ),
    ("fc1", Regime.USUAL): (
        (BESIDE, 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.005),
        (Tile(128, 176, 1, 1, pingpong=True), 1.009),
        (Tile(128, 208, 1, 1, pingpong=True), 1.009),
        (_SINGLE, 1.009),
        (Tile(128, 176, 1, 2, pingpong=True), 1.011),
    ),
    ("fc2", Regime.SOME): (
        (BESIDE, 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.001),
        (_SINGLE, 1.011),
        (Tile(128, 208, 1, 1, pingpong=True), 1.017),
    ),
    ("fc2", Regime.USUAL): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (Tile(128, 208, 1, 1, pingpong=True), 1.004),
        (BESIDE, 1.01),
        (_SINGLE, 1.014),
        (Tile(128, 176, 1, 2, pingpong=True), 1.025),
    ),
    ("fc2", Regime.MANY): (
        (Tile(128, 208, 1, 2, pingpong=True), 1.0),
        (Tile(128, 208, 1, 1, pingpong=True), 1.004),
        (BESIDE, 1.009),
        (_SINGLE, 1.011),
        (Tile(128, 176, 1, 2, pingpong=True), 1.015),
    ),
    ("dact", Regime.SOME): (
        (BESIDE, 1.0),
        (Tile(128, 160, 1, 2, pingpong=True), 1.002),
        (Tile(128, 128, 1, 2, pingpong=True), 1.018),
        (_SINGLE, 1.021),
    ),
    ("dact", Regime.MODEST): (
        (BESIDE, 1.0),
        (_SINGLE, 1.008),
        (Tile(128, 160, 1, 2, pingpong=True), 1.025),
        (Tile(128, 128, 1, 2, pingpong=True), 1.063),
    ),
    ("dact", Regime.USUAL): (
        (BESIDE, 1.0),
        (_SINGLE, 1.005),
        (_ABOVE, 1.014),
        (Tile(128, 160, 2, 1, pingpong=True), 1.023),
        (Tile(128, 160, 1, 2, pingpong=True), 1.028),
        (Tile(128, 128, 1, 2, pingpong=True), 1.05),
    ),
    ("dgrad", Regime.MODEST): ((_SINGLE, 1.0), (BESIDE, 1.004), (Tile(128, 256, 1, 2), 1.045), (_ABOVE, 1.054)),
    ("dgrad", Regime.USUAL): ((BESIDE, 1.0), (_SINGLE, 1.004), (_ABOVE, 1.031), (Tile(128, 256, 1, 2), 1.057)),
    ("dgrad", Regime.MANY): ((_SINGLE, 1.0), (BESIDE, 1.001), (_ABOVE, 1.015), (Tile(128, 256, 1, 2), 1.054)),
    ("dgrad deep", Regime.SOME): _QUICK_DEEP_DGRAD,
    ("dgrad deep", Regime.MODEST): _QUICK_DEEP_DGRAD,
    ("dgrad deep", Regime.USUAL): _QUICK_DEEP_DGRAD,
    ("wgrad", Regime.FEW): (
        (WGRAD._replace(cluster_columns=2), 1.0),
        (WGRAD_BESIDE, 1.003),
        (WGRAD_ABOVE, 1.01),
        (WGRAD, 1.012),
    ),
    ("wgrad", Regime.MODEST): ((WGRAD_ABOVE, 1.0), (WGRAD, 1.01), (WGRAD._replace(cluster_columns=2), 1.02)),
    ("wgrad", Regime.USUAL): ((WGRAD_ABOVE, 1.0), (WGRAD, 1.023), (WGRAD._replace(cluster_columns=2), 1.03)),
    ("wgrad", Regime.MANY): (
        (WGRAD_ABOVE, 1.0),
        (WGRAD._replace(cluster_columns=2), 1.035),
        (WGRAD, 1.036),
        (WGRAD_BESIDE._replace(cluster_rows=2, cluster_columns=1), 1.051),
        (WGRAD_BESIDE, 1.059),
    ),
    ("glu", Regime.SOME): ((BESIDE, 1.0), (_SINGLE, 1.001), (Tile(128, 128, 1, 2, pingpong=True), 1.042)),
    ("glu", Regime.MODEST): (
        (BESIDE, 1.0),
        (_SINGLE, 1.005),
        (Tile(128, 128, 1, 2, pingpong=True), 1.047),
        (Tile(128, 128, 1, 1, pingpong=True), 1.067),
    ),
    ("dglu deep", Regime.SOME): (
        (Tile(128, 128, 1, 1, pingpong=True), 1.0),
        (Tile(128, 160, 1, 1, pingpong=True), 1.002),
        (Tile(128, 128, 1, 2, pingpong=True), 1.006),
    ),
    ("dglu deep", Regime.USUAL): (
        (Tile(128, 160, pingpong=True), 1.0),
        (Tile(128, 160, 1, 1, pingpong=True), 1.021),
        (Tile(128, 128, 1, 2, pingpong=True), 1.024),
        (Tile(128, 128, 1, 1, pingpong=True), 1.027),
    ),
    ("fp8 fast", Regime.FEW): ((BESIDE, 1.0), (Tile(128, 160, 1, 2, pingpong=True), 1.037), (_SINGLE, 1.066)),
    ("fp8 fast", Regime.SOME): (
        (BESIDE, 1.0),
        (Tile(128, 160, 1, 2, pingpong=True), 1.002),
        (_SINGLE, 1.02),
        (Tile(128, 208, 1, 1, pingpong=True), 1.047),
        (Tile(128, 208, 1, 2, pingpong=True), 1.052),
        (Tile(128, 176, 1, 2, pingpong=True), 1.053),
    ),
    ("fp8 fast", Regime.MODEST): (
        (BESIDE, 1.0),
        (_SINGLE, 1.004),
        (Tile(128, 160, 1, 2, pingpong=True), 1.005),
        (Tile(128, 208, 1, 1, pingpong=True), 1.04),
        (Tile(128, 208, 1, 2, pingpong=True), 1.043),
    ),
    ("fp8 fast", Regime.MANY): (
        (BESIDE, 1.0),
        (Tile(128, 208, 1, 2, pingpong=True), 1.001),
        (Tile(128, 176, 1, 2, pingpong=True), 1.007),
        (Tile(128, 160, 1, 2, pingpong=True), 1.008),
        (Tile(128, 208, 1, 1, pingpong=True), 1.009),
        (_SINGLE, 1.011),
    ),
    ("fp8 fast glu", Regime.FEW): ((BESIDE, 1.0), (_SINGLE, 1.016), (Tile(128, 128, 1, 2, pingpong=True), 1.093)),
    ("fp8 fast glu", Regime.MODEST): ((BESIDE, 1.0), (_SINGLE, 1.015)),
    ("fp8 split", Regime.FEW): ((WIDE_BESIDE, 1.0), (WIDE, 1.059), (APART, 1.098)),
    ("fp8 split", Regime.USUAL): ((APART_BESIDE, 1.0), (WIDE_BESIDE, 1.015), (WIDE, 1.015), (APART, 1.021)),
    ("fp8 split", Regime.MANY): ((WIDE, 1.0), (WIDE_BESIDE, 1.001), (APART_BESIDE, 1.017), (APART, 1.025)),
    ("fp8 split wgrad", Regime.SOME): ((WIDE_BESIDE, 1.0), (WIDE, 1.015), (APART, 1.044)),
    ("blocks", Regime.FEW): ((WIDE, 1.0), (APART, 1.023), (APART_BESIDE, 1.032)),
    ("blocks deep", Regime.SOME): (
        (APART_BESIDE, 1.0),
        (Tile(128, 128, 1, 2), 1.006),
        (APART, 1.007),
        (Tile(128, 128, 1, 1), 1.008),
        (WIDE, 1.046),
    ),
    ("blocks pairs", Regime.FEW): ((Tile(128, 192, 1, 1), 1.0), (APART_BESIDE, 1.044), (APART, 1.05)),
    ("blocks pairs deep", Regime.SOME): (
        (APART_BESIDE, 1.0),
        (Tile(128, 128, 1, 1), 1.006),
        (APART, 1.026),
        (Tile(128, 192, 1, 1), 1.03),
    ),
    ("blocks pairs deep", Regime.MODEST): ((APART_BESIDE, 1.0), (Tile(128, 192, 1, 1), 1.008), (APART, 1.011)),
    ("blocks pairs deep", Regime.USUAL): ((Tile(128, 192, 1, 1), 1.0), (APART_BESIDE, 1.006), (APART, 1.01)),
    ("blocks wgrad", Regime.MODEST): ((APART_BESIDE, 1.0), (_APART_ABOVE, 1.002), (APART, 1.017)),
    ("blocks wgrad", Regime.USUAL): ((_APART_ABOVE, 1.0), (APART, 1.015), (APART_BESIDE, 1.017)),
    ("blocks wgrad", Regime.MANY): ((_APART_ABOVE, 1.0), (APART_BESIDE, 1.006), (APART, 1.013)),
}
