"""Runs: what is copied for a set of tensors."""

from __future__ import annotations

import itertools
import math
from random import Random

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from te_offload.offload.extents import ALIGNMENT, SEGMENT, Strip, find_runs, lone, lone_runs, strips_of


def strip(begin: int, end: int, storage_begin: int, storage: int) -> Strip:
    return Strip(begin, end, storage_begin, frozenset([storage]), (0,), torch.uint8, 1, (end - begin,), (1,))


@st.composite
def views(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    count = draw(st.integers(1, 6))
    return [(draw(st.integers(0, 900)), draw(st.integers(0, 60)), draw(st.integers(1, 3))) for _ in range(count)]


@given(views())
@settings(max_examples=200, deadline=None)
def test_every_byte_of_a_view_is_in_one_run_and_runs_do_not_touch(chosen: list[tuple[int, int, int]]) -> None:
    base = torch.zeros(2000, dtype=torch.int32)
    spans = [strips_of([base[start : start + size * step : step]])[0] for start, size, step in chosen]
    found = find_runs(spans, across_storages=False)
    for before, after in itertools.pairwise(found.runs):
        assert before.address + before.nbytes < after.address
    for span, place, (_, size, _) in zip(spans, found.places, chosen, strict=True):
        assert (place is None) == (size == 0)
        if place is not None:
            run = found.runs[place[0]]
            assert run.address + place[1] == span.begin
            assert span.end <= run.address + run.nbytes
            assert run.address % ALIGNMENT == 0 or run.address == span.storage_begin


@given(views())
@settings(max_examples=100, deadline=None)
def test_runs_hold_little_beside_the_views_and_covered_counts_each_byte_once(
    chosen: list[tuple[int, int, int]],
) -> None:
    base = torch.zeros(4000, dtype=torch.uint8)
    spans = strips_of([base[start : start + size] for start, size, _ in chosen])
    read = {byte for start, size, _ in chosen for byte in range(start, start + size)}
    found = find_runs(spans, across_storages=False)
    assert found.covered == len(read)
    assert sum(run.nbytes for run in found.runs) <= len(read) + 2 * ALIGNMENT * len(spans)


def test_neighbours_of_two_storages_share_a_run_only_where_the_device_allows_it() -> None:
    one, other = strip(10240, 11000, 10240, 1), strip(11264, 12288, 11264, 2)
    assert len(find_runs([other, one], across_storages=True).runs) == 1
    assert len(find_runs([other, one], across_storages=False).runs) == 2
    assert find_runs([other, one], across_storages=True).covered == 760 + 1024


def test_no_run_spans_two_segments_of_the_allocator() -> None:
    one, other = strip(SEGMENT - 1024, SEGMENT, SEGMENT - 1024, 1), strip(SEGMENT, SEGMENT + 1024, SEGMENT, 2)
    assert len(find_runs([one, other], across_storages=True).runs) == 2
    inside = strip(SEGMENT - 512, SEGMENT + 512, SEGMENT - 1024, 1)  # one storage may: it is one allocation
    assert len(find_runs([one, inside], across_storages=True).runs) == 1


def test_views_over_new_memory_read_the_same_numbers() -> None:
    base = torch.arange(3000, dtype=torch.float32)
    view = base[700:2500].view(60, 30).t()[3:, ::2]
    span = strips_of([view])[0]
    begin = span.begin - base.data_ptr()
    memory = base.view(torch.uint8)[begin : begin + span.end - span.begin].clone()
    (found,) = span.views(memory.view(torch.float32), 0)
    assert torch.equal(found, view) and found.stride() == view.stride()


RANDOMS = st.randoms(use_true_random=False)
SHAPES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 4])), min_size=2, max_size=8)


@given(SHAPES, st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]), st.one_of(st.none(), RANDOMS))
@settings(max_examples=300, deadline=None)
def test_tensors_that_lie_side_by_side_come_back_from_their_strips_in_their_order(
    shapes: list[tuple[int, int]], dtype: torch.dtype, random: Random | None
) -> None:
    counts = [rows * columns for rows, columns in shapes]
    base = torch.arange(sum(counts) * dtype.itemsize + 3, dtype=torch.uint8)
    whole = base[: sum(counts) * dtype.itemsize].view(dtype)
    tensors = [part.view(shape) for part, shape in zip(whole.split(counts), shapes, strict=True)]
    if random is not None:
        random.shuffle(tensors)
    strips = strips_of(tensors)
    full = [found for found in strips if found.begin != found.end]
    assert len(full) == (1 if any(counts) else 0)
    found: dict[int, torch.Tensor] = {}
    for each in strips:
        begin = each.begin - base.data_ptr()
        memory = base[begin : each.end - base.data_ptr()].clone().view(dtype)
        parts = each.views(memory, 0) if each in full else each.without_elements(base.device)
        found.update(zip(each.members, parts, strict=True))
    assert sorted(found) == list(range(len(tensors)))
    for index, tensor in enumerate(tensors):
        assert found[index].shape == tensor.shape and found[index].dtype == dtype
        assert torch.equal(found[index].view(torch.uint8), tensor.view(torch.uint8))


