"""Plans within a limit of the device's memory, on records made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_offload import DevicePeak, Fate, Phase, Plan, Reason, SlotName, StepRecord
from te_offload.errors import ArgumentError, BudgetError, PlanError, UnsupportedError
from te_offload.offload.choice import make_plan
from te_offload.offload.device_budget import Choice, DeviceBudget, as_they_go, gates_of
from te_offload.offload.device_memory import Watermarks, fill_unused, give_back_unused, watermarks_of
from te_offload.offload.forecast import parcels_of, work_of
from te_offload.offload.likely_steps import orders_of
from te_offload.offload.planner import merge_records
from te_offload.offload.timeline import Bounds, Departures, Foreseen, Key, Levels, Pace, Parcel, Work, follow
from te_offload.report.table import device_lines
from tests.unit.test_plan import LINK, MIB, PLAN, going, policy, record

LAYERS = 4
BOUNDS = Bounds(out=30 * MIB, back=60 * MIB, recall=True, paced=True)
EACH = 60  # MiB that a layer saves, in slots of 10, 30 and 20
WEIGHTS = 1000  # MiB that are there anyhow
OWN = {Phase.FORWARD: 70, Phase.AFTER: 5, Phase.BACKWARD: 90}  # MiB that each phase takes itself


def with_peaks(step: StepRecord, **extra: int) -> StepRecord:
    """A record with the device's peaks, of what its slots held in each phase and what it takes besides."""
    held = follow(work_of(step), parcels_of(step), LINK, BOUNDS)[1]
    peaks = [DevicePeak("", 0, Phase.BEFORE, WEIGHTS * MIB, 0)]
    for (layer, forward), phase in held:
        more = OWN[phase] + extra.get(f"{layer}_{phase.name}", 0)
        had = held[(layer, forward), phase]
        peaks.append(DevicePeak(layer, forward, phase, had + (WEIGHTS + more) * MIB, had))
    in_flight = int(BOUNDS.out), int(BOUNDS.back)
    return dataclasses.replace(step, device_peaks=tuple(peaks), peak_in_flight=in_flight[0], peak_ahead=in_flight[1])


def plan_of(limit: int, step: StepRecord, **arguments: Any) -> Plan:
    return make_plan(policy(device_limit=limit * MIB), step, LINK, BOUNDS, **arguments)


def following(step: StepRecord, plan: Plan) -> StepRecord:
    """The record of a step with a plan."""
    rows = [
        row
        if plan.goes(row.name, row.forward)
        else dataclasses.replace(row, fate=Fate.KEPT, reason=Reason.PLAN, bytes_out=0)
        for row in step.slots
    ]
    return with_peaks(dataclasses.replace(step, slots=tuple(rows), planned=True))


def test_nothing_goes_where_the_limit_has_room_for_all() -> None:
    all_stays = WEIGHTS + LAYERS * EACH + OWN[Phase.BACKWARD]
    assert going(plan_of(all_stays, with_peaks(record()))) == set()
    assert going(plan_of(all_stays - 1, with_peaks(record())))


@pytest.mark.parametrize("less", [1, 35, 70, 105, 140])
def test_limit_is_met_with_no_slot_more_than_it_needs(less: int) -> None:
    step = with_peaks(record(layers=8, forward=100.0, backward=100.0, sizes={SlotName.ACT_INPUT: 30 * MIB}))
    limit = WEIGHTS + 8 * 30 + OWN[Phase.BACKWARD] - less
    plan = plan_of(limit, step)
    assert plan.forecast is not None and plan.forecast.device_bytes is not None
    found = following(step, plan).device_peak
    assert found is not None and found.nbytes == plan.forecast.device_bytes <= limit * MIB
    last = max(number for number, slot in enumerate(plan.slots) if slot.goes)
    assert all(slot.goes for slot in plan.slots[:last])
    slots = [dataclasses.replace(slot, goes=number < last) for number, slot in enumerate(plan.slots)]
    without_it = following(step, Plan(tuple(slots))).device_peak
    assert (
        without_it is not None and without_it.nbytes > (limit - (30 if last else 0)) * MIB
    )  # one more may be under way


