"""Policies, budgets, plans and their files, on records made by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from te_offload import Fate, Outcome, Plan, PlannedSlot, Reason, SlotName, SlotRecord, StepRecord, Window
from te_offload.errors import ArgumentError, ArgumentTypeError, BudgetError, PlanError
from te_offload.offload.choice import check_host_limit, make_plan
from te_offload.offload.forecast import bounds_for, parcels_of, work_of
from te_offload.offload.planner import merge_records
from te_offload.offload.policy import Policy
from te_offload.offload.slot_bytes import bytes_by_slot
from te_offload.offload.timeline import Bounds, Link, simulate

MIB = 2**20
LINK = Link(*[10.0 * MIB] * 4)  # 10 MiB a millisecond
SIZES = {SlotName.FC1_INPUT: 10 * MIB, SlotName.ACT_INPUT: 30 * MIB, SlotName.FC2_INPUT: 20 * MIB}
BOUNDS = Bounds(out=30 * MIB, back=60 * MIB, recall=True)


def policy(**arguments: Any) -> Policy:
    values: dict[str, Any] = {
        "name": "planned",
        "budget_per_layer": None,
        "fraction": None,
        "pp_rank_delta": 0,
        "pp_rank": 0,
        "host_limit": None,
        "replan_drift": 0.25,
    }
    return Policy.of(**(values | arguments))


def record(
    layers: int = 4,
    forward: float = 10.0,
    backward: float = 20.0,
    sizes: Mapping[SlotName, int] = SIZES,
    **kept: Reason,
) -> StepRecord:
    rows, windows = [], []
    for number in range(layers):
        for position, (slot, nbytes) in enumerate(sizes.items()):
            reason = kept.get(slot.value, Reason.NONE)
            goes = reason is Reason.NONE
            fate = Fate.OFFLOADED if goes else Fate.KEPT
            out = nbytes if goes else 0
            outcome = Outcome.HIT if goes else Outcome.NONE
            rows.append(
                SlotRecord(f"layer{number}", str(position), slot, 0, nbytes, 1, fate, reason, out, outcome, 1.0, 1.0)
            )
        needed = layers * forward + (layers - 1 - number) * backward
        read = layers - 1 - number
        windows.append(Window(f"layer{number}", 0, number * forward, forward, 0.0, needed, backward, read))
    total = sum(row.bytes_out for row in rows)
    return StepRecord(
        index=1,
        rank=0,
        slots=tuple(rows),
        windows=tuple(windows),
        residency=(),
        bytes_out=total,
        bytes_back=total,
        copies_out=len(rows),
        copies_back=len(rows),
        peak_in_flight=0,
        peak_ahead=0,
        host_peak=total,
        host_held=total,
        host_allocations=1,
        host_node=None,
        host_nodes=(),
        host_failure=None,
        unseen=0,
        exempt_bytes=0,
        abandoned=0,
        raised=False,
        planned=False,
        predicted_ms=None,
        predicted_waiting_ms=None,
        timed=True,
        throttled_at_end_ms=0.0,
        step_ms=layers * (forward + backward),
        out_ms=total / (10 * MIB),
        back_ms=total / (10 * MIB),
    )


def going(plan: Plan) -> set[str]:
    return {slot.name for slot in plan.slots if slot.goes}


# Policies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"name": "some"}, ArgumentError, "policy must be one of 'all', 'planned', but is 'some'"),
        ({"fraction": 1.5}, ArgumentError, "fraction must be from 0 to 1, but is 1.5"),
        ({"fraction": "half"}, ArgumentTypeError, "fraction must be a number"),
        ({"fraction": True}, ArgumentTypeError, "fraction must be a number"),
        ({"fraction": 0.5, "budget_per_layer": 1}, ArgumentError, "not both"),
        ({"name": "all", "fraction": 0.5}, ArgumentError, "leave it out to let a plan meet the budgets"),
        ({"budget_per_layer": "12 parsecs"}, ArgumentError, "budget_per_layer must be a size"),
        ({"pp_rank_delta": "1.5"}, None, ""),
        ({"pp_rank_delta": -1}, ArgumentError, "pp_rank_delta must not be negative"),
        ({"pp_rank": -1}, ArgumentError, "pp_rank must not be negative"),
        ({"pp_rank": 1.0}, ArgumentTypeError, "pp_rank must be an int"),
        ({"replan_drift": -0.1}, ArgumentError, "replan_drift must be from 0"),
        ({"host_limit": "much"}, ArgumentError, "host_limit must be a size"),
    ],
)
def test_policy_that_cannot_be_is_a_named_error(arguments: Any, kind: Any, message: str) -> None:
    if kind is None:
        policy(**arguments)
        return
    with pytest.raises(kind, match=message):
        policy(**arguments)


def test_budget_makes_the_policy_a_planned_one_and_nothing_makes_it_all() -> None:
    assert policy(name=None, budget_per_layer="1MiB").name == "planned"
    assert policy(name=None, pp_rank_delta="1MiB", pp_rank=2).keep_more == 2 * MIB
    assert policy(name=None).name == "all"


# The choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "goes"),
    [
        (60, set()),
        (50, {"fc1_input"}),
        (40, {"fc2_input"}),
        (30, {"act_input"}),  # 30 of 60 must go: fc1 and fc2 together are 30 as well
        (20, {"act_input", "fc1_input"}),
        (0, {"fc1_input", "act_input", "fc2_input"}),
    ],
)
def test_budget_per_layer_is_met_with_the_fewest_bytes(budget: int, goes: set[str]) -> None:
    plan = make_plan(policy(budget_per_layer=budget * MIB), record(), LINK, BOUNDS)
    for layer in range(4):
        sizes = {slot.name.split(".")[1]: slot.nbytes for slot in plan.slots if slot.name.startswith(f"layer{layer}/")}
        left = {name.split(".")[1] for name in going(plan) if name.startswith(f"layer{layer}/")}
        assert sum(sizes.values()) - sum(sizes[name] for name in left) <= budget * MIB
        assert sum(sizes[name] for name in left) == sum(SIZES[SlotName(name)] for name in goes)


def test_budget_that_cannot_be_met_says_by_how_much_and_what_would_have_to_go() -> None:
    kept = record(act_input=Reason.ASKED)
    with pytest.raises(BudgetError) as found:
        make_plan(policy(budget_per_layer=20 * MIB), kept, LINK, BOUNDS)
    assert str(found.value) == (
        "budget_per_layer is 20.0 MiB, but 30.0 MiB of layer0 must stay, 10.0 MiB too much. These would have to go: "
        "layer0/1.act_input (30.0 MiB, asked by the user). Raise the budget, or let them go."
    )


def test_memory_that_is_there_anyhow_does_not_count_against_the_budget() -> None:
    shared = record(act_input=Reason.ALIAS)
    plan = make_plan(policy(budget_per_layer=10 * MIB), shared, LINK, BOUNDS)
    assert {name.split(".")[1] for name in going(plan)} == {"fc2_input"}


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_fraction_is_one_of_bytes_and_the_earliest_go_first(fraction: float) -> None:
    plan = make_plan(policy(fraction=fraction), record(), LINK, BOUNDS)
    total = sum(slot.nbytes for slot in plan.slots)
    assert plan.bytes_going >= fraction * total
    assert plan.bytes_going <= fraction * total + max(SIZES.values())
    assert plan.forecast is not None
    if fraction <= 0.5:
        assert plan.forecast.waiting_ms == pytest.approx(0.0, abs=1e-6)


def test_last_slots_stay_where_their_leaving_would_free_nothing_at_the_peak() -> None:
    plan = make_plan(policy(), record(), LINK, BOUNDS)
    everything = make_plan(policy(budget_per_layer=0), record(), LINK, BOUNDS)
    assert "layer0/0.fc1_input" in going(plan)
    assert "layer3/2.fc2_input" not in going(plan)
    assert plan.forecast is not None and everything.forecast is not None
    assert plan.forecast.peak_bytes <= everything.forecast.peak_bytes
    assert plan.forecast.step_ms <= everything.forecast.step_ms


def test_more_of_the_last_slots_stay_where_the_copies_take_longer() -> None:
    slow = Link(*[2.0 * MIB] * 4)
    quick_plan = make_plan(policy(), record(), LINK, Bounds(back=60 * MIB, recall=True))
    slow_plan = make_plan(policy(), record(), slow, Bounds(back=60 * MIB, recall=True))
    assert going(slow_plan) < going(quick_plan)


def test_later_pipeline_stage_keeps_its_share_more() -> None:
    first = make_plan(policy(budget_per_layer=0, pp_rank_delta="40MiB", pp_rank=0), record(), LINK, BOUNDS)
    third = make_plan(policy(budget_per_layer=0, pp_rank_delta="40MiB", pp_rank=2), record(), LINK, BOUNDS)
    assert first.bytes_going - third.bytes_going == 80 * MIB
    assert going(third) < going(first)


def test_host_limit_keeps_the_last_slots() -> None:
    plan = make_plan(policy(host_limit="100MiB"), record(), LINK, BOUNDS)
    assert plan.forecast is not None and plan.forecast.host_bytes <= 100 * MIB
    assert "layer0/0.fc1_input" in going(plan) and "layer3/0.fc1_input" not in going(plan)


def test_host_limit_is_met_to_the_byte_and_no_slot_stays_for_nothing() -> None:
    free = make_plan(policy(), record(), LINK, BOUNDS)
    assert free.forecast is not None
    needed = free.forecast.host_bytes
    assert make_plan(policy(host_limit=needed), record(), LINK, BOUNDS) == free
    less = make_plan(policy(host_limit=needed - 1), record(), LINK, BOUNDS)
    assert less.forecast is not None and less.forecast.host_bytes < needed
    (stays,) = going(free) - going(less)
    assert stays == [slot.name for slot in free.slots if slot.goes][-1]
    assert make_plan(policy(host_limit=less.forecast.host_bytes), record(), LINK, BOUNDS) == less
    with_budget = make_plan(policy(budget_per_layer=0, host_limit="240MiB"), record(), LINK, BOUNDS)
    assert with_budget.forecast is not None and with_budget.forecast.host_bytes == 240 * MIB


def test_host_limit_and_budget_that_exclude_each_other_say_so() -> None:
    with pytest.raises(
        BudgetError, match=r"sends 240\.0 MiB to the host, but host_limit is 100\.0 MiB, 140\.0 MiB less"
    ):
        make_plan(policy(budget_per_layer=0, host_limit="100MiB"), record(), LINK, BOUNDS)


def test_of_plans_that_take_as_long_the_one_that_holds_least_is_made() -> None:
    step = record(layers=6)
    plan = make_plan(policy(fraction=0.3), step, LINK, BOUNDS)
    other = parcels_of(record(layers=6, fc1_input=Reason.PLAN, act_input=Reason.PLAN))  # the FC2 inputs of all layers
    found = simulate(work_of(step), other, LINK, BOUNDS)
    assert plan.forecast is not None and plan.forecast.step_ms == pytest.approx(found.step_ms)
    assert plan.bytes_going == sum(parcel.nbytes for group in other.values() for parcel in group if parcel.goes)
    assert (plan.forecast.peak_bytes, found.peak_bytes) == (300 * MIB, 320 * MIB)


EXPERTS_64 = {SlotName.FC1_INPUT: 128 * MIB, SlotName.ACT_INPUT: 88 * MIB, SlotName.FC2_INPUT: 88 * MIB}


def test_bytes_in_flight_are_those_that_the_choice_needs_where_none_were_given() -> None:
    """A bound of less than a layer's slots would have the compute stream wait for the first of them."""
    link, step = Link(55e6, 55e6, 50e6, 50e6), record(8, 1.2, 2.4, EXPERTS_64)
    bounded, free = (
        make_plan(policy(fraction=0.1), step, link, bounds)
        for bounds in (Bounds(256 * MIB, 256 * MIB, recall=True, paced=True), None)
    )
    assert going(bounded) == {f"layer{layer}/1.act_input" for layer in range(3)}
    assert going(free) == {"layer0/0.fc1_input", "layer0/1.act_input", "layer0/2.fc2_input"}
    assert bounded.forecast is not None and free.forecast is not None
    assert free.forecast.step_ms == bounded.forecast.step_ms == pytest.approx(8 * 3.6)  # no wait
    assert (free.forecast.peak_bytes, bounded.forecast.peak_bytes) == (2128 * MIB, 2168 * MIB)


