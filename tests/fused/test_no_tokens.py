"""Calls without a token, as an expert-parallel rank may have them: shapes that the GPU's kernels are given."""

from __future__ import annotations

import pytest
import torch

from te_offload.fused.kernels.interface import Gate, Gated
from te_offload.fused.kernels.pairs import to_halves, to_pairs


def test_columns_of_fc2_s_dgrad_are_those_of_one_half_of_a_gated_input() -> None:
    pytest.importorskip("quack", reason="quack-kernels, whose kernels these are, is not installed here")
    from te_offload.fused.kernels.sm90_fp8_glu import Sm90Fp8GluKernels

    kernels = Sm90Fp8GluKernels(Gated(Gate.SWIGLU))
    assert [kernels._tiled(torch.empty(rows, 896)).shape for rows in (0, 5)] == [(0, 448), (5, 448)]


@pytest.mark.parametrize("interleave", [0, 32])
def test_columns_change_their_order_without_rows(interleave: int) -> None:
    assert to_pairs(torch.empty(0, 128), interleave).shape == (0, 128)
    assert to_halves(torch.empty(0, 128), interleave).shape == (0, 128)
