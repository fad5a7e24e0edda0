"""Queries, keys and values that come back: where they were in their storages, as Transformer Engine looks at them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformer_engine.pytorch.attention.dot_product_attention.utils import get_qkv_layout

from te_offload import OffloadSession
from te_offload.slots import SlotName
from tests.session.test_regions import Layer, _Save

TOKENS, BATCH, HEADS, WIDTH = 6, 2, 4, 8
pytestmark = pytest.mark.usefixtures("alone_and_together")


def apart() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, BATCH, HEADS, WIDTH) for _ in range(3)]


def packed_by_head() -> list[torch.Tensor]:
    return list(torch.randn(TOKENS, BATCH, HEADS, 3 * WIDTH).split(WIDTH, -1))


def packed_by_tensor() -> list[torch.Tensor]:
    return list(torch.randn(TOKENS, BATCH, 3, HEADS, WIDTH).unbind(2))


def keys_with_values() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, BATCH, HEADS, WIDTH), *torch.randn(TOKENS, BATCH, HEADS, 2 * WIDTH).split(WIDTH, -1)]


class Outside(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Save.apply(x, self.seen, *self.make())  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("inner", [False, True], ids=["a layer's", "a region's"])
@pytest.mark.parametrize("make", [apart, packed_by_head, packed_by_tensor, keys_with_values])
def test_they_are_packed_as_before(make: Callable[[], list[torch.Tensor]], inner: bool) -> None:
    made: list[list[torch.Tensor]] = []

    def beside_others() -> list[torch.Tensor]:
        made.append(make())
        return [torch.randn(5, 3), torch.randn(2, 2, 40), *made[-1], torch.randn(3, 3, 3)]

    layer = (Layer if inner else Outside)(beside_others, ("inner",))
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        for _ in range(2):
            with session.step():
                layer(torch.ones(4, requires_grad=True)).sum().backward()
            record = session.records[-1]
            assert record.bytes_back == record.bytes_out > 0
            assert {row.slot for row in record.slots if row.bytes_out} == {SlotName.REGION if inner else SlotName.OTHER}
    for expected, found in zip(made, [seen[2:5] for seen in layer.seen], strict=True):
        assert [one.storage_offset() for one in found] == [one.storage_offset() for one in expected]
        assert all(map(torch.equal, found, expected))
        layouts = [get_qkv_layout(*tensors, qkv_format="sbhd")[0] for tensors in (found, expected)]
        assert layouts[0] == layouts[1]
