"""A session within a limit of the device's memory, as torch's allocator counts it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

from te_offload import OffloadSession
from te_offload.fused import hopper
from te_offload.graphs import CaptureState, capture
from te_offload.offload.device_memory import fill_unused
from tests.support.device_peaks import STEPS, backward_of_a_wide_loss, peak_of_one, peak_of_steps
from tests.support.layer_stack import Batch, Model, batches
from tests.support.mlp import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

LAYERS = 8
RECIPES: dict[str, Any] = {
    "bf16": None,
    "scale a tensor": Float8CurrentScaling,
    "delayed scaling": DelayedScaling,
    "blocks": Float8BlockScaling,
}


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")


def train(model: Model, batch: Batch, recipe: Any = None) -> dict[str, torch.Tensor]:
    """Gradients, after a loss that takes memory of its own."""
    x, sizes, scales = batch
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=False)
    with contextlib.nullcontext() if recipe is None else te.autocast(enabled=True, recipe=recipe()):
        y = model(x, sizes, scales)
    backward_of_a_wide_loss(y)
    assert x.grad is not None
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"x": x.grad, **found}


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_no_step_takes_more_than_the_limit_less_than_all_goes_and_no_bit_changes(share: float, kind: str) -> None:
    given, recipe, model = list(batches(STEPS)), RECIPES[kind], Model(LAYERS)

    def step(number: int) -> None:
        grads = train(model, given[number], recipe)
        assert all(bool(grad.isfinite().all()) for grad in grads.values())

    most, none_out, _ = peak_of_steps(model.layers, step, enabled=False)
    least, all_out, _ = peak_of_steps(model.layers, step)
    assert none_out == 0 < all_out and least < most
    limit = int(most - share * (most - least))
    peak, out, session = peak_of_steps(model.layers, step, device_limit=limit)
    assert session.plan is not None and session.plan.forecast is not None
    print(
        f"\n{kind}: most {most} least {least} limit {limit} peak {peak} out {out} of {all_out} {session.plan.forecast}"
    )
    assert peak <= limit
    assert 0 < out < all_out
    if kind == "delayed scaling":
        return  # scales are those of the steps before
    expected = {name: grad.clone() for name, grad in train(model, given[0], recipe).items()}
    with OffloadSession(model.layers, min_bytes=0, plan=session.plan) as again:
        with again.step():
            found = train(model, given[0], recipe)
        assert again.records[-1].bytes_back > 0
    assert_same_bits(expected, found)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_captured_step_takes_no_more_than_the_limit_either(share: float) -> None:
    given, model = list(batches(STEPS)), Model(LAYERS)
    most, _, _ = peak_of_steps(model.layers, lambda number: train(model, given[number]), enabled=False)
    least, all_out, _ = peak_of_steps(model.layers, lambda number: train(model, given[number]))
    limit = int(most - share * (most - least))
    expected = [[grad.cpu() for grad in train(model, batch).values()] for batch in given]

    def step(*batch: torch.Tensor) -> list[torch.Tensor]:
        return list(train(model, batch).values())  # type: ignore[arg-type]

    peaks = []
    with (
        OffloadSession(model.layers, min_bytes=0, device_limit=limit) as session,
        capture(step, given[0], session=session, modules=[model], warmup=12) as replay,
    ):
        for number, batch in enumerate(given):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            found = replay(*batch)
            torch.cuda.synchronize()
            peaks.append(peak_of_one(session, number))
            for one, other in zip(expected[number], found, strict=True):
                assert torch.equal(one, other.cpu()), number
        out = session.records[-1].bytes_out
        assert replay.state is CaptureState.CAPTURED, replay.reason
        assert session.plan is not None
        print("\n", share, most, least, limit, peaks, out, all_out, session.plan.forecast, torch.cuda.memory_reserved())
        assert 0 < out < all_out
        assert max(peaks[2:]) <= limit


def test_what_is_filled_is_not_given_back() -> None:
    given = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (64, 48, 96)]
    del given
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    given = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (64, 48, 96)]
    given.pop(1)
    device = given[0].device
    del given
    assert torch.cuda.memory_reserved() == before + (208 << 20)
    filling = fill_unused(device, 150 << 20)
    assert sorted(tensor.nbytes >> 20 for tensor in filling) == [48, 96]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before + (144 << 20)
    filling.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
