"""The handle that stands in the autograd graph for a saved tensor.

In: a saved tensor, and later the chunk that its bytes went with. Out: the same tensor, bit for bit. Keeps true: sizes,
strides, dtype and aliasing are the original's; tensors of te.ops are given out once (Transformer Engine cannot run a
second backward), others as often as autograd asks; a tensor that was written to since it was saved is an error, as it
is without hooks. Does not: decide whether its bytes move.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from te_offload.errors import BackwardTwiceError, SavedTensorModifiedError, StepEndedError
from te_offload.offload.chunk import Chunk, Residence, version_of
from te_offload.offload.extents import ViewSpec, storage_key
from te_offload.offload.mover import Mover
from te_offload.ops import te_adapter
from te_offload.slots import Fate, Reason, SlotName, slot_title


@dataclass
class SlotEntry:
    """One slot of one forward while the forward runs, and its fate afterwards.

    Attributes:
        layer, op, slot: its name. keep: the op said ``no_offload_activation``.
        once: the tensors are of te.ops, which reads them once.
        handles: its saved tensors; weak, since the autograd graph alone decides how long they live.
        fate, reason: what became of it. nbytes, tensors, bytes_out: as in `SlotRecord`.
    """

    layer: str
    op: str
    slot: SlotName
    keep: bool
    once: bool
    handles: list[weakref.ref[Saved]] = field(default_factory=list)
    fate: Fate = Fate.KEPT
    reason: Reason = Reason.NONE
    nbytes: int = 0
    tensors: int = 0
    bytes_out: int = 0

    @property
    def name(self) -> str:
        """``layer/op.slot``."""
        return slot_title(self.layer, self.op, self.slot)

    def live_handles(self) -> list[Saved]:
        """The handles that are still in an autograd graph and still hold their tensor."""
        handles = [reference() for reference in self.handles]
        return [handle for handle in handles if handle is not None and handle.tensor is not None]


class Saved:
    """A plain saved tensor, on the device or moved.

    Args:
        tensor: the tensor; held until it moves, or is given out if its slot is read once.
        entry: its slot.
        fetch: called before the tensor is read if its bytes have moved; starts copies back.
        mover: who can bring its bytes back.
    """

    __slots__ = ("__weakref__", "_fetch", "_mover", "_taken", "_version", "chunk", "entry", "key", "spec", "tensor")

    def __init__(self, tensor: torch.Tensor, entry: SlotEntry, fetch: Any, mover: Mover) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.entry = entry
        self.spec: ViewSpec | None = ViewSpec.of(tensor) if is_plain(tensor) else None
        self.key = 0 if self.spec is None else storage_key(tensor)  # valid while the handle holds the tensor
        self.chunk: Chunk | None = None
        self._version = version_of(tensor)
        self._fetch = fetch
        self._mover = mover
        self._taken = False

    @property
    def held(self) -> torch.Tensor:
        """The tensor, while the handle holds it."""
        assert self.tensor is not None
        return self.tensor

    def take(self) -> torch.Tensor:
        """The saved tensor, on the device and ready for work queued from now on.

        Raises:
            BackwardTwiceError: te.ops asked before.
            StepEndedError: its step has ended, and its bytes are gone.
            SavedTensorModifiedError: it was written to since it was saved.
        """
        first, self._taken = not self._taken, True
        if not first and self.entry.once:
            raise BackwardTwiceError(
                f"{self.entry.name} was given to a backward before. te.ops cannot run a second backward over one forward: "
                "Transformer Engine frees what it saved. Run the forward again instead of retain_graph=True."
            )
        if self.tensor is not None:
            tensor = self.tensor
            self._check_version(version_of(tensor) != self._version)
            if self.entry.once:
                self.tensor = None
            return tensor
        chunk, spec = self.chunk, self.spec
        assert spec is not None
        if chunk is None:
            return spec.over_nothing(self._mover.device)
        if chunk.residence is Residence.RELEASED:
            raise StepEndedError(
                f"{self.entry.name} was offloaded in a step that has ended, or its session was closed, so its bytes are "
                "gone. Call backward inside the same `with session.step():` as the forward."
            )
        self._fetch()
        memory = self._mover.bring_back(chunk)
        self._check_version(chunk.modified)
        tensor = spec.over(memory, chunk.interval.start)
        self._mover.hand_over(chunk, first=first)
        return tensor

    def go_with(self, chunk: Chunk | None) -> None:
        """From now on the bytes are the chunk's (``None``: there are none); the handle no longer holds the tensor."""
        if chunk is not None:
            chunk.versions.append((self.held, self._version))
        self.chunk, self.tensor = chunk, None

    def _check_version(self, modified: bool) -> None:
        if modified:
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