def test_of_plans_alike_in_time_and_peak_the_one_with_the_fewest_layers_is_made() -> None:
    """Layers of which nothing goes are left alone; one slot of one layer has as many bytes here as one of either."""
    sizes = {SlotName.FC1_INPUT: 40 * MIB, SlotName.ACT_INPUT: 20 * MIB, SlotName.FC2_INPUT: 20 * MIB}
    plan = make_plan(policy(fraction=0.25), record(2, sizes=sizes), LINK, None)
    assert going(plan) == {"layer0/0.fc1_input"}


def test_slots_that_the_host_has_no_room_for_are_named_whichever_forward_they_are_of() -> None:
    one = record(layers=2)
    later = dataclasses.replace(
        one,
        slots=tuple(dataclasses.replace(row, forward=3) for row in one.slots),
        windows=tuple(dataclasses.replace(window, forward=3) for window in one.windows),
    )
    names = ", ".join(dict.fromkeys(row.name for row in one.slots))
    for found in (one, later):
        with pytest.raises(BudgetError, match=f"These would have to go: {names}[.]"):
            make_plan(policy(fraction=1.0, host_limit="10MiB"), found, LINK, BOUNDS)


def test_host_limit_below_every_slot_is_a_named_error() -> None:
    nothing = record(fc1_input=Reason.NO_ROOM, act_input=Reason.NO_ROOM, fc2_input=Reason.NO_ROOM)
    with pytest.raises(
        BudgetError, match=r"the smallest slot that may go, layer0/0.fc1_input, has 10.0 MiB: 9.0 MiB too"
    ):
        check_host_limit(MIB, nothing)
    check_host_limit(10 * MIB, nothing)  # there was no room for another reason
    check_host_limit(MIB, record())


