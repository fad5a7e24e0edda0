"""Launches of FP8 by blocks on Hopper, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_offload.errors import UnsupportedError
from te_offload.fused.kernels.block_interface import BlockNumbers
from te_offload.fused.kernels.experts import Experts
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


def test_scales_that_kernels_cannot_index_are_refused_with_their_number() -> None:
    pytest.importorskip("quack")
    from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels

    def huge(columns: int) -> BlockNumbers:
        scales = torch.empty(2**18, columns, device="meta")
        return BlockNumbers((2**25, columns), BlockScaling(BlockFormat.FP8), torch.empty(0, device="meta"), scales)

    kernels, offsets = Sm90BlockKernels(SquaredReLU()), torch.zeros(2, dtype=torch.int32, device="meta")
    numbers = torch.empty(1, 8192, 8192, dtype=torch.uint8, device="meta")
    weights: Any = SimpleNamespace(numbers=Experts(numbers, offsets[:1]), inverses=Experts(numbers, offsets[:1]))
    with pytest.raises(UnsupportedError, match=r"2\*\*31 scales .* has 2147483648\. Give the op fewer tokens"):
        kernels.linear_blocks(huge(8192), weights, torch.empty(0, device="meta"), offsets)
