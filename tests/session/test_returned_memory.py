"""Memory that is back on the device: who holds it, how it is cut, and what its copies came after."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_offload import OffloadSession
from te_offload.errors import SavedTensorModifiedError
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.cargo import OWN_LOT, Lot
from te_offload.offload.decide import Rules
from te_offload.offload.engine import GROWTH_STEPS
from te_offload.offload.mover import Mover
from tests.session.test_bits import Layer, round_trip
from tests.session.test_lifetime import SPLITS, Stack
from tests.session.test_order import Op
from tests.support.late_copies import LateTransfer
from tests.support.mlp import run

GONE = "copied out for nobody"


def test_memory_of_tensors_that_were_given_out_goes_with_them_though_the_graph_lives() -> None:
    layer = Layer(lambda: list(torch.arange(64.0).split(32)))
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        y = layer(torch.ones(4, requires_grad=True)).sum()
        y.backward(retain_graph=True)
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in layer.seen[0]]
        assert not any(reference.expired() for reference in memory)
        layer.seen.clear()
        assert all(reference.expired() for reference in memory)
        del y
    assert session.records[-1].bytes_back > 0


class _Two(torch.nn.Module):
    """Saves two tensors, each in a node of the graph of its own, in one region."""

    session: OffloadSession

    def __init__(self) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.session.region("both"):
            return tuple(x * one for one in torch.arange(1024.0).split(512))


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(first, second)
        return x * first + x * second

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        first, second = ctx.saved_tensors
        return grad * first + grad * second, None, None


class _Multiplies(torch.nn.Module):
    """Saves two tensors, whose sum is the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Multiply.apply(x, torch.arange(512.0), torch.arange(512.0, 1024.0))  # type: ignore[no-untyped-call]
        return y


def _noted_memory(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """Filled with what lots allocate from now on."""
    memory: list[StorageWeakRef] = []
    allocate = Lot.allocate

    def noted(lot: Lot, device: torch.device) -> None:
        allocate(lot, device)
        assert lot.memory is not None
        memory.append(StorageWeakRef(lot.memory.untyped_storage()))

    monkeypatch.setattr(Lot, "allocate", noted)
    return memory


def test_memory_of_a_region_s_tensors_goes_with_the_step_though_nobody_asked_for_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = _noted_memory(monkeypatch)
    layer = _Two()
    x = torch.ones(512, requires_grad=True)
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            one, other = layer(x)
            one.sum().backward()
            assert len(memory) == 1 and not memory[0].expired()
        assert memory[0].expired() and other.grad_fn is not None
        assert session.records[-1].bytes_back == 4096
    assert x.grad is not None and torch.equal(x.grad, torch.arange(512.0))


def test_memory_of_a_region_s_tensors_goes_with_the_last_that_was_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _noted_memory(monkeypatch)
    layer = _Two()
    x = torch.ones(512, requires_grad=True)
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer.session = session
        one, other = layer(x)
        one.sum().backward(retain_graph=True)
        one.sum().backward(retain_graph=True)  # twice the one is not both
        assert len(memory) == 1 and not memory[0].expired()
        other.sum().backward(retain_graph=True)
        assert memory[0].expired()
        one.sum().backward()  # as often as autograd asks
        assert len(memory) == 2
    expected = 3 * torch.arange(512.0) + torch.arange(512.0, 1024.0)
    assert x.grad is not None and torch.equal(x.grad, expected)


def test_tensors_of_two_dtypes_in_memory_of_an_odd_length_come_back() -> None:
    def make() -> list[torch.Tensor]:
        base = torch.arange(29, dtype=torch.uint8)
        return [base[:24].view(torch.float64), base[24:]]

    found, session = round_trip(make)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(found, make(), strict=True)
    )
    assert session.records[-1].bytes_back >= 29


@pytest.mark.parametrize("shared", [False, True], ids=["small", "of one storage"])
def test_slots_that_go_together_leave_after_the_last_of_them_is_there(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    sent: list[Any] = []

    class Watched(Mover):
        def send_out(self, cargo: Any, sources: Any) -> None:
            sent.append((cargo, [user.entry for user in (one() for one in cargo.users) if user is not None]))
            super().send_out(cargo, sources)

    monkeypatch.setattr(engine_module, "Mover", Watched)
    monkeypatch.setattr(engine_module, "TIMED_FIRST", 0)
    monkeypatch.setattr(engine_module, "TIMED_EVERY", 1 << 30)
    bases = [torch.arange(192.0)] * 3 if shared else [torch.arange(64.0) for _ in range(3)]
    parts = [base.split(32)[2 * number * shared :][:2] for number, base in enumerate(bases)]
    layer = torch.nn.Sequential(*(Op(lambda number=number: list(parts[number])) for number in range(3)))
    with OffloadSession(layer, min_bytes=0) as session:
        for _ in range(2):
            sent.clear()
            with session.step():
                layer(torch.ones(1, requires_grad=True)).sum().backward()
        assert session.records[-1].bytes_back > 0 and not session.records[-1].timed
    ((cargo, entries),) = sent
    marks = [entry.ready.seconds for entry in entries]
    assert len(marks) == 3 and cargo.ready.seconds == max(marks)


def test_what_was_recalled_goes_once_its_copy_is_over_and_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = LateTransfer()
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: transfer)

    class RunsAll(Mover):
        def begin_use(self) -> None:
            for copy in transfer.out:
                copy.wait()
            super().begin_use()

    monkeypatch.setattr(engine_module, "Mover", RunsAll)
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=0))
    model = Stack(1)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight="1GiB") as session, session.step():
        run(model, SPLITS)
    labels = [moment.label for moment in session.records[-1].residency if moment.label in ("taken", GONE)]
    assert labels == ["taken", GONE, "taken", GONE, "taken", GONE]
    assert session.records[-1].bytes_out > 0


