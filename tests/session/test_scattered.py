"""Tensors of a region that lie apart in memory, at multiples of 512 bytes as a GPU's allocator places them: what goes and
comes back in one piece of memory, and who holds it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from te_offload import OffloadSession
from te_offload.errors import CorruptionError, SavedTensorModifiedError
from te_offload.offload import engine as engine_module
from te_offload.offload import load
from te_offload.offload.cargo import OWN_LOT
from te_offload.offload.extents import Scattered
from te_offload.offload.saved import Part
from te_offload.offload.transfer import Copy, CpuTransfer
from tests.session.test_order import Op
from tests.session.test_regions import Layer
from tests.session.test_verify import use
from tests.support.late_copies import LateTransfer

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64)


def apart(shapes: list[tuple[tuple[int, ...], torch.dtype]], gap: int = 512) -> list[torch.Tensor]:
    """Tensors of their own storages at multiples of 512, in one map of memory, with random bytes; none beside the next."""
    lengths = [-(-torch.Size(shape).numel() * dtype.itemsize // 512) * 512 for shape, dtype in shapes]
    memory = mmap.mmap(-1, sum(lengths) + gap * len(lengths))
    found, begin = [], 0
    for (shape, dtype), length in zip(shapes, lengths, strict=True):
        count = torch.Size(shape).numel()
        one = torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=count * dtype.itemsize)
        one.random_(0, 120)
        found.append(one.view(dtype).view(shape))
        begin += length + gap
    return found


def region(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], OffloadSession]:
    """What comes back of tensors that a region saves."""
    layer = Layer(lambda: tensors, ("norms",))
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    return list(layer.seen[0]), session


def ops(*parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], OffloadSession]:
    """The same of ops that hand over all tensors of their slots at once."""
    owners = [Op(functools.partial(list, part)) for part in parts]
    layer = torch.nn.Sequential(*owners)
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(torch.ones(1, requires_grad=True)).sum().backward()
    return [tensor for op in owners for tensor in op.seen], session


def two_ops(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], OffloadSession]:
    """The same of two ops whose slots go together."""
    return ops(tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :])


def an_op_each(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], OffloadSession]:
    """The same of as many ops as there are tensors, whose slots go together."""
    return ops(*[[tensor] for tensor in tensors])


@pytest.fixture(autouse=True, scope="module", params=["one by one", "at once"])
def however_they_are_cut(request: pytest.FixtureRequest) -> Iterator[None]:
    """A few tensors are cut one by one from memory that is back, many at once."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "at once":
            patch.setattr(load, "_FEW", 1)
            patch.setattr(load, "_LONE", 1)
        yield


