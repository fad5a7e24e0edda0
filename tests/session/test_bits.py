"""What a session takes comes back bit for bit: views, aliases, layouts, wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from te_offload import Fate, OffloadSession, Reason, ops
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp, run

pytestmark = pytest.mark.usefixtures("alone_and_together")


class SaveAll(torch.autograd.Function):
    """Saves tensors in forward, and shows in backward what it got back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[], list[torch.Tensor]], seen: list[Any]) -> torch.Tensor:
        saved = make()
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.seen.append(ctx.saved_tensors)
        return grads[0], None, None


save_all: Callable[..., Any] = SaveAll.apply


class Layer(torch.nn.Module):
    """A layer that saves what ``make`` makes."""

    def __init__(self, make: Callable[[], list[torch.Tensor]]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.make = make
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = save_all(x + self.weight, self.make, self.seen)
        return y


def round_trip(
    make: Callable[[], list[torch.Tensor]], **arguments: Any
) -> tuple[tuple[torch.Tensor, ...], OffloadSession]:
    layer = Layer(make)
    with OffloadSession(layer, **({"min_bytes": 0} | arguments)) as session, session.step():
        layer(torch.ones(4, requires_grad=True)).sum().backward()
    return layer.seen[0], session


def other_row(session: OffloadSession, fate: Fate) -> Any:
    return next(row for row in session.records[-1].slots if row.fate is fate and row.tensors)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool], ids=str
)
def test_dtypes(dtype: torch.dtype) -> None:
    value = torch.randint(0, 2, (300, 7)).to(dtype)
    (found,), session = round_trip(lambda: [value.clone()])
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    assert session.records[-1].bytes_back >= value.nbytes


@pytest.mark.parametrize("odd", [False, True])
def test_tensors_of_several_dtypes_come_back_beside_each_other_and_beside_odd_ones(odd: bool) -> None:
    made = [
        torch.arange(50, dtype=torch.float64),
        torch.arange(60, dtype=torch.int16).view(5, 12),
        torch.arange(7, dtype=torch.float32) / 3,
        torch.arange(33, dtype=torch.uint8),
    ]
    if odd:
        made += [torch.empty(0, 3), torch.arange(32, dtype=torch.float32).view(4, 8).t()]
    found, session = round_trip(lambda: [one.clone() for one in made], max_in_flight=0)
    for one, back in zip(made, found, strict=True):
        assert (back.shape, back.dtype, back.stride()) == (one.shape, one.dtype, one.stride())
        assert torch.equal(back, one)
    assert session.records[-1].bytes_back == sum(one.nbytes for one in made)


def test_nan_payloads_infinities_and_negative_zero_survive() -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 0x7F800001, 1], dtype=torch.int32)
    (found,), _ = round_trip(lambda: [bits.view(torch.float32).clone()])
    assert torch.equal(found.view(torch.int32), bits)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    transpose=st.booleans(),
    step=st.integers(1, 3),
    start=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_sizes_strides_and_values_of_any_view(rows: int, columns: int, transpose: bool, step: int, start: int) -> None:
    base = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    view = (base.t() if transpose else base)[start::step, ::step]

    def make() -> list[torch.Tensor]:
        copy = base.clone()
        return [(copy.t() if transpose else copy)[start::step, ::step]]

    (found,), session = round_trip(make)
    assert found.shape == view.shape and found.stride() == view.stride()
    assert torch.equal(found, view)
    assert (session.records[-1].bytes_out > 0) == (view.numel() > 0)


def test_overlapping_views_are_copied_once_and_stay_aliases() -> None:
    def make() -> list[torch.Tensor]:
        base = torch.arange(1000, dtype=torch.float32)
        return [base[:600], base[400:], base, base.view(10, 100).t()]

    found, session = round_trip(make)
    assert session.records[-1].bytes_out == session.records[-1].bytes_back == 4000
    assert session.records[-1].copies_out == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    assert torch.equal(found[0], torch.arange(600.0)) and torch.equal(found[1], torch.arange(400.0, 1000.0))


