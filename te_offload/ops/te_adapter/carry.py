"""What an op of Transformer Engine saved: passed on through autograd's hooks, or carried past them.

In: the entries of a context's `to_save`, sorted by a reader (layouts.py). Out: `Layout` values, and in the backward the
entries again. Keeps true: a carried slot's buffers are held by whoever took them and by nothing here; exempt entries come
back as the very objects, and one that was written to in between is an error, as it is to autograd. Does not: know which
entry is what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.ops.op import OperationContext
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, prepare_for_saving, restore_from_saved
from transformer_engine.pytorch.tensor import GroupedTensorStorage

from te_offload.errors import BackwardTwiceError, SavedTensorModifiedError
from te_offload.slots import SavedSlot, SlotHandle

Saved = Any  # torch.Tensor | QuantizedTensorStorage | GroupedTensorStorage | None: what a context's to_save may hold
STORAGES = (QuantizedTensorStorage, GroupedTensorStorage)
METADATA_DTYPES = (torch.int32, torch.int64)
PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, type(None)}


def buffers_of(*entries: Saved) -> tuple[torch.Tensor, ...]:
    """The plain tensors of saved entries in the order in which they reach the hooks; quantized storages taken apart."""
    buffers, shells = prepare_for_saving(*entries)
    restore_from_saved(shells, buffers)  # prepare_for_saving empties a storage; this fills it again
    return tuple(buffer for buffer in buffers if buffer is not None)


class Taken:
    """The entries of one slot, whose buffers someone else holds.

    Attributes:
        places: where they are among the saved entries.
        buffers: what was taken, until a handle stands for it.
        handle: stands for the buffers; ``None``: there are none.
    """

    __slots__ = ("_counts", "_parts", "_shells", "_taken_from", "buffers", "handle", "places")

    def __init__(self, places: range, entries: Sequence[Saved]) -> None:
        self.places = places
        self.handle: SlotHandle | None = None
        self._shells: list[Any] | None = None
        self._counts: list[int] = []
        parts = list(entries)
        if not set(map(type, entries)) <= PLAIN_TYPES:
            parts, self._shells = [], []
            for entry in entries:
                if isinstance(entry, STORAGES) and not isinstance(entry, torch.Tensor):
                    buffers, shell = entry.prepare_for_saving()  # which empties it
                    parts += buffers
                    self._shells.append(shell)
                    self._counts.append(len(buffers))
                else:
                    parts.append(entry)
                    self._shells.append(None)
                    self._counts.append(1)
        self._parts = parts
        self._taken_from = [
            index for index, part in enumerate(parts) if part is not None and part.dtype not in METADATA_DTYPES
        ]
        self.buffers = tuple([parts[index] for index in self._taken_from])
        for index in self._taken_from:
            parts[index] = None

    def bring(self) -> list[Saved]:
        """The entries, as they were saved."""
        parts = self._parts
        if self.handle is not None:
            for index, buffer in zip(self._taken_from, self.handle.take(), strict=True):
                parts[index] = buffer
        if self._shells is None:
            return parts
        entries, position = [], 0
        for shell, count in zip(self._shells, self._counts, strict=True):
            if shell is None:
                entries.append(parts[position])
            else:
                shell.restore_from_saved(parts[position : position + count])
                entries.append(shell)
            position += count
        return entries


class Layout:
    """What the forward of one context saved, read.

    Args:
        ctx: the context. exempt: groups of exempt entries. taken: the slots' entries, taken out; ``None``: all stays.

    Attributes:
        slots: the slots, in the order of their ops.
        taken: whether `carry` has to follow.
    """

    def __init__(self, ctx: OperationContext, exempt: Sequence[range], taken: Sequence[Taken] | None) -> None:
        self.slots: tuple[SavedSlot, ...] = ()
        self.taken = taken is not None
        self._ctx = ctx
        self._exempt = exempt
        self._taken = taken or ()

    def carried_bytes(self) -> int:
        """Bytes of the exempt entries, parameters not counted. The weights of one op have one shape and one type: in a
        group of storages the first one's bytes count for all.
        """
        saved = self._ctx.to_save
        assert saved is not None
        nbytes = 0
        for places in self._exempt:
            entries = saved[places.start : places.stop]
            first = next((entry for entry in entries if entry is not None), None)
            if isinstance(first, STORAGES) and not isinstance(first, torch.Tensor):
                nbytes += len(entries) * sum(buffer.nbytes for buffer in buffers_of(first))
            elif not isinstance(first, torch.nn.Parameter):
                nbytes += sum([entry.nbytes for entry in entries if entry is not None])
        return nbytes

    def carry(self, handles: Sequence[SlotHandle | None]) -> None:
        """Keep the exempt entries, and the handles in place of the slots, on the context, so that nothing of it passes a
        hook; `bring_carried` puts all back.
        """
        entries = list(self._ctx.to_save or ())
        for taken, handle in zip(self._taken, handles, strict=True):
            taken.handle = handle
            taken.buffers = ()
            entries[taken.places.start : taken.places.stop] = [None] * len(taken.places)
        tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
        try:
            versions = [tensor._version for tensor in tensors]
        except RuntimeError:  # inference tensors have none
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
            versions = [tensor._version for tensor in tensors]
        self._ctx.to_save = None
        self._ctx.te_offload_carried = (entries, tensors, versions, self._taken)


def bring_carried(op: torch.nn.Module, ctx: OperationContext) -> None:
    """Put back what `Layout.carry` kept, if it did; and have a second backward over the same forward fail by its name.

    Raises:
        SavedTensorModifiedError: an exempt tensor was written to since the forward.
    """
    carried = ctx.__dict__.pop("te_offload_carried", None)
    node: Any = torch._C._current_autograd_node()
    if node is not None and getattr(node, "tensor_objects", 0) is None:
        node.tensor_objects = _Spent(op, carried[3] if carried else ())
    if carried is None:
        return
    entries, tensors, versions, slots = carried
    if [tensor._version for tensor in tensors] != versions:  # what autograd compares
        raise SavedTensorModifiedError(
            f"{type(op).__name__}: a weight, the router scales or the split sizes were written to in place between the "
            "forward and its backward, so gradients would be wrong. Call optimizer.step() after the backward."
        )
    for taken in slots:
        entries[taken.places.start : taken.places.stop] = taken.bring()
    ctx.saved_tensors = entries


class _Spent:
    """Stands where Transformer Engine kept what it restores saved tensors with, and has thrown it away in a backward.

    Without it a second backward fails inside Transformer Engine, before any hook, by the name of a private attribute.
    """

    def __init__(self, op: torch.nn.Module, slots: Sequence[Taken]) -> None:
        self._what = next((taken.handle.name for taken in slots if taken.handle), type(op).__name__)

    def __iter__(self) -> Any:
        raise BackwardTwiceError(
            f"{self._what}: a second backward over one forward. te.ops cannot run it: Transformer Engine frees what it "
            "saved. Run the forward again instead of retain_graph=True."
        )
