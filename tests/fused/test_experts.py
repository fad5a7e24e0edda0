"""Where the weights of experts lie, as multiples of one step."""

from __future__ import annotations

import copy
import mmap
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_offload.errors import ArgumentError
from te_offload.fused.kernels import experts as places
from te_offload.fused.kernels.experts import TMA_BYTES, Experts, ExpertsCache, places_of


@given(st.lists(st.integers(0, 1 << 36).map(lambda number: number * TMA_BYTES), min_size=1, max_size=64))
def test_each_weight_is_found_again_by_its_place(begins: list[int]) -> None:
    base, places, step = places_of(begins)
    assert [base + place * step for place in places] == begins
    assert step % TMA_BYTES == 0 and min(places) == 0


def test_view_shows_every_weight_where_it_lies() -> None:
    block = torch.arange(3000, dtype=torch.float32)
    weights = [block[begin : begin + 32].view(4, 8) for begin in (1000, 40, 2504)]
    experts = Experts.of("FC1", weights)
    assert [experts.view[place].tolist() for place in experts.table.tolist()] == [w.tolist() for w in weights]
    assert experts.view.data_ptr() == weights[1].data_ptr()


def test_bytes_are_the_numbers_that_they_are_said_to_be() -> None:
    weights, cache = [torch.full((4, 16), number, dtype=torch.uint8) for number in (56, 64)], ExpertsCache()
    experts = cache.get("FC1", weights, dtype=torch.float8_e4m3fn)
    assert [float(experts.view[place][0, 0]) for place in experts.table.tolist()] == [1.0, 2.0]
    assert cache.get("FC1", weights, dtype=torch.float8_e4m3fn) is experts
    assert cache.get("FC1", weights, dtype=torch.float8_e5m2).view.dtype is torch.float8_e5m2


def test_weights_that_stay_are_looked_at_once_and_moved_ones_again() -> None:
    weights, cache = [torch.zeros(8, 8) for _ in range(3)], ExpertsCache()
    first = cache.get("fc1", weights)
    assert cache.get("fc1", weights) is first
    weights[1] = torch.zeros(8, 8)
    assert cache.get("fc1", weights) is not first


def test_weights_that_are_back_are_known_until_they_were_at_three_other_places_since() -> None:
    """A capture may copy no table to the GPU; and places that change all the time must not add up."""
    home, cache = [torch.zeros(8, 8) for _ in range(3)], ExpertsCache()
    others = [[torch.zeros(8, 8) for _ in range(3)] for _ in range(4)]
    first = cache.get("fc1", home)
    for elsewhere in (*others[:3], others[0]):
        cache.get("fc1", elsewhere)
        assert cache.get("fc2", elsewhere) is not first
    assert cache.get("fc1", home) is first
    table = weakref.ref(first.table)
    del first
    for elsewhere in others:
        assert table() is not None
        cache.get("fc1", elsewhere)
    assert table() is None


def test_what_a_graph_reads_is_kept_wherever_the_weights_go(monkeypatch: pytest.MonkeyPatch) -> None:
    home = [torch.zeros(8, 8) for _ in range(3)]
    others = [[torch.zeros(8, 8) for _ in range(3)] for _ in range(4)]
    for captures in (True, False):
        cache = ExpertsCache()
        monkeypatch.setattr(places, "_in_capture", lambda _, captures=captures: captures)
        found = cache.get("fc1", home)
        table = weakref.ref(found.table)
        del found
        monkeypatch.setattr(places, "_in_capture", lambda _: False)
        for elsewhere in others:
            cache.get("fc1", elsewhere)
        assert (table() is not None) is captures


def test_copy_of_a_cache_knows_nothing() -> None:
    cache = ExpertsCache()
    first = cache.get("fc1", [torch.zeros(8, 8)])
    assert copy.deepcopy(cache).get("fc1", [torch.zeros(8, 8)]) is not first


def test_weights_of_two_kinds_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="FC1: expert 1 has"):
        Experts.of("FC1", [torch.zeros(8, 8), torch.zeros(8, 16)])


@pytest.mark.parametrize("weight", [torch.zeros(9, 8).T[:8], torch.zeros(65)[1:].view(8, 8)])
def test_weight_that_tma_cannot_read_is_an_error(weight: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="multiple of 16 bytes"):
        Experts.of("FC1", [weight])


_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python has a name for since 3.13


@pytest.fixture(scope="module")
def far_apart() -> list[torch.Tensor]:
    """Two weights (8, 8) 32 GiB apart and a bit, in steps of 16 bytes, in memory of which two pages are there."""
    place = (1 << 35) + TMA_BYTES
    memory = mmap.mmap(-1, place + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return [torch.frombuffer(memory, dtype=torch.float32, count=64, offset=at).view(8, 8) for at in (0, place)]


def test_weights_too_far_apart_to_be_written_are_an_error(far_apart: list[torch.Tensor]) -> None:
    with pytest.raises(ArgumentError, match=r"FC1: experts lie up to 34359738384 bytes apart, in steps of 16"):
        ExpertsCache().get("FC1", far_apart, written=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_weights_too_far_apart_are_read_from_a_copy_which_is_made_each_time(
    far_apart: list[torch.Tensor], dtype: torch.dtype
) -> None:
    weights, cache = [weight.view(dtype) for weight in far_apart], ExpertsCache()
    for value in (1.0, 2.0):
        for number, weight in enumerate(far_apart):
            weight.fill_(value + number)
        with pytest.warns(UserWarning, match="copied in each forward and backward"):
            experts = cache.get("FC1", weights)
        with pytest.warns(UserWarning, match="copied in each forward and backward"):
            assert cache.get("FC1", far_apart, dtype=torch.int32).view.dtype is torch.int32
        for place, weight in zip(experts.table.tolist(), weights, strict=True):
            assert experts.view[place].dtype == dtype and experts.view[place].data_ptr() != weight.data_ptr()
            assert torch.equal(experts.view[place].view(torch.uint8), weight.view(torch.uint8))


def test_weights_just_near_enough_are_read_where_they_lie(far_apart: list[torch.Tensor]) -> None:
    first, last = far_apart
    near = torch.as_strided(first, (4, 8), (8, 1), 2 * TMA_BYTES // 4), last[:4]
    experts = Experts.of("FC1", near)
    assert experts.view.data_ptr() == near[0].data_ptr() and experts.table.tolist() == [0, (1 << 31) - 1]


def test_tensors_that_lie_in_one_are_their_own_view() -> None:
    packed, cache = torch.zeros(3, 8, 8), ExpertsCache()
    first, second = cache.get("FC1", packed), cache.get("FC2", packed)
    assert first.view is packed and first.table is second.table
    assert first.table.tolist() == [0, 1, 2]


def test_one_tensor_that_tma_cannot_read_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"FC1: expert 0's .* multiple of 16 bytes"):
        ExpertsCache().get("FC1", torch.zeros(3 * 64 + 1)[1:].view(3, 8, 8))