def test_what_is_predicted_for_the_choice_that_was_seen_is_what_was_seen() -> None:
    step = following(with_peaks(record()), plan_of(WEIGHTS + 280, with_peaks(record())))
    assert step.device_peak is not None
    went = {(row.name, row.forward) for row in step.slots if row.bytes_out}
    assert 0 < len(went) < 3 * LAYERS
    sizes = {(row.name, row.forward): row.nbytes for row in step.slots}

    def levels_of(choice: Choice) -> Levels:
        parcels: dict[Key, list[Parcel]] = {}
        for (name, forward), nbytes in sizes.items():
            parcels.setdefault((name.split("/")[0], forward), []).append(Parcel(nbytes, (name, forward) in choice))
        return follow(work_of(step), parcels, LINK, BOUNDS)[1]

    budget = DeviceBudget(0, step, levels_of, levels_of(frozenset(went)))
    assert budget.peak(frozenset(went)).nbytes == step.device_peak.nbytes
    assert budget.peak(frozenset(sizes)).nbytes < step.device_peak.nbytes < budget.peak(frozenset()).nbytes


def of_order(order: str) -> list[Work]:
    """Forwards, and backwards in capitals."""
    return [Work((layer.lower(), 0), layer.isupper(), 1.0) for layer in order]


def held_in(work: Sequence[Work], nbytes: int) -> Levels:
    """In steps in which every forward saves so many bytes that stay."""
    return follow(work, {item.key: [Parcel(nbytes, False)] for item in work}, LINK, BOUNDS)[1]


def test_gates_are_where_more_must_have_left_than_before_since_a_backward() -> None:
    work = of_order("abcCdDB")
    held = held_in(work, 100)  # 100, 200, 300; 300 as d ends
    room = {
        (("a", 0), Phase.FORWARD): -90,  # before that nothing can have left
        (("a", 0), Phase.AFTER): 90,
        (("b", 0), Phase.AFTER): 190,
        (("c", 0), Phase.BACKWARD): 270,
        (("b", 0), Phase.BACKWARD): 70,  # after other backwards
        (("d", 0), Phase.AFTER): 285,
    }
    assert gates_of(work, held, room) == ((("a", 0), 10), (("c", 0), 30), (("d", 0), 15))
    assert gates_of(work, held, {}, {}) == gates_of(work, held, {}) == ()


def test_gates_come_before_memory_is_short_so_that_no_more_is_there_before_than_then() -> None:
    work = of_order("abcdDCBA")
    held = held_in(work, 100)
    loss = {(("d", 0), Phase.AFTER): 250}
    assert gates_of(work, held, loss) == ((("c", 0), 50), (("d", 0), 150))
    sooner = gates_of(work, held, loss, {})  # one forward earlier, which finds room for what it saves
    assert sooner == ((("b", 0), 50), (("c", 0), 150))
    assert gates_of(work, held, loss, {("c", 0): 7}) == ((("b", 0), 57), (("c", 0), 150))  # and hands on to d


def test_what_leaves_shortly_before_a_loss_leaves_a_hole_that_counts() -> None:
    step = with_peaks(record(layers=8, forward=20.0, backward=100.0), layer7_AFTER=900)
    slots = frozenset((row.name, row.forward) for row in step.slots)

    def levels_of(choice: Choice) -> Levels:
        parcels: dict[Key, list[Parcel]] = {}
        for row in step.slots:
            parcels.setdefault((row.layer, 0), []).append(Parcel(row.nbytes, (row.name, 0) in choice))
        return follow(work_of(step), parcels, LINK, BOUNDS)[1]

    plain, holes = (DeviceBudget(0, step, levels_of, holes=counts) for counts in (False, True))
    saved = EACH * MIB
    last = levels_of(slots)[("layer7", 0), Phase.FORWARD]
    there = levels_of(slots)[("layer7", 0), Phase.AFTER]
    assert last + saved > there > 0  # something leaves as the last forward ends
    handed_on = OWN[Phase.AFTER] * MIB  # by the forward before, beside as much
    assert holes.peak(slots).nbytes - plain.peak(slots).nbytes == last + saved + handed_on - there
    assert holes.peak(Choice()) == plain.peak(Choice())  # nothing leaves
    backward = with_peaks(record(layers=8), layer0_BACKWARD=900)  # where what was large is free
    plain, holes = (DeviceBudget(0, backward, levels_of, holes=counts) for counts in (False, True))
    assert holes.peak(slots) == plain.peak(slots)


