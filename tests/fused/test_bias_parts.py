"""Where the kernels for gradients of biases put what they have summed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("quack", reason="quack-kernels is not installed here")

from te_offload.fused.kernels import bias_device


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(0, 200))
def test_what_two_experts_have_in_tiles_has_rows_of_its_own(sizes: list[int], beyond: int) -> None:
    rows = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    pieces = {(row // bias_device.ROWS, expert) for row, expert in enumerate(rows)}
    places = {tile + expert for tile, expert in pieces}
    assert len(places) == len(pieces)
    assert max(places, default=0) < bias_device.parts_of(len(rows) + beyond, len(sizes))


@pytest.mark.parametrize(
    ("rows", "columns", "blocks"), [(64 * 600, 5760, 1), (64 * 100, 5760, 5), (64, 512, 2), (1, 8, 1), (64, 99999, 391)]
)
def test_few_tiles_are_shared_by_blocks_of_threads_that_have_columns(rows: int, columns: int, blocks: int) -> None:
    assert bias_device.blocks_beside(rows, columns) == blocks
