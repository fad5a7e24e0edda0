"""Layers with grouped MLPs that torch.compile has traced, on a GPU: fused and op by op, in bf16 and FP8, in a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import OffloadSession
from te_offload.fused import fusions_in, hopper
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp

HIDDEN, SPLITS = 256, ((128, 0, 256), (64, 304, 16), (384, 0, 0))
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # inductor's
]


@pytest.fixture(autouse=True)
def nothing_traced() -> Iterator[None]:
    torch._dynamo.reset()
    FP8GlobalStateManager.reset()
    yield
    torch._dynamo.reset()
    FP8GlobalStateManager.reset()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ways: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.dense = torch.nn.Linear(HIDDEN, HIDDEN, **ways)
        self.mlp = make_mlp(experts=len(SPLITS[0]), hidden=HIDDEN, ffn=2 * HIDDEN, **ways)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.mlp(F.silu(self.dense(F.layer_norm(x, (HIDDEN,)))), *rest))


class Stack(torch.nn.Module):
    def __init__(self, backend: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        if backend is not None:
            for layer in self.layers:
                layer.compile(backend=backend)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def step(model: Stack, recipe: Any, seed: int) -> dict[str, torch.Tensor]:
    x, sizes, scales = make_inputs(SPLITS[seed // 2], HIDDEN, device="cuda", dtype=torch.bfloat16, seed=seed)
    scales = scales.detach().float().requires_grad_()
    model.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, sizes, scales, sizes)
    y.float().square().sum().backward()
    return {"output": y.detach().clone()} | gradients(model, x, scales)


@pytest.mark.parametrize("switch", ["1", "0"], ids=["fused", "op by op"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), DelayedScaling()], ids=["bf16", "current", "delayed"])
def test_compiled_layers_in_a_session_have_the_bits_of_compiled_ones_without(
    recipe: Any, backend: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    found: list[list[dict[str, torch.Tensor]]] = []
    for offloads in (False, True):
        torch._dynamo.reset()
        FP8GlobalStateManager.reset()
        model = Stack(backend)
        with OffloadSession(model.layers, min_bytes=0) if offloads else contextlib.nullcontext() as session:
            steps = []
            for seed in range(6):
                with session.step() if session else contextlib.nullcontext():
                    steps.append(step(model, recipe, seed))
            found.append(steps)
            if session:
                record = session.records[-1]
                assert record.bytes_back > 0
                assert {"layer0/mlp.0.fc1_input", "layer2/mlp.1.act_input"} <= {row.name for row in record.slots}
        assert all((fusion.fused > 0) == (switch == "1") for fusion in fusions_in(model))
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
