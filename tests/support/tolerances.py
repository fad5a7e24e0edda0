"""The one table of tolerances against FP64 references: relative to the reference's largest magnitude, by dtype."""

from __future__ import annotations

import torch

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2.5e-2,
}


def assert_close_to_fp64(
    value: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, name: str, terms: float = 0.0
) -> None:
    """``value``, computed in ``dtype``, is within the table's tolerance of an FP64 reference.

    Args:
        terms: magnitudes that were added up for it, where they may cancel: the tolerance is relative to these, if larger.
    """
    assert reference.dtype == torch.float64
    assert value.shape == reference.shape, f"{name}: {tuple(value.shape)} is not {tuple(reference.shape)}"
    if value.numel() == 0:
        return
    error = (value.detach().double().cpu() - reference.detach().cpu()).abs().max().item()
    bound = TOLERANCES[dtype] * max(reference.abs().max().item(), terms, 1e-3)
    assert error <= bound, f"{name}: off by {error:.3e}, allowed {bound:.3e}"
