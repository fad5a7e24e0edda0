"""The FP8 grouped MLP in torch arithmetic: what the CPU computes, and what tests judge kernels by.

In: as in `fp8_interface.Fp8Kernels`, on any device. Out: as there; columns are rows the other way round, without padding.
Keeps true: numbers and scales are those of the kernels; products are of the dequantized numbers, in float32. Does not: keep
the offsets from the host; add up as coarsely as Hopper does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from te_offload.fused.kernels.fp8_interface import QuantizedRows, QuantizedWeights
from te_offload.fused.kernels.interface import Orders, TileCount, TileOrder
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.ops.scaling import Scaling

_MOST = torch.finfo(torch.float32).max


class ReferenceFp8Kernels(ReferenceKernels):
    """See `fp8_interface.Fp8Kernels`."""

    def quantize_weights(
        self, weights: Sequence[torch.Tensor], scaling: Scaling, *, by_column: bool = True
    ) -> QuantizedWeights:
        """See `Fp8Kernels.quantize_weights`."""
        magnitudes = torch.stack([_magnitude(weight) for weight in weights])
        scales = _scales(magnitudes, scaling)
        rows = [to_fp8(weight.float() * scale, scaling.dtype) for weight, scale in zip(weights, scales, strict=True)]
        return QuantizedWeights(rows, [one.t() for one in rows] if by_column else None, 1 / scales, scales=scales)

    def weight_columns(
        self, weights: Sequence[torch.Tensor], quantized: QuantizedWeights, scaling: Scaling
    ) -> QuantizedWeights:
        """See `Fp8Kernels.weight_columns`."""
        assert quantized.scales is not None
        both = zip(weights, quantized.scales, strict=True)
        columns = [to_fp8(weight.float() * scale, scaling.dtype).t() for weight, scale in both]
        return QuantizedWeights(None, columns, quantized.inverses)

    def take_weights(
        self,
        name: str,
        rows: Sequence[torch.Tensor],
        columns: Sequence[torch.Tensor],
        inverses: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedWeights:
        """See `Fp8Kernels.take_weights`."""
        by_row, by_column = ([one.view(dtype) for one in those] for those in (rows, columns))
        return QuantizedWeights(by_row, by_column, inverses)

    def quantize(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        scaling: Scaling,
        *,
        weights: torch.Tensor,
        magnitudes: torch.Tensor | None = None,
        router: torch.Tensor | None = None,
        by_column: bool = False,
    ) -> QuantizedRows:
        """See `Fp8Kernels.quantize`."""
        numbers = x if router is None else self._activate(x, router)
        parts = _parts(numbers, offsets)
        scales = _scales(torch.stack([_magnitude(part) for part in parts]), scaling)
        inverses = 1 / scales
        by_row, factors = (torch.zeros(x.shape[0], device=x.device) for _ in range(2))
        rows = torch.zeros(numbers.shape, dtype=scaling.dtype, device=x.device)
        for expert, part in enumerate(parts):
            place = slice(int(offsets[expert]), int(offsets[expert + 1]))
            by_row[place], factors[place] = scales[expert], inverses[expert] * weights[expert]
            rows[place] = to_fp8(part.float() * scales[expert], scaling.dtype)
        return QuantizedRows(rows, rows.t() if by_column else None, by_row, inverses, factors)

    def quantize_dact(self, *args: Any, **kwargs: Any) -> QuantizedRows:
        """See `Fp8Kernels.quantize_dact`."""
        return self.quantize(*args, **kwargs)

    def turn(self, rows: QuantizedRows, offsets: torch.Tensor) -> QuantizedRows:
        """See `Fp8Kernels.turn`."""
        assert rows.rows is not None
        return rows._replace(rows=None, columns=rows.rows.t())

    def rebuild(
        self,
        act_input: torch.Tensor,
        router: torch.Tensor,
        rows: QuantizedRows,
        offsets: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedRows:
        """See `Fp8Kernels.rebuild`."""
        numbers = to_fp8(self._activate(act_input, router) * rows.scales[:, None], dtype)
        return rows._replace(rows=None, columns=numbers.t())

    def fc1_fp8(
        self,
        x: QuantizedRows,
        weights: QuantizedWeights,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        *,
        fast: bool,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Fp8Kernels.fc1_fp8`."""
        assert x.rows is not None
        act_input = torch.zeros(x.rows.shape[0], weights.rows[0].shape[0], dtype=dtype, device=x.rows.device)
        self.linear_fp8(x, weights.rows, act_input, offsets, bias=bias, fast=fast)
        return act_input, self._activate(act_input, scales).abs().amax(1, keepdim=True).float()

    def fc1_given(
        self,
        x: QuantizedRows,
        weights: QuantizedWeights,
        bias: torch.Tensor | None,
        router: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        scaling: Scaling,
        others: torch.Tensor,
        *,
        stores: bool,
        fast: bool,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor | None, QuantizedRows]:
        """See `Fp8Kernels.fc1_given`."""
        act_input, magnitudes = self.fc1_fp8(x, weights, bias, router, offsets, dtype, fast=fast)
        rows = self.quantize(act_input, offsets, scaling, weights=others, magnitudes=magnitudes, router=router)
        return act_input if stores else None, rows

    def linear_fp8(
        self,
        x: QuantizedRows,
        weights: Sequence[torch.Tensor],
        out: torch.Tensor,
        offsets: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
        fast: bool,
        count: TileCount | None = None,
    ) -> None:
        """See `Fp8Kernels.linear_fp8`."""
        assert x.rows is not None and x.factors is not None
        factors = _parts(x.factors[:, None], offsets)
        for expert, (rows, to) in enumerate(zip(_parts(x.rows, offsets), _parts(out, offsets), strict=True)):
            found = rows.float() @ weights[expert].float().t() * factors[expert]
            if bias is not None:
                one = bias[expert].float().expand_as(found)
                found = found + (one if bias_scales is None else one * _parts(bias_scales[:, None], offsets)[expert])
            to.copy_(found)

    def fc2_dgrad_fp8(
        self,
        dy: QuantizedRows,
        weights: QuantizedWeights,
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        *,
        fast: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Orders]:
        """See `Fp8Kernels.fc2_dgrad_fp8`. The gradient by fc2_input is not rounded in between, as in the kernel."""
        dfc2_input = torch.zeros(act_input.shape[0], weights.columns[0].shape[0], device=act_input.device)
        self.linear_fp8(dy, weights.columns, dfc2_input, offsets, fast=fast)
        dact_input, dscales = self._dactivate(dfc2_input, act_input.float(), scales)
        self.clear(offsets, dscales[:, None])
        found = dact_input.to(act_input.dtype)
        return found, found.abs().amax(1, keepdim=True).float(), dscales, Orders()

    def wgrad_fp8(
        self,
        dy: QuantizedRows,
        x: QuantizedRows,
        offsets: torch.Tensor,
        out: Sequence[torch.Tensor],
        *,
        accumulate: bool,
        fast: bool,
        order: TileOrder | None = None,
        padded: torch.Tensor | None = None,
    ) -> None:
        """See `Fp8Kernels.wgrad_fp8`."""
        assert dy.columns is not None and x.columns is not None
        factors = dy.inverses * x.inverses
        parts = zip(_parts(dy.columns.t(), offsets), _parts(x.columns.t(), offsets), out, strict=True)
        for expert, (one, other, to) in enumerate(parts):
            found = one.float().t() @ other.float() * factors[expert]
            to.copy_(to.float() + found if accumulate else found)

    def padded_offsets(self, offsets: torch.Tensor) -> None:
        """See `Fp8Kernels.padded_offsets`."""


