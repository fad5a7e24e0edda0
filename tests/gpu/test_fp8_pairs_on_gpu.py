"""Quantizers of pairs for FP8 with a scale a tensor, on a GPU: numbers of torch arithmetic, for ragged experts."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_offload.fused.kernels.interface import Gate, Gated
from te_offload.fused.kernels.pairs import to_pairs
from te_offload.fused.kernels.reference import ReferenceKernels
from tests.support.mlp import seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
pytest.importorskip("quack", reason="quack-kernels, which compiles the quantizers, is not installed here")
from te_offload.fused.kernels import fp8  # noqa: E402 (needs triton)
from te_offload.fused.kernels.fp8_glu import PairQuantizers  # noqa: E402 (needs quack)

SIZES = (130, 0, 200, 7)
USED, TOKENS = sum(SIZES), sum(SIZES) + 5
OFFSETS = torch.tensor([0, *itertools.accumulate(SIZES)], dtype=torch.int32)
SCALES = torch.tensor([0.5, 1.0, 40.0, 3e3])  # of each expert; of the last one many numbers are too large
OF_ROWS = torch.cat([SCALES.repeat_interleave(torch.tensor(SIZES)), torch.full((5,), float("nan"))])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
FORMATS = pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["E4M3", "E5M2"])


def inputs(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """With rows of no expert behind the others."""
    x = seeded((TOKENS, columns), 0, dtype=dtype) * 3
    x[USED:] = float("nan")
    return x


def in_fp8(x: torch.Tensor, form: torch.dtype) -> torch.Tensor:
    """Of experts' rows, as Transformer Engine rounds and saturates."""
    most = torch.finfo(form).max
    return (x[:USED].float() * OF_ROWS[:USED, None]).clamp(-most, most).to(form)


def assert_turned(columns: torch.Tensor, rows: torch.Tensor) -> None:
    """Tokens of ``rows`` lie side by side, each expert's from a multiple of 128 on, with zeros between."""
    columns, place = columns.view(torch.uint8).cpu(), 0
    for begin, end in itertools.pairwise(OFFSETS.tolist()):
        assert torch.equal(columns[:, place : place + end - begin].t(), rows[begin:end].view(torch.uint8))
        upto = place + -(-(end - begin) // fp8.BLOCK) * fp8.BLOCK
        assert not columns[:, place + end - begin : upto].any()
        place = upto


@DTYPES
@FORMATS
@pytest.mark.parametrize(
    ("ffn", "interleave"), [(192, 0), (208, 0), (384, 0), (272, 8), (288, 16), (160, 32), (208, 1), (136, 2), (272, 4)]
)
def test_pairs_are_quantized_as_the_halves_that_they_are_of(
    dtype: torch.dtype, form: torch.dtype, ffn: int, interleave: int
) -> None:
    halves = inputs(2 * ffn, dtype)
    pairs = to_pairs(halves, interleave).contiguous().cuda()
    quantizers, expected = PairQuantizers(), in_fp8(halves, form)
    for by_column in (False, True):
        rows, columns = quantizers.halves(pairs, OFFSETS.cuda(), OF_ROWS.cuda(), form, interleave, by_column=by_column)
        assert torch.equal(rows[:USED].view(torch.uint8).cpu(), expected.view(torch.uint8))
        assert (columns is not None) == by_column
        if columns is not None:
            assert_turned(columns, expected)


@DTYPES
@FORMATS
@pytest.mark.parametrize(
    "gated",
    [Gated(Gate.SWIGLU), Gated(Gate.CLAMPED_QGEGLU, (0.75, 1.702, 1.0), 16), Gated(Gate.SITU_GLU, (4.0, 25.0), 32)],
    ids=lambda one: one.gate.value,
)
def test_what_a_gate_makes_of_pairs_is_near_that_of_torch_arithmetic_and_the_same_both_ways(
    dtype: torch.dtype, form: torch.dtype, gated: Gated
) -> None:
    """A number of ``dtype`` may fall on another side: torch's sigmoid and tanh are others."""
    halves, router = inputs(2 * 288, dtype), torch.rand(TOKENS)
    pairs = to_pairs(halves, gated.interleave).contiguous().cuda()
    quantizers, after, given = PairQuantizers(), (gated, router.cuda()), (OFFSETS.cuda(), OF_ROWS.cuda())
    rows = quantizers.activated(pairs, *given, form, after, by_column=False)[:USED].cpu()
    assert_turned(quantizers.activated(pairs, *given, form, after, by_column=True), rows)
    expected = in_fp8(ReferenceKernels(gated)._activate(halves, router), form).float()
    off = (rows.float() - expected).abs()
    step = 2.0 ** -(3 if form is torch.float8_e4m3fn else 2)
    assert (off <= expected.abs() * step + torch.finfo(form).smallest_normal * step).all()
    assert off.count_nonzero() < off.numel() / 100
