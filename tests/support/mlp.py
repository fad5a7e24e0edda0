"""Grouped MLPs, inputs and results for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload import ops

ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "srelu": lambda **kw: ops.ScaledSReLU(**kw),
    "tanh-srelu": lambda **kw: ops.ScaledTanhSReLU(tanh_clamp_scale=2.0, **kw),
    "swiglu": lambda **kw: ops.ScaledSwiGLU(**kw),
    "swiglu-interleaved": lambda **kw: ops.ScaledSwiGLU(32, **kw),
    "swiglu-pairs": lambda **kw: ops.ScaledSwiGLU(1, **kw),
    "clamped-qgeglu": lambda **kw: ops.ScaledClampedQGeGLU(**kw),
    "tight-clamped-qgeglu": lambda **kw: ops.ScaledClampedQGeGLU(limit=0.75, **kw),
    "situ-glu": lambda **kw: ops.ScaledSiTUGLU(**kw),
}


def is_glu(name: str) -> bool:
    return "glu" in name


def make_mlp(
    *,
    experts: int = 3,
    hidden: int = 16,
    ffn: int = 32,
    activation: str = "srelu",
    keep: Sequence[str] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    fc1: Mapping[str, Any] | None = None,
    fc2: Mapping[str, Any] | None = None,
    **linear: Any,
) -> te.ops.Sequential:
    """FC1, activation, FC2 of `te_offload.ops`; ``keep`` names slots whose op says no_offload_activation."""
    linear = {"bias": False, "device": device, "dtype": dtype, **linear}
    wide = ffn * (2 if is_glu(activation) else 1)
    return te.ops.Sequential(
        ops.GroupedLinear(
            experts, hidden, wide, no_offload_activation="fc1_input" in keep, **(linear | dict(fc1 or {}))
        ),
        ACTIVATIONS[activation](no_offload_activation="act_input" in keep),
        ops.GroupedLinear(
            experts, ffn, hidden, no_offload_activation="fc2_input" in keep, **(linear | dict(fc2 or {}))
        ),
    )


def seeded(shape: Sequence[int], seed: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def make_inputs(
    splits: Sequence[int], hidden: int = 16, *, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input (T, hidden), split sizes, router scales (T,); x and scales need gradients."""
    tokens = sum(splits)
    x = seeded((tokens, hidden), seed, device=device, dtype=dtype).requires_grad_()
    scales = torch.rand(tokens, generator=torch.Generator().manual_seed(seed + 1)).to(device=device, dtype=dtype)
    return x, torch.tensor(splits, device=device), scales.requires_grad_()


def gradients(module: torch.nn.Module, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of parameters and inputs by name, cloned."""
    named = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    named |= {f"input{i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    return {name: grad.detach().clone() for name, grad in named.items()}


def run(
    module: Any, splits: Sequence[int], *, hidden: int = 16, seed: int = 1, extra: int = 3
) -> dict[str, torch.Tensor]:
    """One forward and backward of a grouped MLP; output and every gradient by name."""
    parameter = next(module.parameters())
    x, sizes, scales = make_inputs(splits, hidden, device=str(parameter.device), dtype=parameter.dtype, seed=seed)
    arguments = (sizes, scales, sizes, scales)[:extra]
    module.zero_grad()
    y = module(x, *arguments)
    y.float().square().sum().backward()
    return {"output": y.detach().clone()} | gradients(module, x, scales)


def assert_same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Every tensor of both has the same bits; says which one, how many and where first if not."""
    assert one.keys() == other.keys()
    for name, a in one.items():
        b = other[name]
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if a.numel() == 0:
            continue
        different = (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).flatten().nonzero()
        assert not len(different), (
            f"{name}: {len(different)} of {a.nbytes} bytes differ, the first at {int(different[0])}"
        )
