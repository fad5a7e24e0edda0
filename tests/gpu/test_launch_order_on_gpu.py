"""A product that may begin before the kernel ahead of it is over neither reads nor writes anything before that."""

from __future__ import annotations

import pytest
import torch

from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.ops.scaling import BlockFormat, BlockScaling
from tests.support.mlp import seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
from te_offload.fused.kernels.sm90 import Sm90Kernels  # noqa: E402 (needs quack)
from te_offload.fused.kernels.sm90_blocks import Sm90BlockKernels  # noqa: E402
from tests.support.late import copy_late  # noqa: E402

TOKENS, HIDDEN, FFN = 2048, 512, 384
BF16 = torch.bfloat16


def random(*shape: int) -> torch.Tensor:
    return seeded(shape, len(shape), device="cuda", dtype=BF16)


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device="cuda")


def test_fc1_reads_offsets_that_the_kernel_before_it_writes_at_its_end() -> None:
    kernels = Sm90Kernels(SquaredReLU())
    weights = kernels.prepare("weights", random(2, FFN, HIDDEN))
    x, scales = random(TOKENS, HIDDEN), torch.ones(TOKENS, device="cuda")
    right, read = offsets(1536, TOKENS), offsets(512, TOKENS)  # as many tiles, so that no warp waits for ever
    expected = [one.clone() for one in kernels.fc1(x, weights, None, scales, right)]
    kernels.fc1(torch.zeros_like(x), weights, None, scales, right)  # what the next outputs' memory holds
    copy_late(right, read)
    found = kernels.fc1(x, weights, None, scales, read)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_product_by_blocks_reads_scales_that_the_kernel_before_it_writes_at_its_end() -> None:
    kernels, scaling = Sm90BlockKernels(SquaredReLU()), BlockScaling(BlockFormat.FP8)
    given = kernels.prepare("weights", random(2, FFN, HIDDEN))
    weights, rows = kernels.block_weights(given, scaling, by_column=False).rows, offsets(1536, TOKENS)
    x, _ = kernels.block_rows(random(TOKENS, HIDDEN), rows, scaling, by_column=False)
    expected, found = (
        torch.empty(TOKENS, FFN, dtype=BF16, device="cuda"),
        torch.zeros(TOKENS, FFN, dtype=BF16, device="cuda"),
    )
    kernels.linear_blocks(x, weights, expected, rows)
    right = x.scales.clone()
    x.scales.zero_()
    copy_late(right, x.scales)
    kernels.linear_blocks(x, weights, found, rows)
    assert torch.equal(found, expected)


def test_weight_gradient_of_no_tokens_is_written_after_the_kernel_before_has_read_what_lay_there() -> None:
    kernels = Sm90Kernels(SquaredReLU())
    x, dy, none = random(TOKENS, HIDDEN), random(TOKENS, FFN), offsets(0, 0, TOKENS)
    memory = torch.zeros(3, FFN, HIDDEN, dtype=BF16, device="cuda")
    grads: Experts = kernels.prepare("gradients", memory)
    kernels.wgrad(dy, x, none, grads, accumulate=False)
    memory.fill_(1)
    seen = torch.zeros_like(memory)
    copy_late(memory, seen)
    kernels.wgrad(dy, x, none, grads, accumulate=False)
    assert bool((seen == 1).all())
    assert not memory[:2].any() and bool(memory[2].any())
