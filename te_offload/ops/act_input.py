"""The activation's input in FP8 for the backward: half the bytes, and other gradients.

In: an input in bf16, fp16 or fp32. Out: E4M3 numbers and one scale a row in one allocation, and the input again, rounded.
Keeps true: nothing of the forward changes; scales are powers of two, so that only the rounding to E4M3's three bits of
mantissa loses anything (at most 2**-4 of a number, unless it is less than 2**-13 of its row's largest). Does not: decide
when; it is off unless an op says ``act_input_dtype``.
"""

from __future__ import annotations

import torch

from te_offload.errors import ArgumentError

_TOP = 8  # a row's largest number becomes less than 2**8; E4M3 ends at 448
_ALIGNED = 16  # bytes


def check_dtype(op: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype, if an op can keep its input in it.

    Raises:
        ArgumentError: it cannot.
    """
    if dtype not in (None, torch.float8_e4m3fn):
        raise ArgumentError(
            f"{op}: act_input_dtype must be None (as it came) or torch.float8_e4m3fn, but is {dtype!r}. E4M3 alone has the "
            "mantissa for it."
        )
    return dtype


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers of x's shape, and what to multiply each row with, of x's shape without the last: fp32.

    A row with a number that is not finite becomes NaN as a whole: E4M3 has no infinity, and what a cast makes of one is the
    release's of torch (NaN in 2.11, 448 in 2.15).
    """
    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    begin = -(-rows * columns // _ALIGNED) * _ALIGNED
    packed = torch.empty(begin + 4 * rows, dtype=torch.uint8, device=x.device)
    data = packed[: rows * columns].view(torch.float8_e4m3fn).view(x.shape)
    inverse = packed[begin:].view(torch.float32).view(x.shape[:-1])
    largest = x.detach().abs().amax(-1).float() if x.numel() else inverse.zero_()
    most = 14 if x.dtype is torch.float16 else 120  # of which the dtype has the power of two, and its inverse
    finite = largest.isfinite()
    exponent = torch.where(finite & (largest > 0), torch.frexp(largest)[1] - _TOP, 0).clamp(-most, most)
    inverse.copy_(torch.ldexp(torch.where(finite, 1.0, torch.nan), exponent))
    data.copy_(x.detach() * torch.ldexp(torch.ones_like(largest), -exponent).to(x.dtype).unsqueeze(-1))
    return data, inverse


def dequantize(data: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The input again, in a dtype."""
    return data.to(dtype) * inverse.to(dtype).unsqueeze(-1)
