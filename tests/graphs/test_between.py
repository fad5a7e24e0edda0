"""What may go between a captured forward and its backward: every byte that the backward may read is there again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from te_offload.graphs.layers.between import Between
from te_offload.graphs.layers.items import Item, put, span
from te_offload.graphs.layers.recorder import Recorder
from te_offload.graphs.layers.space import Extent
from te_offload.offload.transfer import CpuTransfer
from te_offload.ops import ScaledSReLU
from te_offload.slots import Reason, SavedSlot, SaveState, SlotName


class Node(torch.autograd.Function):
    """Saves what it is told to, and holds what it is told to, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: list[torch.Tensor], held: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        ctx.held = list(held)
        saved.clear()
        held.clear()
        return x * 2


class Layer(torch.nn.Module):
    """One op, whose slot is a part of what is made, and one node. Each gets the whole: what it takes is to be told."""

    def __init__(self, slot: Any = None, exempt: Any = None, saved: Any = None, held: Any = None) -> None:
        super().__init__()
        self.op = ScaledSReLU()
        self.parts = slot, exempt, saved, held

    def forward(self, x: torch.Tensor, whole: list[torch.Tensor]) -> torch.Tensor:
        made = whole.pop()
        slot, exempt, saved, held = ([] if part is None else part(made) for part in self.parts)
        del made
        if slot:
            assert self.op._slot_observer is not None
            told = SavedSlot(SlotName.ACT_INPUT, SaveState.SAVED, tuple(slot), tuple(exempt))
            x.handle = self.op._slot_observer.slot_saved(self.op, told, take=True)  # type: ignore[attr-defined]
        del slot, exempt
        found: torch.Tensor = Node.apply(x, saved, held)  # type: ignore[no-untyped-call]
        return found


def sorted_out(layer: Layer) -> tuple[Between, Extent, torch.Tensor]:
    """What a layer saved of one allocation of 64 numbers, the allocation, and what keeps it."""
    whole = [torch.arange(64.0).view(8, 8)]
    extent = Extent(whole[0].data_ptr(), 256)
    recorder, x = Recorder(lambda: CpuTransfer().mark), torch.ones(3, requires_grad=True)
    with recorder.watching(layer):
        y = layer(x, whole)
    return Between.of(recorder, [extent], [], None), extent, y


@pytest.mark.parametrize("held", [False, True])
def test_allocation_goes_with_a_part_of_it_unless_someone_holds_more(held: bool) -> None:
    layer = Layer(saved=lambda made: [made[2:4]], held=(lambda made: [made]) if held else None)
    found, extent, _y = sorted_out(layer)
    assert (list(found.taken), list(found.carried)) == (([], [extent]) if held else ([extent], []))
    assert len(found.others) == (not held)


def test_allocation_goes_though_it_is_held_where_all_of_it_was_saved() -> None:
    found, extent, _y = sorted_out(Layer(saved=lambda made: [made[4:], made[:4]], held=lambda made: [made]))
    assert list(found.taken) == [extent] and len(found.others) == 2


def test_slot_stays_beside_what_its_op_exempts_in_one_allocation() -> None:
    found, extent, _y = sorted_out(Layer(slot=lambda made: [made[:6]], exempt=lambda made: [made[6:]]))
    (slot,) = found.slots
    assert slot.items == () and slot.saved.stays is Reason.ALIAS and slot.saved.nbytes == 6 * 8 * 4
    assert list(found.carried) == [extent]


def test_slot_that_takes_all_of_its_allocation_goes() -> None:
    found, extent, _y = sorted_out(Layer(slot=lambda made: list(made.split([3, 5]))))
    assert len(found.slots[0].items) == 2 and found.slots[0].saved.stays is None and list(found.taken) == [extent]


def test_saved_tensor_that_begins_with_a_slot_and_is_longer_goes_too() -> None:
    found, extent, _y = sorted_out(Layer(slot=lambda made: [made[:2]], saved=lambda made: [made]))
    assert [item.size for item in found.others] == [(8, 8)] and list(found.taken) == [extent]
    assert found.slots[0].items != ()


