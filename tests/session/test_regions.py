"""What a region saves: which of its tensors go, and that those that do come back as they were."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_offload import OffloadSession
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.mover import Mover
from te_offload.slots import Fate, Reason, SlotName
from tests.support.late_copies import LateTransfer


class _Save(torch.autograd.Function):
    seen: list[tuple[torch.Tensor, ...]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        ctx.seen.append(saved)
        return grad, None, *[None] * len(saved)


class Layer(torch.nn.Module):
    """Saves tensors in regions, each with what ``make`` gives; ``keep``: regions that stay."""

    session: OffloadSession

    def __init__(
        self, make: Callable[[], list[torch.Tensor]], names: tuple[str, ...], keep: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(8.0))
        self.make = make
        self.names = names
        self.keep = keep
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            with self.session.region(name, no_offload_activation=name in self.keep):
                x = _Save.apply(x, self.seen, *self.make())  # type: ignore[no-untyped-call]
        return x


def _through(make: Callable[[], list[torch.Tensor]], *names: str) -> tuple[list[Any], OffloadSession]:
    layer = Layer(make, names)
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    return layer.seen, session


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


def _rows(session: OffloadSession) -> list[Any]:
    return [row for row in session.records[-1].slots if row.slot is SlotName.REGION]


def test_tensors_of_many_kinds_come_back_as_they_were() -> None:
    def make() -> list[torch.Tensor]:
        base = torch.arange(4096, dtype=torch.float32)
        return [
            *base.split(256),
            base[:2048].view(32, 64).t(),
            torch.arange(7, dtype=torch.uint8),
            torch.empty(0, 3),
            base[16:48].view(torch.bfloat16),
            torch.tensor(3.0),
            torch.arange(64.0, dtype=torch.float64),
        ]

    (found,), session = _through(make, "all")
    expected = make()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one, other)
    (row,) = _rows(session)
    assert (row.fate, row.tensors) == (Fate.OFFLOADED, len(expected))
    assert session.records[-1].bytes_back == session.records[-1].bytes_out >= 4096 * 4 + 7 + 4 + 512


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.ones(8, dtype=torch.complex64).conj(),
        lambda: torch.ones(8, dtype=torch.complex64).conj().imag,
        lambda: torch.ones(3, 3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(8), 0.5, 0, torch.quint8),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["conjugate", "negative", "sparse", "quantized", "meta"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # which torch 2.15 says will go
def test_tensor_of_a_region_that_is_no_dense_memory_stays_and_the_others_go(odd: Callable[[], torch.Tensor]) -> None:
    (found,), session = _through(lambda: [torch.ones(100), odd(), torch.ones(100), odd()], "mixed")
    assert [float(found[0].sum()), float(found[2].sum())] == [100, 100]
    assert type(found[1]) is torch.Tensor and found[1].layout is odd().layout
    if not found[1].is_meta:
        assert torch.equal(_dense(found[1]), _dense(odd()))
    (row,) = _rows(session)
    assert (row.fate, row.tensors) == (Fate.OFFLOADED, 2)
    (other,) = [row for row in session.records[-1].slots if row.slot is SlotName.OTHER]
    assert (other.fate, other.reason, other.tensors) == (Fate.KEPT, Reason.NOT_PLAIN, 2)
    assert session.records[-1].bytes_out == 800


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_stay() -> None:
    class Nested(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.session.region("nested"):
                y = x * self.weight
                parts = torch.nn.functional.relu(torch.nested.as_nested_tensor([y[:3], y[3:]]))
                return torch.cat(list(parts.unbind()))

    layer = Nested(list, ())
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            layer(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, layer.weight.detach() * (x > 0))
    assert [row.reason for row in session.records[-1].slots if row.slot is SlotName.OTHER] == [Reason.NOT_PLAIN]
    assert session.records[-1].bytes_back >= x.nbytes


def test_tensor_of_a_region_stays_with_a_conjugate_view_of_its_memory() -> None:
    def make() -> list[torch.Tensor]:
        z = torch.ones(50, dtype=torch.complex64)
        return [z, z.conj()]

    _, session = _through(make, "shared")
    (row,) = _rows(session)
    assert (row.fate, row.reason, row.tensors) == (Fate.KEPT, Reason.ALIAS, 1)
    assert session.records[-1].bytes_out == 0


def test_region_of_which_nothing_is_dense_memory_stays() -> None:
    _, session = _through(lambda: [torch.ones(3, 3).to_sparse(), torch.ones(3, 3).to_sparse()], "sparse")
    (row,) = _rows(session)
    assert (row.fate, row.reason, row.tensors) == (Fate.KEPT, Reason.NOT_PLAIN, 2)
    assert session.records[-1].bytes_out == 0


def test_marked_tensor_in_a_region_stays_and_the_others_go() -> None:
    def make() -> list[torch.Tensor]:
        tensors = [torch.ones(100), torch.full((50,), 2.0), torch.ones(100)]
        tensors[1]._TE_do_not_offload = True  # type: ignore[attr-defined]
        return tensors

    (found,), session = _through(make, "some")
    assert [float(tensor.sum()) for tensor in found] == [100, 100, 100]
    (row,) = _rows(session)
    assert (row.fate, row.tensors) == (Fate.OFFLOADED, 2)
    assert session.records[-1].bytes_out == 800


def test_parameter_and_a_view_of_one_in_a_region_are_left_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    (found,), session = _through(lambda: [torch.ones(100), weight, weight[:10], torch.ones(100)], "with one")
    assert found[1].data_ptr() == weight.data_ptr()
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in found)
    assert session.records[-1].bytes_out == 800


def test_storage_of_a_tensor_without_elements_is_not_held_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: LateTransfer())
    large: list[StorageWeakRef] = []

    def make() -> list[torch.Tensor]:
        storage = torch.empty(1 << 20)
        large.append(StorageWeakRef(storage.untyped_storage()))
        return [torch.ones(100), storage[:0]]

    layer = Layer(make, ("a",))
    with OffloadSession(layer, min_bytes=0, max_in_flight="1GiB") as session:
        layer.session = session
        with session.step():
            y = layer(torch.ones(1, requires_grad=True)).sum()
            assert large[0].expired()
            y.backward()
    assert [tensor.numel() for tensor in layer.seen[0]] == [100, 0]
    assert session.records[-1].bytes_out == 400


def test_regions_of_one_name_are_one_slot() -> None:
    seen, session = _through(lambda: [torch.ones(100), torch.zeros(100)], "qkv", "norm", "qkv")
    assert [len(found) for found in seen] == [2, 2, 2]
    assert [(row.op, row.tensors) for row in _rows(session)] == [("qkv", 4), ("norm", 2)]
    assert session.records[-1].bytes_out == 6 * 400


def test_memory_of_two_regions_leaves_after_both_have_written_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=0))  # each has its own mark
    base = torch.zeros(1024)
    written: list[float] = []
    marks: list[float] = []
    real = Mover.send_out

    def send_out(mover: Mover, cargo: Any, sources: Any) -> None:
        marks.append(cargo.ready.seconds)
        real(mover, cargo, sources)

    def make() -> list[torch.Tensor]:
        half = base.data[512 * len(written) :][:512]
        half.fill_(len(written) + 1)
        written.append(time.perf_counter())
        return [half]

    monkeypatch.setattr(Mover, "send_out", send_out)
    found, session = _through(make, "one", "other")
    assert [float(half.mean()) for (half,) in found] == [2.0, 1.0]
    assert session.records[-1].bytes_out == session.records[-1].bytes_back == 4096
    assert len(marks) == 1 and marks[0] > written[-1]


class Nested(Layer):
    """A region inside another one, and tensors after both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def save(x: torch.Tensor, count: int) -> torch.Tensor:
            y: torch.Tensor = _Save.apply(x, self.seen, torch.full((count,), float(count)))  # type: ignore[no-untyped-call]
            return y

        with self.session.region("outer"):
            x = save(x, 100)
            with self.session.region("inner"):
                x = save(x, 50)
            x = save(x, 25)
        return save(x, 10)


