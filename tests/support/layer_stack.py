"""A stack of layers with grouped MLPs of the fused Hopper op, how tests train it, and a layer of Transformer Engine's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload import OffloadSession
from te_offload.graphs import LayerGraphs
from tests.support.mlp import make_mlp

EXPERTS, HIDDEN, FFN, TOKENS, LAYERS = 4, 512, 768, 4096, 4
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layer(torch.nn.Module):
    """A norm, whose output the experts save, the experts, and a residual. ``linear``: more for their linears."""

    def __init__(self, **linear: Any) -> None:
        super().__init__()
        size: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN, "dtype": torch.bfloat16}
        self.norm = torch.nn.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.experts = make_mlp(**size, device="cuda", **linear)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.experts(self.norm(x), sizes, scales, sizes)
        return found


class Dense(torch.nn.Module):
    """Transformer Engine's modules, called as our layers are. ``options``: more for each."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        size: dict[str, Any] = {"bias": False, "device": "cuda", "params_dtype": torch.bfloat16, **options}
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, normalization="RMSNorm", activation="swiglu", **size)
        self.last = te.Linear(HIDDEN, HIDDEN, **size)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.last(self.mlp(x))
        return found


class Model(torch.nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, sizes, scales)
        return x


def batches(count: int, seed: int = 0) -> Iterator[Batch]:
    """Random inputs, and random routing of the same number of tokens."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(TOKENS, HIDDEN, generator=random).cuda().bfloat16()
        cuts = torch.randint(0, TOKENS + 1, (EXPERTS - 1,), generator=random).sort().values.tolist()
        sizes = torch.tensor([b - a for a, b in itertools.pairwise([0, *cuts, TOKENS])])
        yield x, sizes.cuda(), torch.rand(TOKENS, generator=random).cuda()


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(*batch).float().square().mean()
    return loss


def train(model: torch.nn.Module, batch: Batch, session: OffloadSession | None = None) -> torch.Tensor:
    """Forward, backward, and SGD without an optimizer's state."""
    parameters: list[torch.Tensor] = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    if session is None:
        loss = loss_of(model, batch)
        loss.backward()
    else:
        with session.step():
            loss = loss_of(model, batch)
            loss.backward()
    with torch.no_grad():
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_add_(parameters, found, alpha=-0.5)
    return loss.detach()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def grads(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


def captured(graphs: LayerGraphs) -> None:
    assert graphs.captured, graphs.report()
