"""Transformer Engine's own modules inside our session, our drop-in for its context, and our ops inside its v1 context."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch import cpu_offload as te_cpu_offload

import te_offload
from te_offload import Fate, OffloadSession, Reason
from tests.gpu.paths import autocast
from tests.support.mlp import assert_same_bits

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 512, 4096
ROOT = Path(__file__).parents[2]


class Modules(torch.nn.Module):
    """Layers of Transformer Engine's modules."""

    def __init__(self, kind: str, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = {"params_dtype": torch.bfloat16, "device": "cuda"}
        make: dict[str, Any] = {
            "Linear": lambda: te.Linear(WIDTH, WIDTH, **size),
            "LayerNormLinear": lambda: te.LayerNormLinear(WIDTH, WIDTH, **size),
            "LayerNormMLP": lambda: te.LayerNormMLP(WIDTH, 4 * WIDTH, **size),
            "GroupedLinear": lambda: te.GroupedLinear(4, WIDTH, WIDTH, **size),
        }
        self.kind = kind
        self.layers = torch.nn.ModuleList(make[kind]() for _ in range(count))

    def forward(self, x: torch.Tensor, context: Any = None, sync: Any = None) -> torch.Tensor:
        for layer in self.layers:
            arguments = ([ROWS // 4] * 4,) if self.kind == "GroupedLinear" else ()
            if context is None:
                x = layer(x, *arguments)
            else:
                with context:
                    x = layer(x, *arguments)
                x = sync(x)
        return x


def step(model: Modules, fp8: bool, *contexts: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with autocast(fp8):
        y = model(x, *contexts)
    y.float().square().mean().backward()
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x.grad": x.grad.clone(), **grads}


KINDS = pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
FORMATS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8-current"])


@KINDS
@FORMATS
@pytest.mark.usefixtures("copies_out_end")
def test_modules_inside_our_session_keep_their_bits_and_their_weights(kind: str, fp8: bool) -> None:
    expected = step(Modules(kind), fp8)
    assert_same_bits(expected, step(Modules(kind), fp8))
    model = Modules(kind)
    with OffloadSession(model.layers, min_bytes=4096, max_in_flight=0, verify=True) as session:
        for _ in range(2):
            with session.step():
                found = step(model, fp8)
            assert_same_bits(expected, found)
    record = session.records[-1]
    assert record.bytes_out == record.bytes_back > 0
    went = sum(row.nbytes for row in record.slots if row.fate is Fate.OFFLOADED)
    weights = sum(p.numel() for p in model.parameters())
    if (
        fp8
    ):  # their quantized weights are marked by the modules themselves, because our switch says that offloading is on
        assert sum(row.nbytes for row in record.slots if row.reason is Reason.MARKED) >= weights
    per_row = {"Linear": 1, "LayerNormLinear": 3, "LayerNormMLP": 11, "GroupedLinear": 1}[kind]
    assert 0 < went <= 4 * ROWS * WIDTH * 2 * per_row + 65536
    assert te_cpu_offload.OFFLOAD_SYNCHRONIZER is None


@KINDS
@FORMATS
def test_drop_in_gives_the_bits_of_transformer_engines_context(kind: str, fp8: bool) -> None:
    arguments: dict[str, Any] = {"enabled": True, "num_layers": 2, "model_layers": 4}
    theirs = te.get_cpu_offload_context(**arguments)
    ours = te_offload.get_cpu_offload_context(**arguments)
    expected = step(Modules(kind), fp8, *theirs)
    model = Modules(kind)
    for _ in range(3):
        assert_same_bits(expected, step(model, fp8, *ours))
    record = ours[0].records[-1]
    assert record.bytes_out > 0
    assert {row.layer for row in record.slots if row.fate is Fate.OFFLOADED} <= {"layer0", "layer1"}


def test_manual_drop_in_copies_on_the_stream_that_it_was_given() -> None:
    stream = torch.cuda.Stream()
    context, sync, controller = te_offload.get_cpu_offload_context(
        enabled=True, model_layers=4, manual_synchronization=True, offload_stream=stream
    )
    expected = step(Modules("Linear"), False)
    model = Modules("Linear")
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = x
    for number, layer in enumerate(model.layers):
        with context:
            y = layer(y)
        y = sync(y)
        controller.start_offload_layer(number)
    for number in range(4):
        controller.release_activation_forward_gpu_memory(number)
    for number in reversed(range(4)):
        controller.start_reload_layer(number)
    y.float().square().mean().backward()
    assert x.grad is not None and torch.equal(x.grad, expected["x.grad"])
    counts = context._engine.mover.counts
    assert counts.bytes_back == counts.bytes_out > 0


V1 = """
import torch, transformer_engine.pytorch as te
from tests.gpu.paths import autocast
from tests.support.mlp import make_mlp
from te_offload.ops import te_adapter
from transformer_engine.pytorch import cpu_offload_v1

def run(keep, fp8, offload):
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        make_mlp(experts=4, hidden=256, ffn=512, device="cuda", dtype=torch.bfloat16, keep=keep) for _ in range(3))
    context, sync = te.get_cpu_offload_context(enabled=offload, num_layers=2, model_layers=3, offload_weights=False)
    sizes = torch.tensor([128] * 4, device="cuda")
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales = torch.rand(512, device="cuda", dtype=torch.bfloat16)
    copied = []
    real = cpu_offload_v1.SynchronizedGroupOffloadHandler.offload
    cpu_offload_v1.SynchronizedGroupOffloadHandler.offload = staticmethod(
        lambda t, *a, **k: (copied.append(t.numel() * t.element_size()), real(t, *a, **k))[1])
    y = x
    with autocast(fp8):
        for layer in layers:
            with context:
                y = layer(y, sizes, scales, sizes)
            if offload:
                y = sync(y)
        assert sizes.tolist() == [128] * 4, sizes
    y.float().square().sum().backward()
    cpu_offload_v1.SynchronizedGroupOffloadHandler.offload = real
    return [x.grad, *(p.grad for p in layers.parameters())], sum(copied)

for fp8 in (False, True):
    plain, none = run([], fp8, False)
    everything, some = run([], fp8, True)
    kept, fewer = run(["act_input"], fp8, True)
    assert none == 0 and 0 < fewer == some - 2 * 512 * 512 * 2, (fp8, none, fewer, some)
    for one, two, three in zip(plain, everything, kept, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
print("same bits", some, fewer)
"""


def test_our_ops_inside_the_v1_context_keep_split_sizes_bits_and_the_slots_that_stay() -> None:
    environment = {**os.environ, "NVTE_CPU_OFFLOAD_V1": "1"}
    result = subprocess.run(
        [sys.executable, "-c", V1], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "same bits" in result.stdout
