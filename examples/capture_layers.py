"""Layers of a small MoE model as CUDA graphs of their own, with offloading between forward and backward.

    ./run examples.capture_layers     # a GPU, and no split size on the host: the fused op, or cuBLAS 13.3

What lies between the layers runs eagerly. On a machine without a GPU it says so and ends.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te

from examples.capture_step import EXPERTS, FFN, HIDDEN, LAYERS, STEPS, batch
from te_offload import OffloadSession, ops
from te_offload.graphs import capture_layers


class Layer(torch.nn.Module):
    """A norm, whose output the experts save; the experts; a residual."""

    def __init__(self) -> None:
        super().__init__()
        size: dict[str, bool | str | torch.dtype] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.norm = torch.nn.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.experts = te.ops.Sequential(
            ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **size),  # type: ignore[arg-type]
            ops.ScaledSReLU(),
            ops.GroupedLinear(EXPERTS, FFN, HIDDEN, **size),  # type: ignore[arg-type]
        )

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """``x`` (T, HIDDEN) and what the experts make of it."""
        found: torch.Tensor = x + self.experts(self.norm(x), split_sizes, scales, split_sizes)
        return found


def main() -> str:
    """Train; the losses, what became of each layer, and what went to the host."""
    if not torch.cuda.is_available():
        return "There is no GPU here, and a CUDA graph needs one."
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    losses = []
    with OffloadSession(layers, min_bytes=0) as session, capture_layers(layers, session=session) as graphs:
        for _ in range(STEPS):
            x, target, split_sizes, scales = batch()
            optimizer.zero_grad()
            with session.step():
                for layer in layers:
                    x = layer(x, split_sizes, scales)
                loss = (x - target).float().square().mean()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        sent = session.records[-1].bytes_out
        report = graphs.report()
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}; {sent} bytes to the host in each step\n{report}"


if __name__ == "__main__":
    print(main())
