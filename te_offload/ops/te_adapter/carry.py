"""What an op of Transformer Engine saved: passed on through autograd's hooks, or carried past them.

In: the entries of a context's `to_save`, sorted by a reader (layouts.py). Out: `Layout` values, and in the backward the
entries again. Keeps true: a carried slot's buffers are held by whoever took them and by nothing here; exempt entries come
back as the very objects, and one that was written to in between is an error, as it is to autograd. Does not: know which
entry is what.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from transformer_engine.pytorch.ops.op import OperationContext
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, prepare_for_saving, restore_from_saved
from transformer_engine.pytorch.tensor import GroupedTensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from te_offload.errors import BackwardTwiceError, SavedTensorModifiedError
from te_offload.slots import FORMATS, SavedSlot, SaveState, SlotHandle, SlotName

Saved = Any  # torch.Tensor | QuantizedTensorStorage | GroupedTensorStorage | None: what a context's to_save may hold
STORAGES = (QuantizedTensorStorage, GroupedTensorStorage)
METADATA_DTYPES = (torch.int32, torch.int64)
_SHAPE, _BASE = map(operator.attrgetter, ("shape", "_base"))
_ROWS, _COLUMNS = map(operator.itemgetter, (0, 1))
_PLAIN_TENSOR = {torch.Tensor}
PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, type(None)}


def buffers_of(*entries: Saved) -> tuple[torch.Tensor, ...]:
    """The plain tensors of saved entries in the order in which they reach the hooks; quantized storages taken apart."""
    buffers, shells = prepare_for_saving(*entries)
    restore_from_saved(shells, buffers)  # prepare_for_saving empties a storage; this fills it again
    return tuple(buffer for buffer in buffers if buffer is not None)


def parts_of_slot(entries: Sequence[Saved]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The plain tensors of a slot's entries: those that may leave the device, and those that stay; see `_stays`."""
    going: list[torch.Tensor] = []
    staying: list[torch.Tensor] = []
    for entry in entries:
        if isinstance(entry, STORAGES):
            tensors = _tensors_in(entry)
            for buffer in buffers_of(entry):
                (staying if _stays(buffer, tensors) else going).append(buffer)
        elif entry is not None:
            (staying if entry.dtype in METADATA_DTYPES else going).append(entry)
    return going, staying


def _tensors_in(storage: Any) -> int:
    """How many tensors a quantized storage holds whose scales and amaxes have memory of their own: one, or one an expert.

    None in NVFP4's storage of one tensor: `tex.split_quantize` lays numbers, scales and amaxes of all experts in one
    allocation, which an amax that stayed would keep.
    """
    return 0 if isinstance(storage, NVFP4TensorStorage) else int(getattr(storage, "num_tensors", 1))


def _stays(buffer: torch.Tensor, tensors: int) -> bool:
    """Whether a buffer of a storage of some tensors stays on the device though its slot goes: sizes and offsets, and what
    is one number a tensor (scale, amax): each such buffer takes the host as long as the data, for a few bytes.
    """
    dtype = buffer.dtype
    return dtype in METADATA_DTYPES or (dtype is torch.float32 and buffer.numel() <= tensors)