def test_orders_of_micro_batches_begin_with_those_that_are_there_or_take_all_of_each_slot() -> None:
    slots = {(f"layer{layer}/0.{kind}", batch): 1 for batch in (0, 1) for layer in (0, 1) for kind in ("x", "y")}
    saved, x_first, y_first, *others = orders_of(slots, None, {key for key in slots if key[1] == 1})
    assert saved == list(slots) and len(others) == 4
    second = [key for key in saved if key[1] == 1]
    assert [order[:4] for order in others[:3]] == [
        second,
        *[[key for key in one if key[1]] for one in (x_first, y_first)],
    ]
    assert [key[1] for key in others[3]] == [0, 1] * 4
    assert orders_of(slots, None, slots)[:3] == [saved, x_first, y_first]  # all are there
    assert orders_of(slots) == [saved, x_first, y_first]


def test_what_a_forward_hands_on_is_there_with_all_that_it_has_saved_itself() -> None:
    a, b = ("a", 0), ("b", 0)
    sizes = [(("", 0), Phase.BEFORE, 100), (a, Phase.FORWARD, 150), (a, Phase.AFTER, 147), (b, Phase.FORWARD, 190)]
    sizes += [(b, Phase.AFTER, 900), (b, Phase.BACKWARD, 500)]
    again = [(("a", 1), Phase.AFTER, 647), (("b", 1), Phase.FORWARD, 690), (("b", 1), Phase.AFTER, 990)]
    peaks = tuple(DevicePeak(*key, phase, nbytes, 0) for key, phase, nbytes in sizes + again)
    levels = {(a, Phase.FORWARD): 0, (a, Phase.AFTER): 40, (b, Phase.FORWARD): 10, (b, Phase.AFTER): 41}
    step = dataclasses.replace(record(), device_peaks=peaks)
    budget = DeviceBudget(0, step, lambda _: levels, {}, holes=True)
    # Beside the 100 that are there anyhow; and no more where 500 have come since.
    assert budget.handed_on == {a: 47, b: 0, ("a", 1): 47}
    assert [peak.held for peak in budget._peaks(Choice())][:6] == [0, 0, 40, 10, 40 + 47, 0]


def test_holes_are_of_what_has_left_since_the_last_backward() -> None:
    a, b = ("a", 0), ("b", 0)
    phases = [(*a, Phase.FORWARD), (*a, Phase.AFTER), (*b, Phase.BACKWARD), (*b, Phase.FORWARD), (*b, Phase.AFTER)]
    phases.append(("not looked at", 0, Phase.AFTER))
    step = dataclasses.replace(record(), device_peaks=tuple(DevicePeak(*phase, 100 * MIB, 0) for phase in phases))
    stays = {(a, Phase.FORWARD): 30, (a, Phase.AFTER): 40, (b, Phase.FORWARD): 5, (b, Phase.AFTER): 15}
    goes = stays | {(a, Phase.AFTER): 5, (b, Phase.AFTER): 5}
    budget = DeviceBudget(0, step, lambda choice: goes if choice else stays, {}, holes=True)
    assert not any(budget.handed_on.values())  # nothing is between two forwards
    found = budget._peaks(Choice([("a", 0)]))
    assert [peak.held for peak in found] == [30, 40, 0, 5, 15, 15]