def _parts(rows: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    ends: list[int] = offsets.tolist()
    return [rows[begin:end] for begin, end in itertools.pairwise(ends)]


def _magnitude(numbers: torch.Tensor) -> torch.Tensor:
    """The largest one; NaN is none."""
    found = numbers.detach().float().abs().nan_to_num(0.0, posinf=float("inf"))
    return found.max() if found.numel() else found.new_zeros(())


def _scales(magnitudes: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """See `fp8_device.expert_scales`."""
    if scaling.given is not None and scaling.kept is not None:
        scaling.kept.copy_(torch.maximum(scaling.kept, magnitudes))
        return scaling.given.clone()
    return scales_of(magnitudes, scaling.dtype, scaling.epsilon, power_of_two=scaling.power_of_two)


def scales_of(
    magnitudes: torch.Tensor, dtype: torch.dtype, epsilon: float, *, power_of_two: bool, most: float = _MOST
) -> torch.Tensor:
    """See `fp8_device`. ``most``: the scale where the quotient is infinite."""
    magnitudes = magnitudes.clamp(min=epsilon)
    largest = torch.full_like(magnitudes, torch.finfo(dtype).max)  # torch multiplies a number by a reciprocal
    scales = largest / magnitudes
    scales = torch.where(scales.isinf(), torch.full_like(scales, most), scales)
    scales = torch.where((magnitudes == 0) | magnitudes.isinf(), torch.ones_like(scales), scales)
    if power_of_two:
        scales = (scales.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scales


def to_fp8(numbers: Any, dtype: torch.dtype) -> torch.Tensor:
    """Saturated."""
    most = torch.finfo(dtype).max
    found: torch.Tensor = numbers.detach().float().clamp(-most, most).to(dtype)
    return found
