"""Runs the kernels of `block_device` on the CPU, by Triton's interpreter: ``python -m tests.support.interpret_blocks``.

Exits with 0 if numbers and scales are those of `ReferenceBlockKernels`, and products near them.
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
from te_offload.ops.scaling import BlockFormat, BlockScaling
from tests.support.interpret_fp8 import replace_in_interpreter, same
from tests.support.mlp import seeded

SIZES = (130, 0, 200, 7)
EXPERTS, TOKENS, HIDDEN, FFN = len(SIZES), sum(SIZES) + 5, 144, 272
OFFSETS = torch.tensor([0, *itertools.accumulate(SIZES)], dtype=torch.int32)
PARTS = [slice(begin, end) for begin, end in itertools.pairwise(OFFSETS.tolist())]


def near(found: torch.Tensor, expected: torch.Tensor, what: object, most: float = 5e-3) -> None:
    assert found.dtype == expected.dtype, what
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error <= most, (what, float(error))


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
    rows, saved = blocks.quantize(x, OFFSETS, scaling, columns=blocks.SAVED)
    by_row, by_column = reference.block_rows(x, OFFSETS, scaling, by_column=True)
    assert rows is not None and saved is not None and by_column is not None

    table = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    packed1 = seeded((EXPERTS, FFN, HIDDEN), 1, dtype=torch.bfloat16)
    packed2 = seeded((EXPERTS, HIDDEN, FFN), 2, dtype=torch.bfloat16)
    weights1 = blocks.quantize_weights(Experts(packed1, table), square, by_column=True)
    weights2 = blocks.quantize_weights(Experts(packed2, table), square, by_column=True)
    dense1 = reference.block_weights([packed1[place] for place in table.tolist()], square, by_column=True)
    dense2 = reference.block_weights([packed2[place] for place in table.tolist()], square, by_column=True)
    assert blocks.quantize_weights(Experts(packed1, table), square, by_column=False).columns is None

    router = torch.rand(TOKENS, generator=torch.Generator().manual_seed(3))
    bias1, bias2 = seeded((EXPERTS, FFN), 4, dtype=torch.bfloat16), seeded((EXPERTS, HIDDEN), 5, dtype=torch.bfloat16)
    end = sum(SIZES)
    for bias in (None, bias1):
        act_input, hidden = blocks.fc1(rows, weights1.rows, bias, router, OFFSETS, x.dtype, scaling, activation)
        expected, _ = reference.fc1_blocks(by_row, dense1, bias, router, (OFFSETS, OFFSETS), x.dtype, scaling)
        near(act_input[:end], expected[:end], (what, "act_input"))
        again, _ = blocks.quantize(act_input, OFFSETS, scaling, activation=(activation, router))
        assert again is not None
        same(hidden.numbers[:end], again.numbers[:end], (what, "FC2's input of the epilogue"))
        same(hidden.scales[:, :end], again.scales[:, :end], (what, "FC2's input of the epilogue"))
    if activation.clamp is None:  # torch's tanh is another one
        by_torch = reference.rebuild_blocks(act_input, router, OFFSETS, scaling)
        _, rebuilt = blocks.quantize(
            act_input, OFFSETS, scaling, activation=(activation, router), by_row=False, columns=blocks.TURNED
        )
        assert rebuilt is not None
        same_columns(rebuilt, by_torch, what, turned=True)

    hidden_rows, _ = reference.block_rows(act_input, OFFSETS, scaling, by_column=False)
    found_rows, _ = blocks.quantize(act_input, OFFSETS, scaling)
    assert found_rows is not None
    for bias, factors in ((None, None), (bias2, None), (bias2, router)):
        out, expected = torch.full((2, TOKENS, HIDDEN), 7.0, dtype=x.dtype).unbind(0)
        blocks.linear(found_rows, weights2.rows, out, OFFSETS, bias=bias, bias_scales=factors)
        reference.linear_blocks(hidden_rows, dense2.rows, expected, OFFSETS, bias=bias, bias_scales=factors)
        near(out, expected, (what, "FC2"))
        assert (out[end:] == 7).all()
    dact_input, parts = blocks.fc2_dgrad(rows, weights2.columns, act_input, router, OFFSETS, activation)
    expected, dscales = reference.fc2_dgrad_blocks(by_row, dense2, act_input, router, OFFSETS)
    near(dact_input[:end], expected[:end], (what, "dgrad of FC2"))
    near(parts.sum(1)[:end], dscales[:end], (what, "router's gradient"))

    dy = seeded((TOKENS, FFN), 6, dtype=torch.bfloat16)
    _, dy_columns = blocks.quantize(dy, OFFSETS, scaling, by_row=False, columns=blocks.TURNED)
    _, dy_expected = reference.block_rows(dy, OFFSETS, scaling, by_column=True)
    turned = BlockNumbers(
        saved.shape, scaling, fp8.turn(saved.numbers.view(torch.float8_e4m3fn), OFFSETS), saved.scales
    )
    assert dy_columns is not None and dy_expected is not None
    for accumulate, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        grads, expected = torch.ones(2, EXPERTS, FFN, HIDDEN, dtype=dtype).unbind(0)
        blocks.wgrad(dy_columns, turned, OFFSETS, Experts(grads, table), accumulate=accumulate)
        by_expert = [expected[place] for place in table.tolist()]
        reference.wgrad_blocks(dy_expected, by_column, OFFSETS, by_expert, accumulate=accumulate)
        near(grads, expected, (what, "wgrad", accumulate, dtype))
        assert (grads[int(table[1])] == int(accumulate)).all()  # the expert without tokens


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