@pytest.fixture
def cut_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the numbers of tensors that each piece of memory holds of those that are cut at once."""
    monkeypatch.setattr(load, "_FEW", 1)
    monkeypatch.setattr(load, "_LONE", 1)
    found: list[int] = []
    share = Part.share

    def noted(self: Part, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.strip, Scattered):
            found.append(len(self.strip.members))
        share(self, *args, **kwargs)

    monkeypatch.setattr(Part, "share", noted)
    return found


@pytest.mark.parametrize("through", [region, ops, two_ops, an_op_each])
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
            st.sampled_from(DTYPES),
        ),
        min_size=2,
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_any_tensors_that_lie_apart_come_back_as_they_were(
    through: Any, shapes: list[tuple[tuple[int, ...], torch.dtype]], order: random.Random
) -> None:
    tensors = apart(shapes)
    order.shuffle(tensors)
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]
    back, session = through(tensors)
    for tensor, bytes_before, found in zip(tensors, before, back, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert found.data_ptr() != tensor.data_ptr()
        assert torch.equal(found.view(torch.uint8), bytes_before)
        offset = found.storage_offset() * found.element_size()  # an allocation of a GPU begins at a multiple of 512
        assert offset % 512 == 0
    record = session.records[-1]
    assert record.bytes_out == record.bytes_back == sum(tensor.nbytes for tensor in tensors)
    assert record.copies_out == len(tensors)


@pytest.mark.parametrize("through", [region, ops, an_op_each])
def test_small_ones_of_one_dtype_share_memory_and_large_ones_have_their_own(through: Any) -> None:
    small = [((3, 50), torch.bfloat16)] * 5 + [((70,), torch.float32)] * 3 + [((9,), torch.uint8)]
    back, _ = through(apart([*small, ((OWN_LOT,), torch.uint8)]))
    memory = [tensor.untyped_storage()._cdata for tensor in back]
    assert len(set(memory[:9])) == 1 and len(set(memory)) == 2
    assert back[9].untyped_storage().nbytes() == OWN_LOT


@pytest.mark.parametrize("through", [region, ops, two_ops, an_op_each])
def test_those_that_touch_are_one_copy_on_a_gpu_and_come_back_each_to_its_own_place(
    monkeypatch: pytest.MonkeyPatch, through: Any
) -> None:
    monkeypatch.setattr(load, "joins_storages", lambda _: True)
    tensors = [*apart([((256,), torch.bfloat16)] * 4, gap=0), *apart([((256,), torch.bfloat16)] * 4)]
    order = [4, 0, 5, 1, 6, 3, 7, 2]
    before = [tensors[number].clone() for number in order]
    back, session = through([tensors[number] for number in order])
    assert all(torch.equal(one, other) for one, other in zip(back, before, strict=True))
    record = session.records[-1]
    assert (record.copies_out, record.bytes_out) == (5, 8 * 512)


def test_those_of_two_regions_go_together(cut_at_once: list[int]) -> None:
    tensors = apart([((64,), torch.bfloat16)] * 6)
    before = [tensor.clone() for tensor in tensors]
    sets = [tensors[:4], tensors[4:]]
    layer = Layer(lambda: sets.pop(0), ("a", "b"))
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    assert cut_at_once == [6]
    back = [*layer.seen[1], *layer.seen[0]]  # the last region's are read first
    assert all(torch.equal(one, other) for one, other in zip(back, before, strict=True))
    assert session.records[-1].bytes_back == 6 * 128


def test_small_slots_that_go_together_keep_their_alignment() -> None:
    first, second = apart([((64,), torch.bfloat16), ((65,), torch.bfloat16)])
    shifted = second[1:]
    back, session = ops([first], [shifted])
    assert torch.equal(back[0], first) and torch.equal(back[1], shifted)
    offsets = [tensor.storage_offset() * tensor.element_size() % 512 for tensor in back]
    assert offsets == [0, 2]
    assert session.records[-1].bytes_back >= 256


def test_slot_without_elements_is_no_copy_among_those_that_go_together() -> None:
    tensors = apart([((64,), torch.bfloat16), ((1,), torch.uint8), ((32,), torch.float32)])
    tensors[1] = tensors[1][:0]
    back, session = ops(*[[tensor] for tensor in tensors])
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
    record = session.records[-1]
    assert (record.copies_out, record.bytes_out, record.bytes_back) == (2, 256, 256)


@pytest.mark.parametrize("touch", [False, True])
@pytest.mark.parametrize("through", [region, ops, two_ops, an_op_each])
def test_stride_of_a_dimension_of_one_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch, through: Any, touch: bool
) -> None:
    monkeypatch.setattr(load, "joins_storages", lambda _: touch)
    tensors = apart([((128, 4), torch.float32)] * 4, gap=0 if touch else 512)
    tensors[1] = tensors[1].as_strided((1, 512), (777, 1))
    tensors[3] = tensors[3].view(1, 512)
    back, session = through(tensors)
    for tensor, found in zip(tensors, back, strict=True):
        assert (found.shape, found.stride()) == (tensor.shape, tensor.stride())
        assert torch.equal(found, tensor)
    assert session.records[-1].bytes_back == 4 * 2048


@pytest.mark.parametrize("through", [region, ops])
def test_one_without_elements_is_no_copy_beside_others_that_lie_apart(through: Any) -> None:
    tensors = apart([((64,), torch.bfloat16), ((1,), torch.uint8), ((32,), torch.float32), ((8,), torch.int64)])
    tensors[1] = tensors[1][:0]
    back, session = through(tensors)
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
    record = session.records[-1]
    assert (record.copies_out, record.bytes_out, record.bytes_back) == (3, 320, 320)


def test_slot_without_elements_does_not_hold_the_memory_that_it_is_a_view_of() -> None:
    def make() -> list[torch.Tensor]:
        whole = torch.zeros(1 << 16)
        memory.append(StorageWeakRef(whole.untyped_storage()))
        return [whole[:0], whole[5:5]]

    memory: list[StorageWeakRef] = []
    op = Op(make)
    layer = torch.nn.Sequential(op)
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        y = layer(torch.ones(1, requires_grad=True)).sum()
        assert memory[0].expired()
        y.backward()
    assert [tensor.shape for tensor in op.seen] == [(0,), (0,)]


def test_their_memory_goes_with_the_last_of_them_though_the_graph_lives(cut_at_once: list[int]) -> None:
    tensors = apart([((300,), torch.float32)] * 4)
    layer = Layer(lambda: tensors, ("norms",))
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            y = layer(torch.ones(1, requires_grad=True)).sum()
            y.backward(retain_graph=True)
            memory = StorageWeakRef(layer.seen[0][0].untyped_storage())
            assert not memory.expired()
            layer.seen.clear()
            assert memory.expired()
            y.backward()
            assert all(torch.equal(one, other) for one, other in zip(layer.seen[0], tensors, strict=True))
    assert cut_at_once == [4]
    assert session.records[-1].bytes_back == 2 * session.records[-1].bytes_out == 2 * 4 * 1200


class _Apart(torch.nn.Module):
    """Saves each tensor in a node of its own, in one region."""

    session: OffloadSession

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.tensors = tensors

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.session.region("norms"):
            return tuple(x * one for one in self.tensors)


def test_what_a_backward_reads_of_some_of_them_is_right_and_nothing_is_left() -> None:
    tensors = apart([((256,), torch.float32)] * 4)
    layer = _Apart(tensors)
    x = torch.ones(1, requires_grad=True)
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            y = layer(x)
            expected = sum(tensors[index].sum() for index in (2, 0))
            (y[2].sum() + y[0].sum()).backward()
        assert x.grad is not None and torch.equal(x.grad, torch.as_tensor(expected).view(1))
        assert session._engine is not None and session._engine.pool.live_bytes == 0
    assert session.records[-1].bytes_back == 4 * 1024


def test_one_that_was_written_to_before_it_had_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LateTransfer())
    layer = _Apart(apart([((256,), torch.float32)] * 3))
    with OffloadSession(layer, min_bytes=0, max_in_flight=0) as session:
        layer.session = session
        with session.step():
            y = torch.stack(layer(torch.ones(1, requires_grad=True))).sum()
            layer.tensors[1].add_(1)
            with pytest.raises(SavedTensorModifiedError, match="norms"):
                y.backward()


def test_verify_names_the_byte_of_a_torn_copy_of_one_of_them(
    monkeypatch: pytest.MonkeyPatch, cut_at_once: list[int]
) -> None:
    use(monkeypatch, LateTransfer(tear=True))
    layers = [Layer(functools.partial(apart, [((256,), torch.float32)] * 3), ("norms",)) for _ in range(2)]
    with OffloadSession(layers, min_bytes=0, max_in_flight=0, verify=True) as session:
        for layer in layers:
            layer.session = session
        with session.step():
            y = layers[1](layers[0](torch.ones(1, requires_grad=True))).sum()
            with pytest.raises(CorruptionError, match=r"layer0/norms\.\w+, forward 0: .* first one is byte \d+, 0x"):
                y.backward()
    assert cut_at_once == [3, 3]


@pytest.mark.parametrize("byte", [0, 1023])
@pytest.mark.parametrize("turned", [False, True])
def test_verify_finds_a_wrong_byte_at_either_end_of_any_of_them(
    monkeypatch: pytest.MonkeyPatch, byte: int, turned: bool
) -> None:
    class Flips(CpuTransfer):
        def copy_out(self, pieces: Any, after: Any) -> Copy:
            copy = super().copy_out(pieces, after)
            _, target, _ = pieces[1]
            (ctypes.c_uint8 * 1024).from_address(target)[byte] ^= 1
            return copy

    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: Flips())
    tensors = apart([((16, 16), torch.float32)] * 3)
    if turned:
        tensors = [tensor.t() for tensor in tensors]
    with pytest.raises(CorruptionError, match=rf"norms\.\w+, forward 0: .* first one is byte {1024 + byte}, 0x"):
        verified(tensors)


def verified(tensors: list[torch.Tensor]) -> None:
    layer = Layer(lambda: tensors, ("norms",))
    with OffloadSession(layer, min_bytes=0, verify=True) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()


def _views(strip: Scattered, offset: int, nbytes: int) -> list[bytes]:
    whole = torch.arange(nbytes // 4, dtype=torch.int32)
    return [bytes(view.contiguous().view(torch.uint8).numpy()) for view in strip.views(whole, offset)]


def _words(first: int, count: int) -> bytes:
    return bytes(torch.arange(first, first + count, dtype=torch.int32).view(torch.uint8).numpy())


def test_views_begin_where_the_first_one_is_put() -> None:
    strip = Scattered(512, [1, 0], [512, 3072], [8, 4], [(2, 1), (1,)], torch.int32)
    assert _views(strip, 512, 4096) == [_words(128, 2), _words(768, 1)]
    assert _views(strip, 1024, 4096) == [_words(256, 2), _words(896, 1)]
    assert strip.parts() == [(512, 520), (3072, 3076)]
