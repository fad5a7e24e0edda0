"""The states of a slot's bytes and of a session, and the one table of legal changes.

In: a state and the next one. Out: the next one, or an error that names both. Keeps true: what `TRANSITIONS` does not
list is a `StateError`. Does not: move bytes.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from te_offload.errors import StateError


class _State(enum.Enum):
    following: tuple[_State, ...]  # what `TRANSITIONS` lists


class SlotState(_State):
    """Where the bytes of one slot of one forward are, and what that costs."""

    SAVED = "saved"  # the saved tensors hold device memory; nothing is decided
    KEPT = "kept"  # the same, for good
    LEAVING = "leaving"  # device memory until the copy out has ended, and host memory
    ON_HOST = "on the host"  # host memory alone
    RETURNING = "returning"  # host memory, and new device memory that is being filled
    RETURNED = "returned"  # host memory, and device memory that is filled (or was never given up)
    RELEASED = "released"  # none


# Shorter, and Python 3.11 is slow to look up an enum's member.
SAVED, KEPT, LEAVING, ON_HOST, RETURNING, RETURNED, RELEASED = SlotState


class SessionState(_State):
    """What a session may be asked to do."""

    IDLE = "between steps"
    IN_STEP = "in a step"
    CLOSED = "closed"


State = SlotState | SessionState

TRANSITIONS: dict[State, frozenset[State]] = {
    SlotState.SAVED: frozenset({SlotState.KEPT, SlotState.LEAVING}),
    SlotState.KEPT: frozenset({SlotState.RELEASED}),
    SlotState.LEAVING: frozenset({SlotState.ON_HOST, SlotState.RETURNED}),
    SlotState.ON_HOST: frozenset({SlotState.RETURNING, SlotState.RELEASED}),
    SlotState.RETURNING: frozenset({SlotState.RETURNED}),
    SlotState.RETURNED: frozenset({SlotState.ON_HOST, SlotState.RELEASED}),
    SlotState.RELEASED: frozenset(),
    SessionState.IDLE: frozenset({SessionState.IN_STEP, SessionState.CLOSED}),
    SessionState.IN_STEP: frozenset({SessionState.IDLE}),
    SessionState.CLOSED: frozenset(),
}

for _state, _ends in TRANSITIONS.items():  # `in` on a tuple compares identities first; an enum's hash costs more
    _state.following = tuple(_ends)

AnyState = TypeVar("AnyState", SlotState, SessionState)


def change(what: object, state: AnyState, to: AnyState) -> AnyState:
    """``to``, if ``what`` (its ``str`` is for the message) may go there from ``state``.

    Raises:
        StateError: `TRANSITIONS` has no such edge.
    """
    if to not in state.following:
        raise StateError(f"{what} is {state.value} and cannot become {to.value}.")
    return to
