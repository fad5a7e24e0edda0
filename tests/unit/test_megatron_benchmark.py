"""What `benchmarks.megatron_core` says and shares, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.megatron_core import WAYS, Experts, Shape, name_in_theirs, share, table
from tests.support.megatron_model import make_config

pytest.importorskip("megatron.core", reason="megatron-core is not installed here")

SHAPE = Shape(layers=1, experts=2, top=1, hidden=64, ffn=32, heads=2, sequence=16)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("decoder.layers.1.mlp.experts.mlp.0.weight3", "decoder.layers.1.mlp.experts.linear_fc1.weight3"),
        ("decoder.layers.1.mlp.experts.mlp.2.weight0", "decoder.layers.1.mlp.experts.linear_fc2.weight0"),
        ("decoder.layers.1.mlp.router.weight", "decoder.layers.1.mlp.router.weight"),
    ],
)
def test_a_parameter_of_our_experts_has_the_name_of_megatron_cores(ours: str, theirs: str) -> None:
    assert name_in_theirs(ours) == theirs


def test_a_model_with_our_experts_has_the_parameters_of_one_with_megatron_cores() -> None:
    config = make_config("cpu", hidden_size=SHAPE.hidden, moe_ffn_hidden_size=SHAPE.ffn)
    layer = torch.nn.ModuleDict({"experts": Experts(SHAPE.experts, config, device="cpu")})
    model = torch.nn.ModuleDict({"layer": layer})
    first: dict[str, torch.nn.Parameter] = {
        f"layer.experts.linear_fc{number}.weight{expert}": torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        for number, shape in ((1, (2 * SHAPE.ffn, SHAPE.hidden)), (2, (SHAPE.hidden, SHAPE.ffn)))
        for expert in range(SHAPE.experts)
    }
    share(model, first)
    assert {id(parameter) for parameter in model.parameters()} == {id(parameter) for parameter in first.values()}


def test_a_way_that_fails_says_why_in_its_row() -> None:
    done: dict[str, Any] = {"peak_bytes": 3 << 20, "bytes_out": 1 << 20, "loss": 1.5, "same_bits": False, "ms": [2.0]}
    rows = [{"name": WAYS[0].name, "error": "no such product", "ms": []}, {"name": WAYS[1].name, **done}]
    text = table(SHAPE, "blockwise", rows)
    assert "FP8, blockwise" in text and f"| {WAYS[0].name} | fails: no such product |" in text
    assert f"| {WAYS[1].name} | 2.0 (2.0, 2.0) | 3 | 1 | 1.50000 | DIFFER |" in text
