"""Intervals: what is copied for a set of views."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_offload.offload.extents import ALIGNMENT, ViewSpec, covering, merge


@st.composite
def views(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    count = draw(st.integers(1, 6))
    return [(draw(st.integers(0, 900)), draw(st.integers(0, 60)), draw(st.integers(1, 3))) for _ in range(count)]


@given(views())
@settings(max_examples=200, deadline=None)
def test_every_byte_of_a_view_is_in_one_interval_and_intervals_do_not_touch(chosen: list[tuple[int, int, int]]) -> None:
    base = torch.zeros(2000, dtype=torch.int32)
    specs = [ViewSpec.of(base[start : start + size * step : step]) for start, size, step in chosen]
    intervals = merge(specs)
    for before, after in itertools.pairwise(intervals):
        assert before.end < after.start
    for spec, (_, size, _) in zip(specs, chosen, strict=True):
        interval = covering(intervals, spec)
        assert (interval is None) == (size == 0)
        if interval is not None:
            assert interval.start % ALIGNMENT == 0
            assert interval.start <= spec.offset and spec.end <= interval.end


@given(views())
@settings(max_examples=100, deadline=None)
def test_intervals_hold_no_more_than_alignment_beside_the_views(chosen: list[tuple[int, int, int]]) -> None:
    base = torch.zeros(4000, dtype=torch.uint8)
    specs = [ViewSpec.of(base[start : start + size]) for start, size, _ in chosen]
    read = {byte for start, size, _ in chosen for byte in range(start, start + size)}
    intervals = merge(specs)
    assert sum(interval.nbytes for interval in intervals) <= len(read) + ALIGNMENT * max(len(intervals), len(specs))


def test_view_over_new_memory_reads_the_same_numbers() -> None:
    base = torch.arange(3000, dtype=torch.float32)
    view = base[700:2500].view(60, 30).t()[3:, ::2]
    spec = ViewSpec.of(view)
    (interval,) = merge([spec])
    memory = interval.bytes_of(base.untyped_storage()).clone()
    assert torch.equal(spec.over(memory, interval.start), view)
