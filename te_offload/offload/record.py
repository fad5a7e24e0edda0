"""What happened in a step: the fate, bytes and times of every slot, and the bytes on the device over time.

In: what the engine notes while it works. Out: frozen `SlotRecord` and `StepRecord`. Keeps true: every slot that was
saved in an attached layer has one row, offloaded or not, and a kept one says why; times are those of the device's own
clock. Does not: format (report/ does), or talk to other ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from te_offload.slots import Fate, Reason, SlotName, slot_title

BACKWARD_BEGINS = "backward begins"  # the label in a step's residency
_ANYHOW = (Reason.ALIAS, Reason.PARAMETER, Reason.LEAF, Reason.OTHER_DEVICE)


class Outcome(str, enum.Enum):
    """How an offloaded slot came back."""

    NONE = ""
    """It was not offloaded."""
    HIT = "hit"
    """It was back before the backward needed it."""
    LATE = "late"
    """The backward waited for it."""
    RECALLED = "never left"
    """The backward needed it before its memory had been given up: nothing was copied back."""
    BACK = "back"
    """It came back, in a step that was not timed."""
    UNREAD = "unread"
    """No backward asked for it in its step."""


@dataclass(frozen=True)
class SlotRecord:
    """One slot of one forward.

    Attributes:
        layer: name of the attached layer.
        op: name of the op, or region, inside the layer; empty for `SlotName.OTHER`.
        slot: the slot's name.
        forward: number of the layer's forward in its step, from 0.
        nbytes: bytes of the slot, each byte of memory once.
        tensors: number of tensors that hold it.
        fate: what became of it.
        reason: why it was not offloaded.
        bytes_out: bytes copied to the host for it; less than ``nbytes`` where a slot before it held the same memory.
        shared: bytes of ``nbytes`` in memory that other slots of its forward hold too (`StepRecord.shared_memory`).
        part_of: name of the region from which it was taken, since it could not go with the rest; else empty.
        outcome: how it came back.
        out_ms, back_ms: how long its copies took; ``None`` where there was none, or it was not timed.
        exposed_ms: how long the backward waited for it.
        sizes: bytes of what goes by itself of it, in the order in which it was saved: of what nobody named each tensor;
            without what is shared.
        format: of its numbers, such as ``"bf16"``, and of a quantized one the directions of a GEMM that it is for, such as
            ``"FP8 by column"`` (columns for wgrad); empty where it is no such tensor.
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
    outcome: Outcome = Outcome.NONE
    out_ms: float | None = None
    back_ms: float | None = None
    exposed_ms: float = 0.0
    format: str = ""
    sizes: tuple[int, ...] = ()
    shared: int = 0
    part_of: str = ""

    @property
    def name(self) -> str:
        """``layer/op.slot``."""
        return slot_title(self.layer, self.op, self.slot)

    @property
    def whole(self) -> str:
        """The name of what it is, or is a part of."""
        return self.part_of or self.name

    @property
    def holds_memory(self) -> bool:
        """Whether it stayed on the device in memory that is not there anyhow, or counted with another slot."""
        return self.fate is Fate.KEPT and self.reason not in _ANYHOW

    @property
    def out_gbs(self) -> float | None:
        """Rate of the copy out in 1e9 bytes a second."""
        return None if not self.out_ms else self.bytes_out / self.out_ms / 1e6

    @property
    def back_gbs(self) -> float | None:
        """Rate of the copy back in 1e9 bytes a second."""
        return None if not self.back_ms else self.bytes_out / self.back_ms / 1e6


@dataclass(frozen=True)
class SharedMemory:
    """Memory that several slots of a forward hold: it leaves with all of them or not at all.

    Attributes:
        layer, forward: which forward. slots: their names, in the order in which they were saved. nbytes: each byte once.
    """

    layer: str
    forward: int
    slots: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Residency:
    """Bytes of saved tensors on the device at one moment of a step; ``label`` says what had just happened."""

    label: str
    nbytes: int


@dataclass(frozen=True)
class Window:
    """The device's time for one forward of a layer and for its backward, in milliseconds.

    Attributes:
        layer, forward: which.
        begin_ms: from the step's begin to the forward's.
        forward_ms: from the forward's begin to its end.
        throttled_ms: how long the compute stream then waited for copies out, to stay within ``max_in_flight``.
        throttled_before_ms, throttled_before_backward_ms: how long it had waited for those of what was read before it had
            left: before ``begin_ms``, where layers are graphs, and before ``needed_ms``.
        needed_ms: from the step's begin to the backward's first read; ``None`` if there was none.
        backward_ms: from there to the first read of the next forward, waits for copies taken out.
        read: number of this backward among those of the step, from 0.
    """

    layer: str
    forward: int
    begin_ms: float
    forward_ms: float
    throttled_ms: float
    needed_ms: float | None
    backward_ms: float | None
    read: int | None
    throttled_before_ms: float = 0.0
    throttled_before_backward_ms: float = 0.0


class Phase(str, enum.Enum):
    """A part of a step, of one forward of a layer."""

    BEFORE = "before the first forward"
    FORWARD = "forward"
    """From its begin until what it saved was decided on."""
    AFTER = "after the forward"
    """Until the next layer's forward begins, or a backward."""
    BACKWARD = "backward"
    """From its first read until the next one's, or the end of the step."""