def test_same_record_gives_the_same_plan() -> None:
    assert make_plan(policy(fraction=0.4), record(), LINK, BOUNDS) == make_plan(
        policy(fraction=0.4), record(), LINK, BOUNDS
    )


# Records -------------------------------------------------------------------------------------------------------------


def test_work_is_the_windows_in_order_without_the_waits() -> None:
    plain = record(layers=2)
    waiting = dataclasses.replace(
        plain,
        slots=tuple(dataclasses.replace(row, exposed_ms=1.0) for row in plain.slots),
        windows=tuple(dataclasses.replace(window, throttled_ms=2.0) for window in plain.windows),
    )
    assert [(item.key[0], item.backward) for item in work_of(plain)] == [
        ("layer0", False),
        ("layer1", False),
        ("layer1", True),
        ("layer0", True),
    ]
    assert [item.ms for item in work_of(plain)] == [10.0, 10.0, 20.0, 20.0]
    assert [item.ms for item in work_of(waiting)] == [8.0, 8.0, 17.0, 17.0]
    quick = dataclasses.replace(
        plain, windows=tuple(dataclasses.replace(each, forward_ms=7.0) for each in plain.windows)
    )
    assert [(item.ms, item.rest_ms) for item in work_of(quick)] == [(7.0, 3.0), (7.0, 3.0), (20.0, 0.0), (20.0, 0.0)]


@pytest.mark.parametrize(
    ("forward", "backward", "layers", "factors"),
    [
        (1.0, 2.0, 4, (1.0, 1.0)),
        (6.0, 12.0, 4, (1.0, 1.0)),
        (3.0, 6.0, 12, None),
        (0.5, 20.0, 8, None),
        (5.0, 1.0, 6, None),
    ],
)
def test_bounds_are_the_least_of_five_each_way_with_which_the_step_is_no_longer_than_with_the_most(
    forward: float, backward: float, layers: int, factors: tuple[float, float] | None
) -> None:
    step = record(layers=layers, forward=forward, backward=backward)
    found = bounds_for(step)
    assert found is not None and not found.recall
    # what the link moves in the longest window, the layer at the most, and one slot more; a quarter of margin
    least_out = 1.25 * (min(10 * MIB * forward, 60 * MIB) + 30 * MIB)
    least_back = 1.25 * (min(10 * MIB * backward, 60 * MIB) + 30 * MIB)
    choices = 1.0, 1.5, 2.0, 3.0, 4.0
    out, back = (
        min(choices, key=lambda one: abs(one - bound / least))
        for bound, least in ((found.out, least_out), (found.back, least_back))
    )
    assert (found.out, found.back) == pytest.approx((out * least_out, back * least_back))

    def ms(out: float, back: float) -> float:
        return simulate(work_of(step), parcels_of(step), LINK, Bounds(out * least_out, back * least_back)).step_ms

    assert back == min(one for one in choices if ms(4.0, one) <= 1.02 * ms(4.0, 4.0))
    assert out == min(one for one in choices if ms(one, back) <= 1.02 * ms(4.0, 4.0))
    assert factors is None or (out, back) == factors


