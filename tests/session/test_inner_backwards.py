"""A layer that runs a backward in its own forward, as a gradient penalty or an implicit layer does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession
from te_offload.offload import engine as engine_module
from te_offload.offload.cargo import Cargo
from te_offload.offload.states import SlotState
from te_offload.offload.transfer import CpuTransfer
from tests.support.late_copies import LateTransfer


class Penalized(torch.nn.Module):
    """Its output, times the norm of the output's gradient by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x * self.weight) * x
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * grad.square().sum().sqrt()


def _gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    found = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("transfer", "recalled"), [(LateTransfer, True), (CpuTransfer, False)], ids=["not left yet", "left"]
)
def test_what_an_inner_backward_has_read_goes_when_the_forward_ends_and_is_read_again(
    monkeypatch: pytest.MonkeyPatch, transfer: Any, recalled: bool
) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: transfer())
    cargos: list[Cargo] = []
    monkeypatch.setattr(Cargo, "move", _noting(cargos))
    x = torch.linspace(-2, 2, 64)
    expected = _gradients(Penalized(), x)
    model = Penalized()
    with OffloadSession([model], min_bytes=0, max_in_flight="1GiB") as session:
        for _ in range(2):
            with session.step():
                found = _gradients(model, x)
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        record = session.records[-1]
    assert record.bytes_out > 0
    assert sum(row.bytes_out for row in record.slots if row.fate is Fate.OFFLOADED) == record.bytes_out
    assert any(cargo.recalled for cargo in cargos) is recalled
    assert (record.bytes_back == record.bytes_out) is not recalled


def _noting(cargos: list[Cargo]) -> Any:
    move = Cargo.move

    def noted(cargo: Cargo, to: SlotState) -> None:
        cargos.append(cargo)
        move(cargo, to)

    return noted
