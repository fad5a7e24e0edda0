"""What a region on a GPU saves."""

from __future__ import annotations

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason, SlotName
from tests.session.test_regions import Layer

pytestmark = pytest.mark.gpu


def test_tensor_of_a_region_on_the_cpu_stays_and_the_others_go() -> None:
    def make() -> list[torch.Tensor]:
        return [torch.ones(100, device="cuda"), torch.ones(5), torch.full((100,), 2.0, device="cuda")]

    layer = Layer(make, ("mixed",)).cuda()
    with OffloadSession(layer, min_bytes=0, max_in_flight=0) as session:
        layer.session = session
        with session.step():
            y = layer(torch.ones(1, device="cuda", requires_grad=True))
            torch.cuda.synchronize()
            y.sum().backward()
        rows = {row.slot: row for row in session.records[-1].slots}
    assert [(tensor.device.type, float(tensor.sum())) for tensor in layer.seen[0]] == [
        ("cuda", 100),
        ("cpu", 5),
        ("cuda", 200),
    ]
    assert (rows[SlotName.REGION].fate, rows[SlotName.REGION].tensors) == (Fate.OFFLOADED, 2)
    assert (rows[SlotName.OTHER].fate, rows[SlotName.OTHER].reason) == (Fate.KEPT, Reason.OTHER_DEVICE)
    assert 800 <= session.records[-1].bytes_out < 800 + 2 * 512
