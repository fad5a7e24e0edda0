"""The table of states: every legal change, and every other one."""

from __future__ import annotations

import itertools

import pytest

from te_offload.errors import StateError
from te_offload.offload.states import TRANSITIONS, SessionState, SlotState, State, change

ALL: list[State] = [*SlotState, *SessionState]
PAIRS = [*itertools.product(SlotState, SlotState), *itertools.product(SessionState, SessionState)]


def test_table_has_a_row_for_every_state() -> None:
    assert set(TRANSITIONS) == set(ALL)


@pytest.mark.parametrize(("state", "to"), PAIRS, ids=lambda state: state.name)
def test_change_follows_the_table_and_names_both_ends_where_it_does_not(state: State, to: State) -> None:
    if to in TRANSITIONS[state]:
        assert change("It", state, to) is to  # type: ignore[type-var]
    else:
        with pytest.raises(StateError, match=f"It is {state.value} and cannot become {to.value}"):
            change("It", state, to)  # type: ignore[type-var]


def test_every_state_but_the_first_can_be_reached_and_the_last_ones_are_final() -> None:
    reached = {to for ends in TRANSITIONS.values() for to in ends}
    assert set(ALL) - reached == {SlotState.SAVED}
    assert {state for state, ends in TRANSITIONS.items() if not ends} == {SlotState.RELEASED, SessionState.CLOSED}