def test_bytes_come_back_no_earlier_for_more_of_them_being_on_their_way_out() -> None:
    """Copies out fall behind the forwards, but not all layers go, and backwards are long: as where the host is slow."""
    slow = record(layers=8, forward=4.4, backward=7.5)
    stays: dict[str, Any] = {"fate": Fate.KEPT, "reason": Reason.PLAN, "bytes_out": 0}
    slots = [dataclasses.replace(row, **stays) if row.layer in ("layer6", "layer7") else row for row in slow.slots]
    found = bounds_for(dataclasses.replace(slow, slots=tuple(slots)))
    assert found is not None
    assert found.out > 1.3 * 1.25 * (44 * MIB + 30 * MIB)  # waits would cost time
    assert found.back == pytest.approx(1.25 * (60 * MIB + 30 * MIB))  # more would cost memory alone


def test_slot_whose_memory_goes_with_another_is_no_parcel_of_its_own() -> None:
    step = record(layers=1)
    first, second, *rest = step.slots
    shared = dataclasses.replace(step, slots=(first, dataclasses.replace(second, bytes_out=MIB), *rest))
    found = parcels_of(shared)["layer0", 0]
    assert [parcel.nbytes for parcel in found] == [first.nbytes, MIB, *(row.nbytes for row in rest)]
    assert second.nbytes > MIB


def test_slot_that_is_computed_again_is_no_parcel_and_meets_no_budget() -> None:
    step = record(layers=2)
    again: dict[str, Any] = {"fate": Fate.RECOMPUTED, "reason": Reason.CHECKPOINT, "bytes_out": 0}
    slots = [dataclasses.replace(row, **again) if row.layer == "layer1" else row for row in step.slots]
    step = dataclasses.replace(step, slots=tuple(slots))
    found = parcels_of(step)
    assert [len(found["layer0", 0]), len(found["layer1", 0])] == [3, 0]
    plan = make_plan(policy(budget_per_layer=MIB), step, LINK, BOUNDS)
    assert {slot.name.split("/")[0] for slot in plan.slots} == {"layer0"} and plan.bytes_going == 60 * MIB


def test_plan_sends_as_another_one_of_which_the_same_slots_go() -> None:
    some = Plan((PlannedSlot("layer0/a.x", 0, 1, goes=True), PlannedSlot("layer0/b.x", 0, 1, goes=False)))
    everything = Plan(tuple(dataclasses.replace(slot, goes=True) for slot in some.slots))
    assert some.sends_as(Plan(some.slots)) and everything.sends_as(None)
    assert not some.sends_as(None) and not some.sends_as(everything) and not everything.sends_as(some)


def test_bounds_do_not_ask_what_comes_after_the_last_backward() -> None:
    step = record(layers=4, backward=2.0)
    *windows, first = sorted(step.windows, key=lambda window: window.read or 0)
    assert first.layer == "layer0"
    longer = dataclasses.replace(step, windows=(dataclasses.replace(first, backward_ms=1000.0), *windows))
    shorter = dataclasses.replace(step, windows=tuple(dataclasses.replace(w, backward_ms=1.0) for w in step.windows))
    assert bounds_for(step) == bounds_for(longer)
    assert bounds_for(step) != bounds_for(shorter)


def test_bounds_grow_where_that_saves_time() -> None:
    uneven = record(layers=8)
    windows = [
        dataclasses.replace(window, begin_ms=0.0 if number == 0 else 1.0 + 40.0 * (number > 3) + 0.1 * number)
        for number, window in enumerate(uneven.windows)
    ]
    windows = [dataclasses.replace(window, forward_ms=0.1, throttled_ms=0.0) for window in windows]
    found = bounds_for(dataclasses.replace(uneven, windows=tuple(windows)))
    assert found is not None and found.out > 1.25 * (MIB + 30 * MIB)


