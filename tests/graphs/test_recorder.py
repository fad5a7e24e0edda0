"""What is noted of the tensors that a captured layer saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_offload.graphs.layers.recorder import Recorder
from te_offload.offload.transfer import CpuTransfer
from te_offload.ops import ScaledSReLU
from te_offload.ops.te_adapter.switches import NOT_OFFLOAD
from te_offload.slots import SavedSlot, SaveState, SlotObserver


def border() -> Callable[[], Any]:
    return CpuTransfer().mark


class Layer(torch.nn.Module):
    """Saves tensors as it is told to."""

    def __init__(self, *saved: torch.Tensor, slot: SavedSlot | None = None) -> None:
        super().__init__()
        self.op = ScaledSReLU()
        self.saved, self.slot = saved, slot
        self.observed_by: list[SlotObserver | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.observed_by.append(self.op._slot_observer)
        if self.slot is not None:
            assert self.op._slot_observer is not None
            self.op._slot_observer.slot_saved(self.op, self.slot, take=False)
        found: torch.Tensor = _Saves.apply(x, *self.saved)  # type: ignore[no-untyped-call]
        return found


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        return x * 2


def noted(layer: Layer) -> Recorder:
    recorder = Recorder(border)
    with recorder.watching(layer):
        layer(torch.ones(3, requires_grad=True))
    return recorder


def addresses(recorder: Recorder) -> list[int]:
    return [tensor.data_ptr() for tensor in recorder.others]


def test_ops_tell_the_recorder_while_it_watches_and_their_own_observer_again_afterwards() -> None:
    layer, own = Layer(), Recorder(border)
    layer.op.observe_slot(own)
    recorder = noted(layer)
    assert layer.observed_by == [recorder] and layer.op._slot_observer is own


def test_tensor_that_is_saved_twice_is_noted_once_and_its_views_apart() -> None:
    whole = torch.ones(4, 4)
    assert addresses(noted(Layer(whole, whole, whole[1:]))) == [whole.data_ptr(), whole[1:].data_ptr()]
    assert len(noted(Layer(whole, whole.view(16))).others) == 2


def test_what_an_op_saved_or_exempts_is_no_other_tensor() -> None:
    buffer, exempt, other = torch.ones(4), torch.ones(5), torch.ones(6)
    slot = SavedSlot(None, SaveState.SAVED, (buffer,), (exempt,))
    recorder = noted(Layer(buffer, exempt, other, slot=slot))
    assert addresses(recorder) == [other.data_ptr()] and [saved for _, saved, *_ in recorder.slots] == [slot]
    assert recorder.storages() == {buffer.data_ptr(), other.data_ptr()}


def test_tensors_without_bytes_of_their_own_or_with_a_mark_are_left_out() -> None:
    marked, other = torch.ones(7), torch.ones(8)
    setattr(marked, NOT_OFFLOAD, True)  # as Transformer Engine marks weights
    sparse = torch.eye(3).to_sparse()
    assert addresses(noted(Layer(marked, torch.empty(0), sparse, other))) == [other.data_ptr()]


@pytest.mark.parametrize(
    ("take", "buffers", "kept"), [(True, 1, True), (True, 0, False), (False, 1, False), (False, 0, False)]
)
def test_buffers_are_kept_for_an_op_that_gives_them_away(*, take: bool, buffers: int, kept: bool) -> None:
    slot = SavedSlot(None, SaveState.SAVED, tuple(torch.ones(4) for _ in range(buffers)), ())
    handle = Recorder(border).slot_saved(ScaledSReLU(), slot, take=take)
    assert (handle is not None) is kept
    if handle is not None:
        assert handle.name == "ScaledSReLU's slot" and handle.take() == list(slot.buffers) and handle.take() == []
