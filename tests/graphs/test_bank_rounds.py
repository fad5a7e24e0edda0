"""Memory behind the addresses of layers' graphs over many rounds: what is mapped again, and what is held idle."""

from __future__ import annotations

from random import Random

import pytest
import torch

from te_offload.graphs.layers.bank import SLACK, Bank, Zone
from tests.graphs.test_bank import MIB, Clock, make_bank, make_zones
from tests.support.paged_memory import PagedMemory


class LayerZones:
    """Of a layer: its output, what its backward reads, and its gradients, where its forward may write too."""

    def __init__(self, memory: PagedMemory) -> None:
        self.output, *self.saved = make_zones(memory, 6, 4, 5, 9)
        self.grads = make_zones(memory, 20, 21)
        self.grad = make_zones(memory, 6)


def train(bank: Bank, clock: Clock, layers: list[LayerZones], going: int, random: Random | None = None) -> None:
    """Forwards and backwards, with what ``going`` layers save away in between.

    Args:
        random: copies out end up to two forwards late, and those back are begun up to one backward early.
    """
    leaves: list[tuple[int, list[Zone]]] = []
    for number, layer in enumerate(layers):
        everything = [layer.output, *layer.saved, *layer.grads, *layer.grad]
        bank.occupy(everything)
        bank.occupy([layer.output, *layer.saved])
        bank.drop(everything)
        if number < going:
            leaves.append((number + (random.randint(0, 2) if random else 0), layer.saved))
        for one in [one for one in leaves if one[0] <= number]:
            leaves.remove(one)
            bank.drop(one[1])
        bank.order(clock.mark)
    for _, zones in leaves:
        bank.drop(zones)
    before: list[Zone] = []
    back = len(layers)
    for number, layer in reversed(list(enumerate(layers))):
        until = number - (random.randint(0, 1) if random else 0)
        while back > max(until, 0):
            back -= 1
            if back < going:
                bank.occupy(layers[back].saved)
        if number:
            bank.drop([layers[number - 1].output])  # the input, which its own backward does not need
        bank.occupy([*layer.grads, *layer.grad])
        bank.drop([*layer.saved, *layer.grads, *before])
        before = layer.grad
        bank.order(clock.mark)
    bank.drop([*before, layers[-1].output])
    bank.order(clock.mark)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("times", ["the same each round", "other ones each round"])
@pytest.mark.parametrize("going", [0, 3, 6])
def test_rounds_of_forwards_and_backwards_soon_map_next_to_nothing_and_hold_no_more_than_they_need(
    going: int, times: str, seed: int
) -> None:
    bank, memory, clock = make_bank()
    layers = [LayerZones(memory) for _ in range(6)]
    random = Random(seed)
    jitter = random if times != "the same each round" else None
    for _ in range(10):  # as captures do, in any order
        some = random.choice(layers)
        zones = random.sample([some.output, *some.saved, *some.grads], 4)
        bank.occupy(zones)
        bank.drop(random.sample(zones, 4))
        bank.order(clock.mark)
    bank.trim()
    maps = []
    for number in range(32):
        if number % 8 == 0:
            bank.relax()
        before = bank.maps
        train(bank, clock, layers, going, jitter)
        maps.append(bank.maps - before)
    assert sum(maps[16:]) <= 16 * (5 if jitter else 2), maps
    bank.relax()
    for _ in range(8):
        train(bank, clock, layers, going, jitter)
    assert 0 <= bank._spare <= (SLACK if jitter else 0)  # of what it holds, at the moment at which it needs most


def idle_then_small(bank: Bank, memory: PagedMemory, clock: Clock, *more: int) -> list[Zone]:
    """A zone of 64 MiB that was dropped, and others that are owned, of 2 MiB and as given."""
    large, *others = make_zones(memory, 64, 2, *more)
    bank.occupy([large])
    bank.drop([large])
    bank.order(clock.mark)
    bank.occupy(others)
    return [large, *others]


def test_pieces_that_do_not_fit_go_back_to_the_device_once_they_are_more_than_the_slack() -> None:
    bank, memory, clock = make_bank()
    large, _ = idle_then_small(bank, memory, clock)
    assert memory.created == bank.held == 66 * MIB and large.pieces
    bank.occupy(make_zones(memory, SLACK // MIB))
    assert memory.created == bank.held == 2 * MIB + SLACK and not large.pieces


def test_pieces_of_other_lengths_go_back_after_a_capture() -> None:
    bank, memory, clock = make_bank()
    idle_then_small(bank, memory, clock)
    bank.trim()
    assert memory.created == bank.held == 2 * MIB


def test_what_is_taken_while_nothing_is_free_is_not_of_the_slack() -> None:
    bank, memory, clock = make_bank()
    bank.occupy(make_zones(memory, SLACK // MIB))
    large, _ = idle_then_small(bank, memory, clock)
    assert bank.held == SLACK + 66 * MIB and large.pieces


def test_slack_is_there_again_after_a_capture_and_after_some_rounds() -> None:
    for again in (Bank.trim, Bank.relax):
        bank, memory, clock = make_bank()
        idle_then_small(bank, memory, clock, SLACK // MIB - 2)
        again(bank)
        large, _ = idle_then_small(bank, memory, clock)
        assert large.pieces, again


def test_memory_that_nobody_had_is_kept_within_the_slack_and_goes_beyond_it() -> None:
    for nbytes, left in ((SLACK, SLACK), (SLACK + 2 * MIB, 0)):
        bank, memory, clock = make_bank()
        zones = make_zones(memory, nbytes // MIB)
        bank.occupy(zones)
        bank.drop(zones)
        bank.order(clock.mark)
        for _ in range(2):  # the first time all of it was in use
            bank.relax()
        assert bank.held == left


def zone_that_lost_a_piece(bank: Bank, memory: PagedMemory, clock: Clock) -> tuple[Zone, Zone]:
    """A zone of 10 MiB, of whose pieces of 8 and 2 another zone has the second."""
    zone, other = make_zones(memory, 10, 2)
    bank.occupy([zone])
    bank.drop([zone])
    bank.order(clock.mark)
    bank.occupy([other])
    assert bank.held == 10 * MIB and other.pieces == zone.pieces[1:]
    return zone, other


def test_a_zone_keeps_the_pieces_that_nobody_took_and_waits_for_the_others_last_use() -> None:
    bank, memory, clock = make_bank()
    zone, _ = zone_that_lost_a_piece(bank, memory, clock)
    kept, maps = zone.pieces[0], bank.maps
    bank.occupy([zone])
    assert zone.pieces[0] is kept and zone.has_memory and bank.held == 12 * MIB
    assert bank.maps == maps + 1 and memory.log[-2:] == ["unmap", "map"] and bank.waits == 1


def test_a_zone_that_finds_no_memory_for_one_piece_leaves_those_that_it_had_to_be_had() -> None:
    bank, memory, clock = make_bank(limit=10 * MIB)
    zone, other = zone_that_lost_a_piece(bank, memory, clock)
    with pytest.raises(torch.OutOfMemoryError, match="No 2097152 bytes"):
        bank.occupy([zone])
    (third,) = make_zones(memory, 8)
    bank.occupy([third])
    assert bank.held == bank.used == 10 * MIB and third.has_memory and other.has_memory
