"""The handle that stands in the autograd graph for a saved tensor.

In: a saved tensor, and later the cargo that its bytes went with. Out: the same tensor, bit for bit. Keeps true: sizes,
strides, dtype and aliasing are the original's; tensors of te.ops are given out once (Transformer Engine cannot run a
second backward), others as often as autograd asks; a tensor that was written to since it was saved is an error, as it
is without hooks. Does not: decide whether its bytes move.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from te_offload.errors import BackwardTwiceError, SavedTensorModifiedError, StepEndedError
from te_offload.offload.cargo import Cargo, Hold, Lot
from te_offload.offload.extents import view_over
from te_offload.offload.states import SlotState
from te_offload.ops import te_adapter
from te_offload.slots import Fate, Reason, SlotName, slot_title

if TYPE_CHECKING:
    from te_offload.offload.transfer import Mark
    from te_offload.offload.visit import LayerVisit


class SlotEntry:
    """One slot of one forward while the forward runs, and its fate afterwards.

    Attributes:
        visit: the forward. op, slot: its name in the layer. ordinal: number of an unnamed one in its forward.
        keep: the op, or the region, said ``no_offload_activation``.
        once: the tensors are of te.ops, which reads them once.
        ready: the mark after which its bytes are there; ``None``: the end of the forward.
        handles: its saved tensors; weak, since the autograd graph alone decides how long they live.
        fate, reason: what became of it. nbytes, tensors, bytes_out: as in `SlotRecord`.
        cargo: what carries its bytes and no other slot's; ``None`` if another slot's does.
    """

    fate = Fate.KEPT
    reason = Reason.NONE
    nbytes = 0
    tensors = 0
    bytes_out = 0
    ready: Mark | None = None
    cargo: Cargo | None = None

    def __init__(
        self, visit: LayerVisit, op: str, slot: SlotName, *, keep: bool, once: bool, ordinal: int | None = None
    ) -> None:
        self.visit = visit
        self.op = op
        self.slot = slot
        self.ordinal = ordinal
        self.keep = keep
        self.once = once
        self.handles: list[weakref.ref[Saved]] = []

    @property
    def title(self) -> str:
        """``layer/op.slot``; all that nobody named is one slot of its layer."""
        return slot_title(self.visit.layer, self.op, self.slot)

    @property
    def name(self) -> str:
        """The title, with a number where nobody named it."""
        return self.title if self.ordinal is None else f"{self.title}[{self.ordinal}]"

    def live_handles(self) -> list[Saved]:
        """The handles that are still in an autograd graph and still hold their tensor."""
        handles = [reference() for reference in self.handles]
        return [handle for handle in handles if handle is not None and handle.tensor is not None]


class Saved:
    """A plain saved tensor, on the device or moved.

    Args:
        tensor: the tensor; held until it moves, or is given out if its slot is read once.
        entry: its slot.
    """

    __slots__ = (
        "__weakref__",
        "_dtype",
        "_offset",
        "_size",
        "_stride",
        "_taken",
        "cargo",
        "entry",
        "hold",
        "lot",
        "tensor",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, entry: SlotEntry) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.entry = entry
        self.version = version_of(tensor)
        self.cargo: Cargo | None = None
        self.hold: Hold | None = None
        self.lot: Lot | None = None
        self._taken = False

    def take(self) -> torch.Tensor:
        """The saved tensor, on the device and ready for work queued from now on.

        Raises:
            BackwardTwiceError: te.ops asked before.
            StepEndedError: its step has ended, and its bytes are gone.
            SavedTensorModifiedError: it was written to since it was saved.
            CorruptionError: ``verify=True`` found other bytes than were saved.
        """
        entry, cargo = self.entry, self.cargo
        first, self._taken = not self._taken, True
        if not first and entry.once:
            raise BackwardTwiceError(
                f"{entry.name} was given to a backward before. te.ops cannot run a second backward over one forward: "
                "Transformer Engine frees what it saved. Run the forward again instead of retain_graph=True."
            )
        visit = entry.visit
        if not visit.read:
            visit.first_read()
        tensor = self.tensor
        if tensor is None and cargo is not None and cargo.state is not SlotState.RETURNED:
            if cargo.state is SlotState.RELEASED:
                raise StepEndedError(
                    f"{entry.name} was offloaded in a step that has ended, or its session was closed, so its bytes are "
                    "gone. Call backward inside the same `with session.step():` as the forward."
                )
            visit.bring_back(cargo)
        if tensor is not None:
            if version_of(tensor) != self.version:
                self._fail_modified()
            if cargo is not None and cargo.state is SlotState.LEAVING:
                visit.recall(cargo)
            if entry.once:
                self.tensor = None
            return tensor
        lot = self.lot
        if lot is None or cargo is None:  # it had no elements
            return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=visit.device)
        if cargo.modified:
            self._fail_modified()
        assert lot.memory is not None
        tensor = view_over(lot.memory, self._offset, self._dtype, self._size, self._stride)
        if first:  # with a lot's last tensor only those that were given out hold its memory
            lot.untaken -= 1
            if lot.untaken == 0:
                lot.memory = None
            cargo.untaken -= 1
            if cargo.untaken == 0:
                cargo.move(SlotState.ON_HOST)
        return tensor

    @property
    def held(self) -> torch.Tensor:
        """The tensor, while the handle holds it."""
        assert self.tensor is not None
        return self.tensor

    def go_with(self, cargo: Cargo | None, place: tuple[int, int] | None) -> None:
        """From now on the bytes are also the cargo's, ``place`` of them in its runs (``None``: there are none)."""
        tensor = self.tensor
        assert tensor is not None
        self._dtype, self._size, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self.cargo = cargo
        if place is not None and cargo is not None:
            lot, begin = cargo.places[place[0]]
            self.lot, self._offset = lot, begin + place[1]
            lot.untaken += 1
            cargo.untaken += 1

    def let_go(self) -> bool:
        """The copy out is over: stop holding the tensor. Whether it was written to since it was saved."""
        tensor, self.tensor = self.tensor, None
        return tensor is not None and version_of(tensor) != self.version

    def _fail_modified(self) -> None:
        raise SavedTensorModifiedError(
            f"{self.entry.name}: a saved tensor was written to in place after the forward had saved it, so its "
            "gradient would be wrong. Write to a clone instead."
        )


class SavedWrapper:
    """A quantized wrapper tensor of Transformer Engine, taken apart into its buffers.

    Args:
        shell: the wrapper without its buffers. parts: the buffers' handles, in order.
    """

    __slots__ = ("_parts", "_shell")

    def __init__(self, shell: Any, parts: list[Any]) -> None:
        self._shell = shell
        self._parts = parts

    def take(self) -> torch.Tensor:
        """The wrapper around its buffers; errors as in `Saved.take`."""
        return te_adapter.put_together(self._shell, [give_out(part) for part in self._parts])


def give_out(packed: Any) -> Any:
    """The unpack hook: a handle's tensor, or what was never packed."""
    return packed.take() if isinstance(packed, (Saved, SavedWrapper)) else packed


def version_of(tensor: torch.Tensor) -> int:
    """The in-place version of a tensor; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense memory that a copy of its bytes restores."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )
