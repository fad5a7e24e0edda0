"""The arithmetic of grouped linear layers and scaled activations in plain torch: what the ops compute on the CPU.

In: dense tensors of any floating dtype on any device. Out: new tensors, or gradients accumulated into given ones.
Keeps true: formulas and gradients are those of Transformer Engine 2.20 (sources named at each); the activations, and
on a CPU sums of products, are computed in float32 (float64 for float64 inputs) and rounded once, as its kernels do.
Does not: quantize, or save.

Shapes: T tokens, N experts, H inputs, F outputs. GLU inputs have 2F columns: the first half is gated, the second is
the linear part, unless ``interleave`` says that blocks of that many columns alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Pair = tuple[torch.Tensor, torch.Tensor | None]


def grouped_forward(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    scales: Sequence[torch.Tensor] | None,
    out: torch.Tensor,
) -> None:
    """``out_i = x_i @ w_i.T + bias_i * scale_i``, expert by expert.

    Args:
        xs: N tensors (T_i, H). weights: N tensors (F, H). biases: N tensors (F,) or None.
        scales: N tensors (T_i,) that multiply the bias, or None for 1.
        out: (T, F), written.
    """
    for index, (x, y) in enumerate(zip(xs, out.split([x.shape[0] for x in xs]), strict=True)):
        y.copy_(_product(x, weights[index].t()))
        if biases is not None:
            bias = biases[index].unsqueeze(0)
            y.add_(bias if scales is None else bias * scales[index].to(bias.dtype).unsqueeze(-1))


def grouped_dgrad(dys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out_i = dy_i @ w_i``: the input's gradient (T, H), written to ``out``."""
    for dy, weight, dx in zip(dys, weights, out.split([dy.shape[0] for dy in dys]), strict=True):
        dx.copy_(_product(dy, weight))


@torch.no_grad()
def grouped_wgrad(
    xs: Sequence[torch.Tensor], dys: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *, accumulate: bool
) -> None:
    """``grad_i (+)= dy_i.T @ x_i``: the weights' gradients (F, H), written or added to ``grads``."""
    for x, dy, grad in zip(xs, dys, grads, strict=True):
        product = _product(dy.t(), x)
        if accumulate:
            grad.add_(product)
        else:
            grad.copy_(product)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``; on a CPU in float32 at least: torch's own products of half precision can take a hundred times as long."""
    return a @ b if a.is_cuda else _wide(a) @ _wide(b)


