"""The session's hold on one layer: forward hooks, and a place where its ops tell of their slots.

In: a layer and the ops inside it that own slots. Out: calls to the session. Keeps true: a copy of the layer (deepcopy,
pickle) is not attached; a layer has at most one attachment. Does not: keep state of a step.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from te_offload.errors import ArgumentError
from te_offload.offload.untraced import untraced
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SlotHandle, SlotName, SlotObserver, Watch, slot_title

if TYPE_CHECKING:
    from te_offload.offload.session import OffloadSession
    from te_offload.offload.visit import LayerVisit


class _ForwardHook:
    """A forward hook whose copies do nothing."""

    def __init__(self, attachment: Attachment | None, *, before: bool) -> None:
        self.attachment = attachment
        self._before = before

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        if self.attachment is None:
            return
        session = self.attachment.session()
        if session is None:
            return
        if self._before:
            untraced(session.begin_forward, self.attachment, args, kwargs)
        else:  # torch calls it with no output, while the exception is handled, if the forward raised
            failed = output is None and sys.exc_info()[0] is not None
            untraced(session.end_forward, self.attachment, output, failed=failed)

    def __deepcopy__(self, memo: Any) -> _ForwardHook:
        return _ForwardHook(None, before=self._before)

    def __reduce__(self) -> Any:
        return _inert_hook, (self._before,)


def _inert_hook(before: bool) -> _ForwardHook:
    return _ForwardHook(None, before=before)


def is_attached(module: torch.nn.Module) -> bool:
    """Whether a living session is attached to a module."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _ForwardHook)]
    return any(hook.attachment is not None and hook.attachment.session() is not None for hook in hooks)


class Attachment(SlotObserver):
    """Attaches a session to a layer.

    Args:
        name: the layer's name in the record. module: the layer.
        owners: its ops that own slots: name inside the layer, op, name of the slot.
        session: who is called.

    Attributes:
        visit: the forward of the layer that runs now, unless another layer's runs inside it.
        forwards: of the layer in this step.
        unseen: the forward that runs now, if it is not looked at.

    Raises:
        ArgumentError: the layer is attached already.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        owners: list[tuple[str, SlotOwner, SlotName]],
        session: weakref.ref[OffloadSession],
    ) -> None:
        if is_attached(module):
            raise ArgumentError(
                f"{name} ({type(module).__name__}) is attached to an OffloadSession already. Close that one first."
            )
        self.name = name
        self.module = module
        self.session: weakref.ref[OffloadSession] = session
        self.forwards = 0
        self.visit: LayerVisit | None = None
        self.unseen: tuple[str, int] | None = None
        self.slot_names = frozenset(slot_title(name, op_name, slot) for op_name, _, slot in owners)
        self._owners = {id(op): (op_name, op, slot) for op_name, op, slot in owners}
        self._handles = [
            module.register_forward_pre_hook(_ForwardHook(self, before=True), prepend=True, with_kwargs=True),
            module.register_forward_hook(_ForwardHook(self, before=False), always_call=True, with_kwargs=True),
        ]
        for _, op, _ in owners:
            op.observe_slot(self)

    def flags(self) -> list[bool]:
        """``no_offload_activation`` of its ops."""
        return [op.no_offload_activation for _, op, _ in self._owners.values()]

    def watch(self) -> Watch:
        """See `SlotObserver.watch`."""
        visit = self.visit
        return Watch.NOT if visit is None else visit.watch()

    def slot_saved(self, op: torch.nn.Module, saved: SavedSlot, *, take: bool) -> SlotHandle | None:
        """See `SlotObserver.slot_saved`."""
        visit = self.visit
        if visit is None:
            return None
        op_name, owner, slot = self._owners[id(op)]
        return visit.note_slot(op_name, slot, owner.no_offload_activation, saved, take=take)

    def detach(self) -> None:
        """Take the hooks off the layer, and the observer off its ops. Idempotent."""
        for handle in self._handles:
            handle.remove()
        for _, op, _ in self._owners.values():
            op.observe_slot(None)
