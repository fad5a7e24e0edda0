"""Sizes as text and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_offload.errors import ArgumentError, ArgumentTypeError
from te_offload.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("256MiB", 256 * 2**20), ("1.5 GiB", 3 * 2**29), ("4096", 4096), ("10kb", 10_000), ("0", 0), (7, 7), ("2 B", 2)],
)
def test_sizes_are_read(text: Any, nbytes: int) -> None:
    assert parse_bytes(text, "size") == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-3MiB", "1e3"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r'size must be a size such as "256MiB"'):
        parse_bytes(text, "size")


@pytest.mark.parametrize("value", [True, 1.0, None])
def test_value_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="size must be a number of bytes"):
        parse_bytes(value, "size")


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1024.0 GiB")])
def test_sizes_are_written(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 2**45))
def test_written_sizes_read_back_within_their_digits(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes), "size") == pytest.approx(nbytes, rel=0.05, abs=1)
