"""How small a card steps within a limit of the device run on: of a stack with a loss over a large vocabulary, whose tensors
are a 256th of their size, on a simulated device and in a model of torch's allocator.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from te_offload.offload import cargo, decide
from te_offload.offload import engine as engine_module
from te_offload.offload import planner as planner_module
from te_offload.offload import session as session_module
from te_offload.offload.device_memory import Watermarks
from te_offload.offload.timeline import Link
from tests.support import simulated_device
from tests.support.caching_allocator import GIVE_BACK, MIB, Traced, least_card, run
from tests.support.simulated_device import SimulatedDevice

SCALE = 256  # times as large as these tensors are those of the allocator's
RATE = 200_000.0  # bytes a millisecond: 51 GB/s of those
TOKENS, HIDDEN, FFN, VOCABULARY = 256, 512, 352, 12576
LAYERS, STEPS = 8, 10
GIB = 1024 * MIB


class _Works(torch.autograd.Function):
    """Saves its inputs, and makes another tensor that it needs no longer than it runs; takes the device some time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, more: int, device: SimulatedDevice, ms: float) -> torch.Tensor:
        more_saved = x.new_zeros(TOKENS, more) if more else None
        ctx.save_for_backward(x, more_saved)
        ctx.device, ctx.ms, ctx.more = device, ms, more
        x.new_zeros(TOKENS, more // 2 or 1)
        device.compute += ms
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, _ = ctx.saved_tensors
        more = grad.new_zeros(TOKENS, ctx.more or 1)
        ctx.device.compute += 2 * ctx.ms
        del more
        return torch.zeros_like(x), None, None, None


class _Loss(torch.autograd.Function):
    """Of logits in float32, which take a copy in either direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: SimulatedDevice) -> torch.Tensor:
        logits = x.new_zeros(TOKENS, VOCABULARY).float()
        ctx.save_for_backward(torch.zeros_like(logits))
        ctx.device, ctx.like = device, x.shape
        device.compute += 12.0
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        picked = torch.zeros_like(logits)
        found = torch.zeros_like(picked)
        del picked
        ctx.device.compute += 10.0
        return found.to(torch.bfloat16).new_zeros(ctx.like), None


class _Block(torch.nn.Module):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in (((0, 0.1), (0, 0.1), (0, 0.1), (HIDDEN, 0.6)), ((0, 0.1), (2 * FFN, 1.3))):
            mixed = x
            for more, ms in half:
                mixed = _Works.apply(mixed, more, self.device, ms)  # type: ignore[no-untyped-call]
            x = x + mixed
        return x


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    made = SimulatedDevice()
    monkeypatch.setattr(simulated_device, "RATE", RATE)
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: made)
    monkeypatch.setattr(engine_module, "FIRST_BOUND", 256 * MIB // SCALE)
    monkeypatch.setattr(planner_module, "probe_link", lambda *_: Link(RATE, RATE, RATE, RATE))
    monkeypatch.setattr(cargo, "OWN_LOT", MIB // SCALE)
    for name in ("together", "most_together"):
        monkeypatch.setattr(decide.Rules, name, getattr(decide.Rules, name) // SCALE)
    rules = functools.partial(decide.Rules, together=decide.Rules.together, most_together=decide.Rules.most_together)
    monkeypatch.setattr(session_module, "Rules", rules)
    return made


def steps(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, limit: int | None, micro_batches: int = 1
) -> tuple[Traced, int, float]:
    """Training for some steps, of micro-batches all forwards first: what was allocated, and of the last step bytes out and
    milliseconds.
    """
    traced = Traced(MIB // SCALE)
    monkeypatch.setattr(engine_module, "give_back_unused", lambda _: traced.events.append(GIVE_BACK))
    monkeypatch.setattr(engine_module, "fill_unused", lambda _, most: traced.fill(most))
    monkeypatch.setattr(session_module, "watermarks_of", lambda _: Watermarks(traced.take_most))
    blocks = torch.nn.ModuleList(_Block(device) for _ in range(LAYERS))
    with (
        OffloadSession(blocks, min_bytes=MIB // SCALE, device_limit=limit, enabled=limit is not None) as session,
        traced,
    ):
        for _ in range(STEPS):
            device.synchronize()
            began = device.compute
            losses = []
            with session.step():
                for _ in range(micro_batches):
                    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
                    for block in blocks:
                        x = block(x)
                    losses.append(_Loss.apply(x, device))  # type: ignore[no-untyped-call]
                    del x
                while losses:
                    losses.pop(0).backward()
            took = device.compute - began
        out = session.records[-1].bytes_out
    return traced, out, took


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4, 0.7])
def test_steps_within_a_limit_run_on_a_card_little_larger(
    share: float, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = run(steps(device, monkeypatch, None)[0].events, SCALE).most_allocated
    limit = everything - int(share * 4.5 * GIB)
    traced, out, _ = steps(device, monkeypatch, limit // SCALE)
    took = run(traced.events, SCALE).most_allocated
    card = least_card(traced.events, SCALE, GIB // 32)
    assert out > 0 and took <= limit
    assert card <= took + 0.1 * GIB  # the loss's blocks are 3 GiB each


def test_plan_takes_no_more_than_a_tenth_of_the_time_for_a_smaller_card(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two losses, of which the first one's logits stay: with room for all holes a step would take half as long again."""
    traced, _, alone = steps(device, monkeypatch, None, micro_batches=2)
    limit = run(traced.events, SCALE).most_allocated - GIB
    traced, out, took = steps(device, monkeypatch, limit // SCALE, micro_batches=2)
    assert out > 0 and run(traced.events, SCALE).most_allocated <= limit
    assert took <= 1.1 * alone
