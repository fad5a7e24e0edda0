"""Plans for slots that share memory, as an attention's output that its projection saves too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import OffloadSession, Reason, SharedMemory
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.device_memory import Watermarks
from te_offload.offload.slot_bytes import bytes_by_slot
from tests.support.caching_allocator import Traced
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import engine_on

KIB = 1024
LAYERS, QUERY, OUTPUT, REST = 6, 40 * KIB, 30 * KIB, 20 * KIB


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: SimulatedDevice, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.device = device
        device.compute += 5.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        assert all(bool(tensor.eq(tensor.numel() % 251).all()) for tensor in saved)
        ctx.device.compute += 10.0
        return grad.clone(), None, *[None] * len(saved)


class Block(torch.nn.Module):
    """A core that saves a query and its output, a projection that saves that and more, or a part of it."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device
        self.region: Any = None
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, output, rest = (torch.full((size,), size % 251, dtype=torch.uint8) for size in (QUERY, OUTPUT, REST))
        with self.region("core"):
            x = _Saves.apply(x, self.device, query, output)  # type: ignore[no-untyped-call]
        with self.region("projection"):
            x = _Saves.apply(x, self.device, output, rest)  # type: ignore[no-untyped-call]
        return x


def run(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, steps: int = 8, **arguments: Any
) -> tuple[OffloadSession, int]:
    """A session's steps, and bytes allocated at the most in the last four."""
    traced = Traced(KIB)
    monkeypatch.setattr(session_module, "watermarks_of", lambda _: Watermarks(traced.take_most))
    monkeypatch.setattr(engine_module, "give_back_unused", lambda _: None)
    blocks = [Block(device) for _ in range(LAYERS)]
    most = 0
    with OffloadSession(blocks, min_bytes=0, **arguments) as session, traced:
        for block in blocks:
            block.region = session.region
        for number in range(steps):
            device.synchronize()
            traced.take_most()
            with session.step():
                x = torch.zeros(1, requires_grad=True)
                for block in blocks:
                    x = block(x)
                x.backward()
            peaks = [peak.nbytes for peak in session.records[-1].device_peaks]
            most = max([most if number > steps - 4 else 0, traced.take_most(), *peaks])
    return session, most


@pytest.fixture
def device() -> Any:
    made = SimulatedDevice()
    with engine_on(made):
        yield made


def test_record_says_what_slots_share_and_counts_it_once(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = run(device, monkeypatch, steps=1)
    record = session.records[-1]
    assert record.shared_memory[0] == SharedMemory(
        "layer0", 0, ("layer0/core.region", "layer0/projection.region"), OUTPUT
    )
    assert {(row.op, row.nbytes, row.shared) for row in record.slots} == {
        ("core", QUERY + OUTPUT, OUTPUT),
        ("projection", OUTPUT + REST, OUTPUT),
    }
    assert record.bytes_out == LAYERS * (QUERY + OUTPUT + REST)
    assert record.bytes_of(lambda row: True)["layer0", 0] == QUERY + OUTPUT + REST
    assert record.bytes_of(lambda row: row.op == "core")["layer0", 0] == QUERY + OUTPUT


def test_what_two_slots_share_is_on_the_device_once_where_both_stay(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = run(device, monkeypatch, fraction=0.0)
    assert session.records[-1].peak_resident == LAYERS * (QUERY + OUTPUT + REST)


@pytest.mark.parametrize(("kept", "goes"), [("core", REST), ("projection", QUERY)])
def test_where_one_of_two_stays_slots_have_the_bytes_that_they_had_and_a_plan_is_not_made_anew(
    kept: str, goes: int, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = QUERY + OUTPUT + REST - goes
    session, _ = run(device, monkeypatch, budget_per_layer=budget, replan_drift=0.0)
    record, plan = session.records[-1], session.plan
    assert plan is not None
    assert {slot.name for slot in plan.slots if not slot.goes} == {f"layer{n}/{kept}.region" for n in range(LAYERS)}
    assert record.bytes_out == LAYERS * goes >= record.bytes_back > 0
    assert record.shared_memory[0].slots == ("layer0/core.region", "layer0/projection.region")
    assert record.peak_resident >= LAYERS * budget
    assert bytes_by_slot(record) == {(slot.name, slot.forward): slot.nbytes for slot in plan.slots}
    assert "budget was not met" not in session.report()
    apart = {(row.whole, row.nbytes) for row in record.slots if row.reason is Reason.ALIAS and row.layer == "layer0"}
    assert apart == {(f"layer0/{'projection' if kept == 'core' else 'core'}.region", OUTPUT)}


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_plan_within_a_limit_of_the_device_takes_what_it_foresees(
    share: float, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = LAYERS * (QUERY + OUTPUT + REST)
    limit = everything - int(share * (everything - 200 * KIB))
    session, most = run(device, monkeypatch, device_limit=limit)
    plan = session.plan
    assert plan is not None and plan.forecast is not None and session.records[-1].bytes_out > 0
    assert most <= limit
    assert plan.forecast.device_bytes == pytest.approx(most, abs=KIB)
