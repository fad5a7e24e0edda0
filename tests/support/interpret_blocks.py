"""Runs the kernels of `block_device` on the CPU, by Triton's interpreter: ``python -m tests.support.interpret_blocks``.

Exits with 0 if numbers and scales are those of `ReferenceBlockKernels`.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools

import torch

from te_offload.fused.kernels import blocks, fp8
from te_offload.fused.kernels.block_interface import BlockNumbers
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.ops import arithmetic
from te_offload.ops.scaling import BlockFormat, BlockScaling
from tests.support.interpret_fp8 import replace_in_interpreter, same
from tests.support.mlp import seeded

SIZES = (130, 0, 200, 7)
EXPERTS, TOKENS, HIDDEN, FFN = len(SIZES), sum(SIZES) + 5, 144, 272
OFFSETS = torch.tensor([0, *itertools.accumulate(SIZES)], dtype=torch.int32)
PARTS = [slice(begin, end) for begin, end in itertools.pairwise(OFFSETS.tolist())]


def dense(weights: blocks.Weights, expert: int) -> torch.Tensor:
    numbers = weights.numbers[expert].view(torch.float8_e4m3fn).float()
    scales = weights.inverses[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return numbers * scales[: numbers.shape[0], : numbers.shape[1]]


def same_rows(found: BlockNumbers, expected: BlockNumbers, what: object) -> None:
    """``expected``: experts one behind the other."""
    numbers, scales = expected.numbers, expected.scales
    parts = -(-found.shape[1] // 128)
    for part in PARTS:
        size = part.stop - part.start
        ours, numbers = numbers[: size * found.shape[1]], numbers[size * found.shape[1] :]
        its, scales = scales[: size * parts], scales[size * parts :]
        same(found.numbers[part].flatten(), ours, what)
        same(found.scales[:, part].flatten(), its.view(size, parts).t().flatten(), what)


def same_columns(found: BlockNumbers, expected: BlockNumbers, what: object, *, turned: bool) -> None:
    numbers, scales = expected.numbers, expected.scales
    columns, block = found.shape[1], 0
    for part in PARTS:
        size = part.stop - part.start
        count = -(-size // 128)
        ours, numbers = numbers[: size * columns].view(size, columns), numbers[size * columns :]
        its, scales = scales[: count * columns], scales[count * columns :]
        place = block * 128
        same(found.numbers[:, place : place + size].t() if turned else found.numbers[part], ours, what)
        if turned:
            assert not found.numbers[:, place + size : place + count * 128].any(), what
        same(found.scales[block : block + count], its.view(count, columns), what)
        block += count


def check(scaling: BlockScaling, activation: SquaredReLU) -> None:
    what = scaling, activation
    reference = ReferenceBlockKernels(activation)
    square = BlockScaling(BlockFormat.FP8, square=True, epsilon=scaling.epsilon, power_of_two=scaling.power_of_two)
    x = seeded((TOKENS, HIDDEN), 0, dtype=torch.bfloat16) * 3
    x[sum(SIZES) :] = float("nan")
    dirty = x.clone()
    dirty[3, 5], dirty[120, 1], dirty[140:150] = float("nan"), float("inf"), 0
    tiny = x * 3e-38  # whose scales are infinite; the interpreter loses numbers that are not normal
    tiny = torch.where(tiny.abs() < torch.finfo(tiny.dtype).tiny, torch.zeros_like(tiny), tiny)
    for source in (x, dirty, tiny):
        rows, saved = blocks.quantize(source, OFFSETS, scaling, columns=blocks.SAVED)
        _, turned = blocks.quantize(source, OFFSETS, scaling, by_row=False, columns=blocks.TURNED)
        by_row, by_column = reference.block_rows(source, OFFSETS, scaling, by_column=True)
        assert rows is not None and saved is not None and turned is not None and by_column is not None
        same_rows(rows, by_row, what)
        same_columns(saved, by_column, what, turned=False)
        same_columns(turned, by_column, what, turned=True)
    _, saved = blocks.quantize(x, OFFSETS, scaling, columns=blocks.SAVED)
    assert saved is not None

    table = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    packed = seeded((EXPERTS, FFN, HIDDEN), 1, dtype=torch.bfloat16)
    weights = blocks.quantize_weights(Experts(packed, table), square, by_column=True)
    expected = reference.block_weights([packed[place] for place in table.tolist()], square, by_column=True)
    for expert in range(EXPERTS):
        same(dense(weights.rows, expert), expected.rows[expert], (what, "weights"))
        same(dense(weights.columns, expert), expected.columns[expert], (what, "weights, the other way round"))
    assert blocks.quantize_weights(Experts(packed, table), square, by_column=False).columns is None

    act_input = seeded((TOKENS, FFN), 4, dtype=torch.bfloat16)
    router = torch.rand(TOKENS, generator=torch.Generator().manual_seed(3))
    after = activation, router
    hidden, _ = blocks.quantize(act_input, OFFSETS, scaling, activation=after)
    _, rebuilt = blocks.quantize(act_input, OFFSETS, scaling, activation=after, by_row=False, columns=blocks.TURNED)
    assert hidden is not None and rebuilt is not None
    if activation.clamp is None:  # torch's tanh is another one
        by_torch, _ = reference.block_rows(
            arithmetic.scaled_srelu(act_input, router), OFFSETS, scaling, by_column=False
        )
        same_rows(hidden, by_torch, (what, "activation"))
        same_columns(rebuilt, reference.rebuild_blocks(act_input, router, OFFSETS, scaling), what, turned=True)

    later = fp8.turn(saved.numbers.view(torch.float8_e4m3fn), OFFSETS)
    _, at_once = blocks.quantize(x, OFFSETS, scaling, by_row=False, columns=blocks.TURNED)
    assert at_once is not None
    place = 0
    for part in PARTS:
        size = part.stop - part.start
        same(
            later.view(torch.uint8)[:, place : place + size],
            at_once.numbers[:, place : place + size],
            (what, "turned"),
        )
        place += -(-size // 128) * 128


def main() -> None:
    replace_in_interpreter()
    for scaling in (
        BlockScaling(BlockFormat.FP8),
        BlockScaling(BlockFormat.FP8, power_of_two=True),
        BlockScaling(BlockFormat.FP8, epsilon=4.0),
    ):
        check(scaling, SquaredReLU(2.0 if scaling.epsilon else None))
    print("the same")


if __name__ == "__main__":
    main()
