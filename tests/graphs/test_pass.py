"""The CUDA graph pass: which nodes can be captured, how a graph is cut around the others, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from te_offload.errors import ArgumentError, StaleOutputError
from te_offload.graphs import CaptureState, GraphedModule, cudagraph_pass
from te_offload.graphs.predicate import reasons
from tests.support.fake_graphs import FakeBackend

CUDA = torch.device("cuda", 0)


def cuda_reasons(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> dict[str, str]:
    """Why nodes of a function of CUDA tensors cannot be captured; no GPU is needed to look at it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, device="cuda:0") for shape in shapes]
        graph = make_fx(function, **options)(*inputs).graph
    return {str(node.target): reason for node, reason in reasons(graph, CUDA).items()}


def test_ordinary_ops_can_be_captured() -> None:
    assert cuda_reasons(lambda a, b: torch.relu(a @ b).sum(0, keepdim=True) + 1, (4, 8), (8, 2)) == {}


@pytest.mark.parametrize(
    ("function", "op", "reason"),
    [
        (lambda x: x.cpu() + 1, "aten._to_copy.default", "unpinned copy between cpu and cuda:0"),
        (lambda x: (x.sum(), torch.ones(2) * 2)[1], "aten.mul.Tensor", "CPU op"),
        (lambda x: x * torch.full((), 2.0), "aten.mul.Tensor", "a number on the CPU, which a replay would not see"),
        (lambda x: x.add_(1), "aten.add_.Tensor", "it writes to the input x_1, which is copied for the graph"),
        (lambda x: x.view(-1)[1:].zero_(), "aten.zero_.default", "it writes to the input x_1"),
        (lambda x: x.new_zeros(2, device="cuda:1"), "aten.new_zeros.default", "runs on cuda:1, the graph on cuda:0"),
    ],
)
def test_node_that_cannot_be_captured_has_a_reason(function: Callable[..., Any], op: str, reason: str) -> None:
    found = cuda_reasons(function, (4, 4))
    assert reason in found[op], found


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (torch.ops.aten.nonzero.default, "host sync: the size of its result depends on data"),
        (torch.ops.aten.masked_select.default, "host sync: the size of its result depends on data"),
        (torch.ops.aten._local_scalar_dense.default, "host sync: its result is a number on the host"),
    ],
    ids=str,
)
def test_node_that_waits_for_the_host_has_a_reason(op: Any, reason: str) -> None:
    graph = Graph()
    graph.call_function(op, (graph.placeholder("x"),))
    assert list(reasons(graph, CUDA).values()) == [reason]


def test_symbolic_shape_is_a_reason() -> None:
    found = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(3, 4)).graph
    assert [reason.split(":")[0] for reason in reasons(found, torch.device("cpu")).values()] == ["dynamic shape"]


def test_calls_that_are_no_aten_ops_or_have_no_value_are_not_captured() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.relu, (x,))
    graph.call_method("cpu", (x,))
    graph.call_function(torch.ops.aten.relu.default, (x,))
    assert [text.split(":")[0].split(" is ")[-1] for text in reasons(graph, CUDA).values()] == [
        "no ATen op",
        "no ATen op",
        "not known",
    ]


@pytest.mark.parametrize("blocked", [False, True])
def test_collective_and_its_wait_are_captured_together_or_not_at_all(blocked: bool) -> None:
    """Failure 21."""
    graph, value = Graph(), {"val": torch.empty(2)}
    x = graph.placeholder("x")
    begun = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    between = graph.call_function(torch.ops.aten.nonzero.default if blocked else torch.ops.aten.relu.default, (x,))
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (begun,))
    for node in graph.nodes:
        node.meta |= value
    found = reasons(graph, torch.device("cpu"))
    if not blocked:
        assert found == {}
        return
    assert set(found) == {begun, between, wait}
    assert found[wait] == "work from outside the capture: nonzero_default lies between a collective and its wait"


