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


def test_columns_are_saved_as_wgrads_read_them_where_that_adds_a_64th_or_less() -> None:
    """Room for any split of two experts is 256 rows more."""
    pytest.importorskip("quack")
    from te_offload.fused.kernels import blocks
    from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels

    kernels, asked = Sm90BlockKernels(SquaredReLU()), []

    def rows(x: torch.Tensor, *_: object, columns: int) -> tuple[str, str]:
        asked.append((x.shape[0], columns))
        return "rows", "columns"

    quantizers: Any = SimpleNamespace(rows=rows)
    kernels._quantizers = quantizers
    scaling, offsets = BlockScaling(BlockFormat.FP8), torch.zeros(3, dtype=torch.int32)
    for tokens in (256 * 64 - 128, 256 * 64):
        for saved in (True, False):
            kernels.block_rows(torch.empty(tokens, 8), offsets, scaling, by_column=True, saved=saved)
    kernels.block_rows(torch.empty(256 * 64, 8), offsets, scaling, by_column=False, saved=True)
    assert asked == [
        (16256, blocks.SAVED),
        (16256, blocks.TURNED),
        (16384, blocks.TURNED),
        (16384, blocks.TURNED),
        (16384, blocks.NOT),
    ]


def test_columns_that_were_saved_as_wgrads_read_them_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quack")
    from te_offload.fused.kernels import fp8
    from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels

    monkeypatch.delattr(fp8, "turn")
    numbers, scales = torch.arange(32 * 384).to(torch.uint8), torch.ones(3 * 32)
    saved = BlockNumbers((256, 32), BlockScaling(BlockFormat.FP8), numbers, scales)
    found = Sm90BlockKernels(SquaredReLU()).turn_blocks(saved, torch.tensor([0, 256], dtype=torch.int32))
    assert found.numbers.shape == (32, 384) and found.numbers.data_ptr() == numbers.data_ptr()
    assert found.scales.shape == (3, 32)


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