class Taken:
    """The entries of one slot, of whose buffers someone else holds all but those that stay in any case.

    Attributes:
        places: where they are among the saved entries.
        buffers: what was taken, until a handle stands for it.
        handle: stands for the buffers; ``None``: there are none.
    """

    __slots__ = ("_parts", "_rows", "_shells", "_taken_from", "buffers", "handle", "places")

    def __init__(self, places: range, entries: Sequence[Saved]) -> None:
        self.places = places
        self.handle: SlotHandle | None = None
        self._shells: list[tuple[Any, int]] | None = None  # each storage without its buffers, and how many those are
        self._rows: list[int] | None = None  # of each entry, where one buffer is all of them
        parts: list[Any] = list(entries)
        cut = _cut_from(parts) if len(parts) > 1 else None
        if cut is not None:
            whole, self._rows = cut
            self.buffers: tuple[torch.Tensor, ...] = (whole,)
            self._parts, self._taken_from = [], []
            return
        if PLAIN_TYPES.issuperset(map(type, parts)):
            taken_from = [index for index, part in enumerate(parts) if part is not None]
        else:
            parts, taken_from, self._shells = [], [], []
            for entry in entries:
                first = len(parts)
                if isinstance(entry, STORAGES) and not isinstance(entry, torch.Tensor):
                    tensors = _tensors_in(entry)
                    buffers, shell = entry.prepare_for_saving()  # which empties it
                    parts += buffers
                    self._shells.append((shell, len(buffers)))
                    taken_from += [
                        index
                        for index, part in enumerate(buffers, first)
                        if part is not None and not _stays(part, tensors)
                    ]
                else:
                    parts.append(entry)
                    self._shells.append((None, 1))
                    taken_from += [first] if entry is not None else []
        self._parts = parts
        self._taken_from = taken_from
        self.buffers = tuple([parts[index] for index in taken_from])
        for index in taken_from:
            parts[index] = None

    def staying_bytes(self) -> int:
        """Bytes of the buffers that stay."""
        return sum([part.nbytes for part in self._parts if part is not None])

    def bring(self) -> list[Saved]:
        """The entries, as they were saved."""
        parts = self._parts
        if self._rows is not None:
            assert self.handle is not None
            (whole,) = self.handle.take()
            return list(torch.unsafe_split_with_sizes(whole, self._rows))
        if self.handle is not None:
            for index, buffer in zip(self._taken_from, self.handle.take(), strict=True):
                parts[index] = buffer
        if self._shells is None:
            return parts
        entries, position = [], 0
        for shell, count in self._shells:
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

    __slots__ = ("_ctx", "_exempt", "_taken", "slots", "taken")

    def __init__(self, ctx: OperationContext, exempt: Sequence[range], taken: Sequence[Taken] | None) -> None:
        self.slots: Sequence[SavedSlot] = ()
        self.taken = taken is not None
        self._ctx = ctx
        self._exempt = exempt
        self._taken = taken or ()

    def carried_bytes(self) -> int:
        """Bytes of the exempt entries and of what stays of the slots, parameters not counted. The weights of one op have
        one shape and one type: in a group of storages the first one's bytes count for all.
        """
        saved = self._ctx.to_save
        assert saved is not None
        nbytes = sum([taken.staying_bytes() for taken in self._taken])
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
        ctx = self._ctx
        entries = list(ctx.to_save or ())
        for taken, handle in zip(self._taken, handles, strict=True):
            taken.handle = handle
            taken.buffers = ()
            entries[taken.places.start : taken.places.stop] = [None] * len(taken.places)
        kinds = {kind for kind in set(map(type, entries)) if issubclass(kind, torch.Tensor)}
        self.slots = ()  # one of which refers to this layout
        _keep(ctx, entries, [entry for entry in entries if type(entry) in kinds], self._taken)


def _cut_from(parts: Sequence[Any]) -> tuple[torch.Tensor, list[int]] | None:
    """The contiguous rows of which `torch.split` made these parts, and how many each has; ``None`` if it did not. One
    tensor leaves, and comes back, in a fraction of the time that the host needs for one an expert.
    """
    first = parts[0]
    if not _PLAIN_TENSOR.issuperset(map(type, parts)):
        return None
    base, begin, shapes = first._base, first.storage_offset(), list(map(_SHAPE, parts))
    if base is None or set(map(id, map(_BASE, parts))) != {id(base)} or set(map(len, shapes)) != {2}:
        return None
    rows, widths = list(map(_ROWS, shapes)), set(map(_COLUMNS, shapes))
    columns = widths.pop()
    begins = list(accumulate([count * columns for count in rows[:-1]], initial=begin))
    if (
        widths
        or begins != list(map(torch.Tensor.storage_offset, parts))
        or False in map(torch.Tensor.is_contiguous, parts)
    ):
        return None
    return first.as_strided((sum(rows), columns), (columns, 1), begin), rows


