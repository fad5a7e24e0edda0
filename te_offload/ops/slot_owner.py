"""What every op of te_offload has beside its `te.ops` class: the keyword, the mark, and someone to tell about slots.

In: the keyword `no_offload_activation`, and the op's context after each forward. Out: marks on saved tensors, and a
call to the observer. Keeps true: the keyword is a plain attribute that survives deepcopy and pickle, the observer
does not; parameters and state-dict keys are those of the `te.ops` class. Does not: decide what is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_offload.errors import ArgumentTypeError
from te_offload.ops import te_adapter
from te_offload.slots import SavedSlot, SaveState, SlotHandle, SlotName, SlotObserver, Watch

Reader = Callable[..., te_adapter.Layout | None]  # `te_adapter.read_grouped_linear`, say


class SlotOwner:
    """Mixin of an op that owns one slot. Goes before the `te.ops` class in the list of bases."""

    no_offload_activation: bool = False
    _slot_observer: SlotObserver | None = None

    def _init_slot_owner(self, no_offload_activation: bool) -> None:
        te_adapter.require_supported_release()
        if not isinstance(no_offload_activation, bool):
            raise ArgumentTypeError(
                f"{type(self).__name__}: no_offload_activation must be True or False, but is "
                f"{no_offload_activation!r} ({type(no_offload_activation).__name__})."
            )
        self.no_offload_activation = no_offload_activation

    @staticmethod
    def computes_on_cpu(tensor: torch.Tensor) -> bool:
        """Whether `arithmetic` computes for a tensor instead of Transformer Engine's kernels: it is on the CPU."""
        return tensor.device.type == "cpu"

    def observe_slot(self, observer: SlotObserver | None) -> None:
        """Tell ``observer`` about the slot of every later forward; ``None`` ends it."""
        if observer is None:
            self.__dict__.pop("_slot_observer", None)
        else:
            self._slot_observer = observer

    def follower(self) -> tuple[SlotObserver | None, Watch]:
        """Who follows the saved tensors of a forward that runs now, and how: the op's own observer, else the owner of the
        innermost saved-tensor hook, if it is one (a context around the layer, which knows no ops), else anyone's hook.
        """
        observer = self._slot_observer
        if observer is not None:
            watch = observer.watch()
            if watch is not Watch.NOT:
                return observer, watch
        if not te_adapter.saved_tensor_hook_active():
            return None, Watch.NOT
        owner = te_adapter.saved_tensor_hook_owner()
        return (owner, owner.watch()) if isinstance(owner, SlotObserver) else (None, Watch.HOOKS)

    def declare_slot(self, saved: SavedSlot, observer: SlotObserver | None) -> None:
        """Mark what was saved, and tell the observer; the tensors pass the saved-tensor hooks afterwards."""
        te_adapter.mark_exempt_and_kept(saved, keep_input=self.no_offload_activation)
        if observer is not None:
            observer.slot_saved(self, saved, take=False)  # type: ignore[arg-type]

    def hand_over(self, saved: SavedSlot, observer: SlotObserver) -> SlotHandle | None:
        """Give the slot's buffers to an observer that takes (`Watch.TAKES`); ``None`` if the slot was not saved."""
        return observer.slot_saved(self, saved, take=True)  # type: ignore[arg-type]

    def declare(self, read: Reader, ctx: te_adapter.OperationContext) -> None:
        """Tell of the slot that a forward of this op alone saved; or hand it over.

        Args:
            read: reads the context. ctx: of the forward.
        """
        observer, watch = self.follower()
        if watch is not Watch.NOT:
            self._declare_to(observer, watch, read, ctx)

    def declare_one(
        self,
        read: Reader,
        ctx: te_adapter.OperationContext,
        place: int,
        *,
        name: SlotName | None = None,
        absent: SaveState = SaveState.NOT_SAVED,
    ) -> None:
        """The same for a forward of te_offload's own, whose slot is at one place of what it saved, and nothing else there
        may leave the device: where that is a plain tensor there is no layout to read.

        Args:
            read, ctx: as for `declare`. place: of the slot. name: as in `SavedSlot`. absent: what it says that nothing is
                there.
        """
        observer, watch = self.follower()
        if watch is Watch.NOT:
            return
        saved = ctx.to_save
        assert saved is not None
        if watch is Watch.TAKES and observer is not None and type(saved[place]) in (torch.Tensor, type(None)):
            slot = te_adapter.slot_at(ctx, place, name, absent)
            te_adapter.carry_tensor(ctx, place, self.hand_over(slot, observer))
        else:
            self._declare_to(observer, watch, read, ctx)

    def _declare_to(
        self, observer: SlotObserver | None, watch: Watch, read: Reader, ctx: te_adapter.OperationContext
    ) -> None:
        layout = read(self, ctx, take=watch is Watch.TAKES)
        if layout is None:
            return
        if layout.taken:
            assert observer is not None
            layout.carry([self.hand_over(layout.slots[0], observer)])
        else:
            self.declare_slot(layout.slots[0], observer)

    def extra_repr(self) -> str:
        """The keyword, beside what the `te.ops` class shows."""
        inherited: str = super().extra_repr()  # type: ignore[misc]
        own = f"no_offload_activation={self.no_offload_activation}"
        return f"{inherited}, {own}" if inherited else own

    def __getstate__(self) -> dict[str, Any]:
        """State for deepcopy and pickle: all but the observer, which belongs to a session and not to the op."""
        state = dict(self.__dict__)
        state.pop("_slot_observer", None)
        return state


def declare_slots(
    ops: Sequence[Any], ctxs: Sequence[te_adapter.OperationContext], read: Callable[..., te_adapter.Layout | None]
) -> None:
    """Tell of the slots that a forward of several ops in one saved, one an op; or hand them over.

    Args:
        ops: `SlotOwner` ops, or plain ones of `te.ops` among them, whose weights stay all the same; then nothing is taken.
        ctxs: their contexts. read: reads them.
    """
    followers = [op.follower() if isinstance(op, SlotOwner) else (None, Watch.NOT) for op in ops]
    watches = [watch for _, watch in followers]
    if all(watch is Watch.NOT for watch in watches):
        return
    layout = read(ops, ctxs, take=all(watch is Watch.TAKES for watch in watches))
    if layout is None:
        return
    told = list(zip(ops, layout.slots, (observer for observer, _ in followers), strict=True))
    if layout.taken:
        layout.carry([op.hand_over(slot, observer) for op, slot, observer in told])
        return
    for op, slot, observer in told:
        if isinstance(op, SlotOwner):
            op.declare_slot(slot, observer)
        else:
            te_adapter.mark_exempt_and_kept(slot, keep_input=False)
