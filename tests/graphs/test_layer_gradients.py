"""Gradients of layers that are graphs of their own, without a GPU, and what a layer returns that its graph has not made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload.graphs import capture_layers
from tests.graphs.test_layer_graphs import WIDTH, batches, layers, run, same
from tests.support import toy_layer
from tests.support.toy_layer import Machine, Toy, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def test_gradient_that_is_held_is_not_written_over(machine: Machine) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(2):
            run(stack, x)
        held = stack[0].weight.grad
        assert held is not None
        before = held.clone()
        assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        assert torch.equal(held, before)
        del held
        assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        assert dict(graphs.scopes["layer0"].eager) == {
            "an output, a saved tensor or a gradient of an earlier call is in use": 1,
        }


def test_gradients_of_leaf_inputs_may_be_held(machine: Machine) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        found = []
        for one in (eager, stack):
            leaves = [x.requires_grad_() for x in batches(5)]
            for x in leaves:
                one.zero_grad()
                one[0](x).square().sum().backward()
            found.append([x.grad for x in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and graphs.captured
        assert not graphs.scopes["layer0"].eager


def test_gradient_that_is_a_saved_tensor_is_copied_in_the_graph(machine: Machine) -> None:
    """Its memory is the forward's, and would be given up with it."""
    eager, stack = (layers(machine, 1, "returns what it saved") for _ in range(2))
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(4):
            given = [x.clone().requires_grad_() for _ in range(2)]
            for one, layer in zip(given, (eager[0], stack[0]), strict=True):
                layer(one).sum().backward()
            assert given[0].grad is not None and given[1].grad is not None
            assert torch.equal(given[0].grad, given[1].grad)
        pair = graphs.scopes["layer0"]._pair
        assert graphs.captured and pair is not None and pair._gradients[0] is not None
        assert pair._gradients[0].extent not in (*pair._between.taken, *pair._between.carried)


class _Beside(Toy):
    """Returns an input, a parameter and a buffer as they are, beside what it computes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(WIDTH, machine)
        self.bias = torch.nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.arange(float(WIDTH)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), y, self.bias, self.table


def test_input_parameter_or_buffer_that_is_returned_is_copied_in_the_graph(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_layer, "STRIDE", 1 << 20)  # places for more
    eager, layer = (_Beside(machine) for _ in range(2))
    found: dict[torch.nn.Module, list[Any]] = {}
    held: list[tuple[Any, Any]] = []
    with capture_layers([layer], warmup=1) as graphs:
        for number, (x, y) in enumerate(zip(batches(5), reversed(batches(5)), strict=True)):
            for one in (eager, layer):
                one.zero_grad()
                with torch.no_grad():
                    one.bias.fill_(number)  # where it lies
                given = [value.clone().requires_grad_().clone() for value in (x, y)]
                arrived: list[torch.Tensor] = []
                given[1].register_hook(arrived.append)
                outputs = one(*given)
                torch.autograd.backward(outputs[:3], [torch.full_like(value, 2 + number) for value in outputs[:3]])
                found[one] = [*outputs, *arrived, one.weight.grad, one.bias.grad]
            assert all(torch.equal(*pair) for pair in zip(found[eager], found[layer], strict=True))
            assert all(torch.equal(*pair) for pair in held)  # the last one's
            held = [(found[eager][4], found[layer][4])]
            found.clear()
        # every other call is eager: what the one before gave is held
        assert graphs.captured and [one.replays for one in graphs.scopes.values()] == [2]
