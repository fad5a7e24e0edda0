"""Something fails anywhere in a step: the caller sees that error, nothing stays on loan, and the next step is sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from te_offload.offload import engine as engine_module
from te_offload.offload import visit as visit_module
from te_offload.offload.cargo import Lot
from te_offload.offload.host_pool import HostPool
from te_offload.offload.transfer import Copy, CpuTransfer, Mark, Piece
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.mlp import assert_same_bits, run

pytestmark = pytest.mark.usefixtures("alone_and_together")


class _Fault(Exception):
    """None of the errors that a session raises by itself."""


class _Points:
    """The places at which something may fail, in the order in which a step comes to them; one of them does."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.fails_at = -1
        self.counts = False

    def come_to(self, name: str) -> None:
        if self.counts:
            self.names.append(name)
            if len(self.names) == self.fails_at + 1:
                raise _Fault(name)

    def before(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def comes(*arguments: Any, **named: Any) -> Any:
            self.come_to(name)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, comes)


class _Failing(CpuTransfer):
    def __init__(self, points: _Points) -> None:
        self.points = points

    def mark(self) -> Mark:
        self.points.come_to("mark")
        return super().mark()

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        self.points.come_to("copy_out")
        return CpuTransfer.copy_out(self, pieces, after)

    def copy_back(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        self.points.come_to("copy_back")
        return CpuTransfer.copy_out(self, pieces, after)

    def block_compute(self, mark: Mark) -> None:
        self.points.come_to("block_compute")


class _Regions(torch.nn.Module):
    """A layer whose regions save several tensors each."""

    session: OffloadSession | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.session is None:
            return self._second(x, self._first(x))
        with self.session.region("up"):
            hidden = self._first(x)
        with self.session.region("down"):
            return self._second(x, hidden)

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.up(x))
        return hidden * hidden.sigmoid()

    def _second(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(hidden)).exp()


class _Ops:
    """Grouped MLPs, whose ops hand their slots over."""

    def __init__(self) -> None:
        self.model = Stack(2)
        self.layers = list(self.model.layers)

    def attach(self, session: OffloadSession) -> None: ...

    def step(self, seed: int) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        return run(self.model, SPLITS, seed=seed)


class _Layers:
    """Layers of torch's modules, whose saved tensors pass the hooks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = [_Regions(), _Regions()]
        self.model = torch.nn.Sequential(*self.layers)

    def attach(self, session: OffloadSession) -> None:
        for layer in self.layers:
            layer.session = session

    def step(self, seed: int) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        self.model(x).sum().backward()
        assert x.grad is not None
        return {"x": x.grad} | {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("kind", [_Ops, _Layers])
def test_a_fault_anywhere_in_a_step_is_what_the_caller_sees_and_the_next_step_is_sound(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    points = _Points()
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: _Failing(points))
    for owner, name in ((Lot, "allocate"), (HostPool, "acquire"), (visit_module, "decide"), (visit_module, "Saved")):
        points.before(monkeypatch, owner, name)
    expected = kind().step(2)
    model = kind()
    met: set[str] = set()
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session:
        model.attach(session)
        with session.step():
            model.step(0)
        number, failed = 0, True
        while failed:
            points.names, points.fails_at, points.counts = [], number, True
            try:
                with session.step():
                    model.step(1)
                failed = False
            except _Fault as fault:
                met.add(str(fault))
            points.counts = False
            assert session.host_bytes == 0
            with session.step():
                found = model.step(2)
            assert_same_bits(expected, found)
            assert all(record.bytes_out >= record.bytes_back for record in session.records)
            assert session.records[-1].bytes_out > 0
            number += 1
    assert met == {"Saved", "acquire", "allocate", "block_compute", "copy_back", "copy_out", "decide", "mark"}
