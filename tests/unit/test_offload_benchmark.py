"""What the benchmark of offloading makes of its times and records, and when its layers ask for their split sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import offload
from benchmarks.stack import Shape, Stack
from te_offload.offload.engine import TIMED_EVERY


class _Layer(torch.nn.Module):
    """Notes its call."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        self._calls.append("layer")
        return x


@pytest.mark.parametrize("asks", [False, True])
def test_a_layer_asks_for_its_split_sizes_before_it_runs_if_told_to(
    monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    calls: list[str] = []
    shape = Shape(0, 4, 8, 8, 16, fp8=False, asks=asks)
    stack = Stack(shape, keep_act=False, plain=False)
    stack.layers = torch.nn.ModuleList(_Layer(calls) for _ in range(2))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: calls.append("asked"))
    stack(torch.ones(2, 3), torch.tensor([2]), torch.ones(2))
    assert calls == (["asked", "layer"] * 2 if asks else ["layer"] * 2)
    assert ("split sizes asked for" in shape.title) is asks


def test_cost_of_looking_weighs_timed_steps_as_they_occur_in_a_long_run() -> None:
    share = 1 / TIMED_EVERY
    cost = offload.cost_of_looking([10.0, 10.0, 10.0], [12.0, 11.0, 11.0], [True, False, False])
    assert cost == pytest.approx((share * 2 + (1 - share) * 1) / 10)
    assert offload.cost_of_looking([10.0], [12.0], [True]) is None  # no step without times


def test_terms_take_the_worst_window_and_not_the_worst_of_each_term() -> None:
    moments = [
        SimpleNamespace(label=label, nbytes=nbytes)
        for label, nbytes in (("layer0 saved", 5), ("taken", 7), ("grad", 9), ("taken", 4))
    ]
    record: Any = SimpleNamespace(residency=moments)
    assert offload.resident(record) == [5, 5, 9, 4]
    assert offload.terms(record, [0, 3, 1, 8]) == 12
    with pytest.raises(ValueError, match="shorter"):
        offload.terms(record, [0, 3])