def test_region_has_what_is_saved_between_its_begin_and_its_end_and_in_no_region_inside_it() -> None:
    layer = Nested(list, ())
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    record = session.records[-1]
    found = {(row.op, row.slot): (row.tensors, row.nbytes, row.fate) for row in record.slots}
    assert found == {
        ("outer", SlotName.REGION): (2, 4 * 125, Fate.OFFLOADED),
        ("inner", SlotName.REGION): (1, 4 * 50, Fate.OFFLOADED),
        ("", SlotName.OTHER): (1, 4 * 10, Fate.OFFLOADED),
    }
    assert [float(tensor.sum()) for (tensor,) in layer.seen] == [100, 25**2, 50**2, 100**2]
    assert record.bytes_back == 4 * 185


@pytest.mark.parametrize(("together", "count", "early"), [(0, 1, True), (1 << 20, 1, False), (1 << 20, 17, True)])
def test_region_of_many_bytes_or_tensors_may_leave_before_its_layers_forward_ends(
    monkeypatch: pytest.MonkeyPatch, together: int, count: int, early: bool
) -> None:
    monkeypatch.setattr(session_module, "Rules", functools.partial(Rules, together=together))
    marks: list[float] = []
    ended: list[float] = []

    class Watched(Mover):
        def send_out(self, cargo: Any, sources: Any) -> None:
            marks.append(cargo.ready.seconds)
            super().send_out(cargo, sources)

    class Goes(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            ended.append(time.perf_counter())
            return y

    monkeypatch.setattr(engine_module, "Mover", Watched)
    layer = Goes(lambda: [torch.ones(100) for _ in range(count)], ("one",))
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    assert len(marks) == 1 and session.records[-1].bytes_back == 400 * count
    assert (marks[0] < ended[0]) is early
