"""Tensors of a graph by where they lie; and of those that one graph lends to another, who owns what."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from te_offload.graphs.handover import Handover
from te_offload.graphs.holding import Holding
from te_offload.graphs.layers.items import Extents, Item, grouped, tensor_is_dense
from te_offload.graphs.layers.space import Extent

CPU = torch.device("cpu")
EXTENT = Extent(1 << 20, 4096)


def item(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Item:
    return Item(EXTENT, offset, torch.float32, torch.Size(size), stride)


def test_address_is_its_offset_behind_where_its_extent_begins() -> None:
    assert item((2, 3), (3, 1), offset=512).address == (1 << 20) + 512


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (torch.empty(2, 3), True),
        (torch.empty(2, 3, dtype=torch.bfloat16), False),
        (torch.empty(3, 2), False),
        (torch.empty(3, 2).t(), False),
    ],
    ids=["the same", "another dtype", "another size", "other strides"],
)
def test_tensor_is_like_another_one_of_its_dtype_size_and_strides(other: torch.Tensor, alike: bool) -> None:
    assert item((2, 3), (3, 1)).is_like(other) == alike


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 3), (4, 1), False),
        ((2, 3), (3, 2), False),
        ((2, 1, 3), (3, 99, 1), True),
        ((2, 3, 4), (12, 4, 1), True),
        ((2, 3, 4), (4, 4, 1), False),
        ((), (), True),
    ],
)
def test_tensor_is_dense_where_its_elements_lie_in_order_without_a_gap(
    size: tuple[int, ...], stride: tuple[int, ...], dense: bool
) -> None:
    assert tensor_is_dense(item(size, stride)) == dense


def test_a_run_ends_where_the_next_tensor_is_of_another_kind_or_begins_elsewhere() -> None:
    first = item((2, 3), (3, 1))
    follows = dataclasses.replace(first, offset=24)
    assert grouped([first, follows]) == [(first, 2)]
    for other in (
        dataclasses.replace(follows, offset=28),
        dataclasses.replace(follows, dtype=torch.int32),
        dataclasses.replace(follows, size=torch.Size((3, 2)), stride=(2, 1)),
        dataclasses.replace(follows, extent=Extent(1 << 21, 4096)),
    ):
        assert grouped([first, other]) == [(first, 1), (other, 1)]


def test_extents_end_before_the_next_address() -> None:
    extents = Extents([EXTENT, Extent(EXTENT.begin + 8192, 16)])
    begin = EXTENT.begin
    assert [extents.find(address) for address in (begin - 1, begin, begin + 4095, begin + 4096)] == [
        None,
        EXTENT,
        EXTENT,
        None,
    ]
    assert extents.find(begin + 8192 + 16) is None


def test_only_plain_tensors_and_parameters_are_items() -> None:
    class Own(torch.Tensor):
        pass

    whole = torch.arange(8.0)
    extents = Extents([Extent(whole.data_ptr(), whole.nbytes)])
    assert extents.item(whole.as_subclass(Own)) is None
    assert extents.item(torch.eye(2).to_sparse()) is None
    found = extents.item(torch.nn.Parameter(whole[2:]))
    assert found is not None and (found.offset, found.requires_grad) == (8, True)


def test_what_is_lent_keeps_the_memory_of_its_captures_after_both_are_captured_anew() -> None:
    handover = Handover(CPU)
    pool = handover.pool
    there = weakref.ref(pool)
    (lent,) = handover.lend([torch.ones(8)], {0}, set())
    handover.renew()
    assert handover.pool is not pool
    del pool
    assert there() is not None and lent.shape == (8,)
    del lent
    assert there() is None


def test_inputs_of_a_capture_are_nobody_elses_once_it_has_them() -> None:
    handover = Handover(CPU)
    inputs = [torch.ones(8)]
    assert len(handover.owned(inputs)) == 1 and not inputs


def test_only_plain_tensors_of_the_device_are_lent() -> None:
    outputs = [
        torch.nn.Parameter(torch.ones(8)),
        torch.ones(8, device="meta"),
        torch.eye(2).to_sparse(),
        3,
        torch.ones(4),
    ]
    found = Handover(CPU).lend(outputs, {0, 1, 2, 3, 4}, set())
    assert [one is given for one, given in zip(found, outputs, strict=True)] == [True, True, True, True, False]


def test_outputs_that_are_not_the_graphs_memory_or_no_tensors_are_handed_out_as_they_are() -> None:
    holding = Holding(lambda inputs: inputs, [], [])
    outputs = [torch.ones(2), torch.ones(2), 3]
    found = holding.hand_out(outputs, [True, False, True], [], copies=False)
    assert [one is given for one, given in zip(found, outputs, strict=True)] == [False, True, True]
    assert found[0].data_ptr() == outputs[0].data_ptr()  # type: ignore[attr-defined]
    assert holding.find_held() == [0]  # the second one is nobody's business
