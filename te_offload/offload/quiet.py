"""Which forwards a session need not look at: those that kept all they saved, while nothing that decides has changed.

In: finished steps, and the arguments of forwards. Out: whether a forward is looked at. Keeps true: in a timed step every
forward is looked at; in the others one whose input has another shape, or whose ops have other arguments, than when it was
last looked at is, and so are all after it; the record counts those that were not. Does not: offload.

Looking costs a layer that keeps everything some 50 to 300 us of the host, 2% of a step with many experts on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_offload.offload.decide import Rules
from te_offload.offload.visit import LayerVisit
from te_offload.slots import Reason

# Not that a forward saved nothing, or not all, since no gradient needed it (weights may be unfrozen), or since it raised.
_LASTING = {
    Reason.ASKED,
    Reason.MARKED,
    Reason.TOO_SMALL,
    Reason.PLAN,
    Reason.DISABLED,
    Reason.REBUILT,
    Reason.GRAPH_GONE,
    Reason.DISCARDED,
    Reason.IN_BACKWARD,
}

Signature = tuple[Any, ...]


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any], flags: Sequence[bool]) -> Signature | None:
    """What decides on the slots of a forward, as far as it is seen from outside; ``None`` if no argument is a tensor."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    again = torch._C._current_graph_task_id() != -1  # by a checkpoint, in a backward
    return (*shapes, *flags, torch.is_grad_enabled(), again) if shapes else None


class Quiet:
    """Remembers, for one session, the forwards from which nothing went.

    Attributes:
        unseen: how many forwards of this step were not looked at.
    """

    def __init__(self) -> None:
        self.unseen = 0
        self._looks = True
        self._rules: Rules | None = None
        self._known: dict[tuple[str, int], Signature] = {}
        self._signatures: dict[tuple[str, int], Signature | None] = {}  # of the forwards looked at in this step

    def begin_step(self, rules: Rules, *, timed: bool) -> None:
        """A step begins under some rules."""
        if rules != self._rules:
            self._rules, self._known = rules, {}
        self._looks = timed
        self.unseen = 0
        self._signatures = {}

    def looks_at(self, key: tuple[str, int], signature: Signature | None) -> bool:
        """Whether a forward (layer, and its number) is looked at."""
        known = None if self._looks else self._known.get(key)
        if known is not None:
            if signature == known:
                self.unseen += 1
                return False
            self._looks = True
        self._signatures[key] = signature
        return True

    def end_step(self, visits: Sequence[LayerVisit]) -> None:
        """The step is over."""
        for visit in visits:
            signature = self._signatures.get(visit.key)
            if signature is not None and visit.entries and {e.reason for e in visit.entries} <= _LASTING:
                self._known[visit.key] = signature
            else:
                self._known.pop(visit.key, None)