def test_there_are_no_bounds_where_nothing_went() -> None:
    disabled = record(fc1_input=Reason.DISABLED, act_input=Reason.DISABLED, fc2_input=Reason.DISABLED)
    assert bounds_for(disabled) is None


def test_ranks_plan_from_the_largest_of_their_numbers_or_refuse() -> None:
    one, other = record(), record()
    other = dataclasses.replace(
        other, rank=1, slots=(dataclasses.replace(other.slots[0], nbytes=99, sizes=(99,)), *other.slots[1:])
    )
    smaller = dataclasses.replace(one, slots=(dataclasses.replace(one.slots[0], nbytes=7), *one.slots[1:]))
    assert bytes_by_slot(merge_records([smaller, other]))["layer0/0.fc1_input", 0] == 99
    assert merge_records([smaller, other]).slots[0].sizes == (99,)
    with pytest.raises(PlanError, match=r"Ranks 0 and 1 have other slots \(12 and 9\)"):
        merge_records([one, dataclasses.replace(record(layers=3), rank=1)])


# Plans and files -----------------------------------------------------------------------------------------------------

PLAN = Plan((PlannedSlot("layer0/0.fc1_input", 0, 5, True), PlannedSlot("layer0/0.fc1_input", 1, 5, False)))


def test_plan_answers_for_its_slots_and_treats_later_forwards_as_the_last_one() -> None:
    assert PLAN.goes("layer0/0.fc1_input", 0)
    assert not PLAN.goes("layer0/0.fc1_input", 1)
    assert not PLAN.goes("layer0/0.fc1_input", 7)
    assert PLAN.goes("layer0/other", 0)


def test_drift_is_the_share_of_the_plans_bytes_that_moved() -> None:
    assert PLAN.drift({("layer0/0.fc1_input", 0): 5, ("layer0/0.fc1_input", 1): 5}) == 0.0
    assert PLAN.drift({("layer0/0.fc1_input", 0): 10, ("layer0/0.fc1_input", 1): 5}) == 0.5
    assert PLAN.drift({("layer0/other", 0): 5}) == 1.5


def test_plan_survives_its_file(tmp_path: Path) -> None:
    plan = make_plan(policy(), record(), LINK, BOUNDS)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    PLAN.save(tmp_path / "hand.json")
    assert Plan.load(tmp_path / "hand.json") == PLAN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no plan of te_offload: JSONDecodeError"),
        ("[]", "holds no plan of te_offload: TypeError"),
        ("{}", "holds no plan of te_offload: KeyError: 'schema'"),
        ('{"schema": "te_offload.plan/9"}', "has schema 'te_offload.plan/9'; this release reads 'te_offload.plan/1'"),
        ('{"schema": "te_offload.plan/1", "forecast": null, "slots": [{"name": 3}]}', "TypeError"),
        (
            '{"schema": "te_offload.plan/1", "forecast": null, "slots": '
            '[{"name": "a", "forward": 0, "nbytes": 1, "goes": "yes"}]}',
            "fields of other types",
        ),
    ],
)
def test_file_that_holds_no_plan_is_a_named_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


def test_missing_file_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="FileNotFoundError"):
        Plan.load(tmp_path / "nowhere.json")


def test_plan_of_another_model_is_refused() -> None:
    PLAN.check_layers({"layer0": ["layer0/0.fc1_input"]})
    with pytest.raises(PlanError, match=r"names layer0/0\.fc1_input, but the session's layers are layer1"):
        PLAN.check_layers({"layer1": []})
    with pytest.raises(PlanError, match=r"but layer0 owns layer0/1\.act_input\. It belongs to another model"):
        PLAN.check_layers({"layer0": ["layer0/1.act_input"]})


def test_plan_is_json_that_people_can_read(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    assert value["schema"] == "te_offload.plan/1"
    assert value["slots"][0] == {"name": "layer0/0.fc1_input", "forward": 0, "nbytes": 5, "goes": True}
