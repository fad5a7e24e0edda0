"""Numbers and scales of block-scaled formats in torch arithmetic, by hand."""

from __future__ import annotations

import pytest
import torch

from te_offload.fused.kernels.reference_formats import make_format
from te_offload.ops.scaling import BlockFormat, BlockScaling
from tests.support.mlp import seeded

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("largest", "exponent"), [(448.0, 127), (450.0, 128), (224.0, 126), (224.5, 127), (0.0, 0), (float("inf"), 254)]
)
def test_mxfp8_takes_the_power_of_two_with_which_the_largest_number_fits(largest: float, exponent: int) -> None:
    """The exponent of amax / 448 with a bias of 127, rounded up; NaN is no magnitude."""
    x = torch.zeros(1, 64)
    x[0, 3], x[0, 40] = -largest, float("nan")
    numbers, scales, amax = make_format(BlockScaling(BlockFormat.MXFP8)).quantize(x, by_column=False)
    assert amax is None
    assert scales.tolist() == [exponent, 0]
    if 0 < exponent < 254:
        expected = torch.tensor(-largest / 2.0 ** (exponent - 127)).to(E4M3)
        assert numbers.view(E4M3)[3].float() == expected.float()


@pytest.mark.parametrize(("power_of_two", "scale"), [(False, 448 / 3), (True, 128.0)])
def test_fp8_by_blocks_scales_128_numbers_of_a_row_or_a_column(power_of_two: bool, scale: float) -> None:
    scaling = BlockScaling(BlockFormat.FP8, power_of_two=power_of_two)
    x = torch.zeros(130, 130)
    x[129, 5] = -3.0
    for by_column, shape, place in ((False, (130, 2), (129, 0)), (True, (2, 130), (1, 5))):
        numbers, inverses, _ = make_format(scaling).quantize(x, by_column=by_column)
        inverses = inverses.view(shape)
        assert inverses[place] == torch.ones(()) / torch.tensor(scale)
        inverses[place] = 1.0
        assert (inverses == 1).all()  # of zeros
        found = numbers.view(E4M3).view(130, 130)[129, 5].float()
        assert found == torch.tensor(-3 * scale).to(E4M3).float()


def test_squares_have_the_same_numbers_both_ways() -> None:
    x = seeded((256, 128), 0)
    for form in (BlockFormat.FP8, BlockFormat.NVFP4):
        made = make_format(BlockScaling(form, square=True))
        one, other = (made.dense(made.quantize(x, by_column=way), (256, 128), by_column=way) for way in (False, True))
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [64, 70])
def test_a_hadamard_transform_of_both_columns_drops_out_of_their_product(rows: int) -> None:
    """And of one alone it does not."""
    x, y = seeded((rows, 96), 0), seeded((rows, 32), 1)
    exact = x.t() @ y
    found = {}
    for first in (False, True):
        one, other = (make_format(BlockScaling(BlockFormat.NVFP4, hadamard=one)) for one in (first, True))
        product = one.dense(one.quantize(x, by_column=True), (rows, 96), by_column=True).t() @ other.dense(
            other.quantize(y, by_column=True), (rows, 32), by_column=True
        )
        found[first] = float((product - exact).norm() / exact.norm())
    assert found[True] < 0.2 and found[False] > 1


@pytest.mark.parametrize("form", BlockFormat)
@pytest.mark.parametrize("by_column", [False, True])
def test_buffers_have_the_sizes_that_are_said(form: BlockFormat, by_column: bool) -> None:
    shape = 70, 96
    made = make_format(BlockScaling(form))
    numbers, scales, _ = made.quantize(seeded(shape, 0), by_column=by_column)
    assert (numbers.numel(), scales.numel()) == made.sizes(shape, by_column=by_column)
    assert numbers.dtype is torch.uint8
    assert made.dense((numbers, scales, torch.ones(1)), shape, by_column=by_column).shape[1] == 96