def test_slot_that_stays_keeps_its_bytes_where_another_slot_would_go() -> None:
    """One buffer of it is in no pool: so it stays, and with it what shares memory with its other buffer."""

    class Two(Layer):
        def forward(self, x: torch.Tensor, whole: list[torch.Tensor]) -> torch.Tensor:
            made = whole.pop()
            assert self.op._slot_observer is not None
            for buffers in ((made[:4], torch.ones(3)), (made[4:],)):
                told = SavedSlot(SlotName.ACT_INPUT, SaveState.SAVED, buffers, ())
                self.op._slot_observer.slot_saved(self.op, told, take=True)
            return x * 2

    found, extent, _y = sorted_out(Two())
    assert [slot.saved.stays for slot in found.slots] == [Reason.CROSSES_BORDER, Reason.ALIAS]
    assert list(found.carried) == [extent]


@pytest.mark.parametrize("holders", [0, 1])
@pytest.mark.parametrize("outputs", [1, 2])
def test_output_that_nobody_else_holds_is_read_by_nobody(outputs: int, holders: int) -> None:
    """However many outputs lie in one storage."""
    whole = torch.arange(64.0)
    extent = Extent(whole.data_ptr(), 256)
    keepers = [whole.untyped_storage() for _ in range(outputs)]
    held = [whole] * holders
    del whole
    found = Between.of(Recorder(lambda: CpuTransfer().mark), [extent], keepers, None)
    assert list(found.carried) == [extent] * len(held)


def test_slot_under_a_checkpoint_inside_the_layer_is_told_of_and_not_taken() -> None:
    class Checkpointed(Layer):
        def forward(self, x: torch.Tensor, whole: list[torch.Tensor]) -> torch.Tensor:
            def inner(x: torch.Tensor) -> torch.Tensor:
                observer, watch = self.op.follower()
                told = SavedSlot(SlotName.ACT_INPUT, SaveState.SAVED, (whole[0],), ())
                if observer is not None:
                    watches.append(watch.value)
                    observer.slot_saved(self.op, told, take=False)
                return x.exp()

            found: torch.Tensor = checkpoint(inner, x, use_reentrant=False)
            return found

    watches: list[str] = []
    found, extent, y = sorted_out(Checkpointed())
    assert watches == ["through hooks"]
    (slot,) = found.slots
    assert (slot.items, slot.saved.stays, slot.saved.nbytes) == ((), Reason.CHECKPOINT, 256)
    assert list(found.carried) == [extent]
    y.sum().backward()


def item(tensor: torch.Tensor) -> Item:
    storage = tensor.untyped_storage()
    extent = Extent(storage.data_ptr(), storage.nbytes())
    return Item(extent, tensor.data_ptr() - extent.begin, tensor.dtype, tensor.size(), tensor.stride())


VIEWS = {
    "dense": lambda whole: whole,
    "columns": lambda whole: whole[:, 3:5],
    "expanded": lambda whole: whole[2, :3].expand(5, 3),
    "windows": lambda whole: whole.view(-1).as_strided((4, 6), (2, 1), 1),
    "one number": lambda whole: whole[3, 3],
}


@pytest.mark.parametrize(
    ("view", "contiguous"), [*((view, False) for view in VIEWS), ("columns", True), ("expanded", True)]
)
def test_tensor_is_put_where_another_one_was(view: str, contiguous: bool) -> None:
    source, target = torch.randn(8, 8), torch.zeros(8, 8)
    there = VIEWS[view](target)
    given = VIEWS[view](source)
    put(item(there), target.untyped_storage(), given.contiguous() if contiguous else given)
    assert torch.equal(there, given)
    begin, end = span(item(there))
    first, last = (begin - target.data_ptr()) // 4, (end - target.data_ptr()) // 4
    flat: Sequence[float] = target.view(-1).tolist()
    assert not any(flat[:first]) and not any(flat[last:])
    if not contiguous:  # someone may read what lies in between
        assert flat[first:last] == source.view(-1).tolist()[first:last]