def test_peak_that_is_no_layer_s_own_counts_with_the_slots_that_are_there_then() -> None:
    step = with_peaks(record(), layer3_AFTER=500)  # a loss, say: all layers' slots are there
    plan = plan_of(WEIGHTS + 505 + 130, step)
    assert plan.bytes_going >= (LAYERS * EACH - 100) * MIB
    early = with_peaks(record(), layer0_FORWARD=500)  # nothing is saved yet, so that nothing need go
    assert going(plan_of(WEIGHTS + 570, early)) == set()


def test_limit_that_cannot_be_met_says_by_how_much_where_and_what_stays() -> None:
    step = with_peaks(record(act_input=Reason.ASKED), layer3_AFTER=500)
    with pytest.raises(BudgetError) as error:
        plan_of(WEIGHTS, step)
    message = str(error.value)
    assert message.startswith("device_limit is 1000.0 MiB, but torch has ") and "(layer3, after the forward)" in message
    assert "Of saved tensors 120.0 MiB stay, such as layer0/1.act_input (30.0 MiB, asked by the user)" in message
    assert "lower max_in_flight (up to 30.0 MiB wait for copies out, 60.0 MiB are back early), or compute" in message
    with pytest.raises(BudgetError, match="let those go, or compute more again"):
        make_plan(policy(device_limit=WEIGHTS * MIB), step, LINK, None)


def test_where_nothing_may_go_the_limit_is_met_or_it_is_an_error() -> None:
    step = with_peaks(record(fc1_input=Reason.ASKED, act_input=Reason.MARKED, fc2_input=Reason.ASKED))
    assert step.device_peak is not None
    enough = make_plan(policy(device_limit=step.device_peak.nbytes), step, LINK, None)
    assert enough.slots == () and enough.foreseen is None and enough.forecast is not None
    assert enough.forecast.device_bytes == step.device_peak.nbytes
    with pytest.raises(BudgetError, match=r"1\.0 MiB too much. Of saved tensors 240\.0 MiB stay"):
        make_plan(policy(device_limit=step.device_peak.nbytes - MIB), step, LINK, None)


def test_limit_that_the_seen_step_met_is_no_error_though_it_has_no_margin_and_all_goes() -> None:
    step = with_peaks(record())
    assert step.device_peak is not None
    exactly = make_plan(policy(device_limit=step.device_peak.nbytes), step, LINK, BOUNDS)
    assert len(going(exactly)) == 3 * LAYERS
    with pytest.raises(BudgetError):
        make_plan(policy(device_limit=step.device_peak.nbytes - 1), step, LINK, BOUNDS)


def test_limit_that_steps_of_a_plan_cannot_meet_is_no_error_and_all_goes() -> None:
    assert len(going(plan_of(WEIGHTS, with_peaks(record()), before=Plan(())))) == 3 * LAYERS


@pytest.mark.parametrize(("ms", "stays"), [(100.0, True), (5.0, False)], ids=["copies are hidden", "they are not"])
def test_plan_that_there_is_stays_unless_another_is_a_twentieth_quicker(ms: float, stays: bool) -> None:
    first = with_peaks(record(forward=ms, backward=ms))
    tight = WEIGHTS + LAYERS * EACH - 70 + OWN[Phase.BACKWARD]
    before = plan_of(tight, first)
    roomy = tight + 200  # by now nothing need go
    after = plan_of(roomy, following(first, before), before=before)
    assert going(before) and (going(after) == going(before)) == stays
    assert stays or going(after) == set()


