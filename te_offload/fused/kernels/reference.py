"""The fused grouped MLP in torch arithmetic: what the CPU computes, and what tests judge kernels by.

In: as in `interface.Kernels`, on any device. Out: as there. Keeps true: each intermediate result is rounded where the
kernels round it. Does not: keep the offsets from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_offload.fused.kernels.interface import (
    Activation,
    Counts,
    Gate,
    Gated,
    Orders,
    Tensors,
    TileCount,
    TileOrder,
)
from te_offload.ops import arithmetic


class ReferenceKernels:
    """See `interface.Kernels`.

    Args:
        activation: between FC1 and FC2.
    """

    def __init__(self, activation: Activation) -> None:
        self._activation = activation

    def prepare(self, name: str, tensors: Tensors, *, written: bool = False) -> Sequence[torch.Tensor]:
        """See `Kernels.prepare`."""
        return list(tensors.unbind(0)) if isinstance(tensors, torch.Tensor) else tensors

    def offsets(self, split_sizes: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, Counts]:
        """See `Kernels.offsets`."""
        ends = split_sizes.cumsum(0).clamp(max=out.shape[0])
        offsets = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        self.clear(offsets, out)
        return offsets, Counts()

    def clear(self, offsets: torch.Tensor, out: torch.Tensor) -> None:
        """See `Kernels.clear`."""
        out[int(offsets[-1]) :].zero_()

    def fc1(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.fc1`."""
        act_input = self.fc1_linear(x, weights, bias, offsets)
        return act_input, self._activate(act_input, scales)

    def fc1_activated(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> torch.Tensor:
        """See `Kernels.fc1_activated`."""
        return self._activate(self.fc1_linear(x, weights, bias, offsets), scales)

    def fc1_linear(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> torch.Tensor:
        """See `Kernels.fc1_linear`."""
        act_input = x.new_empty(x.shape[0], weights[0].shape[0])
        self.fc2(x, weights, bias, None, offsets, act_input)
        return act_input

    def fc2(
        self,
        fc2_input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        bias_scales: torch.Tensor | None,
        offsets: torch.Tensor,
        out: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """See `Kernels.fc2`."""
        biases = None if bias is None else list(bias.unbind(0))
        scales = None if bias_scales is None else _rows(bias_scales, offsets)
        arithmetic.grouped_forward(_rows(fc2_input, offsets), weights, biases, scales, _used(out, offsets))

    def fc2_dgrad(
        self,
        dy: torch.Tensor,
        weights: Sequence[torch.Tensor],
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Orders]:
        """See `Kernels.fc2_dgrad`. The gradient by fc2_input is not rounded in between, as in the kernel."""
        wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
        dfc2_input = torch.empty(dy.shape[0], weights[0].shape[1], dtype=wide, device=dy.device)
        dys = [rows.to(wide) for rows in _rows(dy, offsets)]
        arithmetic.grouped_dgrad(dys, [weight.to(wide) for weight in weights], _used(dfc2_input, offsets))
        self.clear(offsets, dfc2_input)
        dact_input, dscales = self._dactivate(dfc2_input, act_input.to(wide), scales.to(wide))
        self.clear(offsets, dscales[:, None])
        return dact_input.to(dy.dtype), self._activate(act_input, scales), dscales, Orders()

    def _dactivate(
        self, grad: torch.Tensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients by the activation's input and by the router's scales."""
        of = self._activation
        if isinstance(of, Gated):
            dx, dscales = arithmetic.scaled_dglu(grad, x, scales, _gate(of), of.interleave, need_scales=True)
        elif of.clamp is None:
            dx, dscales = arithmetic.scaled_dsrelu(grad, x, scales, need_scales=True)
        else:
            dx, dscales = arithmetic.scaled_dtanh_srelu(grad, x, scales, of.clamp, need_scales=True)
        assert dscales is not None
        return dx, dscales

    def _activate(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        of = self._activation
        if isinstance(of, Gated):
            return arithmetic.scaled_glu(x, scales, _gate(of), of.interleave)
        if of.clamp is None:
            return arithmetic.scaled_srelu(x, scales)
        return arithmetic.scaled_tanh_srelu(x, scales, of.clamp)

    def fc1_dgrad(
        self,
        dact_input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        offsets: torch.Tensor,
        out: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """See `Kernels.fc1_dgrad`."""
        arithmetic.grouped_dgrad(_rows(dact_input, offsets), weights, _used(out, offsets))
        self.clear(offsets, out)

    def wgrad(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        offsets: torch.Tensor,
        out: Sequence[torch.Tensor],
        *,
        accumulate: bool,
        order: TileOrder | None = None,
    ) -> None:
        """See `Kernels.wgrad`."""
        arithmetic.grouped_wgrad(_rows(x, offsets), _rows(dy, offsets), list(out), accumulate=accumulate)

    def fc1_wgrad(self, *args: Any, **kwargs: Any) -> None:
        """See `Kernels.fc1_wgrad`."""
        self.wgrad(*args, **kwargs)

    def fc1_backward(
        self,
        dact_input: torch.Tensor,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        offsets: torch.Tensor,
        dx: torch.Tensor,
        dweights: Sequence[torch.Tensor],
        *,
        accumulate: bool,
        order: TileOrder | None = None,
        count: TileCount | None = None,
    ) -> None:
        """See `Kernels.fc1_backward`."""
        self.fc1_dgrad(dact_input, weights, offsets, dx)
        self.fc1_wgrad(dact_input, x, offsets, dweights, accumulate=accumulate)

    def bias_grads(
        self,
        dy: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Kernels.bias_grads`."""
        scales = None if bias_scales is None else _rows(bias_scales, offsets)
        biases = None if bias is None else list(bias.unbind(0))
        grads, dscales = arithmetic.grouped_bias_grads(_rows(dy, offsets), biases, scales)
        if dscales is not None:
            beyond = dy.shape[0] - dscales.shape[0]
            dscales = torch.cat([dscales, dscales.new_zeros(beyond)])
        return torch.stack(grads), dscales

    def fc1_bias_grads(self, dact_input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `Kernels.fc1_bias_grads`."""
        return self.bias_grads(dact_input, offsets)[0]


def _gate(of: Gated) -> arithmetic.Gate:
    if of.gate is Gate.SWIGLU:
        return arithmetic.swiglu_gate
    if of.gate is Gate.CLAMPED_QGEGLU:
        return arithmetic.clamped_qgeglu_gate(*of.numbers)
    return arithmetic.situ_glu_gate(*of.numbers)


def _used(tensor: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The experts' rows."""
    return tensor[: int(offsets[-1])]


def _rows(tensor: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sizes: list[int] = offsets.diff().tolist()
    rows: tuple[torch.Tensor, ...] = _used(tensor, offsets).split(sizes)
    return rows
