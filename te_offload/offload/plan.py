"""A plan: which slots go, decided before a step, as a value that can be kept in a file.

In: slots with their bytes. Out: an answer for each slot. Keeps true: frozen; a plan of another model is refused, by the
names of its layers and slots; a file that is no plan is refused. Does not: choose (planner.py does).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from te_offload.errors import PlanError
from te_offload.offload.timeline import Forecast, Foreseen
from te_offload.slots import TENSORS_OP, SlotName

SCHEMA = "te_offload.plan/1"


@dataclass(frozen=True)
class PlannedSlot:
    """One slot of one forward.

    Attributes:
        name: ``layer/op.slot``; everything that nobody named is one slot, ``layer/other``.
        forward: number of the layer's forward in its step. nbytes: its bytes when the plan was made. goes: the decision.
    """

    name: str
    forward: int
    nbytes: int
    goes: bool


@dataclass(frozen=True)
class Plan:
    """Which slots go.

    Attributes:
        slots: every slot that may go, in the order in which they are saved.
        forecast: what was predicted; ``None`` for a plan written by hand.
        foreseen: how its steps are to run, if they may not hold more than predicted; in no file.
    """

    slots: tuple[PlannedSlot, ...]
    forecast: Forecast | None = None
    foreseen: Foreseen | None = None

    @functools.cached_property
    def _goes(self) -> dict[tuple[str, int], bool]:
        return {(slot.name, slot.forward): slot.goes for slot in self.slots}

    @functools.cached_property
    def _last_forward(self) -> dict[str, int]:
        return {slot.name: slot.forward for slot in sorted(self.slots, key=lambda slot: slot.forward)}

    def goes(self, name: str, forward: int) -> bool:
        """Whether a slot goes. A forward beyond the plan's is treated as the last one; an unknown slot goes."""
        known = self._goes.get((name, forward))
        if known is None:
            last = self._last_forward.get(name)
            return last is None or self._goes[name, last]
        return known

    def sends_as(self, before: Plan | None) -> bool:
        """Whether the same slots go as with a plan before; ``None``: as where all go."""
        return all(slot.goes == (before is None or before.goes(slot.name, slot.forward)) for slot in self.slots)

    def holds_as(self, before: Plan | None) -> bool:
        """Whether the same is on the device as with a plan before, as far as one knows."""
        theirs = None if before is None or before.foreseen is None else before.foreseen.departures
        return self.sends_as(before) and (self.foreseen is None or self.foreseen.departures == theirs)

    @property
    def bytes_going(self) -> int:
        """Bytes of the slots that go; those that several share count in each of them."""
        return sum(slot.nbytes for slot in self.slots if slot.goes)

    def drift(self, found: Mapping[tuple[str, int], int]) -> float:
        """How far bytes of slots (by name and forward) have moved from the plan's, as a share of the plan's bytes."""
        planned = {(slot.name, slot.forward): slot.nbytes for slot in self.slots}
        moved = sum(abs(found.get(key, 0) - planned.get(key, 0)) for key in {*planned, *found})
        return moved / max(sum(planned.values()), 1)

    def check_layers(self, slots_of: Mapping[str, Iterable[str]]) -> None:
        """Refuse a plan of another model.

        Args:
            slots_of: the slots that the ops of each layer own, by the layer's name. Those of regions, of ops of tensors
                alone, and others are known in a forward only.

        Raises:
            PlanError: the plan names a layer, or a slot of an op, that is not there.
        """
        owned = {name for names in slots_of.values() for name in names}
        free = (SlotName.OTHER.value, SlotName.REGION.value)
        for slot in self.slots:
            layer = slot.name.split("/")[0]
            if layer not in slots_of:
                raise PlanError(
                    f"The plan names {slot.name}, but the session's layers are {', '.join(slots_of)}. It belongs to "
                    "another model; make a new one."
                )
            of_tensors = slot.name.startswith(f"{layer}/{TENSORS_OP}.")
            if slot.name not in owned and not slot.name.endswith(free) and not of_tensors:
                raise PlanError(
                    f"The plan names {slot.name}, but {layer} owns {', '.join(sorted(slots_of[layer])) or 'no slot'}. It "
                    "belongs to another model; make a new one."
                )

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        forecast = None if self.forecast is None else asdict(self.forecast)
        value = {"schema": SCHEMA, "forecast": forecast, "slots": [asdict(slot) for slot in self.slots]}
        Path(path).write_text(json.dumps(value, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan of a file.

        Raises:
            PlanError: the file cannot be read, or holds no plan.
        """
        try:
            value: Any = json.loads(Path(path).read_text())
            if value["schema"] != SCHEMA:
                raise PlanError(f"{path} has schema {value['schema']!r}; this release reads {SCHEMA!r}.")
            slots = tuple(_slot(item) for item in value["slots"])
            forecast = None if value["forecast"] is None else Forecast(**value["forecast"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"{path} holds no plan of te_offload: {type(error).__name__}: {error}.") from error
        return cls(slots, forecast)


def _slot(item: Any) -> PlannedSlot:
    slot = PlannedSlot(**item)
    kinds = (slot.name, str), (slot.forward, int), (slot.nbytes, int), (slot.goes, bool)
    if not all(type(value) is kind for value, kind in kinds):
        raise TypeError(f"a slot with fields of other types: {item}")
    return slot
