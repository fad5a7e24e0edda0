"""Steps of many forwards, as gradient accumulation and pipelines have them: what a read costs does not grow with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from te_offload.offload import returns
from tests.session.test_order import Op

LAYERS = 4


def asked(monkeypatch: pytest.MonkeyPatch, forwards: int) -> tuple[int, int]:
    """How often a step that has all of its forwards before the backwards asks whether a forward has something to bring
    back, in its second round; and the bytes that came back.
    """
    calls = 0
    is_away = returns._is_away

    def counted(visit: Any) -> bool:
        nonlocal calls
        calls += 1
        return is_away(visit)

    monkeypatch.setattr(returns, "_is_away", counted)
    layers = torch.nn.ModuleList(torch.nn.Sequential(Op(lambda: [torch.ones(100)])) for _ in range(LAYERS))
    with OffloadSession(layers, min_bytes=0, max_in_flight="1GiB") as session:
        for _ in range(2):
            calls = 0
            with session.step():
                outputs = []
                for _ in range(forwards):
                    y = torch.ones(1, requires_grad=True)
                    for layer in layers:
                        y = layer(y)
                    outputs.append(y)
                for y in outputs:
                    y.sum().backward()
    monkeypatch.undo()
    return calls, session.records[-1].bytes_back


def test_questions_whether_something_is_to_come_back_are_a_few_for_each_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When all is back nothing is away, however many forwards there are."""
    calls, bytes_back = asked(monkeypatch, 40)
    assert bytes_back == 40 * LAYERS * 400
    assert calls <= 3 * 40 * LAYERS