def test_strip_ends_where_the_dtype_changes_or_a_gap_begins() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    one, other, apart = base[:8], base[8:16].view(torch.float32), base[20:24]
    assert [list(found.members) for found in strips_of([one, other, apart])] == [[0], [1], [2]]
    assert [list(found.members) for found in strips_of([apart, base[8:16], one])] == [[2, 1], [0]]


def test_a_transposed_tensor_and_its_neighbour_are_two_strips() -> None:
    base = torch.arange(64.0)
    turned, straight = base[:32].view(4, 8).t(), base[32:].view(8, 4)
    assert [list(found.members) for found in strips_of([turned, straight])] == [[0], [1]]
    assert [list(found.members) for found in strips_of([straight, turned])] == [[1], [0]]


def test_strip_does_not_cross_from_one_segment_of_the_allocator_into_the_next() -> None:
    base = torch.zeros(3 * SEGMENT, dtype=torch.uint8)
    border = -base.data_ptr() % SEGMENT + SEGMENT
    before, after = base[border - 512 : border], torch.empty(0, dtype=torch.uint8)
    after.set_(
        torch.frombuffer(memoryview(base.numpy().data)[border : border + 512], dtype=torch.uint8).untyped_storage()
    )
    after.resize_(512)
    assert before.data_ptr() + 512 == after.data_ptr() and after.data_ptr() % SEGMENT == 0
    assert len(strips_of([before, after])) == 2  # two storages: two allocations, perhaps
    assert len(strips_of([before, base[border : border + 512]])) == 1


def storages_side_by_side(count: int, nbytes: int) -> list[torch.Tensor]:
    """Each with a storage of its own, one behind the other from the begin of a segment on, as on a GPU."""
    base = torch.zeros(SEGMENT + count * nbytes, dtype=torch.uint8)
    first = -base.data_ptr() % SEGMENT
    memory = memoryview(base.numpy().data)[first:]
    parts = [memory[number * nbytes : (number + 1) * nbytes] for number in range(count)]
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def test_storages_side_by_side_in_one_segment_are_one_strip() -> None:
    tensors = storages_side_by_side(5, 512)
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 5
    assert [list(found.members) for found in strips_of(tensors)] == [[0, 1, 2, 3, 4]]
    longer = [tensors[0], tensors[1][:256], *tensors[2:]]  # of two sizes, and a gap
    assert [list(found.members) for found in strips_of(longer)] == [[0, 1], [2, 3, 4]]


def test_storages_side_by_side_on_the_cpu_are_a_strip_each() -> None:
    tensors = storages_side_by_side(3, 512)
    one = torch.zeros(1024, dtype=torch.uint8)
    assert len(strips_of(tensors, across_storages=False)) == 3
    assert len(strips_of([tensors[0][:256], *tensors[1:]], across_storages=False)) == 3
    assert len(strips_of([one[:256], one[256:512]], across_storages=False)) == 1


