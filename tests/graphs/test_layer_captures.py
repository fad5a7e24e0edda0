"""What the capture of a layer keeps, and what it notes, on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from te_offload.fused import hopper
from te_offload.graphs.backend import Pool
from te_offload.graphs.layers import ground, pair
from te_offload.graphs.layers.pair import GraphPair
from te_offload.graphs.layers.recorder import Recorder
from te_offload.offload.transfer import CpuTransfer
from te_offload.ops import ScaledSReLU
from te_offload.slots import SavedSlot, SaveState
from tests.support.mlp import make_mlp
from tests.support.toy_layer import FakeBackend, FakeGround, FakeRecording, install


class _Plain(FakeBackend):
    """Runs what it is to capture, in memory of its own."""

    def record(self, function: Callable[[], Any], generators: Sequence[Any]) -> tuple[Any, Any]:
        return FakeRecording(self.machine, lambda: None), function()


def test_captured_backward_may_work_where_it_has_read_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an eager one: nothing that watched the forward keeps what it saved."""
    machine = install(monkeypatch)
    monkeypatch.setenv(hopper.SWITCH, "reference")
    backend = type("Backend", (_Plain,), {"machine": machine})
    monkeypatch.setattr(pair, "CudaBackend", backend)
    saved: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(16)
            self.experts = make_mlp(experts=2, hidden=16, ffn=8, device="cpu", dtype=torch.float32)

        def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            normed = self.norm(x)
            saved.append(weakref.ref(normed.untyped_storage()))
            normed.register_hook(lambda _: alive.append(saved[-1]() is not None))  # when the experts' backward is over
            found: torch.Tensor = x + self.experts(normed, sizes, scales, sizes)
            return found

    layer, x = Layer(), torch.randn(7, 16, requires_grad=True)
    leaves, structure = pytree.tree_flatten(((x, torch.tensor([3, 4]), torch.rand(7)), {}))
    found = GraphPair(FakeGround(x.device, virtual=True), "layer", layer, layer.forward, structure, leaves, [0])
    found._run(Pool(), grad_outputs=None)
    assert alive == [False]


@pytest.mark.parametrize("written", [False, True])
def test_slot_is_there_since_its_op_said_so_unless_it_was_written_to_afterwards(written: bool) -> None:
    borders, mark = list[int](), CpuTransfer().mark()

    def border() -> Callable[[], Any]:
        borders.append(len(borders))
        return lambda: mark

    recorder, op, buffer = Recorder(border), ScaledSReLU(), torch.ones(4)
    recorder.slot_saved(op, SavedSlot(None, SaveState.SAVED, (buffer,), ()), take=True)
    if written:
        buffer += 1
    ((told_by, saved, ready, versions),) = recorder.slots
    assert told_by is op and borders == [0] and ready is not None and ready() is mark
    assert ([one._version for one in saved.buffers] != versions) is written


def test_torch_warns_of_streams_again_once_layers_have_no_graphs() -> None:
    was = ground._set_warning(on=True)
    try:
        assert ground._set_warning(on=False) is True
        assert ground._set_warning(on=True) is False
    finally:
        ground._set_warning(on=was)
