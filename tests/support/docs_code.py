"""The Python that README and the docs show, run as a reader would, with what it takes for granted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload import OffloadSession, ops
from tests.support.mlp import make_inputs, make_mlp

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXPERTS, HIDDEN, FFN, LAYERS = 3, 128, 256, 3
SPLITS = (4_500, 0, 3_700)  # slots of more than a MiB, of which a session offloads none that is smaller
_FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SIZES = {"64, 2048, 1408": f"{EXPERTS}, {HIDDEN}, {FFN}", "64, 1408, 2048": f"{EXPERTS}, {FFN}, {HIDDEN}"}


def code_blocks() -> dict[str, str]:
    """By page and number on it."""
    return {
        f"{page.name} {number}": match[1]
        for page in PAGES
        for number, match in enumerate(_FENCED.finditer(page.read_text()), 1)
    }


def run(code: str, device: str, **taken_for_granted: Any) -> dict[str, Any]:
    """Run a block with its sizes made small and on a device; all names afterwards."""
    for size, small in _SIZES.items():
        code = code.replace(size, small)
    names = {"torch": torch, "te": te, "ops": ops, "OffloadSession": OffloadSession, **taken_for_granted}
    exec(compile(code.replace('"cuda"', f'"{device}"'), "<docs>", "exec"), names)
    return names


class Model(torch.nn.Module):
    """Grouped MLPs one after the other."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, device=device, dtype=dtype) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, split_sizes, scales, split_sizes)
        return x


class LossOf(torch.nn.Module):
    """A model whose ``model(batch)`` is a loss."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layers = model.layers
        self._forward = model.forward

    def forward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._forward(*batch).float().square().mean()


def batches(count: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[torch.Tensor, ...]]:
    """Input, split sizes and router scales, other ones each time."""
    for seed in range(count):
        inputs = make_inputs(SPLITS, HIDDEN, device=device, dtype=dtype, seed=seed)
        yield tuple(tensor.detach() for tensor in inputs)
