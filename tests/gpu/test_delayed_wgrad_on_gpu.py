"""Weight gradients that a fused MLP computes in ``backward_dw``: the bits of those at once, whatever ran in between."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

from te_offload import OffloadSession
from te_offload.fused import fusions_in, hopper
from tests.gpu.paths import came_back_or_never_left, slow_copies
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")

SPLITS, HIDDEN, FFN = (300, 0, 700, 24), 256, 512
RECIPES = {"bf16": None, "FP8": Float8CurrentScaling(), "blocks": Float8BlockScaling()}


def layers(count: int, *, delays: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    size: dict[str, Any] = {"experts": len(SPLITS), "hidden": HIDDEN, "ffn": FFN, "dtype": torch.bfloat16}
    return torch.nn.ModuleList(
        make_mlp(device="cuda", delay_wgrad_compute=delays, **size, **options) for _ in range(count)
    )


def train(model: Any, recipe: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    """One step, weight gradients that wait among it; all gradients by name."""
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16, seed=seed)
    y = x
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        for layer in model:
            y = layer(y, sizes, scales, sizes)
    (y.float().square().mean() * 1e3).backward()
    garbage = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(32)]  # in memory that was given up
    del garbage
    for layer in reversed(model):
        for index in (2, 0):
            layer[index].backward_dw()
    return gradients(model, x, scales)


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"activation": "swiglu"}], ids=["plain", "bias", "gated"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gradients_have_the_bits_of_those_at_once(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, options: dict[str, Any], offload: bool
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")
    slow_copies(monkeypatch, 2_000_000, "copy_out", "copy_back")
    once, later = (layers(2, delays=delays, **options) for delays in (False, True))
    session = OffloadSession(later, min_bytes=0) if offload else None
    with session or contextlib.nullcontext():
        for seed in (1, 2, 3, 4):
            expected = train(once, recipe, seed)
            with session.step() if session else contextlib.nullcontext():
                found = train(later, recipe, seed)
            assert_same_bits(expected, found)
            for model in (once, later):
                model.zero_grad()
    assert [fusion.fused for fusion in fusions_in(later)] == [4, 4]
    if session is not None:
        assert came_back_or_never_left(session.records[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_main_grad_is_added_to_later(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")
    once, later = (layers(1, delays=delays, accumulate_into_main_grad=True) for delays in (False, True))
    for model in (once, later):
        for parameter in model.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.5, dtype=dtype, device="cuda")
            parameter.grad_added_to_main_grad = False
        for seed in (1, 2):
            train(model, None, seed)
    expected, found = ({name: weight.main_grad for name, weight in model.named_parameters()} for model in (once, later))
    assert_same_bits(expected, found)


def test_step_and_its_delayed_wgrads_are_captured_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")
    (model,) = layers(1, delays=True)
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(x, sizes, scales, sizes).float().square().sum().backward()
        for index in (2, 0):
            model[index].backward_dw()

    def forget() -> None:
        for tensor in (*model.parameters(), x, scales):
            tensor.grad = None

    step()
    torch.cuda.synchronize()
    expected = gradients(model, x, scales)
    forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for tensor in (*model.parameters(), x, scales):
        assert tensor.grad is not None
        tensor.grad.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(expected, gradients(model, x, scales))
