"""When a session need not look: nothing went for some steps, and nothing that decides has changed.

In: finished steps, and the arguments of forwards. Out: whether a forward is looked at. Keeps true: a forward whose input
has another shape, or whose ops have other arguments, than in the last step that was looked at is looked at; so is every
forward of each `EVERY`-th step; the record counts what was not. Does not: offload.

Looking costs a layer that keeps everything some 50 us of the host, which is 2% of a step with many experts on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_offload.offload.decide import Rules
from te_offload.offload.visit import LayerVisit
from te_offload.slots import Reason

AFTER = 4  # steps in a row in which nothing went
EVERY = 8  # of the steps after them, one so often is looked at

_LASTING = (
    Reason.ASKED,
    Reason.MARKED,
    Reason.TOO_SMALL,
    Reason.PLAN,
    Reason.DISABLED,
    Reason.FROZEN,
    Reason.REBUILT,
    Reason.GRAPH_GONE,
    Reason.IN_BACKWARD,
)

Signature = tuple[Any, ...]


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any], flags: Sequence[bool]) -> Signature | None:
    """What decides on the slots of a forward, as far as it is seen from outside; ``None`` if no argument is a tensor."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return (*shapes, *flags, torch.is_grad_enabled()) if shapes else None


class Quiet:
    """Remembers, for one session, what forwards looked like while nothing went."""

    def __init__(self) -> None:
        self.unseen = 0
        self._steps_in_vain = 0
        self._rules: Rules | None = None
        self._known: dict[tuple[str, int], Signature | None] = {}
        self._looks = True

    def begin_step(self, index: int, rules: Rules) -> None:
        """A step begins under some rules."""
        if rules != self._rules:
            self._rules, self._steps_in_vain = rules, 0
        self._looks = self._steps_in_vain < AFTER or index % EVERY == 0
        self.unseen = 0
        if self._looks:
            self._known = {}

    def looks_at(self, layer: str, forward: int, signature: Signature | None) -> bool:
        """Whether a forward is looked at."""
        if not self._looks:
            if signature is not None and self._known.get((layer, forward)) == signature:
                self.unseen += 1
                return False
            self._looks, self._steps_in_vain = True, 0
        self._known[layer, forward] = signature
        return True

    def end_step(self, visits: Sequence[LayerVisit], bytes_out: int) -> None:
        """The step is over."""
        if self._looks:
            reasons = {entry.reason for visit in visits for entry in visit.entries} if not bytes_out else {Reason.NONE}
            self._steps_in_vain = self._steps_in_vain + 1 if reasons.issubset(_LASTING) else 0
