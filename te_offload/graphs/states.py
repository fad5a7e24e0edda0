"""The states of a capture, and the one table of legal changes.

In: a state and the next one. Out: the next one, or an error that names both. Keeps true: what `TRANSITIONS` does not list
is a `StateError`. Does not: capture.
"""

from __future__ import annotations

import enum

from te_offload.errors import StateError


class CaptureState(enum.Enum):
    """What the next call of a capture does."""

    WARMING_UP = "warming up"  # runs eagerly on the capture's stream, until there were enough runs
    CAPTURING = "capturing"
    CAPTURED = "captured"  # replays
    EAGER = "eager, since it could not be captured"
    CLOSED = "closed"


TRANSITIONS: dict[CaptureState, frozenset[CaptureState]] = {
    CaptureState.WARMING_UP: frozenset({CaptureState.CAPTURING, CaptureState.EAGER, CaptureState.CLOSED}),
    CaptureState.CAPTURING: frozenset({CaptureState.CAPTURED, CaptureState.EAGER, CaptureState.WARMING_UP}),
    CaptureState.CAPTURED: frozenset({CaptureState.WARMING_UP, CaptureState.EAGER, CaptureState.CLOSED}),
    CaptureState.EAGER: frozenset({CaptureState.CLOSED}),
    CaptureState.CLOSED: frozenset(),
}


def change(state: CaptureState, to: CaptureState) -> CaptureState:
    """``to``, if a capture may go there from ``state``.

    Raises:
        StateError: `TRANSITIONS` has no such edge.
    """
    if to not in TRANSITIONS[state]:
        raise StateError(f"This capture is {state.value} and cannot become {to.value}.")
    return to
