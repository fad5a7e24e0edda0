"""A training step of a small stack of grouped MLPs, captured as a CUDA graph with its offloading.

    ./run examples.capture_step     # a GPU, and no split size on the host: the fused op, or cuBLAS 13.3

Three steps run eagerly, the fourth is captured, the others are replays. On a machine without a GPU it says so and ends.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te

from te_offload import OffloadSession, ops
from te_offload.graphs import capture

EXPERTS, HIDDEN, FFN, TOKENS, LAYERS, STEPS = 8, 256, 512, 2048, 4, 30


class Model(torch.nn.Module):
    """Grouped MLPs with residuals."""

    def __init__(self) -> None:
        super().__init__()
        size: dict[str, bool | str | torch.dtype] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.layers = torch.nn.ModuleList(
            te.ops.Sequential(
                ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **size),  # type: ignore[arg-type]
                ops.ScaledSReLU(),
                ops.GroupedLinear(EXPERTS, FFN, HIDDEN, **size),  # type: ignore[arg-type]
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """``x`` (T, HIDDEN) and what each layer makes of it."""
        for layer in self.layers:
            x = x + layer(x, split_sizes, scales, split_sizes)
        return x


def batch() -> tuple[torch.Tensor, ...]:
    """A random input, target, routing and router scales; always the same number of tokens."""
    x, target = (torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cuts = torch.randint(0, TOKENS + 1, (EXPERTS - 1,), device="cuda").sort().values
    ends = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), TOKENS)])
    return x, 0.1 * target, ends.diff(), torch.rand(TOKENS, device="cuda")


def main() -> str:
    """Train; the losses and what the graph does."""
    if not torch.cuda.is_available():
        return "There is no GPU here, and a CUDA graph needs one."
    torch.manual_seed(0)
    model = Model()
    parameters: list[torch.Tensor] = list(model.parameters())

    def step(x: torch.Tensor, target: torch.Tensor, split_sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss: torch.Tensor = (model(x, split_sizes, scales) - target).float().square().mean()
        loss.backward()
        with torch.no_grad():
            torch._foreach_add_(parameters, [p.grad for p in parameters if p.grad is not None], alpha=-30.0)
        return loss.detach()

    with (
        OffloadSession(model.layers, min_bytes=0, max_in_flight="1MiB") as session,
        capture(step, batch(), session=session, modules=[model]) as replay,
    ):
        losses = [replay(*batch()).item() for _ in range(STEPS)]
        sent = session.records[-1].bytes_out
        state = f"{replay.state.value}{'' if replay.reason is None else f' ({replay.reason})'}"
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}; {state}; {sent} bytes to the host and back in each step"


if __name__ == "__main__":
    print(main())
