"""The fused grouped MLP as a function, for models that torch.compile traces whole.

In: rows of one expert after the other, all experts' weights of a linear as one tensor, split sizes. Out: rows. Keeps true:
as `fused.traced` and `fused.traced_quantized`, whose ops it calls; eager calls have the same bits. Does not: anything else;
dynamo.py leaves it to be traced.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from te_offload.errors import ArgumentError
from te_offload.fused import traced_flops as _traced_flops  # noqa: F401  registers the ops, too
from te_offload.fused.quantized import RECIPES as RECIPES

SLOTS = ("fc1_input", "act_input", "fc2_input")


def grouped_mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    split_sizes: torch.Tensor,
    scales: torch.Tensor | None = None,
    *,
    gate: str = "SwiGLU",
    numbers: Sequence[float] = (),
    interleave: int = 0,
    recompute_act_input: bool = False,
    no_offload_activation: Collection[str] = (),
    recipe: str | None = None,
) -> torch.Tensor:
    """``act(x_i @ w1_i.T) * scale @ w2_i.T`` for each expert i of N; differentiable once.

    Args:
        x: (T, H), bf16 or fp16 on a Hopper GPU, anything on a CPU. Rows beyond the last expert's give zeros and take no
            gradient.
        w1: (N, 2F, H), or (N, F, H) without a gate. w2: (N, H, F). Contiguous, of x's dtype.
        split_sizes: (N,) int32 or int64, on x's device; how many rows each expert has.
        scales: (T,), of the router; ``None``: ones.
        gate: of the activation: ``"SwiGLU"``, ``"ClampedQGeGLU"`` or ``"SiTUGLU"``, of Transformer Engine's scaled ops;
            empty: squared ReLU.
        numbers: of ClampedQGeGLU limit, alpha and offset; of SiTUGLU both betas; of squared ReLU a clamp, if it has one
            (`ScaledTanhSReLU`).
        interleave: ``glu_interleave_size``; 0: the gate's half of w1's rows comes first.
        recompute_act_input: the backward computes FC1 once more, from x, instead of keeping the activation's input.
        no_offload_activation: slots that a session keeps on the GPU, of `SLOTS`. They are ``layer/grouped_mlp.fc1_input``
            and ``layer/grouped_mlp.act_input`` there; FC2's input is never saved.
        recipe: of Transformer Engine's, by a name of `RECIPES`: ``"fp8"`` (current scaling: a scale an expert) or
            ``"fp8-block"``, as these classes are by default. Weights stay in x's dtype; each forward quantizes them, and
            the backward again, so that nothing of them is kept. ``None``: nothing is quantized.

    Returns:
        (T, H).

    Raises:
        ArgumentError: shapes, dtypes, devices or numbers that do not fit, a gate, a slot or a recipe of another name;
            weights where TMA cannot reach them.
        UnsupportedError: inside of te.autocast without a recipe of its own; on a GPU, the kernels do not run here, with the
            reason.
    """
    stays = [no_offload_activation] if isinstance(no_offload_activation, str) else list(no_offload_activation)
    for name in stays:
        if name not in SLOTS:
            raise ArgumentError(f"grouped_mlp: no_offload_activation has {name}, but slots are {', '.join(SLOTS)}.")
    saves = not recompute_act_input and torch.is_grad_enabled()
    given = x, w1, w2, split_sizes, scales, gate, numbers, interleave
    ops = torch.ops.te_offload
    y: torch.Tensor
    if recipe is None:
        y = ops.grouped_mlp(*given, saves, stays)
    else:
        y = ops.grouped_mlp_quantized(*given, recipe, saves, w1.requires_grad, stays)
    return y
