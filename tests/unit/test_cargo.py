"""Where a cargo's runs lie on the host and when they are back: against addresses counted one by one."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from te_offload.offload.cargo import OWN_LOT, Cargo
from te_offload.offload.extents import Run
from te_offload.slots import SlotName

LABEL = ("layer", "op", SlotName.FC1_INPUT, None)
SIZES = st.one_of(
    st.integers(1, 5000), st.integers(1, 8).map(lambda n: 512 * n), st.integers(OWN_LOT - 600, OWN_LOT + 600)
)
GAPS = st.one_of(st.just(0), st.integers(0, 3000), st.integers(0, 8).map(lambda n: 512 * n))


class Memory:
    """An allocation at a chosen address."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


@st.composite
def runs(draw: st.DrawFn, *, on_gpu: bool) -> tuple[Run, ...]:
    """Runs in the order of their addresses; on a GPU each begins at a multiple of 512."""
    found, end = [], 512 * draw(st.integers(1, 1000))
    for _ in range(draw(st.integers(1, 12))):
        begin = end + draw(GAPS)
        begin = -(-begin // 512) * 512 if on_gpu else begin
        found.append(Run(begin, draw(SIZES)))
        end = found[-1].address + found[-1].nbytes
    return tuple(found)


def check_places(cargo: Cargo, given_runs: tuple[Run, ...]) -> None:
    """Every run has a place of its own, as far from a multiple of 512 as it was, and short ones share an allocation."""
    assert cargo.copied == sum(run.nbytes for run in given_runs)
    assert len(cargo.places) == len(given_runs)
    taken: dict[int, list[tuple[int, int]]] = {}
    for run, (lot, begin) in zip(given_runs, cargo.places, strict=True):
        assert begin % 512 == run.address % 512
        taken.setdefault(id(lot), []).append((begin, begin + run.nbytes))
    lots = {id(lot): lot for lot in cargo.lots}
    assert len(lots) == len(cargo.lots) and taken.keys() == lots.keys()
    for number, spans in taken.items():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert lots[number].nbytes == spans[-1][1]
        gaps = [begin - end for (_, end), (begin, _) in itertools.pairwise(spans)]
        assert spans[0][0] < 512 and max(gaps, default=0) < 1024
    shared = [spans for spans in taken.values() if len(spans) > 1]
    assert len(shared) <= 1
    for spans in shared:
        assert all(end - begin < OWN_LOT for begin, end in spans)
    short = sum(run.nbytes < OWN_LOT for run in given_runs)
    assert len(cargo.lots) == len(given_runs) - short + (short > 0)


@given(given_runs=st.booleans().flatmap(lambda on_gpu: runs(on_gpu=on_gpu)))
def test_every_run_has_a_place_of_its_own_when_it_is_back(given_runs: tuple[Run, ...]) -> None:
    check_places(Cargo(LABEL, 0, given_runs), given_runs)


@given(data=st.data(), given_runs=st.booleans().flatmap(lambda on_gpu: runs(on_gpu=on_gpu)))
def test_bytes_go_to_the_lease_one_behind_the_other_and_come_back_to_their_places(
    data: st.DataObject, given_runs: tuple[Run, ...]
) -> None:
    """Also where the lease has several pieces, whose borders are anywhere."""
    cargo: Any = Cargo(LABEL, 0, given_runs)
    inner = data.draw(st.lists(st.integers(1, max(1, cargo.copied - 1)), max_size=3, unique=True).map(sorted))
    borders = [0, *[one for one in inner if one < cargo.copied], -(-cargo.copied // 512) * 512]
    pieces = tuple((10**9 * (n + 1), end - begin) for n, (begin, end) in enumerate(itertools.pairwise(borders)))
    host = [(address, start) for (address, _), start in zip(pieces, borders, strict=False)]

    class Lease:
        def __init__(self) -> None:
            self.pieces = pieces

    cargo.lease = Lease()
    for number, lot in enumerate(cargo.lots):
        lot.memory = Memory(10**12 * (number + 1))
    there = dict(zip(map(id, cargo.lots), cargo.lots, strict=True))

    def at(offset: int) -> Any:
        """The address on the host of a byte of the cargo."""
        return next(address + offset - start for address, start in reversed(host) if start <= offset)

    def expand(moved: list[tuple[int, int, int]], *, back: bool) -> set[tuple[int, int]]:
        """Host and device address of the first and the last byte of each piece, no piece over a border."""
        ends = set()
        for source, target, nbytes in moved:
            assert nbytes > 0
            one, other = (source, target) if back else (target, source)
            ends |= {(one, other), (one + nbytes - 1, other + nbytes - 1)}
        return ends

    out, back, offset = cargo.pieces_out(), cargo.pieces_back(), 0
    assert sum(n for _, _, n in out) == sum(n for _, _, n in back) == cargo.copied
    leaving, coming = expand(out, back=False), expand(back, back=True)
    for run, (lot, begin) in zip(given_runs, cargo.places, strict=True):
        home = there[id(lot)].memory.data_ptr() + begin
        for byte in (0, run.nbytes - 1):
            assert (at(offset + byte), run.address + byte) in leaving
            assert (at(offset + byte), home + byte) in coming
        offset += run.nbytes


def test_allocation_is_as_long_as_its_last_run_needs() -> None:
    cargo = Cargo(LABEL, 0, (Run(512, 100), Run(5120, 700), Run(51200, 3)))
    lot = cargo.lots[0]
    assert [begin for _, begin in cargo.places] == [0, 512, 1536] and lot.nbytes == 1539
    lot.allocate(torch.device("cpu"))
    assert lot.memory is not None and lot.memory.numel() >= 1539