def test_collective_that_overlaps_one_that_cannot_be_captured_is_not_captured_either() -> None:
    """Failure 21."""
    graph = Graph()
    x = graph.placeholder("x")
    collective, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
    first, second = (graph.call_function(collective, (x, "sum", "0")) for _ in range(2))
    first_wait = graph.call_function(wait, (first,))
    blocked = graph.call_function(torch.ops.aten.nonzero.default, (x,))
    second_wait = graph.call_function(wait, (second,))
    after = graph.call_function(torch.ops.aten.relu.default, (second_wait,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    assert set(reasons(graph, torch.device("cpu"))) == {first, second, first_wait, blocked, second_wait}
    assert after in graph.nodes


def test_wait_for_what_another_graph_began_is_not_captured() -> None:
    """Failure 21."""
    graph = Graph()
    begun = graph.placeholder("begun")
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (begun,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    assert reasons(graph, torch.device("cpu")) == {
        wait: "work from outside the capture: begun lies between a collective and its wait"
    }


def around(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Something that cannot be captured between what can."""
    y = torch.relu(a @ b) + 1
    places = torch.nonzero(y > 0)
    z = (y * 2 + 3).sin()
    return z, places, y


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(3, 4), torch.randn(4, 5)


def passed(
    function: Callable[..., Any], *examples: Any, **options: Any
) -> tuple[GraphedModule, FakeBackend, GraphModule]:
    module, backend = make_fx(function)(*examples), FakeBackend()
    graphed = cudagraph_pass(module, examples, make_backend=lambda device: backend, warmup=1, **options)
    return graphed, backend, module


def test_graph_is_cut_around_what_cannot_be_captured_and_computes_the_same() -> None:
    graphed, backend, module = passed(around, *inputs(), clone_outputs=True)
    assert [(part.captured, part.ops) for part in graphed.parts] == [(True, 4), (False, 1), (True, 3)]
    assert graphed.parts[1].reasons == ("nonzero: host sync: the size of its result depends on data",)
    for seed in range(5):
        for found, expected in zip(graphed(*inputs(seed)), module(*inputs(seed)), strict=True):
            assert torch.equal(found, expected)
    assert backend.log.count("begin") == 2 and backend.log.count("replay") == 2 * 4
    assert "submod_1: 1 calls, eager\n  nonzero: host sync" in graphed.report()
    graphed.close()
    assert backend.log.count("close") == 2


def test_later_part_reads_an_earlier_ones_outputs_where_they_lie() -> None:
    graphed, _, _ = passed(around, *inputs())
    for seed in range(3):
        graphed(*inputs(seed))
    first, second = graphed.captures
    assert first is not None and second is not None
    assert first.state is second.state is CaptureState.CAPTURED
    assert len(first._buffers) == 2 and not second._buffers
    assert not first.recaptures and not second.recaptures


def test_outputs_of_a_graph_are_stale_after_the_next_call() -> None:
    graphed, _, _ = passed(around, *inputs())
    for _ in range(2):
        graphed(*inputs())
    z, places, _ = graphed(*inputs(1))
    graphed(*inputs(2))
    with pytest.raises(StaleOutputError):
        z.sum()
    assert places.sum() > 0  # of what was not captured


def test_static_inputs_are_read_and_written_where_they_lie() -> None:
    def step(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        counts.add_(1)
        return x * counts + 1

    x, counts = torch.ones(3), torch.zeros(3)
    graphed, _, _ = passed(step, x, counts)
    assert [part.captured for part in graphed.parts] == [False, True]
    assert "it writes to the input counts_1" in graphed.report()
    graphed, _, _ = passed(step, x, counts, static_inputs=[1])
    assert [part.captured for part in graphed.parts] == [True]


def test_what_is_no_tensor_among_static_inputs_does_not_count() -> None:
    """As the mesh of devices that torch 2.15 gives a graph of tensors on several."""
    x = torch.ones(3)
    graphed, _, _ = passed(lambda x, _: (x * 2 + 1,), x, "mesh", static_inputs=[0, 1], saved_outputs=())
    for _ in range(4):
        (found,) = graphed(x, "mesh")
        assert torch.equal(found, torch.full((3,), 3.0))
        del found
    assert graphed.holding is not None and not graphed.holding.eager
    assert [capture.state for capture in graphed.captures if capture] == [CaptureState.CAPTURED]


def test_part_that_is_too_short_for_a_graph_runs_eagerly_with_its_neighbours() -> None:
    graphed, backend, module = passed(around, *inputs(), min_ops=4)
    assert [(part.captured, part.ops) for part in graphed.parts] == [(True, 4), (False, 4)]
    assert "mul: 3 calls, fewer than 4" in graphed.report()
    for _ in range(3):
        assert torch.equal(graphed(*inputs())[0] + 0, module(*inputs())[0])
    assert backend.log.count("begin") == 1


def test_write_to_what_another_part_computed_is_not_captured() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + 1
        places = torch.nonzero(y)
        y.add_(1)
        return (y * 3).sin() + places.sum()

    graphed, _, module = passed(function, torch.ones(3))
    assert "add_: it writes to add, which another part computes" in graphed.report()
    for size in range(1, 4):
        x = torch.full((3,), float(size))
        assert torch.equal(graphed(x) + 0, module(x))


def test_other_shapes_are_captured_anew_in_all_parts() -> None:
    graphed, _, _ = passed(around, *inputs())
    for rows in (3, 3, 3, 5, 5, 5):
        a, b = torch.randn(rows, 4), torch.randn(4, 5)
        assert torch.equal(graphed(a, b)[0] + 0, around(a, b)[0])
    first, second = graphed.captures
    assert first is not None and second is not None
    assert first.state is second.state is CaptureState.CAPTURED
    assert len(first.recaptures) == len(second.recaptures) == 1 and not second._buffers


def test_other_shapes_are_captured_anew() -> None:
    graphed, _, _ = passed(lambda x: (x * 2 + 1).sin(), torch.ones(3))
    for size in (3, 3, 3, 5, 5, 5):
        assert torch.equal(graphed(torch.ones(size)) + 0, (torch.ones(size) * 2 + 1).sin())
    (captured,) = graphed.captures
    assert captured is not None and len(captured.recaptures) == 1


@pytest.mark.parametrize(
    ("examples", "options", "message"),
    [
        ((3.0,), {}, "needs a tensor"),
        ((torch.ones(2),), {"static_inputs": [1]}, r"names \[1\], but there are 1 inputs"),
    ],
)
def test_arguments_that_cannot_be_are_errors(examples: Any, options: Any, message: str) -> None:
    module = make_fx(lambda x: torch.ones(2) + x)(torch.ones(2))
    with pytest.raises(ArgumentError, match=message):
        cudagraph_pass(module, examples, make_backend=lambda device: FakeBackend(), **options)
