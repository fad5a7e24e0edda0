"""When graphs of layers may go, and what they leave: backwards to come, gradients, failures, layers without a backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from te_offload.errors import InputMismatchError, StateError
from te_offload.graphs import CaptureState, LayerGraphs, capture_layers
from tests.graphs.test_layer_graphs import ROWS, WIDTH, batches, layers, run, same
from tests.support.toy_layer import FakeGround, Machine, Toy, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def ground_of(graphs: LayerGraphs) -> FakeGround:
    ground = graphs._ground
    assert isinstance(ground, FakeGround)
    return ground


def test_other_inputs_before_the_backward_of_the_last_ones_leave_its_graphs_alone(machine: Machine) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1, on_mismatch="recapture") as graphs:
        for x in batches(2):
            run(stack, x)
        for one in (eager, stack):
            one.zero_grad()
            first, second = one[0](batches(1)[0]), one[0](batches(1, rows=100)[0])
            second.square().sum().backward()
            first.square().sum().backward()
        assert same(eager, stack)
        scope = graphs.scopes["layer0"]
        assert dict(scope.eager) == {"a backward of other inputs is still to come": 1} and not scope.recaptures
        run(stack, batches(1, rows=100)[0])
        assert len(scope.recaptures) == 1


def test_forward_that_is_forgotten_keeps_no_graphs(machine: Machine) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=1, on_mismatch="recapture") as graphs:
        for x in batches(2):
            run(stack, x)
        stack[0](batches(1)[0])  # whose backward never comes
        run(stack, batches(1, rows=100)[0])
        assert len(graphs.scopes["layer0"].recaptures) == 1


def test_backward_after_close_is_an_error_that_says_so(machine: Machine) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=1):
        run(stack, batches(1)[0])
        loss = stack[0](batches(1)[0]).sum()
    with pytest.raises(StateError, match=r"layer0: .* graphs were closed since. Close them after the last backward"):
        loss.backward()


def test_layer_without_a_gradient_is_replayed_captured_anew_and_closed(machine: Machine) -> None:
    layer = Toy(WIDTH, machine)
    layer.weight.requires_grad_(False)
    unused = torch.nn.Parameter(torch.ones(3))
    layer.register_parameter("unused", unused)
    with capture_layers(layer, warmup=1, on_mismatch="recapture") as graphs:
        for x in [*batches(3), *batches(3, rows=100)]:
            held = layer(x)
            assert torch.equal(held, torch.relu(x * layer.weight)) and not held.requires_grad
        scope = graphs.scopes["layer"] if "layer" in graphs.scopes else next(iter(graphs.scopes.values()))
        assert len(scope.recaptures) == 1 and scope.state is CaptureState.CAPTURED and scope.replays
        assert sum(scope.eager.values()) > 0  # what was held


@pytest.mark.parametrize("trains", [True, False])
def test_graph_has_the_events_that_it_records_to(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """Also where nobody asks when the slot was there."""
    layer = Toy(WIDTH, machine, "slot")
    layer.weight.requires_grad_(trains)
    events: list[weakref.ref[Any]] = []

    class Event:
        def __call__(self) -> Any:
            raise AssertionError("asked for")

    def border(_: Any) -> Event:
        event = Event()
        events.append(weakref.ref(event))
        return event

    with capture_layers(layer, warmup=1) as graphs:
        monkeypatch.setattr(type(ground_of(graphs).transfer), "border", border)
        for x in batches(2):
            layer(x).sum().backward() if trains else layer(x)
        gc.collect()
        (scope,) = graphs.scopes.values()
        assert scope.replays == 1 and [event() is not None for event in events] == [False, True]  # of the rehearsal


def test_what_closures_of_a_failed_capture_hold_is_let_go_of(machine: Machine) -> None:
    class Changes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(WIDTH))
            self.runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def inner(x: torch.Tensor) -> torch.Tensor:
                self.runs += 1
                return x * self.weight if machine.capturing and self.runs % 2 == 0 else (x * self.weight).exp()

            found: torch.Tensor = checkpoint(inner, x, use_reentrant=False)
            return found

    layer = Changes()
    with capture_layers(layer, warmup=1) as graphs:
        for x in batches(3):
            layer(x).sum().backward()
        (scope,) = graphs.scopes.values()
        assert scope.state is CaptureState.EAGER and "different number of tensors" in str(scope.reason)
        graphs.settle()
        assert graphs.used_bytes == 0 and not ground_of(graphs).memory.mapped
        given = weakref.ref(x)
        del x
        assert given() is None
        notes = getattr(scope.reason, "__notes__", ["check_recomputed_tensors_match"])  # since Python 3.11
        assert "check_recomputed_tensors_match" in notes[0]


def test_gradient_that_moves_out_of_the_way_is_the_same_tensor_elsewhere(machine: Machine) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1):
        run(eager, batches(1)[0]), run(stack, batches(1)[0])
        for one in (eager, stack):
            one.zero_grad()
            one[0](batches(1)[0]).sum().backward()
        grad = stack[0].weight.grad
        place = grad.data_ptr()
        for one in (eager, stack):
            one[0](batches(1)[0]).sum().backward()
        assert stack[0].weight.grad is grad and grad.data_ptr() != place and same(eager, stack)


def test_input_with_other_strides_than_at_the_capture_runs_eagerly(machine: Machine) -> None:
    stack = layers(machine, 1)
    x = torch.randn(WIDTH, ROWS).t()
    with capture_layers(stack, warmup=1) as graphs:
        for _ in range(3):
            run(stack, x)
        scope = graphs.scopes["layer0"]
        assert scope.replays == 2 and not scope.eager
        expected = torch.relu(x * stack[0].weight)
        assert torch.equal(stack[0](x.contiguous()), expected)
        assert dict(scope.eager) == {"an input has other strides than the one of the capture": 1}
        assert torch.equal(stack[0](x), expected) and scope.replays == 3


@pytest.mark.parametrize("turned", [False, True])
def test_gradient_comes_in_as_in_the_warm_up_and_the_report_counts_others(machine: Machine, turned: bool) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        for number, x in enumerate(batches(3)):
            for one in (eager, stack):
                one.zero_grad()
                y = one[0](x)
                factor = torch.randn(WIDTH, ROWS, generator=torch.Generator().manual_seed(number)).t()
                (y * factor if turned or number == 2 else y * factor.contiguous()).sum().backward()
            assert same(eager, stack)
        scope = graphs.scopes["layer0"]
        assert scope._pair is not None and scope._pair._grads is not None
        (item,) = scope._pair._grads._items
        assert item.stride == ((1, ROWS) if turned else (WIDTH, 1)) and scope.copied == (not turned)
        assert ("in 1 backwards gradients came in with other strides" in graphs.report()) is not turned


@pytest.mark.parametrize("how", ["training of a part", "frozen", "thawed"])
def test_part_that_trains_no_more_or_again_is_another_call(machine: Machine, how: str) -> None:
    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.toy, self.dropout = Toy(WIDTH, machine), torch.nn.Dropout(0.5)
            self.other = torch.nn.Parameter(torch.ones(3), requires_grad=how != "thawed")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.toy(x)
            return found

    layer = Whole()
    with capture_layers(layer, warmup=1):
        for x in batches(2):
            layer(x).sum().backward()
        if how == "training of a part":
            layer.dropout.eval()
        else:
            layer.other.requires_grad_(how == "thawed")
        expected = {
            "training of a part": "dropout.training was True and is False",
            "frozen": "other.requires_grad was True and is False",
            "thawed": "other.requires_grad was False and is True",
        }
        with pytest.raises(InputMismatchError, match=expected[how]):
            layer(x)


def test_layer_whose_input_is_no_graphs_output_any_more_is_captured_anew(machine: Machine) -> None:
    eager, stack = layers(machine, 2), layers(machine, 2)
    with capture_layers(stack, warmup=1, on_mismatch="recapture") as graphs:
        for number, x in enumerate(batches(8)):
            for one in (eager, stack):
                if number == 3:
                    one[0].weight.data = one[0].weight.data.clone()
                one.zero_grad()
                one[1](one[0](x)).sum().backward()
            assert same(eager, stack)
        first, second = graphs.scopes.values()
        assert len(first.recaptures) == 1 and second.recaptures == ["an input was the output of a graph that is gone"]
        assert second._pair is not None and second._pair.chained and not second.eager
