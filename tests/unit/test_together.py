"""Which slots of a forward go as one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from te_offload.offload import decide


@given(sizes=st.lists(st.integers(0, 40), min_size=0, max_size=12), below=st.integers(0, 40), most=st.integers(0, 60))
def test_every_slot_goes_once_small_ones_in_lots_of_so_many_bytes_in_the_order_in_which_the_last_was_saved(
    sizes: list[int], below: int, most: int
) -> None:
    loads: list[Any] = [SimpleNamespace(nbytes=size, number=number) for number, size in enumerate(sizes)]
    with mock.patch.object(decide, "as_one", lambda group, _: list(group)):
        found: list[Any] = decide._together(loads, below, most, torch.device("cpu"))
    lots = [one if isinstance(one, list) else [one] for one in found]
    assert sorted(load.number for lot in lots for load in lot) == list(range(len(sizes)))
    assert [lot[-1].number for lot in lots] == sorted(lot[-1].number for lot in lots)
    for lot in lots:
        nbytes = [load.nbytes for load in lot]
        assert len(lot) == 1 or (sum(nbytes) <= most and max(nbytes) < below)
    small = [lot for lot in lots if lot[0].nbytes < below]
    for lot, following in itertools.pairwise(small):  # no lot is smaller than it must be
        assert sum(load.nbytes for load in lot) + following[0].nbytes > most