def test_what_nobody_named_goes_tensor_by_tensor_and_small_ones_together() -> None:
    assert as_they_go([400 * MIB, 40 * MIB, 32 * MIB]) == [400 * MIB, 40 * MIB, 32 * MIB]
    assert as_they_go([10 * MIB] * 10) == [60 * MIB, 40 * MIB]  # of 64 MiB at the most
    step = record(layers=6, forward=100.0, backward=100.0, sizes={SlotName.OTHER: 400 * MIB})
    sizes = (*[40 * MIB] * 8, 0, 50 * MIB, 30 * MIB)
    rows = tuple(dataclasses.replace(row, tensors=11, sizes=sizes) for row in step.slots)
    step = with_peaks(dataclasses.replace(step, slots=rows))
    plan = plan_of(WEIGHTS + 6 * 400 + OWN[Phase.BACKWARD] - 1, step)
    assert [slot.goes for slot in plan.slots] == [True] + [False] * 5
    tight = plan_of(WEIGHTS + 6 * 400 + OWN[Phase.BACKWARD] - 351, step)  # with a margin of the largest tensor
    assert [slot.goes for slot in tight.slots] == [True, True] + [False] * 4
    assert [slot.goes for slot in plan_of(WEIGHTS + 6 * 400 + OWN[Phase.BACKWARD] - 350, step).slots] == [True] + [
        False
    ] * 5


def test_limit_and_a_host_that_has_no_room_exclude_each_other_and_say_so() -> None:
    asked = policy(device_limit=(WEIGHTS + OWN[Phase.BACKWARD] + 150) * MIB, host_limit=10 * MIB)
    with pytest.raises(BudgetError, match=r"device_limit=1.2 GiB sends .* but host_limit is 10.0 MiB"):
        make_plan(asked, with_peaks(record()), LINK, BOUNDS)


@pytest.mark.parametrize(
    "others", [{"fraction": 0.5}, {"budget_per_layer": 1}, {"pp_rank_delta": 1, "pp_rank": 1}], ids=str
)
def test_limit_is_the_only_budget(others: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="Give device_limit alone"):
        policy(device_limit="1GiB", **others)
    assert policy(name=None, device_limit="1GiB").name == "planned"