def grouped_bias_grads(
    dys: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None, scales: Sequence[torch.Tensor] | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Gradients of the biases, N tensors (F,), and of the scales, (T,), where there are any, which takes biases."""
    bias_grads: list[torch.Tensor] = []
    scale_grads: list[torch.Tensor] = []
    for index, dy in enumerate(dys):
        wide = _wide(dy)
        if scales is None or biases is None:
            bias_grads.append(wide.sum(0).to(dy.dtype))
        else:
            bias_grads.append((wide * _wide(scales[index]).unsqueeze(-1)).sum(0).to(dy.dtype))
            scale_grads.append((wide * _wide(biases[index])).sum(-1))
    return bias_grads, torch.cat(scale_grads) if scales is not None else None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


# Unary activations: y = act(x) * scale, with scale of shape (T,)


def scaled_srelu(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``relu(x)^2 * scale``; `ScaledSReLU` of Transformer Engine."""
    return (torch.relu(_wide(x)).square() * _wide(scales).unsqueeze(-1)).to(x.dtype)


def scaled_dsrelu(dy: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, *, need_scales: bool) -> Pair:
    """Gradients of `scaled_srelu` by input and by scale."""
    relu, grad = torch.relu(_wide(x)), _wide(dy)
    dscales = (relu.square() * grad).sum(-1).to(scales.dtype) if need_scales else None
    return (grad * _wide(scales).unsqueeze(-1) * 2 * relu).to(x.dtype), dscales


def scaled_tanh_srelu(x: torch.Tensor, scales: torch.Tensor, clamp: float) -> torch.Tensor:
    """``(s * tanh(relu(x) / s))^2 * scale`` with ``s = clamp``; `ScaledTanhSReLU` of Transformer Engine."""
    soft = clamp * torch.tanh(torch.relu(_wide(x)) / clamp)
    return (soft.square() * _wide(scales).unsqueeze(-1)).to(x.dtype)


def scaled_dtanh_srelu(
    dy: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, clamp: float, *, need_scales: bool
) -> Pair:
    """Gradients of `scaled_tanh_srelu` by input and by scale."""
    tanh, grad = torch.tanh(torch.relu(_wide(x)) / clamp), _wide(dy)
    soft = clamp * tanh
    dscales = (soft.square() * grad).sum(-1).to(scales.dtype) if need_scales else None
    return (grad * _wide(scales).unsqueeze(-1) * (2 * soft * (1 - tanh.square()))).to(x.dtype), dscales


# Gated activations: y = gate(a) * linear(b) * scale


def _halves(x: torch.Tensor, interleave: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    if not interleave:
        a, b = _wide(x).chunk(2, dim=-1)
        return a, b
    blocks = _wide(x).unflatten(-1, (-1, 2, interleave))
    return blocks.select(-2, 0).flatten(-2), blocks.select(-2, 1).flatten(-2)


def _joined(a: torch.Tensor, b: torch.Tensor, interleave: int | None, dtype: torch.dtype) -> torch.Tensor:
    if not interleave:
        return torch.cat([a, b], dim=-1).to(dtype)
    pairs = torch.stack([a.unflatten(-1, (-1, interleave)), b.unflatten(-1, (-1, interleave))], dim=-2)
    return pairs.flatten(-3).to(dtype)


Gate = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
"""(a, b) -> gate(a), gate'(a), linear(b), linear'(b)."""


def swiglu_gate(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``a * sigmoid(a)`` and ``b``; `ScaledSwiGLU` of Transformer Engine."""
    sigmoid = torch.sigmoid(a)
    return a * sigmoid, sigmoid * (1 + a * (1 - sigmoid)), b, torch.ones_like(b)


def clamped_qgeglu_gate(limit: float, alpha: float, offset: float) -> Gate:
    """``c * sigmoid(alpha * c)`` with ``c = min(a, limit)``, and ``clamp(b, -limit, limit) + offset``.

    `ScaledClampedQGeGLU` of Transformer Engine, whose numerics are those of its ClampedSwiGLU (gpt-oss).
    """

    def gate(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        c = a.clamp(max=limit)
        sigmoid = torch.sigmoid(alpha * c)
        dgate = sigmoid * (1 + alpha * c * (1 - sigmoid)) * (a <= limit)
        return c * sigmoid, dgate, b.clamp(-limit, limit) + offset, (b.abs() <= limit).to(b.dtype)

    return gate


def situ_glu_gate(beta1: float, beta2: float) -> Gate:
    """``beta1 * tanh(a / beta1) * sigmoid(a)`` and ``beta2 * tanh(b / beta2)``; `ScaledSiTUGLU`."""

    def gate(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        soft, sigmoid, linear = torch.tanh(a / beta1), torch.sigmoid(a), torch.tanh(b / beta2)
        dgate = (1 - soft.square()) * sigmoid + beta1 * soft * sigmoid * (1 - sigmoid)
        return beta1 * soft * sigmoid, dgate, beta2 * linear, 1 - linear.square()

    return gate


def scaled_glu(x: torch.Tensor, scales: torch.Tensor, gate: Gate, interleave: int | None) -> torch.Tensor:
    """``gate(a) * linear(b) * scale``: (T, 2F) to (T, F)."""
    gated, _, linear, _ = gate(*_halves(x, interleave))
    return (gated * linear * _wide(scales).unsqueeze(-1)).to(x.dtype)


def scaled_dglu(
    dy: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, gate: Gate, interleave: int | None, *, need_scales: bool
) -> Pair:
    """Gradients of `scaled_glu` by input, (T, 2F), and by scale, (T,)."""
    gated, dgated, linear, dlinear = gate(*_halves(x, interleave))
    grad = _wide(dy)
    dscales = (gated * linear * grad).sum(-1).to(scales.dtype) if need_scales else None
    scaled = grad * _wide(scales).unsqueeze(-1)
    return _joined(scaled * dgated * linear, scaled * gated * dlinear, interleave, x.dtype), dscales
