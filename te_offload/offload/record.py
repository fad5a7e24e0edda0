"""What happened in a step: the fate and bytes of every slot, and the bytes on the device over time.

In: what the session notes while it works. Out: frozen `SlotRecord` and `StepRecord`. Keeps true: every slot that was
saved in an attached layer has one row, offloaded or not, and a kept one says why. Does not: format (report/ does).
"""

from __future__ import annotations

from dataclasses import dataclass

from te_offload.slots import Fate, Reason, SlotName, slot_title


@dataclass(frozen=True)
class SlotRecord:
    """One slot of one forward.

    Attributes:
        layer: name of the attached layer.
        op: name of the op inside the layer; empty for `SlotName.OTHER`.
        slot: the slot's name.
        forward: number of the layer's forward in its step, from 0.
        nbytes: bytes of the slot, each byte of memory once.
        tensors: number of tensors that hold it.
        fate: what became of it.
        reason: why it was not offloaded.
        bytes_out: bytes copied to the host for it; less than ``nbytes`` where a slot before it held the same memory.
    """

    layer: str
    op: str
    slot: SlotName
    forward: int
    nbytes: int
    tensors: int
    fate: Fate
    reason: Reason
    bytes_out: int

    @property
    def name(self) -> str:
        """``layer/op.slot``."""
        return slot_title(self.layer, self.op, self.slot)


@dataclass(frozen=True)
class Residency:
    """Bytes of saved tensors on the device at one moment of a step; ``label`` says what had just happened."""

    label: str
    nbytes: int


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        index: number of the step in its session, from 0.
        slots: a row for each slot of each forward, in the order of the forwards.
        residency: bytes of saved tensors on the device over the step; weights and metadata do not count.
        bytes_out, bytes_back: bytes copied to the host, and back.
        copies_out, copies_back: number of copies each way.
        peak_in_flight: most bytes that were held on the device only for a copy out to end.
        host_peak: most bytes of host memory held at once.
        host_held: bytes that the pool holds after the step (page-locked where the device is a GPU).
        host_allocations: how often the session has taken memory from the system so far.
        exempt_bytes: bytes of tensors that are never offloaded (weights, their copies, metadata), each forward's counted.
        abandoned: chunks offloaded whose backward did not come in the step.
    """

    index: int
    slots: tuple[SlotRecord, ...]
    residency: tuple[Residency, ...]
    bytes_out: int
    bytes_back: int
    copies_out: int
    copies_back: int
    peak_in_flight: int
    host_peak: int
    host_held: int
    host_allocations: int
    exempt_bytes: int
    abandoned: int

    @property
    def peak_resident(self) -> int:
        """Most bytes of saved tensors on the device at one moment."""
        return max((moment.nbytes for moment in self.residency), default=0)
