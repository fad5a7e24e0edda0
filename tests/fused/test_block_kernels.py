"""Launches of FP8 by blocks on Hopper, without a GPU."""

from __future__ import annotations

import pytest
import torch

from te_offload.fused.kernels.block_interface import BlockNumbers
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.ops.scaling import BlockFormat, BlockScaling


def test_saved_columns_are_turned_with_a_row_of_scales_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are saved flat, in the grouped storage; the products read (blocks, columns)."""
    pytest.importorskip("quack")
    from te_offload.fused.kernels import fp8
    from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels

    monkeypatch.setattr(fp8, "turn", lambda numbers, offsets: numbers.t().contiguous())
    numbers = torch.arange(256 * 32, dtype=torch.int64).to(torch.uint8)
    scales = torch.arange(3 * 32, dtype=torch.float32)
    saved = BlockNumbers((256, 32), BlockScaling(BlockFormat.FP8), numbers, scales)
    found = Sm90BlockKernels(SquaredReLU()).turn_blocks(saved, torch.tensor([0, 130, 256], dtype=torch.int32))
    assert torch.equal(found.scales, scales.view(3, 32))
    assert torch.equal(found.numbers.view(torch.uint8), numbers.view(256, 32).t())