def test_host_memory_is_given_up_after_the_last_copy_back() -> None:
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session:
        for _ in range(GROWTH_STEPS + 1):  # until then the pool may have been made anew between steps
            with session.step():
                run(model, SPLITS)
        assert session._engine is not None
        queued = [cargo.back.ended for visit in session._engine.visits for cargo in visit.cargos if cargo.back]
        last = session._engine.pool.last_read
        assert last is not None and last.seconds == max(mark.seconds for mark in queued)  # type: ignore[attr-defined]


def test_copies_back_come_after_new_memory_was_filled_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch fills new memory with NaN, on the compute stream, which a copy on another stream must not overtake."""
    allocated: list[float] = []
    allocate = Lot.allocate

    def noted(lot: Lot, device: torch.device) -> None:
        allocate(lot, device)
        allocated.append(time.perf_counter())

    class Checked(LateTransfer):
        def copy_back(self, pieces: Any, after: Any) -> Any:
            assert max(mark.seconds for mark in after if not hasattr(mark, "owner")) >= allocated[-1]
            return super().copy_back(pieces, after)

    monkeypatch.setattr(Lot, "allocate", noted)
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: Checked())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session:
        for _ in range(2):
            with session.step():
                run(model, SPLITS)
    assert session.records[-1].bytes_back > 0 and allocated


@pytest.mark.parametrize("over", [False, True], ids=["before its copy is over", "after"])
def test_tensor_written_to_while_its_copy_may_read_it_is_an_error_and_later_it_is_none(
    monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    transfer = LateTransfer()
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: transfer)
    base = torch.arange(64.0)
    layer = Layer(lambda: [base])
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        y = layer(torch.ones(4, requires_grad=True)).sum()
        assert session._engine is not None
        (copy,) = transfer.out
        for moment in range(2):
            if moment == over:
                base.fill_(0.0)
            copy.wait()
            session._engine.mover.settle()
        if over:
            y.backward()
            assert torch.equal(layer.seen[0][0], torch.arange(64.0))
        else:
            with pytest.raises(SavedTensorModifiedError, match="written to in place"):
                y.backward()
    assert session.records[-1].bytes_out == 256


class _Home:
    """Gives memory of just so many bytes as were asked for."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def place_of(self, begin: int, nbytes: int) -> Any:
        def place() -> torch.Tensor:
            self.given.append(torch.empty(nbytes, dtype=torch.uint8))
            return self.given[-1]

        return place


def test_tensors_of_several_dtypes_come_back_to_a_home_whose_bytes_are_no_multiple_of_theirs() -> None:
    home = _Home()
    base = torch.empty(1 << 12, dtype=torch.uint8).random_(0, 100)
    base = base[-base.data_ptr() % 512 :]
    saved = [base[:512].view(torch.float32), base[512:1024].view(torch.bfloat16), base[1024:1027]]
    layer = Layer(lambda: saved)
    with OffloadSession(layer, min_bytes=0) as session:
        session.add_home(home)
        with session.step():
            layer(torch.ones(4, requires_grad=True)).sum().backward()
    assert [given.numel() for given in home.given] == [1027]
    for one, other in zip(saved, layer.seen[0], strict=True):
        assert torch.equal(one, other)
        assert other.untyped_storage()._cdata == home.given[0].untyped_storage()._cdata
    assert session.records[-1].bytes_back == 1027


def test_what_is_sent_away_only_when_its_backward_begins_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: LateTransfer())
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=0))
    layer = _Multiplies()
    x = torch.zeros(512, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # new memory has no old numbers in it
    try:
        with OffloadSession(layer, min_bytes=0, max_in_flight=0) as session:
            session.delay_commits(on=True)
            with session.step():
                y = layer(x)
                assert session.host_bytes == 0
                y.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert x.grad is not None and torch.equal(x.grad, torch.arange(512.0) + torch.arange(512.0, 1024.0))
    assert session.records[-1].bytes_back > 0 and session.delay is not None and session.delay.forced == 1


class _Branches(torch.nn.Module):
    """Saves two tensors in nodes of their own, each large enough for memory of its own when it is back."""

    session: OffloadSession

    def __init__(self) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.session.region("both"):
            return tuple(x * (number + torch.arange(float(OWN_LOT // 4))) for number in range(2))


def test_tensor_comes_back_again_while_another_of_its_copy_was_never_asked_for() -> None:
    layer = _Branches()
    x = torch.zeros(OWN_LOT // 4, requires_grad=True)
    with OffloadSession(layer, min_bytes=0, max_in_flight=0) as session:
        layer.session = session
        with session.step():
            first, second = layer(x)
            session._engine.mover.drain()  # type: ignore[union-attr]
            for times in range(1, 4):
                first.sum().backward(retain_graph=True)
                assert x.grad is not None and torch.equal(x.grad, times * torch.arange(float(OWN_LOT // 4)))
            second.sum().backward()
            assert x.grad is not None and torch.equal(x.grad, 4 * torch.arange(float(OWN_LOT // 4)) + 1)
    assert session.records[-1].bytes_back >= 2 * 2 * OWN_LOT
