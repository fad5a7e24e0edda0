"""`te-offload explain`: which grouped MLPs a fused op takes on this machine, and why not the others.

In: the widths of a grouped MLP, and how its halves lie. Out: rows as a table or JSON. Keeps true: every row is what
`te_offload.fused.explain` says of a window of that kind, and every no has its reason. Does not: run anything on a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformer_engine.common import recipe as te_recipe

from te_offload import ops
from te_offload.fused import Window, explain
from te_offload.report.as_json import SCHEMA

UNARY: tuple[Callable[[], torch.nn.Module], ...] = (
    ops.ScaledSReLU,
    lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=2.0),
)
GATED: tuple[Callable[..., torch.nn.Module], ...] = (
    ops.ScaledSwiGLU,
    ops.ScaledClampedQGeGLU,
    ops.ScaledSiTUGLU,
)
RECIPES: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("none", lambda: None),
    ("FP8 current scaling", te_recipe.Float8CurrentScaling),
    ("FP8 delayed scaling", te_recipe.DelayedScaling),
    ("FP8 by blocks", te_recipe.Float8BlockScaling),
    ("MXFP8", lambda: te_recipe.MXFP8BlockScaling(fp8_format=te_recipe.Format.E4M3)),
    ("NVFP4", te_recipe.NVFP4BlockScaling),
)


@dataclass(frozen=True)
class Row:
    """One kind of window: activation, recipe, whether a fused op takes it, and if not, why."""

    activation: str
    recipe: str
    ok: bool
    reason: str


def rows(hidden: int, ffn: int, *, bias: bool, interleave: int | None = None) -> Iterator[Row]:
    """Every activation with every recipe; the weights are bf16. ``interleave``: of gated ones, ``glu_interleave_size``."""
    linear: dict[str, Any] = {"bias": bias, "device": "cpu", "dtype": torch.bfloat16}
    activations = [(make(), 1) for make in UNARY] + [(make(glu_interleave_size=interleave), 2) for make in GATED]
    for activation, columns in activations:  # of FC1's for one of FC2's
        window = Window(
            0,
            ops.GroupedLinear(2, hidden, columns * ffn, **linear),
            activation,
            ops.GroupedLinear(2, ffn, hidden, **linear),
        )
        for name, recipe in RECIPES:
            support = explain(window, recipe())
            yield Row(type(activation).__name__, name, support.ok, support.reason)


def run_explain(*, hidden: int, ffn: int, bias: bool, interleave: int | None, as_json: bool) -> int:
    """Print the rows; returns the exit status."""
    found = list(rows(hidden, ffn, bias=bias, interleave=interleave))
    console = Console()
    if as_json:
        console.print_json(json.dumps({"schema": SCHEMA, "windows": [asdict(row) for row in found]}))
        return 0
    table = Table("activation", "recipe", "fused")
    table.add_column("why not", overflow="fold")  # names of variables are there to be copied
    for row in found:
        table.add_row(row.activation, row.recipe, "[green]yes[/]" if row.ok else "[yellow]no[/]", row.reason)
    console.print(table)
    return 0