class TakenTensor:
    """The same as `Taken` for a slot that is one plain tensor, or none.

    Attributes:
        places: where it is among the saved entries. handle: stands for it; ``None``: there is none.
    """

    __slots__ = ("handle", "places")

    def __init__(self, place: int, handle: SlotHandle | None) -> None:
        self.places = range(place, place + 1)
        self.handle = handle

    def bring(self) -> list[torch.Tensor | None]:
        """The entry, as it was saved."""
        return [None] if self.handle is None else [*self.handle.take()]


def slot_at(ctx: OperationContext, place: int, name: SlotName | None, absent: SaveState) -> SavedSlot:
    """The slot of a forward of te_offload's own that saved plain tensors alone, all but one of which are exempt.

    Args:
        ctx: its context. place: of the slot's tensor, or of ``None``, among what it saved. name: as in `SavedSlot`.
        absent: what ``None`` says.
    """
    saved = ctx.to_save
    assert saved is not None
    tensor = saved[place]
    if tensor is None:
        return SavedSlot(name, absent, (), (), functools.partial(_bytes_beside, saved, place))
    kind = FORMATS.get(tensor.dtype, "")
    return SavedSlot(name, SaveState.SAVED, (tensor,), (), functools.partial(_bytes_beside, saved, place), format=kind)


def _bytes_beside(saved: Sequence[torch.Tensor | None], place: int) -> int:
    return sum([entry.nbytes for number, entry in enumerate(saved) if number != place and entry is not None])


def carry_tensor(ctx: OperationContext, place: int, handle: SlotHandle | None) -> None:
    """`Layout.carry` for what `slot_at` read."""
    entries = list(ctx.to_save or ())
    entries[place] = None
    _keep(ctx, entries, [entry for entry in entries if entry is not None], (TakenTensor(place, handle),))


def _keep(
    ctx: OperationContext, entries: list[Saved], tensors: list[torch.Tensor], taken: Sequence[Taken | TakenTensor]
) -> None:
    """Keep entries on the context, the tensors among them with their versions."""
    try:
        versions = [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors have none
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
    ctx.to_save = None
    ctx.te_offload_carried = (entries, tensors, versions, taken)


def bring_carried(op: torch.nn.Module, ctx: OperationContext) -> None:
    """Put back what `Layout.carry` kept, if it did; and have a second backward over the same forward fail by its name.

    Raises:
        SavedTensorModifiedError: an exempt tensor was written to since the forward.
    """
    bring_slots = bring_exempt(op, ctx)
    if bring_slots is not None:
        bring_slots()


def bring_exempt(op: torch.nn.Module, ctx: OperationContext) -> Callable[[], None] | None:
    """`bring_carried`, but for slots that are away, which what is returned brings; ``None``: none is.

    Raises:
        SavedTensorModifiedError: an exempt tensor was written to since the forward.
    """
    carried = ctx.__dict__.pop("te_offload_carried", None)
    node: Any = torch._C._current_autograd_node()
    if node is not None and getattr(node, "tensor_objects", 0) is None:
        node.tensor_objects = _Spent(op, carried[3] if carried else ())
    if carried is None:
        return None
    entries, tensors, versions, slots = carried
    if [tensor._version for tensor in tensors] != versions:  # what autograd compares
        raise SavedTensorModifiedError(
            f"{type(op).__name__}: a weight, the router scales or the split sizes were written to in place between the "
            "forward and its backward, so gradients would be wrong. Call optimizer.step() after the backward."
        )
    ctx.saved_tensors = entries
    if all(taken.handle is None or taken.handle.is_here for taken in slots):
        _bring(entries, slots)
        return None
    return functools.partial(_bring, entries, slots)


def _bring(entries: list[Saved], slots: Sequence[Taken | TakenTensor]) -> None:
    for taken in slots:
        entries[taken.places.start : taken.places.stop] = taken.bring()


class _Spent:
    """Stands where Transformer Engine kept what it restores saved tensors with, and has thrown it away in a backward.

    Without it a second backward fails inside Transformer Engine, before any hook, by the name of a private attribute.
    """

    def __init__(self, op: torch.nn.Module, slots: Sequence[Taken | TakenTensor]) -> None:
        self._what = next((taken.handle.name for taken in slots if taken.handle), type(op).__name__)

    def __iter__(self) -> Any:
        raise BackwardTwiceError.of_te_ops(self._what)
