"""A session within a limit of the device's memory, as torch's allocator counts it."""

from __future__ import annotations

import pytest
import torch

from te_offload import OffloadSession
from te_offload.fused import hopper
from tests.support.layer_stack import Batch, Model, batches
from tests.support.mlp import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

STEPS, LAYERS, LOGITS = 20, 8, 64 << 20


def train(model: Model, batch: Batch) -> dict[str, torch.Tensor]:
    """Gradients, after a loss that takes memory of its own."""
    x, sizes, scales = batch
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=False)
    y = model(x, sizes, scales)
    wide = torch.empty(LOGITS, dtype=torch.uint8, device="cuda").zero_()
    (y.float().pow(2).mean() + wide[0]).backward()
    del wide
    assert x.grad is not None
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"x": x.grad, **found}


def peak_of_steps(model: Model, given: list[Batch], **arguments: object) -> tuple[int, int, OffloadSession]:
    """Torch's most bytes in any step from the third on, in which the session resets its statistics; and bytes out."""
    peaks: list[int] = []
    out = 0
    with OffloadSession(model.layers, min_bytes=0, **arguments) as session:  # type: ignore[arg-type]
        for number, batch in enumerate(given):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with session.step():
                grads = train(model, batch)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            record = session.records[-1]
            if record.device_peak is not None and record.index == number:
                peak = max(peak, record.device_peak.nbytes)
                assert record.device_peak.held <= record.device_peak.nbytes
            peaks.append(peak)
            out = record.bytes_out
            with torch.no_grad():
                assert all(bool(grad.isfinite().all()) for grad in grads.values())
    return max(peaks[2:]), out, session


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_no_step_takes_more_than_the_limit_less_than_all_goes_and_no_bit_changes(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")
    given = list(batches(STEPS))
    model = Model(LAYERS)
    most, none_out, _ = peak_of_steps(model, given, enabled=False)
    least, all_out, _ = peak_of_steps(model, given)
    assert none_out == 0 < all_out and least < most
    limit = int(most - share * (most - least))
    peak, out, session = peak_of_steps(model, given, device_limit=limit)
    assert session.plan is not None and session.plan.forecast is not None
    print(f"\nmost {most} least {least} limit {limit} peak {peak} out {out} of {all_out} {session.plan.forecast}")
    assert peak <= limit
    assert 0 < out < all_out
    expected = {name: grad.clone() for name, grad in train(model, given[0]).items()}
    with OffloadSession(model.layers, min_bytes=0, plan=session.plan) as again:
        with again.step():
            found = train(model, given[0])
        assert again.records[-1].bytes_back > 0
    assert_same_bits(expected, found)