def test_storages_side_by_side_are_a_strip_a_segment() -> None:
    tensors = storages_side_by_side(6, SEGMENT // 4)
    assert [list(found.members) for found in strips_of(tensors)] == [[0, 1, 2, 3], [4, 5]]


def test_a_transposed_tensor_behind_two_others_is_a_strip_of_its_own() -> None:
    base = torch.arange(96.0)
    one, other, turned = base[:32].view(4, 8), base[32:64].view(4, 8), base[64:].view(8, 4).t()
    assert [list(found.members) for found in strips_of([one, other, turned])] == [[0, 1], [2]]


def test_tensors_of_one_size_at_one_pitch_are_one_strip_and_come_back() -> None:
    base = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = [base[128 * index : 128 * index + 4].view(torch.float32) for index in range(5)]
    boxes = [base[1024 + 64 * index : 1072 + 64 * index].view(4, 12) for index in range(4)]
    odd = base[1024 + 64 * 4 + 1 : 1073 + 64 * 4].view(4, 12)  # off the pitch
    tensors = [*scales, *boxes, odd]
    strips = strips_of(tensors)
    assert [(found.members, found.pitch) for found in strips] == [([0, 1, 2, 3, 4], 128), ([5, 6, 7, 8], 64), ((9,), 0)]
    assert find_runs(strips, across_storages=False).covered == sum(tensor.nbytes for tensor in tensors)
    for found in strips:
        begin = found.begin - base.data_ptr()
        views = found.views(base[begin : found.end - base.data_ptr()].clone().view(found.dtype), 0)
        for member, view in zip(found.members, views, strict=True):
            assert torch.equal(view.view(torch.uint8), tensors[member].view(torch.uint8))
            assert view.shape == tensors[member].shape


def test_distance_that_is_no_multiple_of_a_number_is_no_pitch() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    one, other = (
        base[:4].view(torch.float32),
        torch.frombuffer(memoryview(base.numpy().data)[6:10], dtype=torch.float32),
    )
    assert len(strips_of([one, other])) == 2


@given(st.integers(0, 900), st.lists(st.integers(0, 5), min_size=0, max_size=3), st.booleans())
def test_one_contiguous_tensor_is_cut_as_any_others_are(begin: int, size: list[int], across: bool) -> None:
    tensor = torch.arange(1100, dtype=torch.int16)[begin : begin + math.prod(size)].view(size)
    strip, runs = lone(tensor)
    assert [strip] == strips_of([tensor])
    assert runs == find_runs([strip], across_storages=across)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1500) | st.just(512)), min_size=2, max_size=6),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@example([(0, 512)] * 3, 1, Random(0), True)  # the second one begins a segment
@example([(0, 512)] * 6, 2, Random(0), True)
def test_contiguous_tensors_of_their_own_have_the_runs_that_any_others_have(
    parts: list[tuple[int, int]], lead: int, random: Random, across: bool
) -> None:
    base = torch.zeros(3 * SEGMENT, dtype=torch.uint8)
    begin = -base.data_ptr() % SEGMENT + SEGMENT - lead * ALIGNMENT  # some before the border of a segment, some behind
    memory, tensors = memoryview(base.numpy().data), []
    for gap, nbytes in parts:
        begin += gap * ALIGNMENT
        tensors.append(torch.frombuffer(memory[begin : begin + nbytes], dtype=torch.uint8))
        begin += -(-nbytes // ALIGNMENT) * ALIGNMENT
    random.shuffle(tensors)
    strips = [strips_of([tensor])[0] for tensor in tensors]
    begins, lengths = [tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors]
    runs, order = lone_runs(begins, lengths, across_storages=across)
    assert runs == find_runs(strips, across_storages=across)
    assert order == sorted(range(len(begins)), key=begins.__getitem__)


SIZES = st.lists(st.integers(0, 4), min_size=2, max_size=9)


@given(SIZES, st.sampled_from([(), (3,), (1,), (2, 2)]), st.sampled_from([torch.uint8, torch.bfloat16]))
@settings(max_examples=200, deadline=None)
def test_strips_of_what_split_sizes_cut_are_those_of_the_same_tensors_in_any_order(
    sizes: list[int], row: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = list(torch.zeros(sum(sizes), *row, dtype=dtype).split(sizes))
    found, turned = strips_of(tensors), strips_of(tensors[::-1])
    assert [each[:4] for each in found] == [each[:4] for each in turned]
    assert [each.sizes() for each in found if each.begin != each.end] == [
        each.sizes() for each in turned if each.begin != each.end
    ]
    for each, other in zip(found, turned, strict=True):
        members = sorted(len(tensors) - 1 - member for member in other.members)
        assert sorted(each.members) == members and (each.dtype, each.ndim, each.pitch) == (dtype, 1 + len(row), 0)


def test_split_sizes_of_which_one_is_turned_around_are_not_one_strip() -> None:
    base = torch.zeros(96)
    one, turned, last = base[:24].view(3, 8), base[24:56].view(4, 8).t(), base[56:].view(8, 5)
    assert [list(found.members) for found in strips_of([one, turned, last])] == [[0], [1], [2]]


def test_neighbours_of_two_dtypes_or_numbers_of_dimensions_are_two_strips() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    for other in (base[12:28].view(torch.float32), base[12:28].view(4, 4)):
        assert [list(found.members) for found in strips_of([base[:12], other])] == [[0], [1]]


def test_neighbours_of_two_storages_and_two_sizes_are_a_strip_each_where_storages_do_not_join() -> None:
    long = storages_side_by_side(2, 512)[0]
    memory = memoryview(long.numpy().data)
    one, other = (torch.frombuffer(part, dtype=torch.uint8) for part in (memory[:200], memory[200:]))
    assert len(strips_of([one, other], across_storages=False)) == 2
    (both,) = strips_of([one, other])
    assert both.storages == {one.untyped_storage()._cdata, other.untyped_storage()._cdata}
