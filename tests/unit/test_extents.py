"""Runs: what is copied for a set of tensors."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_offload.offload.extents import ALIGNMENT, SEGMENT, Span, find_runs, view_over


@st.composite
def views(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    count = draw(st.integers(1, 6))
    return [(draw(st.integers(0, 900)), draw(st.integers(0, 60)), draw(st.integers(1, 3))) for _ in range(count)]


@given(views())
@settings(max_examples=200, deadline=None)
def test_every_byte_of_a_view_is_in_one_run_and_runs_do_not_touch(chosen: list[tuple[int, int, int]]) -> None:
    base = torch.zeros(2000, dtype=torch.int32)
    spans = [Span.of(base[start : start + size * step : step]) for start, size, step in chosen]
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
    spans = [Span.of(base[start : start + size]) for start, size, _ in chosen]
    read = {byte for start, size, _ in chosen for byte in range(start, start + size)}
    found = find_runs(spans, across_storages=False)
    assert found.covered == len(read)
    assert sum(run.nbytes for run in found.runs) <= len(read) + 2 * ALIGNMENT * len(spans)


def test_neighbours_of_two_storages_share_a_run_only_where_the_device_allows_it() -> None:
    one, other = Span(10240, 11000, 10240, 1), Span(11264, 12288, 11264, 2)
    assert len(find_runs([other, one], across_storages=True).runs) == 1
    assert len(find_runs([other, one], across_storages=False).runs) == 2
    assert find_runs([other, one], across_storages=True).covered == 760 + 1024


def test_no_run_spans_two_segments_of_the_allocator() -> None:
    one, other = Span(SEGMENT - 1024, SEGMENT, SEGMENT - 1024, 1), Span(SEGMENT, SEGMENT + 1024, SEGMENT, 2)
    assert len(find_runs([one, other], across_storages=True).runs) == 2
    inside = Span(SEGMENT - 512, SEGMENT + 512, SEGMENT - 1024, 1)  # one storage may: it is one allocation
    assert len(find_runs([one, inside], across_storages=True).runs) == 1


def test_view_over_new_memory_reads_the_same_numbers() -> None:
    base = torch.arange(3000, dtype=torch.float32)
    view = base[700:2500].view(60, 30).t()[3:, ::2]
    span = Span.of(view)
    begin = span.begin - base.data_ptr()
    memory = base.view(torch.uint8)[begin : begin + span.end - span.begin].clone()
    assert torch.equal(view_over(memory, 0, view.dtype, view.shape, view.stride()), view)
