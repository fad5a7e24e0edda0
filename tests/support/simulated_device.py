"""A device whose streams are clocks: how long a step takes by the engine's own decisions, on any machine.

The host is infinitely quick, so that it sees that a copy is over only where it has waited (`SimulatedDevice.synchronize`),
or (``lockstep``) as quick as the compute stream.
Copies run one at a time each way, each after its marks, and move real bytes at once; the compute stream moves on by what
layers say, and by waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_offload.offload.timeline import Bounds, Forecast, Link, Parcel, Work, simulate
from te_offload.offload.transfer import Copy, CpuTransfer, Mark, Piece
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState

RATE = 1000.0  # bytes a millisecond, each way


class Moment:
    """Milliseconds on the device."""

    def __init__(self, ms: float, device: SimulatedDevice) -> None:
        self.ms = ms
        self.device = device

    def is_over(self) -> bool:
        return self.ms <= (self.device.compute if self.device.lockstep else self.device.seen)

    def wait(self) -> None: ...


class SimulatedDevice(CpuTransfer):
    """See the module.

    Attributes:
        compute, out, back: where its streams are, in milliseconds. waited: by the compute stream for copies.
        lockstep: whether the host is where the compute stream is. backs: when each copy back began.
        seen: else, up to where the host has waited for it.
    """

    def __init__(self, *, lockstep: bool = False) -> None:
        self.lockstep = lockstep
        self.seen = -math.inf
        self.backs: list[float] = []
        self.compute = self.out = self.back = self.waited = 0.0

    def synchronize(self) -> None:
        """The host waits for all that was queued."""
        self.seen = self.compute = max(self.compute, self.out, self.back)

    def mark(self) -> Mark:
        return Moment(self.compute, self)

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        super().copy_out(pieces, after)
        began, self.out = self._run(self.out, pieces, after)
        return Copy(Moment(began, self), Moment(self.out, self))

    def copy_back(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        super().copy_out(pieces, after)
        began, self.back = self._run(self.back, pieces, after)
        self.backs.append(began)
        return Copy(Moment(began, self), Moment(self.back, self))

    def _run(self, free: float, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> tuple[float, float]:
        began = max([free, *(mark.ms for mark in after)])  # type: ignore[attr-defined]
        return began, began + sum(nbytes for _, _, nbytes in pieces) / RATE

    def block_compute(self, mark: Mark) -> None:
        assert isinstance(mark, Moment)
        self.waited += max(0.0, mark.ms - self.compute)
        self.compute = max(self.compute, mark.ms)

    def milliseconds(self, first: Mark, second: Mark) -> float:
        assert isinstance(first, Moment) and isinstance(second, Moment)
        return second.ms - first.ms


class _Works(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: WorkingOp) -> torch.Tensor:
        observer, _ = op.follower()
        slot = torch.full((op.nbytes,), op.number, dtype=torch.uint8)
        saved = SavedSlot(None, SaveState.SAVED, (slot,), ())
        ctx.handle, ctx.op = None if observer is None else op.hand_over(saved, observer), op  # a layer left alone
        op.device.compute += op.forward_ms
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        handle, ctx.handle = ctx.handle, None
        assert handle is None or handle.take()[0].eq(ctx.op.number).all()
        ctx.op.device.compute += ctx.op.backward_ms
        return grad, None


class WorkingOp(SlotOwner, torch.nn.Module):
    """Saves a slot of so many bytes, all of one number, and takes the device so long."""

    def __init__(
        self, device: SimulatedDevice, nbytes: int, number: int, forward_ms: float, backward_ms: float
    ) -> None:
        super().__init__()
        self.device = device
        self.nbytes = nbytes
        self.number = number
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Works.apply(x, self)  # type: ignore[no-untyped-call]
        return y


def stack(
    device: SimulatedDevice, layers: int, slots: Sequence[int], forward_ms: float, backward_ms: float
) -> torch.nn.Sequential:
    """Layers of some slots, which share a layer's milliseconds."""
    made = []
    for layer in range(layers):
        shares = forward_ms / len(slots), backward_ms / len(slots)
        ops = [WorkingOp(device, nbytes, 10 * layer + place, *shares) for place, nbytes in enumerate(slots)]
        made.append(torch.nn.Sequential(*ops))
        made[-1].anchor = torch.nn.Parameter(torch.zeros(1))
    return torch.nn.Sequential(*made)


def predicted(
    layers: int, slots: Sequence[int], forward_ms: float, backward_ms: float, bound: float, *, recall: bool = True
) -> Forecast:
    """What `timeline` says of one step of `stack`."""
    keys = [(f"layer{number}", 0) for number in range(layers)]
    work = [Work(key, False, forward_ms) for key in keys] + [Work(key, True, backward_ms) for key in reversed(keys)]
    parcels = {key: [Parcel(nbytes, True) for nbytes in slots] for key in keys}
    return simulate(work, parcels, Link(RATE, RATE, RATE, RATE), Bounds(bound, bound, recall))
