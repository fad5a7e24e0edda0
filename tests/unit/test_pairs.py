"""Columns of a gated activation in halves and in pairs."""

from __future__ import annotations

import pytest
import torch

from te_offload.fused.kernels.pairs import to_halves, to_pairs
from te_offload.ops import arithmetic


@pytest.mark.parametrize("interleave", [0, 1, 2, 4])
def test_pairs_have_a_column_of_each_half_and_are_undone(interleave: int) -> None:
    halves = torch.arange(3 * 16.0).view(3, 16)
    pairs = to_pairs(halves, interleave)
    a, b = arithmetic._halves(halves, interleave)
    assert torch.equal(pairs[:, 0::2], a) and torch.equal(pairs[:, 1::2], b)
    assert torch.equal(to_halves(pairs, interleave), halves)
