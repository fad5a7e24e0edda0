"""Spots: tensors taken one by one, against what `find_runs` says of their strips, and against their bytes."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_offload.offload.extents import ALIGNMENT, SEGMENT, find_runs, strips_of
from te_offload.offload.spots import Spot, covered_by, runs_of, spots_of

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Some with elements: whole, in part, turned or strided views of a few storages, which may lie side by side."""
    memory = torch.zeros(3 * SEGMENT, dtype=torch.uint8)
    place = -memory.data_ptr() % SEGMENT + SEGMENT - 512 * draw(st.integers(0, 8))
    storages = []
    for _ in range(draw(st.integers(1, 4))):
        length = 64 * draw(st.integers(1, 20))
        storages.append(torch.frombuffer(memoryview(memory.numpy().data)[place : place + length], dtype=torch.uint8))
        place += -(-length // 512) * 512 + 512 * draw(st.integers(0, 1))
    found = []
    for _ in range(draw(st.integers(1, 8))):
        whole = draw(st.sampled_from(storages)).view(draw(st.sampled_from(DTYPES)))
        begin = draw(st.integers(0, whole.numel() - 1))
        count = draw(st.integers(1, whole.numel() - begin))
        view = whole[begin : begin + count]
        rows = draw(st.sampled_from([n for n in range(1, 5) if count % n == 0]))
        view = view.view(rows, count // rows)
        view = view.t() if draw(st.booleans()) else view
        found.append(view[:: draw(st.integers(1, 3))])
    return found


def last_byte(tensor: torch.Tensor) -> int:
    """Address behind the tensor's last one."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (steps + 1) * tensor.element_size()


@given(tensors(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_tensor_is_in_one_run_at_its_place_and_each_byte_in_one(chosen: list[torch.Tensor], across: bool) -> None:
    spots = spots_of(chosen)
    assert spots is not None
    found = runs_of(spots, across_storages=across)
    ends = [(run.address, run.address + run.nbytes) for run in found.runs]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    for tensor, spot, place in zip(chosen, spots, found.places, strict=True):
        assert place is not None
        run = found.runs[place[0]]
        assert run.address + place[1] == spot.begin == tensor.data_ptr()
        assert spot.end == last_byte(tensor) <= run.address + run.nbytes
        assert run.address % ALIGNMENT == 0  # and the address modulo 512 is kept
        assert (spot.size, spot.stride, spot.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    read = {byte for tensor in chosen for byte in range(tensor.data_ptr(), last_byte(tensor))}
    assert found.covered == covered_by(spots) == len(read)


@given(tensors())
@settings(max_examples=300, deadline=None)
def test_runs_are_those_of_strips(chosen: list[torch.Tensor]) -> None:
    """Where storages are not joined; else a strip may join neighbours that are not in one block of a segment's length."""
    spots = spots_of(chosen)
    assert spots is not None
    strips = strips_of(chosen, across_storages=False)
    assert runs_of(spots, across_storages=False).runs == find_runs(strips, across_storages=False).runs


def spot(begin: int, end: int, storage: int) -> Spot:
    return Spot(begin, end, begin, storage, (end - begin,), (1,), torch.uint8)


def test_neighbours_of_two_storages_share_a_run_in_one_segment_where_the_device_allows_it() -> None:
    one, other = spot(10240, 11000, 1), spot(11264, 12288, 2)
    assert len(runs_of([other, one], across_storages=True).runs) == 1
    assert len(runs_of([other, one], across_storages=False).runs) == 2
    before, behind = spot(SEGMENT - 1024, SEGMENT, 1), spot(SEGMENT, SEGMENT + 1024, 2)
    assert len(runs_of([before, behind], across_storages=True).runs) == 2
    inside = spot(SEGMENT, SEGMENT + 1024, 1)  # one storage may span two: it is one allocation
    assert len(runs_of([before, inside], across_storages=True).runs) == 1


def test_tensor_without_elements_has_no_spot() -> None:
    assert spots_of([torch.zeros(3), torch.zeros(0, 4)]) is None
    assert spots_of([]) == []
