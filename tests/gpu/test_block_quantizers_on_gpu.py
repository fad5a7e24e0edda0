"""Quantizers of FP8 by blocks on a GPU: numbers and scales of torch arithmetic, for ragged experts."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_offload.fused.kernels.block_interface import BlockNumbers
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.interface import Gate, Gated, SquaredReLU
from te_offload.fused.kernels.pairs import to_halves, to_pairs
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.ops import arithmetic
from te_offload.ops.scaling import BlockFormat, BlockScaling
from tests.support.mlp import seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
pytest.importorskip("quack", reason="quack-kernels, which compiles the quantizers, is not installed here")
from te_offload.fused.kernels import blocks, fp8  # noqa: E402 (needs quack)

SIZES = (130, 0, 200, 7)
EXPERTS, TOKENS, HIDDEN, FFN = len(SIZES), sum(SIZES) + 5, 144, 272
MANY_SIZES = {count: tuple(expert % 3 * 70 for expert in range(count)) for count in (70, 300, 601)}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SCALINGS = pytest.mark.parametrize(
    "scaling",
    [BlockScaling(BlockFormat.FP8, power_of_two=power, epsilon=epsilon) for power, epsilon in ((True, 0), (False, 4))],
    ids=["powers of two", "any scales, at least an epsilon"],
)


def offsets_of(sizes: tuple[int, ...] = SIZES) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)


def parts_of(sizes: tuple[int, ...]) -> list[slice]:
    return [slice(begin, end) for begin, end in itertools.pairwise(offsets_of(sizes).tolist())]


def inputs(dtype: torch.dtype, sizes: tuple[int, ...] = SIZES, columns: int = HIDDEN) -> torch.Tensor:
    """With numbers that are none, infinite and zero, and rows of no expert behind the others."""
    x = seeded((sum(sizes) + 5, columns), 0, dtype=dtype) * 3
    x[3, 5], x[120, 1], x[140:150] = float("nan"), float("inf"), 0
    x[sum(sizes) :] = float("nan")
    return x


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    found = found.cpu().contiguous()
    assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


def assert_same_rows(found: BlockNumbers | None, expected: BlockNumbers, sizes: tuple[int, ...] = SIZES) -> None:
    """``expected``: experts one behind the other."""
    assert found is not None
    numbers, scales = expected.numbers, expected.scales
    parts = -(-found.shape[1] // 128)
    for part in parts_of(sizes):
        size = part.stop - part.start
        ours, numbers = numbers[: size * found.shape[1]], numbers[size * found.shape[1] :]
        its, scales = scales[: size * parts], scales[size * parts :]
        assert_same(found.numbers[part].flatten(), ours)
        assert_same(found.scales[:, part].flatten(), its.view(size, parts).t().flatten())


def assert_same_columns(
    found: BlockNumbers | None, expected: BlockNumbers | None, *, turned: bool, sizes: tuple[int, ...] = SIZES
) -> None:
    assert found is not None and expected is not None
    numbers, scales = expected.numbers, expected.scales
    columns, block = found.shape[1], 0
    for part in parts_of(sizes):
        size = part.stop - part.start
        count = -(-size // 128)
        ours, numbers = numbers[: size * columns].view(size, columns), numbers[size * columns :]
        its, scales = scales[: count * columns], scales[count * columns :]
        place = block * 128
        assert_same(found.numbers[:, place : place + size].t() if turned else found.numbers[part], ours)
        if turned:
            assert not found.numbers[:, place + size : place + count * 128].any()
        assert_same(found.scales[block : block + count], its.view(count, columns))
        block += count


@DTYPES
@SCALINGS
def test_rows_and_columns_are_those_of_torch_arithmetic(dtype: torch.dtype, scaling: BlockScaling) -> None:
    x, offsets = inputs(dtype), offsets_of()
    by_row, by_column = ReferenceBlockKernels(SquaredReLU()).block_rows(x, offsets, scaling, by_column=True)
    quantizers = blocks.Quantizers()
    rows, saved = quantizers.rows(x.cuda(), offsets.cuda(), scaling, columns=blocks.SAVED)
    alone, turned = quantizers.rows(x.cuda(), offsets.cuda(), scaling, by_row=False, columns=blocks.TURNED)
    assert alone is None
    assert_same_rows(rows, by_row)
    assert_same_columns(saved, by_column, turned=False)
    assert_same_columns(turned, by_column, turned=True)


@pytest.mark.parametrize("sizes", list(MANY_SIZES.values()), ids=list(map(str, MANY_SIZES)))
def test_rows_of_more_experts_than_lanes_or_threads_are_found(sizes: tuple[int, ...]) -> None:
    x, offsets, scaling = inputs(torch.bfloat16, sizes), offsets_of(sizes), BlockScaling(BlockFormat.FP8)
    by_row, by_column = ReferenceBlockKernels(SquaredReLU()).block_rows(x, offsets, scaling, by_column=True)
    rows, turned = blocks.Quantizers().rows(x.cuda(), offsets.cuda(), scaling, columns=blocks.TURNED)
    assert_same_rows(rows, by_row, sizes)
    assert_same_columns(turned, by_column, turned=True, sizes=sizes)


def test_rows_that_begin_at_any_address_are_read() -> None:
    x, offsets, scaling = inputs(torch.bfloat16), offsets_of(), BlockScaling(BlockFormat.FP8)
    place = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    assert place.data_ptr() % 16
    rows, _ = blocks.Quantizers().rows(place, offsets.cuda(), scaling)
    assert_same_rows(rows, ReferenceBlockKernels(SquaredReLU()).block_rows(x, offsets, scaling, by_column=False)[0])


@DTYPES
def test_what_the_activation_makes_is_that_of_torch_arithmetic(dtype: torch.dtype) -> None:
    reference, scaling, offsets = ReferenceBlockKernels(SquaredReLU()), BlockScaling(BlockFormat.FP8), offsets_of()
    act_input, router = seeded((TOKENS, FFN), 4, dtype=dtype), torch.rand(TOKENS)
    after = SquaredReLU(), router.cuda()
    quantizers = blocks.Quantizers()
    rows, _ = quantizers.rows(act_input.cuda(), offsets.cuda(), scaling, activation=after)
    _, columns = quantizers.rows(
        act_input.cuda(), offsets.cuda(), scaling, activation=after, by_row=False, columns=blocks.TURNED
    )
    dense = arithmetic.scaled_srelu(act_input, router)
    assert_same_rows(rows, reference.block_rows(dense, offsets, scaling, by_column=False)[0])
    assert_same_columns(columns, reference.rebuild_blocks(act_input, router, offsets, scaling), turned=True)


@DTYPES
@pytest.mark.parametrize(
    ("ffn", "interleave"), [(192, 0), (256, 0), (272, 8), (288, 16), (160, 32), (208, 1), (136, 2), (272, 4)]
)
def test_pairs_are_quantized_as_the_halves_that_they_are_of(dtype: torch.dtype, ffn: int, interleave: int) -> None:
    pairs, offsets, scaling = inputs(dtype, columns=2 * ffn), offsets_of(), BlockScaling(BlockFormat.FP8)
    halves = to_halves(pairs, interleave)
    by_row, by_column = ReferenceBlockKernels(SquaredReLU()).block_rows(halves, offsets, scaling, by_column=True)
    rows, turned = blocks.Quantizers().rows(
        pairs.cuda(), offsets.cuda(), scaling, pairs=interleave, columns=blocks.TURNED
    )
    assert_same_rows(rows, by_row)
    assert_same_columns(turned, by_column, turned=True)


@DTYPES
@pytest.mark.parametrize(
    "gated",
    [Gated(Gate.SWIGLU), Gated(Gate.CLAMPED_QGEGLU, (0.75, 1.702, 1.0), 16), Gated(Gate.SITU_GLU, (4.0, 25.0), 32)],
    ids=lambda one: one.gate.value,
)
def test_what_a_gate_makes_of_pairs_is_near_that_of_torch_arithmetic_and_alike_both_ways(
    dtype: torch.dtype, gated: Gated
) -> None:
    """Numbers of 8 bits within one step, and scales that are no powers of two within a rounding of ``dtype``."""
    scaling, offsets = BlockScaling(BlockFormat.FP8, power_of_two=False), offsets_of()
    ffn = FFN + 16  # a multiple of 32
    halves, router = seeded((TOKENS, 2 * ffn), 4, dtype=dtype), torch.rand(TOKENS)
    after, pairs = (gated, router.cuda()), to_pairs(halves, gated.interleave).contiguous().cuda()
    quantizers = blocks.Quantizers()
    rows, _ = quantizers.rows(pairs, offsets.cuda(), scaling, activation=after)
    _, columns = quantizers.rows(pairs, offsets.cuda(), scaling, activation=after, by_row=False, columns=blocks.TURNED)
    assert rows is not None and columns is not None
    dense = ReferenceBlockKernels(gated)._activate(halves, router)
    used, off = sum(SIZES), torch.finfo(dtype).eps
    scales = rows.scales[:, :used].cpu()
    for index in range(scales.shape[0]):
        upto = slice(128 * index, min(128 * index + 128, ffn))
        most = dense[:used, upto].float().abs().amax(1) / 448
        torch.testing.assert_close(scales[index], most, rtol=2 * off, atol=0)
        found = rows.numbers[:used, upto].cpu().view(torch.float8_e4m3fn).float() * scales[index, :, None]
        torch.testing.assert_close(found, dense[:used, upto].float(), rtol=2**-3, atol=float(most.max()) * 2**-9)
    block = 0
    for part in parts_of(SIZES):
        count = part.stop - part.start
        for begin in range(0, count, 128):
            size = min(128, count - begin)
            its = slice(part.start + begin, part.start + begin + size)
            numbers = columns.numbers[:, 128 * block : 128 * block + size].cpu().view(torch.float8_e4m3fn).float().t()
            found = numbers * columns.scales[block].cpu()
            most = dense[its].float().abs().amax(0) / 448
            torch.testing.assert_close(columns.scales[block].cpu(), most, rtol=2 * off, atol=0)
            torch.testing.assert_close(found, dense[its].float(), rtol=2**-3, atol=float(most.max()) * 2**-9)
            block += 1


@DTYPES
@SCALINGS
def test_weights_are_those_of_torch_arithmetic(dtype: torch.dtype, scaling: BlockScaling) -> None:
    table = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    packed = seeded((EXPERTS, FFN, HIDDEN), 1, dtype=dtype)
    square = BlockScaling(BlockFormat.FP8, square=True, epsilon=scaling.epsilon, power_of_two=scaling.power_of_two)
    of_each = [packed[place] for place in table.tolist()]
    expected = ReferenceBlockKernels(SquaredReLU()).block_weights(of_each, square, by_column=True)
    quantizers = blocks.Quantizers()
    found = quantizers.weights(Experts(packed.cuda(), table.cuda()), square, by_column=True)
    for ours, its in ((found.rows, expected.rows), (found.columns, expected.columns)):
        for expert in range(EXPERTS):
            numbers = ours.numbers.view[expert].view(torch.float8_e4m3fn).float()
            scales = ours.inverses.view[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert_same(numbers * scales[: numbers.shape[0], : numbers.shape[1]], its[expert])
    alone = quantizers.weights(Experts(packed.cuda(), table.cuda()), square, by_column=False)
    assert alone.columns is None
    assert_same(alone.rows.numbers.view, found.rows.numbers.view.cpu())


def test_saved_columns_are_turned_as_they_are_quantized_at_once() -> None:
    x, offsets, scaling = inputs(torch.bfloat16).cuda(), offsets_of().cuda(), BlockScaling(BlockFormat.FP8)
    quantizers = blocks.Quantizers()
    _, saved = quantizers.rows(x, offsets, scaling, columns=blocks.SAVED)
    _, at_once = quantizers.rows(x, offsets, scaling, by_row=False, columns=blocks.TURNED)
    assert saved is not None and at_once is not None
    later = fp8.turn(saved.numbers.view(torch.float8_e4m3fn), offsets)
    place = 0
    for size in SIZES:
        upto = slice(place, place + size)
        assert_same(later.view(torch.uint8)[:, upto], at_once.numbers[:, upto].cpu())
        place += -(-size // 128) * 128
