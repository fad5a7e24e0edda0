"""Writes of a constant number through a mask: folded where nothing changes, and left alone otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from te_offload.graphs import CudagraphBackend, cudagraph_pass
from te_offload.graphs.masked_writes import fold_masked_writes
from tests.support.fake_graphs import FakeBackend

NUMBERS = torch.tensor(0), torch.tensor(0.25)


def functional(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    traced = make_fx(torch.func.functionalize(function), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    assert isinstance(traced, GraphModule)
    return traced


def targets(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def split_embedding(words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """A table whose rows 2 to 5 are here."""
    elsewhere = (words < 2) | (words >= 6)
    here = words - 2
    here[elsewhere] = 0
    found = torch.nn.functional.embedding(here, table)
    found[elsewhere, :] = 0.25
    return found


def with_writes(words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The same as torch up to 2.14 traces it; 2.15 makes masked fills of it by itself."""
    write, fresh = torch.ops.aten.index_put, torch.ops.aten.lift_fresh_copy
    elsewhere = (words < 2) | (words >= 6)
    here = write(words - 2, [elsewhere], fresh(NUMBERS[0]))
    found: torch.Tensor = write(torch.nn.functional.embedding(here, table), [elsewhere], fresh(NUMBERS[1]))
    return found


def words() -> torch.Tensor:
    return torch.randint(0, 8, (3, 5), generator=torch.Generator().manual_seed(0))


def test_writes_around_a_split_embedding_are_masked_fills_with_the_same_bits() -> None:
    inputs = words(), torch.randn(4, 7)
    traced = functional(with_writes, *inputs)
    before = copy.deepcopy(traced)
    folded = fold_masked_writes(traced)
    assert sum("index_put" in name or "lift_fresh" in name for name in targets(traced)) == 4
    assert not any("index_put" in name or "lift_fresh" in name for name in targets(folded))
    assert sum("masked_fill.Scalar" in name for name in targets(folded)) == 2
    assert torch.equal(folded(*inputs), split_embedding(*inputs))
    assert targets(traced) == targets(before) and torch.equal(traced(*inputs), folded(*inputs))


def test_the_pass_captures_a_split_embedding_as_a_whole() -> None:
    inputs = words(), torch.randn(4, 7)
    traced = functional(with_writes, *inputs)
    graphed = cudagraph_pass(traced, inputs, make_backend=lambda _: FakeBackend())
    assert [part.captured for part in graphed.parts] == [True]
    assert graphed.parts[0].ops == len(targets(fold_masked_writes(traced)))


def test_compiled_split_embedding_is_captured_as_a_whole() -> None:
    torch._dynamo.reset()
    backend = CudagraphBackend(make_backend=lambda _: FakeBackend())
    table = torch.randn(4, 7, requires_grad=True)
    compiled: Any = torch.compile(split_embedding, backend=backend)
    for _ in range(5):
        found = compiled(words(), table)
        assert torch.equal(found, split_embedding(words(), table))
        found.sum().backward()
        del found
    assert [part.captured for graphed in backend.forwards for part in graphed.parts] == [True]
    backend.close()
    torch._dynamo.reset()


def accumulates(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.index_put(x, [x > 0], torch.tensor(1.0), True)
    return found


def writes_rows(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.index_put(x, [torch.arange(2)], torch.tensor(1.0))
    return found


def writes_a_row(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.index_put(x, [x[:, 0] > 0], torch.tensor([1.0, 2.0, 3.0]))
    return found


def writes_what_is_computed(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.index_put(x, [x > 0], x.sum())
    return found


@pytest.mark.parametrize("function", [accumulates, writes_rows, writes_a_row, writes_what_is_computed])
def test_other_writes_stay_as_they_are(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    traced = functional(function, x)
    assert "aten.index_put.default" in targets(traced)
    assert fold_masked_writes(traced) is traced
