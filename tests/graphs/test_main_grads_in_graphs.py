"""Gradients that go into ``main_grad``, in graphs: where it lies, and Megatron's protocol."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload.errors import InputMismatchError
from te_offload.graphs import CaptureState, LayerGraphs, capture_layers
from te_offload.graphs.capture import Capture
from te_offload.graphs.residents import Residents
from tests.graphs.test_capture import ready
from tests.graphs.test_layer_graphs import WIDTH, batches
from tests.support.toy_layer import Machine, Toy, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


class Trainer:
    """Layers whose weights' gradients are kept as Megatron's DistributedDataParallel keeps them.

    Attributes:
        dummies: what stood for ``.grad`` when the hooks ran.
    """

    def __init__(self, machine: Machine, count: int = 2) -> None:
        self.layers: Any = torch.nn.ModuleList(Toy(WIDTH, machine, "main_grad") for _ in range(count))
        self.before: Any = torch.nn.Parameter(torch.ones(WIDTH))
        self.dummies: list[Any] = []
        self._nodes = []
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros(WIDTH)
            parameter.grad_added_to_main_grad = False
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_hook(lambda *_, parameter=parameter: self._hook(parameter))
            self._nodes.append(node)

    def parameters(self) -> list[Any]:
        return [self.before, *self.layers.parameters()]

    def _hook(self, parameter: Any) -> None:
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        elif parameter is not self.before:
            self.dummies.append(parameter.grad)
        parameter.grad = None

    def step(self, x: torch.Tensor, microbatches: int = 2) -> list[torch.Tensor]:
        for parameter in self.parameters():
            parameter.main_grad.zero_()
            parameter.grad_added_to_main_grad = False
        for number in range(microbatches):
            y = (x + number) * self.before
            for layer in self.layers:
                y = layer(y)
            y.square().sum().backward()
        assert [one.grad_added_to_main_grad for one in self.parameters()] == [False] + [True] * len(self.layers)
        return [one.main_grad.clone() for one in self.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def captured(trainer: Trainer, **options: Any) -> LayerGraphs:
    graphs = capture_layers(trainer.layers, warmup=1, **options)
    for x in batches(2):
        trainer.step(x)
    assert graphs.captured
    return graphs


def test_microbatches_add_to_main_grad_what_eager_ones_add(machine: Machine) -> None:
    eager, trainer = Trainer(machine), Trainer(machine)
    with captured(trainer) as graphs:
        for x in batches(3):
            assert same(eager.step(x), trainer.step(x))
        assert all(not scope.eager for scope in graphs.scopes.values())


def test_a_capture_neither_adds_nor_says_that_it_has(machine: Machine) -> None:
    eager, trainer = Trainer(machine), Trainer(machine)
    seen: list[Any] = []
    with capture_layers(trainer.layers, warmup=1):
        for x in batches(3):
            expected = eager.step(x)
            hook = trainer.layers[0].register_forward_hook(
                lambda *_: seen.append([one.grad_added_to_main_grad for one in trainer.layers.parameters()])
            )
            assert same(expected, trainer.step(x))
            hook.remove()
    assert seen == 3 * [[False, False], [True, True]]  # of the first microbatch, and of the second


def test_a_capture_that_fails_leaves_the_flags_as_they_were(machine: Machine) -> None:
    eager, trainer = Trainer(machine), Trainer(machine)
    machine.fails_at = "backward"
    with capture_layers(trainer.layers, warmup=1) as graphs:
        for x in batches(3):
            assert same(eager.step(x), trainer.step(x))
        assert {scope.state for scope in graphs.scopes.values()} == {CaptureState.EAGER}


def test_each_backward_gives_dummies_of_its_own_over_the_same_memory(machine: Machine) -> None:
    """As Transformer Engine does; autograd would copy a tensor that somebody else holds."""
    trainer = Trainer(machine, 1)
    with captured(trainer):
        trainer.dummies.clear()
        trainer.step(batches(1)[0])
        first, second = trainer.dummies
        assert first is not second and first.data_ptr() == second.data_ptr()


def test_main_grad_that_moved_is_an_error(machine: Machine) -> None:
    trainer = Trainer(machine, 1)
    (weight,) = trainer.layers.parameters()
    with captured(trainer):
        held = weight.main_grad
        weight.main_grad = held.clone()
        with pytest.raises(InputMismatchError, match=r"weight\.main_grad was at 0x[0-9a-f]+ and is at 0x[0-9a-f]+"):
            trainer.step(batches(1)[0])
        weight.main_grad = held
        trainer.step(batches(1)[0])


def test_main_grad_that_moved_or_is_overwritten_is_captured_anew_where_asked(machine: Machine) -> None:
    eager, trainer = Trainer(machine, 1), Trainer(machine, 1)
    (weight,) = trainer.layers.parameters()
    (other,) = eager.layers.parameters()
    with captured(trainer, on_mismatch="recapture") as graphs:
        weight.main_grad = torch.zeros(WIDTH)
        for x in batches(3):
            assert same(eager.step(x), trainer.step(x))
        weight.overwrite_main_grad = other.overwrite_main_grad = True
        for x in batches(3):
            assert same(eager.step(x), trainer.step(x))
        moved, overwritten = graphs.scopes["layer0"].recaptures
        assert "main_grad was at" in moved
        assert overwritten == "weight.overwrite_main_grad was False and is True" and graphs.captured


@pytest.mark.parametrize("delays", [False, True])
def test_layer_that_delays_its_wgrad_is_no_graph(machine: Machine, *, delays: bool) -> None:
    trainer = Trainer(machine, 1)
    trainer.layers[0].need_backward_dw = lambda: delays
    with capture_layers(trainer.layers, warmup=1) as graphs:
        for x in batches(3):
            trainer.step(x)
        assert ("backward_dw would find what the capture left" in str(graphs.scopes["layer0"].reason)) is delays
        assert graphs.captured is not delays


def test_parameters_of_megatrons_fsdp_are_in_no_graph(machine: Machine) -> None:
    trainer = Trainer(machine, 1)
    (weight,) = trainer.layers.parameters()
    setattr(weight, "__fsdp_param__", True)  # noqa: B010  (a name that a class would mangle)
    with capture_layers(trainer.layers, warmup=1) as graphs:
        for x in batches(3):
            trainer.step(x)
        assert "weight is sharded by Megatron's FSDP" in str(graphs.scopes["layer0"].reason)


def test_main_grad_of_a_captured_step_stays_too() -> None:
    """And what the step leaves said of it, each replay says."""
    layer = torch.nn.Linear(2, 2)
    weight: Any = layer.weight
    bias: Any = layer.bias
    weight.main_grad, weight.grad_added_to_main_grad, bias.grad_added_to_main_grad = torch.zeros(2, 2), False, True
    residents = Residents([layer])
    residents.look()
    weight.grad_added_to_main_grad = True  # by the backward that is captured
    residents.note()
    flags = weight.grad_added_to_main_grad, bias.grad_added_to_main_grad
    bias.grad_added_to_main_grad, bias.main_grad = False, torch.zeros(2)  # of which the graph knows nothing
    residents.say_added()
    assert residents.moved() is None and flags == (False, True)
    assert (weight.grad_added_to_main_grad, bias.grad_added_to_main_grad) == (True, False)
    weight.main_grad = torch.zeros(2, 2)
    assert (residents.moved() or "").startswith("weight.main_grad was at 0x")
    del weight.main_grad
    assert (residents.moved() or "").endswith("and is at 0x0 (0: there is none)")


def test_replays_of_a_captured_step_say_that_gradients_were_added() -> None:
    layer = torch.nn.Linear(2, 2)
    weight: Any = layer.weight
    weight.grad_added_to_main_grad = False
    captures: list[Capture] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        if not captures:  # a replay runs no Python
            weight.grad_added_to_main_grad = True
        return x * 2

    captured, _ = ready(step, torch.zeros(2), modules=[layer])
    captures.append(captured)
    weight.grad_added_to_main_grad = False  # by the optimizer
    captured(torch.ones(2))
    assert weight.grad_added_to_main_grad is True


def test_a_look_that_fails_restores_no_flags_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(2, 2)
    weight: Any = layer.weight
    weight.grad_added_to_main_grad = False
    residents = Residents([layer])
    residents.look()
    residents.restore()  # that capture failed
    weight.grad_added_to_main_grad = True

    def fail() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(residents, "refresh", fail)
    with pytest.raises(RuntimeError, match="injected"):
        residents.look()
    residents.restore()
    assert weight.grad_added_to_main_grad is True