def test_ranks_plan_from_the_largest_of_their_peaks() -> None:
    one, other = with_peaks(record(), layer3_AFTER=500), with_peaks(record(), layer0_FORWARD=500)
    both = merge_records([one, other])
    for mine, its, merged in zip(one.device_peaks, other.device_peaks, both.device_peaks, strict=True):
        assert merged.nbytes == max(mine.nbytes, its.nbytes)
        assert merged.nbytes - merged.held == max(mine.nbytes - mine.held, its.nbytes - its.held)
    reserved = [dataclasses.replace(one, device_reserved=nbytes) for nbytes in (5, 9, 7)]
    assert merge_records(reserved).device_reserved == 9
    less = [dataclasses.replace(peak, nbytes=peak.nbytes - 1, held=peak.held // 2) for peak in one.device_peaks]
    merged = merge_records([one, dataclasses.replace(one, device_peaks=tuple(less))]).device_peaks[-1]
    assert (
        merged.nbytes == one.device_peaks[-1].nbytes and merged.nbytes - merged.held == less[-1].nbytes - less[-1].held
    )
    with pytest.raises(PlanError, match="cannot have the same plan"):
        merge_records([one, dataclasses.replace(other, device_peaks=other.device_peaks[::-1])])


@pytest.mark.parametrize("capturing", [False, True])
def test_what_the_allocator_keeps_of_a_gpu_is_given_back_where_steps_keep_other_slots_but_in_no_capture(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(None))
    give_back_unused(torch.device("cuda", 0))
    assert len(given_back) == (not capturing)
    give_back_unused(torch.device("cpu"))
    assert len(given_back) == (not capturing)


def test_plan_holds_as_another_one_of_which_the_same_slots_go_and_leave_where_they_do() -> None:
    def within(place: int) -> Plan:
        departures = Departures({("layer0", 0): 1}, {("layer0", 0): ((5, place),)})
        return dataclasses.replace(PLAN, foreseen=Foreseen(Pace({}, {}), departures, BOUNDS))

    assert within(1).holds_as(within(1)) and PLAN.holds_as(Plan(PLAN.slots))
    assert not within(1).holds_as(within(2)) and not within(1).holds_as(PLAN) and not within(1).holds_as(None)


def _segment(nbytes: int, *states: str, **other: Any) -> dict[str, Any]:
    blocks = [{"state": state} for state in states]
    usual = {"device": 0, "stream": 7, "is_expandable": False, "segment_pool_id": (0, 0), "segment_type": "large"}
    return {**usual, "total_size": nbytes, "blocks": blocks, **other}


def test_filled_are_whole_segments_that_nobody_uses_the_largest_first_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = [
        _segment(30, "inactive"),
        _segment(50, "inactive"),
        _segment(40, "inactive"),
        _segment(20, "inactive", "active_allocated"),
        _segment(21, "active_allocated"),
        _segment(22, "inactive", device=1),
        _segment(23, "inactive", stream=8),
        _segment(24, "inactive", is_expandable=True),
        _segment(25, "inactive", segment_pool_id=(0, 1)),
        _segment(26, "inactive", segment_type="small"),
    ]
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch, "empty", lambda nbytes, **_: made.append(nbytes))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert len(fill_unused(torch.device("cuda", 0), 85)) == 2 and made == [50, 30]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert fill_unused(torch.device("cuda", 0), 85) == []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert fill_unused(torch.device("cpu"), 85) == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fill_unused(torch.device("cuda", 0), 85) == []


def test_each_peak_is_of_its_own_window() -> None:
    reads = iter((7, 30, 10, 20, 40))
    marks = Watermarks(lambda: next(reads))
    marks.border("layer0", 0, Phase.FORWARD)  # in a step that is not watched
    assert marks.end() == ()
    marks.begin()
    marks.border("layer0", 0, Phase.FORWARD)
    marks.border("layer0", 0, Phase.AFTER)
    marks.border("layer0", 0, Phase.BACKWARD)
    found = marks.end()
    assert [peak.nbytes for peak in found] == [30, 10, 20, 40]
    assert [peak.phase for peak in found] == [Phase.BEFORE, Phase.FORWARD, Phase.AFTER, Phase.BACKWARD]
    assert marks.end() == ()


def test_what_the_allocator_took_is_the_most_of_any_window_of_one_step() -> None:
    reads = iter((50, 30, 40, 20, 60, 35))
    now: list[int] = []

    def read() -> int:
        now.append(next(reads))
        return 1

    marks = Watermarks(read, lambda: now[-1])
    for borders, most in ((2, 40), (0, 35)):  # what was taken before a step began is not the step's
        marks.begin()
        for _ in range(borders):
            marks.border("layer0", 0, Phase.FORWARD)
        marks.end()
        assert marks.reserved == most
    assert next(reads, None) is None


def test_peaks_are_torchs_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, Any] = {"allocated_bytes": {"all": {"peak": 8}}, "reserved_bytes": {"all": {"peak": 13}}}
    began: list[torch.device] = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda of: stats if of == device else {})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", began.append)
    marks = watermarks_of(device)
    marks.begin()
    assert marks.reserved == 0
    assert [peak.nbytes for peak in marks.end()] == [8] and began == [device, device]
    assert marks.reserved == 13
    for counts_nothing in ({"allocated_bytes": {"all": {"peak": 0}}}, {}):
        stats.clear()
        stats.update(counts_nothing)
        with pytest.raises(UnsupportedError, match="torch's allocator does not count here"):
            marks.begin()
    with pytest.raises(ArgumentError, match="the layers are on cpu"):
        watermarks_of(torch.device("cpu"))


def test_report_says_where_the_peak_was_and_by_how_much_it_missed_the_limit() -> None:
    step = with_peaks(record(), layer2_BACKWARD=900)
    assert step.device_peak is not None
    line = device_lines(step, step.device_peak.nbytes - 3 * MIB)
    assert "(layer2, backward): 3.0 MiB more than device_limit" in line
    assert "within device_limit" in device_lines(step, step.device_peak.nbytes)
    assert "taken" not in line
    taken = dataclasses.replace(step, device_reserved=3 << 30)
    assert device_lines(taken, 1).endswith(" Its allocator had taken up to 3.0 GiB of the device.\n")
    assert device_lines(step, None) == device_lines(record(), 1) == ""
