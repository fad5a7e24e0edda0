"""What `benchmarks.torchtitan_moe` runs and says, without a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from te_offload.fused import hopper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan", reason="torchtitan is not installed here")
    from benchmarks.torchtitan_moe import WAYS, Shape, Variant, table

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # of torchtitan's router

SHAPE = Shape(layers=2, experts=4, top=2, dim=64, ffn=48, tokens=4096)


def test_every_way_in_bf16_of_ours_and_of_the_stock_experts_runs_with_parameters_of_its_kind_and_keeps_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    numbers = torch.randn(1, SHAPE.tokens, SHAPE.dim, dtype=torch.bfloat16)
    parameters: dict[str, dict[str, torch.nn.Parameter]] = {"stock": {}, "ours": {}}
    moved = {}
    for way in WAYS:
        if way.experts in ("fused", "float8") or way.recipe or way.compiled:  # need a GPU
            continue
        x = numbers.clone().requires_grad_()
        variant = Variant(way, SHAPE, parameters[way.experts], x, torch.ones_like(x))
        for _ in range(2):
            variant.step()
        assert x.grad is not None and x.grad.isfinite().all()
        kept = {id(parameter) for parameter in parameters[way.experts].values()}
        assert {id(parameter) for parameter in variant.layers.parameters()} == kept and len(kept) > 4
        assert all(parameter.grad is None for parameter in variant.layers.parameters())
        if variant.session is not None:
            moved[way.name] = variant.session.records[-1].bytes_out
            variant.session.close()
    assert moved and min(moved.values()) > 0


def test_the_table_has_medians_and_mebibytes() -> None:
    row: dict[str, Any] = {"name": "some", "ms": [1.0, 3.0, 2.0], "peak_bytes": 3 << 20, "bytes_out": 1 << 20}
    text = table(SHAPE, [row | {"graphs": False}, row | {"name": "other", "graphs": True}])
    assert "tokens 4096; bf16" in text and "| some | 2.0 (1.0, 3.0) | 3 | 1 |" in text
    assert "| other | 2.0 (1.0, 3.0) | in the graphs | 1 |" in text