def test_bytes_between_distant_views_are_not_copied() -> None:
    def make() -> list[torch.Tensor]:
        base = torch.arange(100_000, dtype=torch.float32)
        return [base[:1024], base[-1024:]]

    found, session = round_trip(make)
    assert session.records[-1].bytes_out <= 2 * 4096 + 512
    assert torch.equal(found[1], torch.arange(100_000.0)[-1024:])


def test_one_tensor_comes_back_as_often_as_autograd_asks_and_its_memory_goes_with_the_first() -> None:
    layer = Layer(lambda: [torch.arange(64.0).view(8, 8)])
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        y = layer(torch.ones(4, requires_grad=True)).sum()
        for number in range(2):
            y.backward(retain_graph=True)
            (found,) = layer.seen.pop()
            assert torch.equal(found, torch.arange(64.0).view(8, 8)) and found.is_contiguous()
            memory = StorageWeakRef(found.untyped_storage())
            del found
            assert number == 1 or memory.expired()
        del y
    assert session.records[-1].bytes_back == 2 * session.records[-1].bytes_out == 2 * 256


def test_restored_memory_is_aligned_as_the_original_was() -> None:
    original = torch.arange(10_000, dtype=torch.bfloat16)[1001:]
    address = original.data_ptr()
    (found,), _ = round_trip(lambda: [original])
    offset = found.storage_offset() * found.element_size()  # an allocation of the device begins at a multiple of 512
    assert offset % 512 == address % 512


def test_expanded_tensor_is_stored_once() -> None:
    (found,), session = round_trip(lambda: [torch.arange(64.0).view(64, 1).expand(64, 100)])
    assert session.records[-1].bytes_out == 64 * 4
    assert torch.equal(found, torch.arange(64.0).view(64, 1).expand(64, 100))


def test_empty_tensor_comes_back() -> None:
    (found, other), _ = round_trip(lambda: [torch.empty(0, 7), torch.ones(5)])
    assert found.shape == (0, 7)
    assert torch.equal(other, torch.ones(5))


def test_quantized_wrapper_comes_back_whole() -> None:
    data = torch.randint(0, 200, (64, 32), dtype=torch.uint8)

    def make() -> list[torch.Tensor]:
        wrapper = Float8Tensor(
            shape=(64, 32),
            dtype=torch.bfloat16,
            data=data.clone(),
            fp8_scale_inv=torch.tensor([0.25]),
            fp8_dtype=DType.kFloat8E4M3,
            data_transpose=data.t().contiguous(),
            device=torch.device("cpu"),
        )
        return [wrapper]

    (found,), session = round_trip(make)
    assert isinstance(found, Float8Tensor)
    assert torch.equal(found._data, data) and torch.equal(found._transpose, data.t())
    assert torch.equal(found._scale_inv, torch.tensor([0.25]))
    assert session.records[-1].bytes_out == 2 * 64 * 32 + 4


def test_parameter_and_its_views_never_move() -> None:
    weight = torch.nn.Parameter(torch.ones(1000))

    class Owner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight
            self.register_buffer("table", torch.ones(1000))
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor) -> Any:
            return save_all(
                x, lambda: [weight, weight.detach()[10:], self.get_buffer("table")[5:], torch.ones(10)], self.seen
            )

    owner = Owner()
    with OffloadSession(owner, min_bytes=0) as session, session.step():
        owner(torch.ones(4, requires_grad=True)).sum().backward()
    assert owner.seen[0][0].data_ptr() == weight.data_ptr()
    assert owner.seen[0][1].data_ptr() == weight[10:].data_ptr()
    assert owner.seen[0][2].data_ptr() == owner.get_buffer("table")[5:].data_ptr()
    assert other_row(session, Fate.KEPT).reason is Reason.PARAMETER
    assert session.records[-1].bytes_out == 40


