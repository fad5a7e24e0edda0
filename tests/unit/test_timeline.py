"""Steps computed by hand, and steps that a card took."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from te_offload.offload.record import Phase
from te_offload.offload.timeline import Bounds, Departures, Link, Parcel, Work, departures_of, follow, pace_of, simulate

RECORDS = Path(__file__).parents[2] / "docs/results/data/2026-11-23-h200-recall-records.json"
SEEN: dict[str, Any] = json.loads(RECORDS.read_text())
LINK = Link(out=10.0, back=10.0, out_duplex=5.0, back_duplex=5.0)  # bytes a millisecond


def stack(layers: int, forward: float, backward: float) -> list[Work]:
    keys = [(f"layer{number}", 0) for number in range(layers)]
    return [Work(key, False, forward) for key in keys] + [Work(key, True, backward) for key in reversed(keys)]


def slots(*sizes: int) -> dict[tuple[str, int], list[Parcel]]:
    return {(f"layer{number}", 0): [Parcel(size, size > 0)] if size else [] for number, size in enumerate(sizes)}


def test_without_slots_a_step_is_its_work() -> None:
    found = simulate(stack(3, 2.0, 4.0), {}, LINK, Bounds())
    assert (found.step_ms, found.waiting_ms, found.peak_bytes, found.host_bytes) == (18.0, 0.0, 0, 0)


def test_one_layer_goes_out_and_comes_back_before_its_backward() -> None:
    # forward to 2, out 2 to 12, back 12 to 22, backward 22 to 26
    found = simulate(stack(1, 2.0, 4.0), slots(100), LINK, Bounds())
    assert found.step_ms == pytest.approx(26.0)
    assert found.waiting_ms == pytest.approx(20.0)
    assert (found.peak_bytes, found.host_bytes) == (100, 100)


def test_copies_hide_behind_the_work_of_other_layers() -> None:
    # layer0: out 2 to 4, back 10 to 12; its backward begins at 14, when that of layer2 and layer1 is over
    found = simulate(stack(3, 2.0, 4.0), slots(20, 0, 0), LINK, Bounds())
    assert found.step_ms == 18.0 and found.waiting_ms == 0.0


def test_two_copies_at_once_share_the_duplex_rate() -> None:
    # layer0 out 1 to 11, layer1 out 11 to 21; layer1's backward waits: back 21 to 31 alone, backward 31 to 32,
    # layer0 back 31 to 41, backward 41 to 42
    alone = simulate(stack(2, 1.0, 1.0), slots(100, 100), LINK, Bounds())
    assert alone.step_ms == pytest.approx(42.0)
    # layer1 stays: layer0's out to 11 and its back from 11 never meet another copy
    assert simulate(stack(2, 1.0, 1.0), slots(100, 0), LINK, Bounds()).step_ms == pytest.approx(22.0)
    # 1F1B: b's copy out and a's copy back are under way together, each at half the rate
    work = [
        Work(("a", 0), False, 10.0),
        Work(("b", 0), False, 10.0),
        Work(("a", 0), True, 1.0),
        Work(("b", 0), True, 1.0),
    ]
    parcels = {("a", 0): [Parcel(100, True)], ("b", 0): [Parcel(100, True)]}
    # a out 10 to 20; b out and a back from 20 at 5 a ms: both to 40; a's backward 40 to 41; b back 40 to 50, backward to 51
    assert simulate(work, parcels, LINK, Bounds()).step_ms == pytest.approx(51.0)


def test_bound_out_makes_the_forward_wait_and_lowers_the_peak() -> None:
    free = simulate(stack(3, 1.0, 1.0), slots(100, 100, 100), LINK, Bounds(back=100))
    bound = simulate(stack(3, 1.0, 1.0), slots(100, 100, 100), LINK, Bounds(out=100, back=100))
    assert free.peak_bytes == 300 and bound.peak_bytes == 200
    assert bound.step_ms >= free.step_ms


def test_bound_back_brings_back_no_more_than_that_ahead() -> None:
    work, parcels = stack(4, 30.0, 30.0), slots(100, 100, 100, 100)
    unbound = simulate(work, parcels, LINK, Bounds())
    bound = simulate(work, parcels, LINK, Bounds(back=100))
    assert bound.peak_bytes < unbound.peak_bytes
    assert bound.step_ms == pytest.approx(unbound.step_ms)  # one layer ahead is enough here


def test_copy_back_begins_when_there_is_room_and_not_before() -> None:
    # out 10 to 20, 20 to 30, 30 to 40; layer2 back 40 to 50 and layer1, one ahead, 50 to 60. layer2's backward 50 to 70;
    # then there is room for layer0, back 70 to 80. layer1's backward 70 to 72, layer0's 80 to 82
    keys = [(f"layer{number}", 0) for number in range(3)]
    backwards = [Work(key, True, ms) for key, ms in zip(reversed(keys), (20.0, 2.0, 2.0), strict=True)]
    work = [*(Work(key, False, 10.0) for key in keys), *backwards]
    found = simulate(work, slots(100, 100, 100), LINK, Bounds(back=100))
    assert found.step_ms == pytest.approx(82.0) and found.waiting_ms == pytest.approx(20.0 + 8.0)


def test_host_memory_of_a_forward_serves_the_next_one_after_its_backward() -> None:
    one, other = ("layer0", 0), ("layer0", 1)
    work = [Work(one, False, 1.0), Work(one, True, 1.0), Work(other, False, 1.0), Work(other, True, 1.0)]
    parcels = {one: [Parcel(100, True)], other: [Parcel(70, True)]}
    assert simulate(work, parcels, LINK, Bounds()).host_bytes == 100


def test_what_has_not_left_is_read_where_it_is() -> None:
    # the copy out is under way from 2 to 12. The backward comes at 2 and is over at 6, and the step when the copy is
    found = simulate(stack(1, 2.0, 4.0), slots(100), LINK, Bounds(recall=True))
    assert found.step_ms == 12.0 and found.waiting_ms == 6.0
    # another layer's backward is longer than that
    found = simulate(stack(2, 2.0, 4.0), slots(0, 60), LINK, Bounds(recall=True))
    assert found.step_ms == 12.0 and found.waiting_ms == 0.0


def test_what_is_read_where_it_is_takes_no_room_of_what_comes_back() -> None:
    # layer0 is out from 3 to 8. The backward comes at 9: layer2 and layer1 have not left, layer0 comes back at once beside
    # their copies out, 9 to 19; its backward is over at 20, and the last copy out, alone again from 19, at 23
    found = simulate(stack(3, 3.0, 1.0), slots(50, 50, 50), LINK, Bounds(back=50, recall=True))
    assert found.step_ms == pytest.approx(23.0) and found.waiting_ms == pytest.approx(8.0 + 3.0)
    assert found.peak_bytes == 150


def test_slots_that_stay_count_at_the_peak_only() -> None:
    parcels = {("layer0", 0): [Parcel(70, False)], ("layer1", 0): [Parcel(30, False)]}
    found = simulate(stack(2, 1.0, 1.0), parcels, LINK, Bounds())
    assert (found.step_ms, found.peak_bytes, found.host_bytes) == (4.0, 100, 0)


def test_levels_are_what_is_kept_and_what_is_under_way_as_each_phase_begins() -> None:
    parcels = {("layer0", 0): [Parcel(100, True)], ("layer1", 0): [Parcel(50, False)]}
    work = stack(2, 1.0, 4.0)
    _, levels = follow(work, parcels, LINK, Bounds())
    found = {(layer, phase.name): nbytes for ((layer, _), phase), nbytes in levels.items()}
    assert found == {
        ("layer0", "FORWARD"): 0,
        ("layer0", "AFTER"): 100,  # its copy takes 10 ms
        ("layer1", "FORWARD"): 100,
        ("layer1", "AFTER"): 150,
        ("layer1", "BACKWARD"): 150,
        ("layer0", "BACKWARD"): 100,
    }


@pytest.mark.parametrize("row", SEEN["rows"], ids=[row["way"] for row in SEEN["rows"]])
def test_steps_that_a_card_took_are_predicted(row: dict[str, Any]) -> None:
    work = [Work((layer, 0), backward, ms) for layer, backward, ms in row["work"]]
    parcels = {(layer, 0): [Parcel(nbytes, goes) for nbytes, goes in slots] for layer, slots in row["slots"]}
    out, back = row["bounds"]
    found = simulate(work, parcels, Link(*SEEN["link"]), Bounds(out, back, recall=True))
    assert found.step_ms == pytest.approx(row["ms"], rel=0.02)
    assert found.peak_bytes == pytest.approx(row["peak_resident"], rel=0.04)


# Pace -----------------------------------------------------------------------------------------------------------------


def test_pace_begins_copies_back_in_time_even_half_as_slow_again() -> None:
    # backwards begin at 8, 12, 16 and 20; layer0's 16 bytes take 6 ms of 1.5 x 4 at the slower rate, so from 14 on at the
    # latest, with the backward that begins at 12; 2 bytes from 19.25 on, 40 from 5 on, before any of them
    work = stack(4, 2.0, 4.0)
    link = Link(out=10.0, back=10.0, out_duplex=4.0, back_duplex=4.0)
    pace = pace_of(work, slots(16, 0, 0, 0), link)
    assert dict(pace.number) == {("layer3", 0): 0, ("layer2", 0): 1, ("layer1", 0): 2, ("layer0", 0): 3}
    found = [pace_of(work, slots(nbytes, 0, 0, 0), link).start["layer0", 0] for nbytes in (2, 16, 40)]
    assert found == [2, 1, 0]


def test_pace_has_copies_back_queue_up_where_there_is_no_time_for_them_one_by_one() -> None:
    # each takes 6 ms of a backward's 4: layer0's begins 6 ms before its own, layer1's 8 before its own, then 10 and so on
    early = pace_of(stack(12, 2.0, 4.0), slots(*[20] * 12), Link(10.0, 10.0, 5.0, 5.0))
    assert [early.start[f"layer{number}", 0] for number in (0, 1, 2, 3, 4)] == [9, 8, 6, 5, 3]
    # ten times as long: all would have to begin before the first backward
    late = pace_of(stack(12, 2.0, 4.0), slots(*[200] * 12), Link(10.0, 10.0, 5.0, 5.0))
    assert set(late.start.values()) == {0}


def test_pace_of_a_micro_batch_does_not_hurry_the_one_before_it() -> None:
    def micro_batch(number: int) -> list[Work]:
        return [Work((item.key[0], number), item.backward, item.ms) for item in stack(4, 2.0, 4.0)]

    work = [*micro_batch(0), *micro_batch(1)]
    alone = {("layer0", 0): [Parcel(2, True)]}
    both = alone | {("layer3", 1): [Parcel(1000, True)]}  # which takes longer than the whole step
    pace, hurried = pace_of(work, alone, LINK), pace_of(work, both, LINK)
    assert pace.number["layer0", 0] == 3 and pace.number["layer0", 1] == 7
    assert pace.start["layer0", 0] == hurried.start["layer0", 0] == 2
    assert hurried.start["layer3", 1] == 0


def test_pace_of_a_step_that_stood_still_makes_nothing_late() -> None:
    parcels = slots(40, 40, 40, 40, 40, 40)
    usual, stalled = stack(6, 2.0, 4.0), stack(6, 2.0, 4.0)
    stalled[8] = Work(stalled[8].key, True, 4000.0)
    found, other = pace_of(usual, parcels, LINK), pace_of(stalled, parcels, LINK)
    assert any(other.start[key] > start for key, start in found.start.items())
    assert found.no_later_than(other) == other.no_later_than(found) == found


def test_there_is_no_pace_without_a_second_step_of_the_same_backwards() -> None:
    pace, fewer = (pace_of(stack(layers, 2.0, 4.0), slots(2, 2), LINK) for layers in (6, 5))
    assert pace.no_later_than(None) is None and pace.no_later_than(fewer) is None


def test_paced_steps_take_no_longer_and_hold_less_where_the_backward_begins() -> None:
    work, parcels = (
        stack(8, 2.0, 4.0),
        {("layer0", 0): [Parcel(20, True)]} | {(f"layer{number}", 0): [Parcel(20, False)] for number in range(1, 8)},
    )
    early, paced = (
        simulate(work, parcels, LINK, Bounds(back=100, recall=True, paced=paced)) for paced in (False, True)
    )
    assert paced.step_ms == early.step_ms == 48.0
    assert (early.peak_bytes, paced.peak_bytes) == (160, 140)


@pytest.mark.parametrize("row", SEEN["rows"], ids=[row["way"] for row in SEEN["rows"]])
def test_pace_costs_steps_that_a_card_took_no_time(row: dict[str, Any]) -> None:
    work = [Work((layer, 0), backward, ms) for layer, backward, ms in row["work"]]
    parcels = {(layer, 0): [Parcel(nbytes, goes) for nbytes, goes in slots] for layer, slots in row["slots"]}
    out, back = row["bounds"]
    early, paced = (
        simulate(work, parcels, Link(*SEEN["link"]), Bounds(out, back, recall=True, paced=paced))
        for paced in (False, True)
    )
    assert paced.step_ms <= early.step_ms * 1.001
    assert paced.peak_bytes <= early.peak_bytes


# Departures -----------------------------------------------------------------------------------------------------------


def test_departures_tell_with_which_work_s_begin_copies_out_are_over_even_a_tenth_slower() -> None:
    # work begins at 0, 2, 4, 6, 8, 12, 16 and 20; layer0's bytes are there at 2 and take 0.22 ms each at the slower rate
    work, parcels = stack(4, 2.0, 4.0), {("layer0", 0): [Parcel(9, True), Parcel(50, False), Parcel(11, True)]}
    found = departures_of(work, parcels, LINK)
    assert dict(found.after) == {("layer0", 0): 1, ("layer1", 0): 2, ("layer2", 0): 3, ("layer3", 0): 4}
    assert dict(found.over) == {("layer0", 0): ((9, 2), (20, 4))}  # at 3.98 and 6.4
    assert [found.place(("layer0", 0), nbytes) for nbytes in (1, 9, 10, 20, 25)] == [2, 2, 4, 4, 4]
    assert found.place(("layer0", 0), 26) == found.place(("layer1", 0), 1) == math.inf


def test_departures_queue_up_and_end_with_the_step() -> None:
    # layer0: 2 to 8.6; layer1, there at 4: to 15.2; layer2 to 37.2, after all work has begun and ended
    found = departures_of(stack(4, 2.0, 4.0), slots(30, 30, 100, 0), LINK)
    assert dict(found.over) == {("layer0", 0): ((30, 5),), ("layer1", 0): ((30, 6),), ("layer2", 0): ((100, 9),)}
    later = departures_of(stack(4, 2.0, 4.0), slots(0, 0, 10, 0), LINK)  # no queue before it: from 6 to 8.2
    assert dict(later.over) == {("layer2", 0): ((10, 5),)}


def test_departures_of_two_steps_are_the_later_ones_of_what_both_sent() -> None:
    usual, stalled = stack(4, 2.0, 4.0), stack(4, 2.0, 4.0)
    stalled[1] = Work(stalled[1].key, False, 400.0)
    one = departures_of(usual, slots(30, 30, 0, 0), LINK)
    other = departures_of(stalled, slots(30, 0, 0, 0), LINK)
    assert (one.over["layer0", 0], other.over["layer0", 0]) == (((30, 5),), ((30, 2),))
    expected = Departures(one.after, {("layer0", 0): ((30, 5),)})
    assert one.no_earlier_than(other) == other.no_earlier_than(one) == expected
    assert one.no_earlier_than(None) is None
    assert one.no_earlier_than(departures_of(stack(5, 2.0, 4.0), slots(30), LINK)) is None


def test_what_leaves_while_no_layer_runs_has_not_left_before_that() -> None:
    # a loss of 20 after layer3: layer2's 20 bytes are there at 6 and out at 8, layer3's, there at 8, at 10
    work, parcels = stack(4, 2.0, 4.0), slots(0, 0, 20, 20)
    work[3] = Work(work[3].key, False, 2.0, rest_ms=20.0)
    assert dict(departures_of(work, parcels, LINK).over) == {("layer2", 0): ((20, 5),), ("layer3", 0): ((20, 5),)}
    found, levels = follow(work, parcels, LINK, Bounds(recall=True, paced=True))
    assert (found.step_ms, found.waiting_ms) == (44.0, 0.0)
    assert levels[("layer3", 0), Phase.AFTER] == 40
    seen, levels = follow(work, parcels, LINK, Bounds(recall=True))  # by the host: layer2's are out as layer3 ends
    assert levels[("layer3", 0), Phase.AFTER] == 20 and seen.waiting_ms == 2.0  # for layer3's to come back, from 28 on
    start = pace_of(work, parcels, LINK).start  # of backwards that begin at 28, 32, 36 and 40
    assert start["layer2", 0] == 0


def test_what_is_back_early_is_held_by_the_forwards_in_between() -> None:
    # y's 20 bytes are there at 20 and out at 22; x's backward, at 20, asks for them, and z's forward comes before y's
    order = (("x", False), ("y", False), ("x", True), ("z", False), ("y", True))
    work = [Work((layer, 0), backward, 10.0, rest_ms=5.0 if layer == "z" else 0.0) for layer, backward in order]
    found, levels = follow(work, {("y", 0): [Parcel(20, True)], ("z", 0): [Parcel(30, True)]}, LINK, Bounds())
    assert (levels[("z", 0), Phase.FORWARD], levels[("z", 0), Phase.AFTER]) == (20, 50)
    assert (found.peak_bytes, levels[("y", 0), Phase.BACKWARD]) == (50, 20)  # z's are out before that


def test_gate_is_passed_when_the_first_bytes_have_left() -> None:
    # copies out from 2, 10 bytes a millisecond: layer0's to 6, layer1's to 10, layer2's to 14, and foreseen a tenth slower
    link = Link(out=10.0, back=10.0, out_duplex=10.0, back_duplex=10.0)
    work, parcels = stack(4, 2.0, 4.0), slots(0, 40, 40, 0)
    parcels["layer0", 0] = [Parcel(15, True), Parcel(25, True)]
    free = {("layer0", 0): ((15, 2), (40, 4)), ("layer1", 0): ((40, 5),), ("layer2", 0): ((40, 6),)}
    assert dict(departures_of(work, parcels, link).over) == free
    assert dict(departures_of(work, parcels, link, ((("layer1", 0), 15),)).over) == free  # the first slot is enough
    gates = ((("layer1", 0), 16), (("layer3", 0), 41))
    found = departures_of(work, parcels, link, gates)
    assert dict(found.over) == {**free, ("layer0", 0): ((15, 2), (40, 2)), ("layer1", 0): ((40, 4),)}
    gated, levels = follow(work, parcels, link, Bounds(recall=True, paced=True, gates=gates))
    # layer1 ends at 4 and waits to 6, layer3 ends at 10, as layer1's are out; and the backward waits for them, from 14 on
    assert (levels[("layer1", 0), Phase.AFTER], levels[("layer3", 0), Phase.AFTER]) == (40, 40)
    assert gated.waiting_ms >= 2.0
    _, levels = follow(work, parcels, link, Bounds(recall=True, paced=True))
    assert (levels[("layer1", 0), Phase.AFTER], levels[("layer3", 0), Phase.AFTER]) == (65, 80)


def test_gate_of_a_later_micro_batch_is_for_what_was_not_read_before() -> None:
    keys = [("layer0", 0), ("layer1", 0)]
    order = [(keys[0], False), (keys[1], False), (keys[1], True), (keys[0], True)]
    work = [Work((layer, turn), backward, 2.0) for turn in range(2) for (layer, _), backward in order]
    parcels = {(layer, turn): [Parcel(40, True)] for layer, _ in keys for turn in range(2)}
    free = departures_of(work, parcels, LINK).over
    found = departures_of(work, parcels, LINK, ((("layer1", 1), 30),)).over
    assert {key for key in free if found[key] != free[key]} == {("layer0", 1)}
    assert found["layer0", 1] == ((40, 6),)
    gates = ((("layer1", 0), 40), (("layer1", 1), 30))  # what left by the first one was read since
    both = departures_of(work, parcels, LINK, gates).over
    assert {key for key in free if both[key] != free[key]} == {("layer0", 0), ("layer0", 1)}
    assert both["layer0", 1] == ((40, 6),)


def test_gate_goes_on_within_the_forward_of_which_the_one_before_has_a_part() -> None:
    slow = Link(out=0.1, back=0.1, out_duplex=0.1, back_duplex=0.1)
    parcels = {("layer0", 0): [Parcel(10, True)] * 3, ("layer1", 0): [Parcel(10, True)] * 2}
    work = stack(4, 2.0, 4.0)
    never = len(work) + 1
    gates = ((("layer1", 0), 10), (("layer2", 0), 20), (("layer3", 0), 40))
    found = departures_of(work, parcels, slow, gates).over
    assert found["layer0", 0] == ((10, 2), (20, 3), (30, 4))
    assert found["layer1", 0] == ((10, 4), (20, never))


def test_what_was_read_where_it_was_is_held_until_its_copy_is_over() -> None:
    # layer1's 200 bytes are there at 4 and out at 24; its backward, from 4 to 8, reads them where they are
    link = Link(out=10.0, back=10.0, out_duplex=10.0, back_duplex=10.0)
    work, parcels = stack(2, 2.0, 4.0), {("layer0", 0): [Parcel(7, False)], ("layer1", 0): [Parcel(200, True)]}
    _, levels = follow(work, parcels, link, Bounds(recall=True, paced=True))
    assert levels[("layer0", 0), Phase.BACKWARD] == 207
    found, levels = follow(work, parcels, link, Bounds(out=100.0, recall=True, paced=True))
    assert levels[("layer0", 0), Phase.BACKWARD] == 7 and found.step_ms == 28.0  # which waits for that: 24 to 28


def test_what_is_due_back_has_the_time_of_a_loss_too() -> None:
    # forwards to 30, backwards at 30 and 40, another forward to 60 and its loss to 80, when c's backward begins: 125 bytes
    # that take 37.5 at two thirds of the duplex rate are due at 42.5
    order = (("a", False), ("b", False), ("c", False), ("a", True), ("b", True), ("d", False), ("c", True))
    work = [Work((layer, 0), backward, 10.0, rest_ms=20.0 if layer == "d" else 0.0) for layer, backward in order]
    assert pace_of(work, {("c", 0): [Parcel(125, True)]}, LINK).start["c", 0] == 1


def test_what_has_not_left_for_certain_by_the_last_forward_is_read_where_it_is() -> None:
    # layer2's 20 bytes are there at 6 and out at 8, where the backward begins, or a tenth slower, at 8.2
    link = Link(out=10.0, back=0.5, out_duplex=10.0, back_duplex=0.5)
    work, parcels = stack(4, 2.0, 4.0), slots(0, 0, 20, 0)
    found = simulate(work, parcels, link, Bounds(recall=True, paced=True))
    assert (found.step_ms, found.waiting_ms, found.peak_bytes) == (24.0, 0.0, 20)
    by_a_host_that_sees_it = simulate(work, parcels, link, Bounds(recall=True))
    assert by_a_host_that_sees_it.waiting_ms == pytest.approx(36.0)  # from 8 to 48 on its way back, and needed at 12
