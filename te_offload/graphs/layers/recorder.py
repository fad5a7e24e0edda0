"""What a layer saves for its backward while its forward is captured.

In: tensors that pass the saved-tensor hook, and slots that ops tell of. Out: which is which. Keeps true: ops tell their own
observer again afterwards; nothing is taken away from anyone. Does not: keep tensors longer than the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from te_offload.offload.transfer import Mark
from te_offload.offload.unmoved import without_graph
from te_offload.ops import te_adapter
from te_offload.ops.inside import named_parts
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import Reason, SavedSlot, SlotHandle, SlotObserver, Watch


class _Handle(SlotHandle):
    """Keeps a slot's buffers until the backward takes them, which may then use their memory while it still runs."""

    def __init__(self, name: str, buffers: list[torch.Tensor]) -> None:
        self._name = name
        self._buffers = buffers

    @property
    def name(self) -> str:
        """See `SlotHandle.name`."""
        return self._name

    @property
    def is_here(self) -> bool:
        """See `SlotHandle.is_here`. What was away comes back before the graph is replayed."""
        return True

    def take(self) -> list[torch.Tensor]:
        """See `SlotHandle.take`."""
        found, self._buffers = self._buffers, []
        return found


class Recorder(SlotObserver):
    """Watches one forward.

    Args:
        border: makes a moment of the graph that is being captured; see `Transfer.border`.

    Attributes:
        slots: which op saved what, since when it is there, and the versions that its buffers had then.
        others: what passed the hook, and is of no slot and not exempt.
        borders: all moments that were made: the graph writes to their events as long as it is replayed.
    """

    def __init__(self, border: Callable[[], Callable[[], Mark]]) -> None:
        self._border = border
        self.slots: list[tuple[SlotOwner, SavedSlot, Callable[[], Mark] | None, list[int]]] = []
        self.others: list[torch.Tensor] = []
        self.borders: list[Callable[[], Mark]] = []
        self._packed: list[torch.Tensor] = []
        self._given: list[torch.Tensor] = []  # what autograd holds
        self._exempt: list[torch.Tensor] = []

    def seen(self) -> list[torch.Tensor]:
        """All plain tensors that were saved or exempt, which someone holds because of that alone."""
        found = [tensor for _, saved, *_ in self.slots for tensor in (*saved.buffers, *saved.exempt)]
        found += self._given + self.others
        return [tensor for tensor in found if type(tensor) is torch.Tensor]

    def storages(self) -> set[int]:
        """Addresses of the storages of all that was saved."""
        buffers = [buffer for _, saved, *_ in self.slots for buffer in saved.buffers]
        return {
            tensor.untyped_storage().data_ptr() for tensor in (*self.others, *buffers) if type(tensor) is torch.Tensor
        }

    def clear(self) -> None:
        """Forget all tensors."""
        self.slots, self.others, self._packed, self._given, self._exempt = [], [], [], [], []

    @contextmanager
    def watching(self, module: torch.nn.Module) -> Iterator[None]:
        """Stand in for the observers of a module's ops, and above all hooks."""
        owners = [part for _, part in named_parts(module) if isinstance(part, SlotOwner)]
        observers = [owner._slot_observer for owner in owners]
        for owner in owners:
            owner.observe_slot(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
                yield
        finally:
            for owner, observer in zip(owners, observers, strict=True):
                owner.observe_slot(observer)
        self._sort()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook."""
        if type(tensor) is torch.Tensor and not te_adapter.is_marked_not_offload(tensor):
            self._packed.append(tensor.detach())
        given = _alone(tensor)
        self._given.append(given)
        return given

    def watch(self) -> Watch:
        """See `SlotObserver.watch`. What passes the hook of a checkpoint inside the layer is not there in the backward."""
        foreign = te_adapter.saved_tensor_hook_active() and not isinstance(
            te_adapter.saved_tensor_hook_owner(), SlotObserver
        )
        return Watch.HOOKS if foreign else Watch.TAKES

    def slot_saved(self, op: torch.nn.Module, saved: SavedSlot, *, take: bool) -> SlotHandle | None:
        """See `SlotObserver.slot_saved`."""
        assert isinstance(op, SlotOwner)
        if self.watch() is Watch.HOOKS:
            nbytes = sum([buffer.nbytes for buffer in saved.buffers])
            reason = Reason.CHECKPOINT if te_adapter.checkpoint_hook_active() else Reason.FOREIGN_HOOK
            told = saved._replace(buffers=(), exempt=(), stays=reason, nbytes=nbytes)
            self.slots.append((op, told, None, []))
            return None
        ready = self._border() if saved.buffers else None
        if ready is not None:
            self.borders.append(ready)
        saved = saved._replace(buffers=tuple(map(_alone, saved.buffers)), exempt=tuple(map(_alone, saved.exempt)))
        self.slots.append((op, saved, ready, [buffer._version for buffer in saved.buffers]))
        self._exempt.extend(saved.exempt)
        if not take or not saved.buffers:
            return None
        return _Handle(f"{type(op).__name__}'s slot", list(saved.buffers))

    def _sort(self) -> None:
        known = [tensor for _, saved, *_ in self.slots for tensor in saved.buffers] + self._exempt
        ends: dict[int, int] = {}
        for tensor in known:
            if tensor.numel():
                ends[tensor.data_ptr()] = max(_end(tensor), ends.get(tensor.data_ptr(), 0))
        seen = set()
        for tensor in self._packed:
            if tensor.layout is not torch.strided or not tensor.numel():
                continue
            place = tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()
            if place in seen or _end(tensor) <= ends.get(tensor.data_ptr(), 0):
                continue
            seen.add(place)
            self.others.append(tensor)
        self._packed, self._exempt = [], []


def _end(tensor: torch.Tensor) -> int:
    """The address behind its last byte."""
    if type(tensor) is not torch.Tensor:
        return tensor.data_ptr() + tensor.nbytes
    last = sum([(size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True)])
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its place in autograd's graph, and without the one that it is a view of."""
    return tensor.detach() if type(tensor) is torch.Tensor and tensor._is_view() else without_graph(tensor)
