"""The smallest training loop with offloading: one grouped MLP, one slot kept, a report.

    ./run examples.train_moe

Runs on a GPU if there is one, else on the CPU.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te

from te_offload import OffloadSession, ops

EXPERTS, HIDDEN, FFN, TOKENS, STEPS = 8, 256, 512, 1024, 3


def main() -> str:
    """Train some steps; returns the report of the last one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mlp = te.ops.Sequential(
        ops.GroupedLinear(EXPERTS, HIDDEN, FFN, bias=False, device=device, dtype=dtype),
        ops.ScaledSReLU(no_offload_activation=True),
        ops.GroupedLinear(EXPERTS, FFN, HIDDEN, bias=False, device=device, dtype=dtype),
    )
    optimizer = torch.optim.SGD(mlp.parameters(), lr=1e-3)
    splits = torch.full((EXPERTS,), TOKENS // EXPERTS, device=device)
    with OffloadSession(mlp) as session:
        for _ in range(STEPS):
            x = torch.randn(TOKENS, HIDDEN, device=device, dtype=dtype, requires_grad=True)
            router_scales = torch.rand(TOKENS, device=device, dtype=dtype)
            optimizer.zero_grad()
            with session.step():
                mlp(x, splits, router_scales, splits).square().mean().backward()
            optimizer.step()
        return session.report()


if __name__ == "__main__":
    print(main())
