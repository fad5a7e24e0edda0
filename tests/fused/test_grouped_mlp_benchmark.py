"""What the benchmark of the grouped MLP keeps of a captured step, and what it says of a full card."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from benchmarks.grouped_mlp import memory_for, without_graph


class _Held:
    """Lives as long as a node."""


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: _Held) -> torch.Tensor:
        ctx.held = held
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return 2 * grad, None


def test_results_that_a_graph_keeps_hold_no_node_of_autograds() -> None:
    held = _Held()
    alive = weakref.ref(held)
    y: torch.Tensor = _Twice.apply(torch.ones(3, requires_grad=True), held)  # type: ignore[no-untyped-call]
    results = y, (y + 1, "a word"), None
    kept = without_graph(results)
    del results, y, held
    assert alive() is None
    assert torch.equal(kept[0], torch.full((3,), 2.0)) and kept[1][1] == "a word" and kept[2] is None


def test_a_full_card_ends_the_benchmark_with_what_to_do() -> None:
    said = r"^E32 H7168 F2048 T65536: .* --only .*, or give fewer --tokens\. Tried to allocate 896\.00 MiB\.$"
    with pytest.raises(SystemExit, match=said), memory_for("E32 H7168 F2048 T65536"):
        raise torch.OutOfMemoryError("Tried to allocate 896.00 MiB.\nSee documentation")