@dataclass(frozen=True)
class DevicePeak:
    """The most bytes that torch had allocated on the device at one moment of a phase, whatever they were for.

    Attributes:
        held: of saved tensors, as the phase began; in a backward, with those whose copies back began with it.
    """

    layer: str
    forward: int
    phase: Phase
    nbytes: int
    held: int

    @property
    def name(self) -> str:
        """Where in the step, in words."""
        if self.phase is Phase.BEFORE:
            return str(self.phase.value)
        number = f" {self.forward}" if self.forward else ""
        return f"{self.layer}, {self.phase.value}{number}"


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        index: number of the step in its session, from 0. rank: of the process, 0 without torch.distributed.
        slots: a row for each slot of each forward, in the order of the forwards.
        windows: a row for each forward that was not left alone.
        residency: bytes of saved tensors on the device over the step; weights, metadata and what ``unseen`` forwards save
            do not count. A slot that an op has taken counts until the next one is taken, or a forward begins.
        bytes_out, bytes_back: bytes copied to the host, and back.
        copies_out, copies_back: number of runs of memory copied each way.
        peak_in_flight: most bytes that were held on the device only for a copy out to end.
        peak_ahead: most bytes that were back on the device before the backward reached their layer.
        host_peak: most bytes of host memory on loan at once, aligned to 512.
        host_held: bytes that the pool holds after the step (page-locked where the device is a GPU).
        host_allocations: how often the session has taken memory from the system so far.
        host_node: the GPU's NUMA node, on which host memory was asked for; ``None`` if the machine has one or does not say.
        host_nodes: the nodes on which sampled pages of it lie.
        host_failure: why the system refused host memory, if it did.
        unseen: forwards that were not looked at, since nothing of them went the last time and nothing changed.
        exempt_bytes: bytes of tensors that are never offloaded (weights, their copies, metadata, scales of whole
            tensors), each forward's counted, in a timed step.
        abandoned: slots offloaded whose backward did not come in the step.
        raised: whether an error ended the step, or a forward in it: what it shows of sizes and times is not a step's.
        planned: whether a plan chose the slots.
        predicted_ms, predicted_waiting_ms: what the plan foresaw: the step, and its waits for copies; ``None`` without one.
        timed: whether times were taken; if not, they and ``exempt_bytes`` are ``None`` or 0, and there are no windows.
        throttled_at_end_ms: how long the compute stream waited after the last work for copies out that were under way.
        step_ms: the device's time from the step's begin to its end, that wait included.
        out_ms, back_ms: time during which a copy out, or back, was under way.
        device_peaks: of each phase in order, what torch had allocated; in timed steps under a ``device_limit`` alone.
        device_reserved: most bytes that torch's allocator had taken of the device in such a step, which a card must have
            room for unless the allocator can give some back; else 0.
        shared_memory: what several slots of a forward hold.
    """

    index: int
    rank: int
    slots: tuple[SlotRecord, ...]
    windows: tuple[Window, ...]
    residency: tuple[Residency, ...]
    bytes_out: int
    bytes_back: int
    copies_out: int
    copies_back: int
    peak_in_flight: int
    peak_ahead: int
    host_peak: int
    host_held: int
    host_allocations: int
    host_node: int | None
    host_nodes: tuple[int, ...]
    host_failure: str | None
    unseen: int
    exempt_bytes: int
    abandoned: int
    raised: bool
    planned: bool
    predicted_ms: float | None
    predicted_waiting_ms: float | None
    timed: bool
    throttled_at_end_ms: float
    step_ms: float
    out_ms: float
    back_ms: float
    device_peaks: tuple[DevicePeak, ...] = ()
    device_reserved: int = 0
    shared_memory: tuple[SharedMemory, ...] = ()

    def bytes_of(self, counts: Callable[[SlotRecord], bool]) -> dict[tuple[str, int], int]:
        """Bytes of some slots of each forward (layer, and its number), each byte of memory once."""
        rows = [row for row in self.slots if counts(row)]
        found: dict[tuple[str, int], int] = {}
        for row in rows:
            key = row.layer, row.forward
            found[key] = found.get(key, 0) + row.nbytes - row.shared
        sharing = {(row.whole, row.forward) for row in rows if row.shared}
        for piece in self.shared_memory:
            key = piece.layer, piece.forward
            if any((name, piece.forward) in sharing for name in piece.slots):
                found[key] = found.get(key, 0) + piece.nbytes
        return found

    @property
    def device_peak(self) -> DevicePeak | None:
        """The largest of ``device_peaks``; ``None`` if there are none."""
        return max(self.device_peaks, key=lambda peak: peak.nbytes, default=None)

    @property
    def saved_by_forward(self) -> dict[tuple[str, int], int]:
        """Bytes of the slots of each forward: layer, and its number."""
        found: dict[tuple[str, int], int] = {}
        for row in self.slots:
            found[row.layer, row.forward] = found.get((row.layer, row.forward), 0) + row.nbytes
        return found

    @property
    def peak_resident(self) -> int:
        """Most bytes of saved tensors on the device at one moment."""
        return max((moment.nbytes for moment in self.residency), default=0)

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Bytes copied to the host of each `SlotRecord.format`."""
        found: dict[str, int] = {}
        for row in self.slots:
            if row.bytes_out:
                found[row.format] = found.get(row.format, 0) + row.bytes_out
        return found

    @property
    def exposed_ms(self) -> float:
        """How long backwards waited for slots."""
        return sum(row.exposed_ms for row in self.slots)

    @property
    def throttled_ms(self) -> float:
        """How long the compute stream waited for copies out: to stay within ``max_in_flight``, and at the step's end."""
        return self.throttled_at_end_ms + sum(
            window.throttled_ms + window.throttled_before_ms + window.throttled_before_backward_ms
            for window in self.windows
        )

    @property
    def out_gbs(self) -> float | None:
        """Rate of the copies out while one was under way, in 1e9 bytes a second."""
        return None if not self.out_ms else self.bytes_out / self.out_ms / 1e6

    @property
    def back_gbs(self) -> float | None:
        """Rate of the copies back while one was under way, in 1e9 bytes a second."""
        return None if not self.back_ms else self.bytes_back / self.back_ms / 1e6
