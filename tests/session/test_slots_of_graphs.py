"""Slots that a layer's graph tells of, and that stay in any case."""

from __future__ import annotations

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason, ops
from te_offload.slots import SavedSlot, SaveState


class Layer(torch.nn.Module):
    """Tells of a slot as a layer's graph does."""

    def __init__(self, stays: Reason) -> None:
        super().__init__()
        self.op = ops.GroupedLinear(2, 8, 8, bias=False, device="cpu", dtype=torch.float32)
        self._stays = stays

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        observer, _ = self.op.follower()
        assert observer is not None
        saved = SavedSlot(None, SaveState.SAVED, (), (), None, self._stays, 4096)
        assert observer.slot_saved(self.op, saved, take=True) is None
        return x.exp()


@pytest.mark.parametrize("stays", [Reason.CROSSES_BORDER, Reason.NO_VIRTUAL_MEMORY])
def test_slot_that_a_graph_keeps_is_recorded_with_its_bytes_and_the_reason(stays: Reason) -> None:
    layer = Layer(stays)
    with OffloadSession([layer], min_bytes=0) as session:
        with session.step():
            layer(torch.ones(16, 8, requires_grad=True)).sum().backward()
        rows = {row.slot.value: row for row in session.records[-1].slots}
    row = rows["grouped_linear_input"]
    assert (row.fate, row.reason, row.nbytes) == (Fate.KEPT, stays, 4096)
    assert rows["other"].fate is Fate.OFFLOADED and session.records[-1].bytes_out == 16 * 8 * 4
