"""Split sizes against rows in what a CUDA graph captures: what is noted, cut and told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_offload.errors import CaptureError, RowOverflowError
from te_offload.ops import row_check
from te_offload.ops.row_check import RowCheck

OP = SimpleNamespace(num_groups=2, in_features=8, out_features=16)
CPU = torch.device("cpu")


def sizes(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_split_sizes_are_left_alone_where_nobody_checks() -> None:
    given = sizes(3, 4)
    assert row_check.fitting(OP, given, 5) is given
    with RowCheck(torch.device("meta")).watching():
        assert row_check.fitting(OP, given, 5) is given


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(0, 60),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_split_sizes_are_cut_where_the_rows_end(values: list[int], rows: int, dtype: torch.dtype) -> None:
    check = RowCheck(CPU)
    with check.watching():
        found = row_check.fitting(OP, torch.tensor(values, dtype=dtype), rows)
    left, expected = rows, []
    for value in values:
        expected.append(min(value, left))
        left -= expected[-1]
    assert found.tolist() == expected and found.dtype is dtype
    excess = max(0, sum(values) - rows)
    assert list(check.overflows().values()) == ([excess] if excess else [])


def test_replay_that_the_host_has_not_waited_for_tells_nothing_twice() -> None:
    """It was queued before the host looked, and copies to it what the one before had noted."""
    check = RowCheck(CPU)
    for asked, told in ((9, [3]), (6, []), (7, [3]), (10, [4])):
        with check.watching():
            row_check.note(OP, sizes(asked, 0), 6)
        assert list(check.overflows().values()) == told


def test_the_most_of_all_replays_is_told_once() -> None:
    check = RowCheck(CPU)
    for asked in (5, 9, 7):
        with check.watching():
            row_check.note(OP, sizes(asked, 0), 6)
            row_check.note(OP, sizes(1, 2), 6)
    assert check.overflows() == {"0: SimpleNamespace(2 experts, 8 to 16) on 6 rows": 3}
    assert check.overflows() == {}


def test_the_same_split_sizes_are_one_place_until_they_are_written_to() -> None:
    check, given = RowCheck(CPU), sizes(3, 4)
    with check.watching():
        assert row_check.fitting(OP, given, 5) is row_check.fitting(OP, given, 5)
        row_check.note(OP, given, 5)
        assert len(check.places) == 1
        given += 1
        assert row_check.fitting(OP, given, 5).tolist() == [4, 1]
        row_check.note(OP, given, 4)
        assert len(check.places) == 3


def watch(check: RowCheck, *rows: int, fails: bool = False) -> None:
    with check.watching():
        for number in rows:
            row_check.note(OP, sizes(9), number)
        if fails:
            raise RuntimeError("injected")


def test_capture_that_fails_leaves_no_check_behind() -> None:
    check, given = RowCheck(CPU), sizes(9)
    with pytest.raises(RuntimeError, match="injected"):
        watch(check, 1, fails=True)
    assert check.overflows() == {} and row_check.fitting(OP, given, 1) is given


def test_more_calls_than_places_are_an_error() -> None:
    with pytest.raises(CaptureError, match=r"3 calls .* place for 2"):
        watch(RowCheck(CPU, most=2), 1, 2, 3)


def test_error_names_the_place_and_the_rows() -> None:
    error = row_check.error({"layer0, 1: GroupedLinear(8 experts, 2 to 3) on 64 rows": 7})
    assert isinstance(error, RowOverflowError)
    assert "GroupedLinear(8 experts, 2 to 3) on 64 rows: at the most 7 more" in str(error) and "router" in str(error)
