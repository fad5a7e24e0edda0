"""What `benchmarks.megatron_core` says and shares, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.megatron_core import WAYS, Shape, share, table, warmed_up

pytest.importorskip("megatron.core", reason="megatron-core is not installed here")

SHAPE = Shape(layers=1, experts=2, top=1, hidden=64, ffn=32, heads=2, sequence=16)


def test_a_model_has_the_parameters_of_the_first_one_by_name() -> None:
    def linears() -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({"one": torch.nn.Linear(3, 4), "other": torch.nn.Linear(4, 5, bias=False)})

    first, model = dict(linears().named_parameters()), linears()
    share(model, first)
    assert {name: id(each) for name, each in model.named_parameters()} == {
        name: id(each) for name, each in first.items()
    }


def test_a_way_that_cannot_be_made_or_run_has_the_reason_in_its_row() -> None:
    def refuse(_: Any) -> Any:
        raise ValueError("no such recipe\nof many words")

    variant, row = warmed_up(WAYS[1], refuse, None, {}, {})
    assert variant is None and row["error"] == "no such recipe" and row["name"] == WAYS[1].name


def test_a_way_that_fails_says_why_in_its_row() -> None:
    sizes = {"peak_bytes": 3 << 20, "between_bytes": 5 << 20, "bytes_out": 1 << 20}
    done: dict[str, Any] = {**sizes, "loss": 1.5, "same_bits": False, "ms": [2.0]}
    rows = [{"name": WAYS[0].name, "error": "no such product", "ms": []}, {"name": WAYS[1].name, **done}]
    text = table(SHAPE, "blockwise", rows)
    assert "FP8, blockwise" in text and f"| {WAYS[0].name} | fails: no such product |" in text
    assert f"| {WAYS[1].name} | 2.0 (2.0, 2.0) | 3 | 5 | 1 | 1.50000 | DIFFER |" in text
