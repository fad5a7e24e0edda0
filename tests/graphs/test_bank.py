"""Memory behind the addresses of layers' graphs, on virtual memory of the CPU."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_offload.errors import StateError
from te_offload.graphs.layers import bank as bank_module
from te_offload.graphs.layers.bank import LARGEST, Bank, Zone
from te_offload.graphs.layers.items import Extents, grouped, made
from te_offload.graphs.layers.space import Extent, Space, tensor_of
from tests.support.paged_memory import PagedMemory

MIB = 1 << 20


class Clock:
    """Marks of a device that does nothing until it is told to."""

    def __init__(self) -> None:
        self.now, self.passed = 0, 0

    def mark(self) -> Moment:
        self.now += 1
        return Moment(self, self.now)


class Moment:
    def __init__(self, clock: Clock, number: int) -> None:
        self.clock, self.number = clock, number

    def is_over(self) -> bool:
        return self.clock.passed >= self.number

    def wait(self) -> None:
        self.clock.passed = max(self.clock.passed, self.number)


def make_bank(limit: int | None = None) -> tuple[Bank, PagedMemory, Clock]:
    memory = PagedMemory(limit)
    return Bank(memory, lambda: None), memory, Clock()


def make_zones(memory: PagedMemory, *sizes: int) -> list[Zone]:
    return [Zone(memory.reserve(size * MIB), size * MIB) for size in sizes]


def test_memory_of_a_zone_that_was_dropped_serves_the_next_one_without_waiting() -> None:
    bank, memory, clock = make_bank()
    first, second = make_zones(memory, 10, 10)
    bank.occupy([first])
    bank.drop([first])
    bank.order(clock.mark)
    bank.occupy([second])
    assert bank.held == 10 * MIB and bank.used == 10 * MIB and bank.waits == 0 and clock.passed == 0
    pieces = {zone.begin + place * MIB: nbytes * MIB for zone in (first, second) for place, nbytes in ((0, 8), (8, 2))}
    assert memory.mapped == pieces  # the older mapping is not in the way


def test_memory_is_not_taken_before_the_order_in_which_it_was_dropped() -> None:
    bank, memory, clock = make_bank()
    first, second = make_zones(memory, 10, 10)
    bank.occupy([first])
    bank.drop([first])
    bank.occupy([second])
    assert bank.held == 20 * MIB
    bank.order(clock.mark)
    assert bank.used == 10 * MIB


def test_zone_whose_memory_nobody_took_has_it_again_without_a_call() -> None:
    bank, memory, clock = make_bank()
    (zone,) = make_zones(memory, 10)
    for _ in range(3):
        bank.occupy([zone])
        bank.drop([zone])
        bank.order(clock.mark)
    assert memory.log == ["map"] and bank.maps == 1


def test_zone_that_comes_back_before_the_device_has_passed_its_last_use_waits_for_it() -> None:
    bank, memory, clock = make_bank()
    first, second = make_zones(memory, 10, 10)
    bank.occupy([first])
    bank.drop([first])
    bank.order(clock.mark)
    bank.occupy([second])
    bank.occupy([first])  # whose old mapping has to go
    assert bank.waits == 1 and clock.passed == 1 and bank.held == 20 * MIB
    assert first.has_memory and second.has_memory


def test_zone_keeps_its_memory_until_its_last_owner_goes() -> None:
    bank, memory, clock = make_bank()
    (zone,) = make_zones(memory, 2)
    bank.occupy([zone])
    bank.occupy([zone])
    bank.drop([zone])
    bank.order(clock.mark)
    assert zone.has_memory
    bank.drop([zone])
    bank.order(clock.mark)
    assert bank.used == 0


def test_zone_that_is_owned_again_before_the_order_keeps_its_memory() -> None:
    bank, memory, clock = make_bank()
    first, second = make_zones(memory, 2, 2)
    bank.occupy([first])
    bank.drop([first])
    bank.count()
    bank.occupy([first])
    bank.order(clock.mark)
    bank.occupy([second])
    assert first.has_memory and second.has_memory and bank.used == 4 * MIB


def test_memory_of_a_zone_can_be_read_at_other_addresses_and_serves_on_afterwards() -> None:
    bank, memory, clock = make_bank()
    space = Space(torch.device("cpu"), bank)
    source, mirror, other = (space.add_segment(2 * MIB) for _ in range(3))
    tensor = space.bytes_at(source, MIB).fill_(7)
    zone = space.mirror(mirror, tensor)
    assert zone is not None and bank.held == bank.used == 2 * MIB
    at_mirror = (ctypes.c_char * MIB).from_address(mirror)
    assert torch.frombuffer(at_mirror, dtype=torch.uint8).unique().tolist() == [7]
    assert space.mirror(mirror, tensor) is zone and memory.log.count("map") == 2  # is there already
    assert space.mirror(other, tensor[1:]) is None  # begins no zone
    memory.mirrors = False
    assert space.mirror(other, tensor) is None  # as memory that stays where it is
    zone.left = clock.mark()
    del tensor, at_mirror
    gc.collect()
    bank.order(clock.mark)
    again = space.bytes_at(mirror, MIB).fill_(9)  # the same memory, now its own
    assert bank.held == 2 * MIB and bank.waits == 0 and memory.log.count("map") == 2
    back = space.bytes_at(source, MIB).fill_(1)
    assert again.unique().tolist() == [9] and back.unique().tolist() == [1] and bank.held == 4 * MIB


def test_scratch_of_several_graphs_is_one_memory() -> None:
    bank, memory, _ = make_bank()
    first, second, third = make_zones(memory, 10, 10, 12)
    bank.share([first])
    bank.share([second])
    assert bank.held == bank.used == 10 * MIB
    bank.share([third])
    assert bank.held == bank.used == 10 * MIB + 4 * MIB  # 12 = 8 + 4, and of 10 = 8 + 2 the 8 serves again
    for zone in (first, second, third):
        assert bank.used
        bank.take_back(zone)
    assert bank.used == 0
    bank.trim()
    assert memory.created == bank.held == 0 and not memory.mapped


def test_memory_that_nobody_had_since_the_last_call_goes_back_and_no_more() -> None:
    bank, memory, clock = make_bank()
    first, second, third = make_zones(memory, 64, 16, 8)
    bank.occupy([first, second, third])
    bank.drop([first, second, third])
    bank.order(clock.mark)
    bank.relax()  # all of it was in use at a time
    assert bank.held == memory.created == 88 * MIB
    bank.occupy([second])
    bank.drop([second])
    bank.order(clock.mark)
    bank.relax()
    assert bank.held == memory.created == 16 * MIB  # 72 MiB went, as pieces of 64 and 8
    bank.occupy([second])
    assert bank.held == bank.used == 16 * MIB


def test_device_without_memory_is_an_error_with_numbers_and_changes_nothing() -> None:
    bank, memory, _ = make_bank(limit=10 * MIB)
    first, second = make_zones(memory, 8, 4)
    bank.occupy([first])
    with pytest.raises(torch.OutOfMemoryError, match=r"No 4194304 bytes .* which hold 8388608 bytes"):
        bank.occupy([second])
    assert not second.owners and not second.pieces and bank.used == 8 * MIB


def test_zone_that_finds_no_memory_for_its_last_piece_leaves_the_others_to_be_had() -> None:
    bank, memory, _ = make_bank(limit=10 * MIB)
    zone, small = make_zones(memory, 12, 8)
    with pytest.raises(torch.OutOfMemoryError, match=r"No 4194304 bytes"):
        bank.occupy([zone])  # 8 MiB and 4
    assert bank.used == 0 and not zone.pieces
    bank.occupy([small])
    assert bank.held == bank.used == memory.created == 8 * MIB


def test_device_without_memory_is_asked_again_after_others_have_made_room() -> None:
    memory, asked = PagedMemory(4 * MIB), list[int]()

    def make_room() -> None:
        asked.append(bank.held)
        memory.limit = 12 * MIB

    bank = Bank(memory, make_room)
    first, second = make_zones(memory, 4, 8)
    bank.occupy([first])
    bank.occupy([second])
    assert asked == [4 * MIB] and bank.held == bank.used == 12 * MIB


def test_device_without_memory_gets_all_back_that_nobody_has_before_it_is_an_error() -> None:
    bank, memory, clock = make_bank(limit=14 * MIB)
    zones = make_zones(memory, 4, 4, 4)
    bank.occupy(zones)
    bank.drop(zones)
    bank.order(clock.mark)
    (other,) = make_zones(memory, 2)
    memory.limit = 2 * MIB  # someone else took the rest
    bank.occupy([other])
    assert bank.held == bank.used == memory.created == 2 * MIB


def test_no_more_pieces_go_back_than_the_one_that_is_needed_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_module, "SLACK", 0)
    bank, memory, clock = make_bank()
    first, second, small = make_zones(memory, 4, 4, 4)
    bank.occupy([first, second])
    bank.drop([first, second])
    bank.order(clock.mark)
    (large,) = make_zones(memory, 2)
    bank.occupy([large])
    assert bank.held == 4 * MIB + 2 * MIB  # one of 4 went for the one of 2
    bank.occupy([small])
    assert bank.held == bank.used == 6 * MIB


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_two_owned_zones_ever_have_memory_in_common(data: st.DataObject) -> None:
    bank, memory, clock = make_bank()
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=6))
    zones = make_zones(memory, *[2 * size for size in sizes])
    most = 0
    for _ in range(data.draw(st.integers(1, 40))):
        zone = data.draw(st.sampled_from(zones))
        if zone.owners and data.draw(st.booleans()):
            bank.drop([zone])
            bank.count()
        elif not zone.owners and zone in bank._left:
            bank.order(clock.mark)
        else:
            bank.occupy([zone])
        if data.draw(st.booleans()):
            bank.order(clock.mark)
        if data.draw(st.booleans()):
            clock.passed = clock.now
        if data.draw(st.integers(0, 5)) == 0:
            bank.relax()
        for one in zones:
            assert memory.mapped.get(one.begin, 0) == (one.pieces[0].length if one.pieces else 0)
            assert all(one in piece.zones for piece in one.pieces)
        behind = {id(piece): piece.zones for one in zones for piece in one.pieces}
        assert sum(map(len, behind.values())) == sum(len(one.pieces) for one in zones)
        owned = [one for one in zones if one.owners]
        pieces = [piece.memory for one in owned for piece in one.pieces]
        assert len(pieces) == len(set(pieces)) and all(one.has_memory for one in owned)
        assert bank.used >= sum(one.nbytes for one in owned)
        most = max(most, bank.used)
        assert bank.held <= most + LARGEST * len(zones)
    for zone in zones:
        for _ in range(zone.owners):
            bank.drop([zone])
    bank.order(clock.mark)
    clock.passed = clock.now
    bank.trim()
    assert memory.created == bank.held == bank.used == 0 and not memory.mapped


def test_tensor_keeps_its_addresses_in_memory_as_long_as_it_lives() -> None:
    bank, _, clock = make_bank()
    space = Space(torch.device("cpu"), bank)
    begin = space.add_segment(5 * MIB)
    assert len(space.zones_of(begin)) == 1 and space.zones_of(begin)[0].nbytes == 6 * MIB
    with_ranges, without = space.cut(begin, [(begin, 100), (begin + 2 * MIB, MIB), (begin + 2 * MIB + MIB // 2, MIB)])
    assert [zone.nbytes for zone in with_ranges] == [2 * MIB, 2 * MIB] and [zone.nbytes for zone in without] == [
        2 * MIB
    ]
    tensor = tensor_of(space.storage(begin + 2 * MIB, MIB), torch.float32, (4, 8), (8, 1), 512)
    tensor.fill_(3)
    assert tensor.data_ptr() == begin + 2 * MIB + 512 and tensor._base is None
    assert space.place_of(tensor.data_ptr(), 128) is not None
    assert space.place_of(begin - 1, 128) is None and space.place_of(begin + 6 * MIB - 64, 128) is None
    view = tensor[1:]
    del tensor
    bank.order(clock.mark)
    assert bank.used == 2 * MIB and view.sum() == 72
    del view
    gc.collect()
    bank.order(clock.mark)
    assert bank.used == 0 and not space.are_owned(space.zones_of(begin))


def test_granules_of_the_same_ranges_are_one_zone() -> None:
    bank, _, _ = make_bank()
    space = Space(torch.device("cpu"), bank)
    begin = space.add_segment(10 * MIB)
    with_ranges, without = space.cut(begin, [(begin, 4 * MIB), (begin + 4 * MIB, 2 * MIB)])
    assert [(zone.begin - begin, zone.nbytes) for zone in with_ranges] == [(0, 4 * MIB), (4 * MIB, 2 * MIB)]
    assert [(zone.begin - begin, zone.nbytes) for zone in without] == [(6 * MIB, 4 * MIB)]
    assert space.bytes_at(begin, 4 * MIB).fill_(5)[-1] == 5


def test_place_of_a_tensor_may_end_where_its_segment_does() -> None:
    bank, _, _ = make_bank()
    space = Space(torch.device("cpu"), bank)
    begin = space.add_segment(2 * MIB)
    assert space.place_of(begin + MIB, MIB) is not None and space.place_of(begin + MIB, MIB + 1) is None


def test_edges_are_the_granules_that_addresses_share_with_others() -> None:
    bank, _, _ = make_bank()
    space = Space(torch.device("cpu"), bank)
    at = 20 * MIB
    assert space.edges([Extent(at, 2 * MIB)]) == []
    assert space.edges([Extent(at, 5 * MIB)]) == [Extent(at + 4 * MIB, 2 * MIB)]
    assert space.edges([Extent(at + MIB, 3 * MIB), Extent(at + MIB, 100)]) == [Extent(at, 2 * MIB)]


def test_bytes_written_to_one_zone_do_not_reach_another_that_has_memory() -> None:
    bank, _, clock = make_bank()
    space = Space(torch.device("cpu"), bank)
    first, second = (space.add_segment(2 * MIB) for _ in range(2))
    one = space.bytes_at(first, MIB).fill_(1)
    del one
    gc.collect()
    bank.order(clock.mark)
    other = space.bytes_at(second, MIB).fill_(2)  # in the memory that the first one had
    again = space.bytes_at(first, MIB).fill_(3)
    assert other.unique().tolist() == [2] and again.unique().tolist() == [3] and bank.held == 4 * MIB


def test_place_of_a_tensor_is_gone_with_its_segment_also_when_another_segment_has_its_addresses() -> None:
    bank, memory, clock = make_bank()
    space = Space(torch.device("cpu"), bank)
    begin = space.add_segment(2 * MIB)
    place = space.place_of(begin, MIB)
    assert place is not None
    one = place()
    assert one is not None and (one.data_ptr(), one.nbytes) == (begin, MIB)
    del one
    gc.collect()
    bank.order(clock.mark)
    bank.take_back(space.zones_of(begin)[0])
    space.drop_segment(begin)
    assert place() is None
    memory.reserve = lambda nbytes: begin  # type: ignore[method-assign]
    assert space.add_segment(2 * MIB) == begin
    assert place() is None and space.place_of(begin, MIB) is not None


def test_scratch_memory_of_graphs_is_given_to_no_tensor() -> None:
    bank, _, _ = make_bank()
    space = Space(torch.device("cpu"), bank)
    first, second = (space.add_segment(2 * MIB) for _ in range(2))
    for segment in (first, second):
        bank.share(space.zones_of(segment))
    for segment in (first, second):
        with pytest.raises(StateError, match=f"2097152 bytes at {segment:#x} are scratch memory"):
            space.bytes_at(segment, MIB)


def test_items_are_made_again_over_the_same_memory() -> None:
    whole = torch.arange(4096, dtype=torch.float32)
    extent = Extent(whole.data_ptr(), whole.nbytes)
    extents = Extents([Extent(extent.begin - 1000, 500), extent])
    parts = [*whole[:60].view(3, 4, 5).unbind(0), whole[100:200].view(10, 10).t(), whole[300:310]]
    items = [extents.item(part) for part in parts]
    assert None not in items and extents.item(torch.ones(3)) is None and extents.item(whole[:0]) is None
    runs = grouped([item for item in items if item is not None])
    assert [count for _, count in runs] == [3, 1, 1]
    found = made(runs, {extent: whole.untyped_storage()})
    assert all(
        torch.equal(a, b) and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
        for a, b in zip(parts, found, strict=True)
    )
