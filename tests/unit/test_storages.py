"""Every storage and wrapper of Transformer Engine, taken out of what an op saved and brought back, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te  # noqa: F401  # before its extension module
import transformer_engine_torch as tex
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Tensor,
    Float8TensorStorage,
    GroupedTensor,
    GroupedTensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

from te_offload.ops.te_adapter.carry import Taken, buffers_of, parts_of_slot
from te_offload.ops.te_adapter.storages import addresses, bare, format_of, has_buffers, is_wrapper, state_of
from tests.support import block_formats, te_on_cpu

E4M3 = tex.DType.kFloat8E4M3
ROWS, COLUMNS, EXPERTS = 256, 128, 2


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)


def numbers() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()


def of(make: Callable[[], Any], *, internal: bool) -> Any:
    quantizer = make()
    quantizer.internal = internal
    return quantizer(numbers())


def float8(*, internal: bool) -> Any:
    quantizer = Float8CurrentScalingQuantizer(E4M3, device=torch.device("cpu"))
    found = te_on_cpu.quantize(quantizer, numbers())
    return found if internal else Float8Tensor(shape=(ROWS, COLUMNS), dtype=torch.bfloat16, **found.get_metadata())


def grouped(*, internal: bool) -> Any:
    quantizer = MXFP8Quantizer(E4M3)
    sizes = torch.tensor([ROWS // 2] * EXPERTS)
    found = block_formats.group_quantize(numbers(), quantizer, sizes.tolist(), sizes, torch.arange(EXPERTS + 1))
    if internal:
        return found
    names = ("data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "first_dims", "tensor_offsets")
    fields = {name: getattr(found, "rowwise_data" if name == "data" else name) for name in names}
    return GroupedTensor((ROWS, COLUMNS), torch.bfloat16, num_tensors=EXPERTS, quantizer=quantizer, **fields)


MAKERS: dict[str, Callable[..., Any]] = {
    "float8": float8,
    "block": lambda internal: of(lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True), internal=internal),
    "mxfp8": lambda internal: of(lambda: MXFP8Quantizer(E4M3), internal=internal),
    "nvfp4": lambda internal: of(NVFP4Quantizer, internal=internal),
    "grouped": grouped,
    "hybrid": lambda internal: of(
        lambda: HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=NVFP4Quantizer()),
        internal=internal,
    ),
    "identity": lambda internal: of(IdentityQuantizer, internal=internal),
}
KINDS = pytest.mark.parametrize("kind", MAKERS)


def copies(entry: Any) -> list[torch.Tensor]:
    """What each buffer holds now; the entry stays as it is."""
    return [buffer.clone() for buffer in buffers_of(bare(entry))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bytes, sizes and dtypes."""
    pairs = zip(one, other, strict=True)
    return all(
        a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )


class Elsewhere:
    """Has the bytes of a slot while nothing else does, and gives others with the same bytes."""

    name = "fc1_input"

    def __init__(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self._kept = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            buffer.view(torch.uint8).fill_(0xAA)

    @property
    def is_here(self) -> bool:
        return True

    def take(self) -> list[torch.Tensor]:
        return [kept.clone() for kept in self._kept]


@KINDS
def test_storage_goes_out_and_comes_back_byte_for_byte(kind: str) -> None:
    storage = MAKERS[kind](internal=True)
    assert not isinstance(storage, torch.Tensor)
    before = copies(storage)
    taken = Taken(range(1), [storage])
    assert taken.buffers
    taken.handle = Elsewhere(taken.buffers)
    (back,) = taken.bring()
    assert type(back) is type(storage) and same(before, copies(back))


@KINDS
def test_what_goes_and_what_stays_is_every_buffer_once(kind: str) -> None:
    storage = MAKERS[kind](internal=True)
    addresses = [one.data_ptr() for one in buffers_of(bare(storage))]
    going, staying = parts_of_slot([storage])
    assert sorted(one.data_ptr() for one in (*going, *staying)) == sorted(addresses)
    taken = Taken(range(1), [storage])
    assert [one.data_ptr() for one in taken.buffers] == [one.data_ptr() for one in going]
    assert taken.staying_bytes() == sum(one.nbytes for one in staying)


@pytest.mark.parametrize("kind", ["float8", "block", "mxfp8", "nvfp4", "hybrid"])  # an identity has one buffer for both
def test_direction_that_is_not_needed_is_not_among_what_goes(kind: str) -> None:
    both, one = MAKERS[kind](internal=True), MAKERS[kind](internal=True)
    one.update_usage(rowwise_usage=False, columnwise_usage=True)
    needed = [part.nbytes for part in buffers_of(bare(one))]
    assert sum(needed) < sum(part.nbytes for part in buffers_of(bare(both)))
    going, staying = parts_of_slot([one])
    assert sum(part.nbytes for part in (*going, *staying)) == sum(needed)


@KINDS
def test_wrapper_is_as_it_was_after_its_storage_was_taken(kind: str) -> None:
    wrapper = MAKERS[kind](internal=False)
    assert isinstance(wrapper, torch.Tensor) and is_wrapper(type(wrapper))
    before = copies(wrapper)
    storage = bare(wrapper)
    assert not isinstance(storage, torch.Tensor)
    assert [a.data_ptr() for a in buffers_of(bare(wrapper))] == [b.data_ptr() for b in buffers_of(storage)]
    taken = Taken(range(1), [storage])
    assert taken.buffers
    assert same(before, copies(wrapper))


@KINDS
def test_storage_of_a_wrapper_has_the_bytes_of_the_internal_one(kind: str) -> None:
    assert same(copies(MAKERS[kind](internal=True)), copies(MAKERS[kind](internal=False)))


def test_sizes_offsets_and_one_number_a_tensor_stay() -> None:
    going, staying = parts_of_slot([grouped(internal=True)])
    assert {one.dtype for one in going} == {torch.uint8} and {one.dtype for one in staying} == {torch.int64}
    going, staying = parts_of_slot([float8(internal=True)])
    assert {one.dtype for one in going} == {torch.uint8} and [one.numel() for one in staying] == [1]


def test_parameters_and_plain_tensors_are_no_wrappers() -> None:
    assert not any(
        is_wrapper(kind) for kind in (torch.Tensor, torch.nn.Parameter, Float8TensorStorage, GroupedTensorStorage)
    )


def test_format_names_the_numbers_and_the_directions_that_are_there() -> None:
    found = {kind: format_of([None, make(internal=True)]) for kind, make in MAKERS.items()}
    assert found == {
        "float8": "FP8 by row and column",
        "block": "FP8 by blocks by row and column",
        "mxfp8": "MXFP8 by row and column",
        "nvfp4": "NVFP4 by row and column",
        "grouped": "MXFP8 by row and column",
        "hybrid": "MXFP8 by row and NVFP4 by column",
        "identity": "bf16",
    }
    storage = MAKERS["nvfp4"](internal=True)
    storage.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert format_of([storage, MAKERS["nvfp4"](internal=True)]) == "NVFP4 by column"
    assert [format_of(entries) for entries in ([], [None], [torch.ones(2)], [torch.ones(2, dtype=torch.int8)])] == [
        "",
        "",
        "fp32",
        "",
    ]


def holders(entry: Any) -> list[tuple[Any, str]]:
    """Where the buffers of an entry are attributes, those of its parts too."""
    found = []
    for name, value in vars(entry).items():
        if type(value) is torch.Tensor and value.numel() and "dims" not in name and "offsets" not in name:
            found.append((entry, name))
        elif isinstance(value, QuantizedTensorStorage):
            found += holders(value)
    return found


@KINDS
@pytest.mark.parametrize("internal", [True, False], ids=["storage", "wrapper"])
def test_each_buffer_that_moves_changes_the_addresses_and_comes_back_with_the_state(kind: str, internal: bool) -> None:
    entry = MAKERS[kind](internal=internal)
    assert has_buffers(entry)
    before, state = addresses(entry), state_of(entry)
    places = holders(entry)
    assert len(places) >= 1
    for holder, name in places:
        setattr(holder, name, getattr(holder, name).clone())
        assert addresses(entry) != before, name
        for one, attribute, value in state:
            setattr(one, attribute, value)
        assert addresses(entry) == before


def test_a_plain_tensor_has_one_address_and_no_state() -> None:
    tensor = numbers()
    assert not has_buffers(tensor) and addresses(tensor) == (tensor.data_ptr(),) and state_of(tensor) == []
