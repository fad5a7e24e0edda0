"""Block-scaled formats in torch arithmetic: one tensor in one direction, to numbers with scales and back.

In: matrices, scalings. Out: flat buffers; matrices of float32. Keeps true: FP8 follows Transformer Engine's formula
(common/recipe/recipe_common.cuh), MXFP8 rounds its scale up, as Transformer Engine is known to (not compared with its
kernels, which need another card), NVFP4 is Transformer Engine's own quantizer in torch; what is read back comes from the
buffers alone. Does not: know of experts or products; round stochastically.

With `BlockScaling.hadamard` columns are of ``H @ x``, 16 tokens at a time, H orthogonal: so are both operands of a wgrad,
and it drops out of their product.
"""

from __future__ import annotations

from typing import Protocol

import torch

from te_offload.fused.kernels.reference_fp8 import scales_of, to_fp8
from te_offload.ops import te_adapter
from te_offload.ops.scaling import BlockFormat, BlockScaling

_E4M3 = torch.float8_e4m3fn
_LENGTHS = {BlockFormat.FP8: 128, BlockFormat.MXFP8: 32, BlockFormat.NVFP4: 16}
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Numbers as bytes, scales, and the amax (1,) of NVFP4, each flat."""


class Format(Protocol):
    """One format."""

    def quantize(self, x: torch.Tensor, *, by_column: bool) -> Buffers:
        """A matrix in one direction."""

    def dense(self, buffers: Buffers, shape: tuple[int, int], *, by_column: bool) -> torch.Tensor:
        """The matrix again, in float32."""

    def sizes(self, shape: tuple[int, int], *, by_column: bool) -> tuple[int, int]:
        """How many bytes of numbers and how many scales a matrix takes in one direction."""


def make_format(scaling: BlockScaling) -> Format:
    """Of a scaling."""
    return _Nvfp4(scaling) if scaling.format is BlockFormat.NVFP4 else _Fp8(scaling)


def block_of(scaling: BlockScaling, *, by_column: bool) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    length = _LENGTHS[scaling.format]
    if scaling.square:
        return length, length
    return (length, 1) if by_column else (1, length)


class _Fp8:
    """FP8 by blocks, and MXFP8."""

    def __init__(self, scaling: BlockScaling) -> None:
        self._scaling = scaling

    def quantize(self, x: torch.Tensor, *, by_column: bool) -> Buffers:
        """See `Format.quantize`. Numbers lie as the matrix does."""
        block = block_of(self._scaling, by_column=by_column)
        amax = _amax(x, block)
        if self._scaling.format is BlockFormat.MXFP8:
            stored = _e8m0(amax * (1 / torch.finfo(_E4M3).max))
            inverses = _of_e8m0(stored)
            scales = 1 / inverses
        else:
            epsilon, power_of_two = self._scaling.epsilon, self._scaling.power_of_two
            most = torch.finfo(x.dtype).max
            scales = scales_of(amax, _E4M3, epsilon, power_of_two=power_of_two, most=most)
            stored = 1 / scales
        numbers = to_fp8(x.float() * _spread(scales, block, x.shape), _E4M3)
        return numbers.view(torch.uint8).flatten(), stored.flatten(), None

    def dense(self, buffers: Buffers, shape: tuple[int, int], *, by_column: bool) -> torch.Tensor:
        """See `Format.dense`."""
        block = block_of(self._scaling, by_column=by_column)
        numbers, stored, _ = buffers
        inverses = stored.view(_blocks(shape, block))
        if self._scaling.format is BlockFormat.MXFP8:
            inverses = _of_e8m0(inverses)
        return numbers.view(_E4M3).view(shape).float() * _spread(inverses, block, shape)

    def sizes(self, shape: tuple[int, int], *, by_column: bool) -> tuple[int, int]:
        """See `Format.sizes`."""
        rows, columns = _blocks(shape, block_of(self._scaling, by_column=by_column))
        return shape[0] * shape[1], rows * columns


class _Nvfp4:
    """NVFP4. By column, bytes lie as those of the transpose do, whose rows are tokens of a multiple of 16. Square blocks
    have their scale in each row, as in Transformer Engine.
    """

    def __init__(self, scaling: BlockScaling) -> None:
        self._scaling = scaling

    def quantize(self, x: torch.Tensor, *, by_column: bool) -> Buffers:
        """See `Format.quantize`."""
        if by_column:
            x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % _LENGTHS[BlockFormat.NVFP4]))
        numbers, scales, amax = te_adapter.nvfp4_reference(self._scaling, by_column=by_column)(x.float())
        return numbers.flatten(), scales.contiguous().view(torch.uint8).flatten(), amax

    def dense(self, buffers: Buffers, shape: tuple[int, int], *, by_column: bool) -> torch.Tensor:
        """See `Format.dense`. With a Hadamard transform by column: of the transformed matrix, in whole groups."""
        numbers, scales, amax = buffers
        assert amax is not None
        rows, columns = _turned(shape) if by_column else shape
        inverses = scales.view(_E4M3).view(rows, columns // 16).float() * (amax / (6 * 448))
        found = te_adapter.nvfp4_numbers(numbers.view(rows, columns // 2)) * inverses.repeat_interleave(16, 1)
        return found.t() if by_column else found

    def sizes(self, shape: tuple[int, int], *, by_column: bool) -> tuple[int, int]:
        """See `Format.sizes`."""
        rows, columns = _turned(shape) if by_column else shape
        return rows * columns // 2, rows * columns // 16


def _turned(shape: tuple[int, int]) -> tuple[int, int]:
    return shape[1], -(-shape[0] // 16) * 16


def _blocks(shape: tuple[int, int] | torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block; NaN is none."""
    rows, columns = _blocks(x.shape, block)
    padded = torch.zeros(rows * block[0], columns * block[1], device=x.device)
    padded[: x.shape[0], : x.shape[1]] = x.detach().float().abs().nan_to_num(0.0, posinf=float("inf"))
    found: torch.Tensor = padded.view(rows, block[0], columns, block[1]).amax((1, 3))
    return found


def _spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int] | torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _e8m0(numbers: torch.Tensor) -> torch.Tensor:
    """The exponent of each positive number with a bias of 127, rounded up; zero has the least one."""
    bits = numbers.float().contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return torch.where(numbers.isinf(), torch.full_like(bits, 0xFE), exponent + up.int()).to(torch.uint8)


def _of_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)