def test_view_of_a_parameter_is_passed_through_and_has_no_row() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)  # saves a transposed view of its weight
    x = torch.ones(3, 8, requires_grad=True)
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(x * 1).sum().backward()
    assert [(row.nbytes, row.fate) for row in session.records[-1].slots] == [(3 * 8 * 4, Fate.OFFLOADED)]


def test_object_that_two_ops_save_belongs_to_both_slots() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = ops.ScaledSReLU(), ops.ScaledTanhSReLU(tanh_clamp_scale=2.0)
            self.weight = torch.nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor, scales: torch.Tensor) -> Any:
            h = x + self.weight
            return te.ops.Sequential(te.ops.MakeExtraOutput(), self.one)(h, scales)[0] + self.two(h, scales)

    def call(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        x, _, scales = make_inputs((4, 0, 6))
        module(x, scales).square().sum().backward()
        return gradients(module, x, scales)

    module = Twice()
    expected = call(Twice())
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = call(module)
    assert_same_bits(expected, found)
    rows = {row.op: row for row in session.records[-1].slots if row.op}
    assert {op: (row.fate, row.nbytes) for op, row in rows.items()} == dict.fromkeys(
        ("one", "two"), (Fate.OFFLOADED, 640)
    )
    assert sorted(row.bytes_out for row in rows.values()) == [0, 640]


def test_slot_that_shares_memory_with_a_kept_one_stays() -> None:
    class Sharing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = make_mlp(keep=["fc1_input"])

        def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            x = x * 1  # a layer's input as most are: no leaf
            y: torch.Tensor = self.mlp(x, *rest) + x.square()  # square saves x itself
            return y

    module = Sharing()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = run(module, (4, 0, 6))
    assert_same_bits(run(module, (4, 0, 6)), found)
    reasons = {row.name: row.reason for row in session.records[-1].slots if row.fate is Fate.KEPT}
    assert reasons["layer0/mlp.0.fc1_input"] is Reason.ASKED
    assert reasons["layer0/other"] is Reason.ALIAS
    assert session.records[-1].bytes_out > 0


def test_small_slots_stay_and_say_so() -> None:
    _, session = round_trip(lambda: [torch.ones(511), torch.ones(512), torch.ones(1000)], min_bytes="2KiB")
    row = other_row(session, Fate.KEPT)
    assert (row.reason, row.nbytes) == (Reason.TOO_SMALL, 2044)
    assert session.records[-1].bytes_out == 2048 + 4000


def test_host_limit_is_kept_and_the_slot_says_so() -> None:
    found, session = round_trip(lambda: [torch.ones(1000), torch.ones(1000)], host_limit=4096)
    assert other_row(session, Fate.KEPT).reason is Reason.NO_ROOM
    assert (session.records[-1].host_peak, session.records[-1].bytes_out) == (4096, 4000)
    assert all(torch.equal(tensor, torch.ones(1000)) for tensor in found)


def test_tensor_marked_by_transformer_engine_stays() -> None:
    def make() -> list[torch.Tensor]:
        marked = torch.ones(1000)
        marked._TE_do_not_offload = True  # type: ignore[attr-defined]
        return [marked, torch.ones(10)]

    _, session = round_trip(make)
    assert other_row(session, Fate.KEPT).reason is Reason.MARKED
    assert session.records[-1].bytes_out == 40


def test_complex_conjugate_view_stays() -> None:
    (found, _), session = round_trip(lambda: [torch.ones(50, dtype=torch.complex64).conj(), torch.ones(10)])
    assert found.is_conj()
    assert other_row(session, Fate.KEPT).reason is Reason.NOT_PLAIN
    assert session.records[-1].bytes_out == 40


def test_disabled_session_records_and_moves_nothing() -> None:
    _, session = round_trip(lambda: [torch.ones(1000)], enabled=False)
    assert other_row(session, Fate.KEPT).reason is Reason.DISABLED
    assert session.records[-1].bytes_out == 0
    assert session.records[-1].peak_resident >= 4000
