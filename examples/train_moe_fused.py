"""A small mixture-of-experts layer with a router and SwiGLU, trained with the fused grouped MLP and offloading.

    ./run examples.train_moe_fused                                  # a Hopper GPU with quack-kernels
    TE_OFFLOAD_FUSED_MLP=reference ./run examples.train_moe_fused   # anywhere, in torch arithmetic

The router's split sizes never leave the device. The report says of ``fc2_input`` that the backward rebuilds it.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te

from te_offload import OffloadSession, ops

EXPERTS, TOP, HIDDEN, FFN, TOKENS, STEPS = 8, 2, 256, 512, 1024, 20


class MoE(torch.nn.Module):
    """Each token goes to the ``TOP`` experts that its router scores highest, and back to its place.

    Args:
        device, dtype: of the weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, device=device, dtype=dtype)
        self.experts = te.ops.Sequential(
            ops.GroupedLinear(EXPERTS, HIDDEN, 2 * FFN, bias=False, device=device, dtype=dtype),
            ops.ScaledSwiGLU(no_offload_activation=True),
            ops.GroupedLinear(EXPERTS, FFN, HIDDEN, bias=False, device=device, dtype=dtype),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (T, HIDDEN) plus what its experts make of it."""
        scores, chosen = self.router(x).float().softmax(-1).topk(TOP)
        order = chosen.flatten().argsort(stable=True)  # rows by expert
        tokens = order // TOP
        splits = (chosen.flatten()[:, None] == torch.arange(EXPERTS, device=x.device)).sum(0)
        rows = self.experts(x[tokens], splits, scores.flatten()[order], splits)
        return x.index_add(0, tokens, rows)


def main() -> str:
    """Train some steps; returns the losses and the report of the last timed step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = MoE(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=dtype)
    target = x.roll(1, dims=1)
    losses = []
    with OffloadSession(model) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            with session.step():
                loss = (model(x) - target).float().square().mean()
                loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        first, last = losses[0].item(), losses[-1].item()
        return f"loss {first:.3f} -> {last:.3f}\n{session.report()}"


if __name__ == "__main__":
    print(main())
