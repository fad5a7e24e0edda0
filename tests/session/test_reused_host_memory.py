"""Host memory that was copied back from, and is copied to again: the copy out comes after the copy back."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from te_offload import OffloadSession
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.transfer import Copy, CpuTransfer, Mark, Piece


class _Moment:
    def __init__(self, number: int) -> None:
        self.number = number

    def is_over(self) -> bool:
        return False  # the device is slow

    def wait(self) -> None: ...


class _Ordered(CpuTransfer):
    """Numbers the moments of the compute stream and of copies, and compares those that use the same host memory."""

    def __init__(self) -> None:
        self.number = self.compared = 0
        self.read: list[tuple[int, int, int]] = []

    def mark(self) -> Mark:
        self.number += 1
        return _Moment(self.number)

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        waits = max(mark.number for mark in after)  # type: ignore[attr-defined]
        for _, target, nbytes in pieces:
            for begin, end, number in self.read:
                if begin < target + nbytes and target < end:
                    self.compared += 1
                    assert number < waits, "it may overwrite what is still to be copied back"
        return CpuTransfer.copy_out(self, pieces, after)

    def copy_back(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        copy = CpuTransfer.copy_out(self, pieces, after)
        self.read += [(source, source + nbytes, copy.ended.number) for source, _, nbytes in pieces]  # type: ignore[attr-defined]
        return copy

    def milliseconds(self, first: Mark, second: Mark) -> float:
        return float(second.number - first.number)  # type: ignore[attr-defined]


class _Layer(torch.nn.Module):
    """Saves a tensor in a region; and then runs a backward of a forward before it, if it is given one."""

    session: OffloadSession

    def __init__(self) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.inside: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.session.region("product"):
            y = x * torch.ones(512)
        while self.inside:
            with torch.enable_grad():
                self.inside.pop().sum().backward()
        return y


@pytest.mark.parametrize("delay", [False, True])
def test_copy_out_comes_after_the_copy_back_from_its_host_memory(monkeypatch: pytest.MonkeyPatch, delay: bool) -> None:
    transfer = _Ordered()
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: transfer)
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=0))
    layers = [_Layer(), _Layer(), _Layer()]
    x = torch.zeros(512, requires_grad=True)
    with OffloadSession(layers, min_bytes=0, max_in_flight=0) as session:
        session.delay_commits(on=delay)
        for layer in layers:
            layer.session = session
        with session.step():
            first, second = layers[0](x), layers[1](x)
            session.commit_delayed()
            session._engine.mover.drain()  # type: ignore[union-attr]
            first.sum().backward(retain_graph=True)
            if delay:
                third = layers[2](x)  # its copies are put off until another forward is read of for the first time
                first.sum().backward()
            else:
                layers[2].inside.append(first)
                third = layers[2](x)
            second.sum().backward()
            third.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((512,), 4.0))
    assert session.records[-1].bytes_out == 3 * 2048 and transfer.compared > 0
