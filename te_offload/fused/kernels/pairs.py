"""The two orders of a gated activation's columns: Transformer Engine's halves, and pairs of one column of each.

In: matrices (rows, 2F). Out: the same columns in the other order. Keeps true: one is the other's inverse. Does not: copy
what is large on a step's way; kernels follow the order by a layout (`sm90_glu_device`).
"""

from __future__ import annotations

import torch


def to_pairs(halves: torch.Tensor, interleave: int) -> torch.Tensor:
    """Pairs of halves in blocks of so many columns; 0: one block of each."""
    blocks: torch.Tensor = halves.unflatten(1, (-1, 2, interleave or halves.shape[1] // 2))
    return blocks.transpose(2, 3).flatten(1)


def to_halves(pairs: torch.Tensor, interleave: int) -> torch.Tensor:
    """The other way round."""
    blocks: torch.Tensor = pairs.unflatten(1, (-1, interleave or pairs.shape[1] // 2, 2))
    return blocks.transpose(2, 3).flatten(1)
