"""Finds grouped-MLP windows: GroupedLinear, scaled activation, GroupedLinear, one behind the other.

In: a list of ops, or a module that holds some. Out: `Window` values and slot names. Keeps true: this is the only
matcher; a window is a matter of structure alone (no shapes, dtypes or devices), and windows do not overlap. Does not:
say which kernels take a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import transformer_engine.pytorch as te

from te_offload.ops.inside import named_parts
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SlotName

ACTIVATIONS = (
    te.ops.ScaledSReLU,
    te.ops.ScaledTanhSReLU,
    te.ops.ScaledSwiGLU,
    te.ops.ScaledClampedQGeGLU,
    te.ops.ScaledSiTUGLU,
)


_ASKED = "_te_offload_fuses"


@dataclass(frozen=True)
class Window:
    """One grouped MLP among the ops of a Sequential.

    Attributes:
        start: index of FC1 in the list of ops.
        fc1, activation, fc2: the ops, of `te.ops` or of `te_offload.ops`.
    """

    start: int
    fc1: torch.nn.Module
    activation: torch.nn.Module
    fc2: torch.nn.Module

    @property
    def ops(self) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
        """The three ops in order."""
        return self.fc1, self.activation, self.fc2

    @property
    def has_slot_owner(self) -> bool:
        """Whether at least one of the ops is of `te_offload.ops`."""
        return any(isinstance(op, SlotOwner) for op in self.ops)

    @property
    def needs_ops(self) -> str | None:
        """Why its ops must run one by one on every machine; ``None`` if they need not."""
        if getattr(self.activation, "act_input_dtype", None) is not None:
            return "its activation saves its input in FP8 (act_input_dtype), which fused kernels write as it is"
        return None

    @property
    def asked_for(self) -> bool:
        """Whether `ask_for` was called."""
        return bool(getattr(self.fc1, _ASKED, False))

    def ask_for(self) -> None:
        """Have te_offload's own fused op take it, also if all of its ops are of plain `te.ops`."""
        setattr(self.fc1, _ASKED, True)


def find_windows(ops: Sequence[torch.nn.Module]) -> Iterator[Window]:
    """Every grouped-MLP window in a list of ops, from the front, without overlaps."""
    start = 0
    while start + 3 <= len(ops):
        fc1, activation, fc2 = ops[start : start + 3]
        if (
            isinstance(fc1, te.ops.GroupedLinear)
            and isinstance(activation, ACTIVATIONS)
            and isinstance(fc2, te.ops.GroupedLinear)
        ):
            yield Window(start, fc1, activation, fc2)
            start += 3
        else:
            start += 1


def named_slot_owners(module: torch.nn.Module) -> list[tuple[str, SlotOwner, SlotName]]:
    """Every op of `te_offload.ops` inside a module, with its name there and the name of its slot.

    A GroupedLinear outside any window owns `grouped_linear_input`; an activation always owns `act_input`.
    """
    names: dict[int, SlotName] = {}
    for _, sequential in named_parts(module):
        if isinstance(sequential, te.ops.Sequential):
            for window in find_windows(list(sequential.children())):
                names[id(window.fc1)] = SlotName.FC1_INPUT
                names[id(window.fc2)] = SlotName.FC2_INPUT
    found: list[tuple[str, SlotOwner, SlotName]] = []
    for name, op in named_parts(module):
        if isinstance(op, SlotOwner):
            default = SlotName.ACT_INPUT if isinstance(op, ACTIVATIONS) else SlotName.GROUPED_LINEAR_INPUT
            found.append((name, op, names.get(id(op), default)))
    return found
