"""What stands for parameters while a layer is captured: hooks of others, parameters kept twice, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload.fused import fusions_in, hopper
from te_offload.graphs import CaptureState, capture_layers
from te_offload.graphs.layers.aliases import Aliases, aliased
from tests.graphs.test_layer_graphs import batches, layers, run, same
from tests.graphs.test_quantized_residents import Holder, fp8_weight
from tests.support import toy_layer
from tests.support.mlp import make_inputs, make_mlp
from tests.support.toy_layer import Machine, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def test_hooks_of_parameters_run_once_for_each_backward_and_not_in_the_capture(machine: Machine) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    seen: list[bool] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(machine.capturing)
        return grad * 2

    for one in (eager, stack):
        one[0].weight.register_hook(double)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(4):
            assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        assert graphs.captured and seen == [False] * 8


@pytest.mark.parametrize("used", [True, False], ids=["in both places", "elsewhere alone"])
def test_parameters_that_a_module_keeps_elsewhere_too_have_their_gradients(*, used: bool) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(3.0))
            self.flat = [self.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = x * self.flat[0].square()
            return found + x * self.weight if used else found

    module, x = Module(), torch.tensor([1.0, 2.0, 3.0])
    (expected,) = torch.autograd.grad(module(x).sum(), [module.weight])
    with aliased(module) as aliases:
        others = [*aliases.of([module.flat[0]]), module.flat[0]]
        found = torch.autograd.grad(module(x).sum(), others, allow_unused=True)
    (one,) = aliases.one_each(found, 1)
    assert torch.equal(expected, one)  # type: ignore[arg-type]
    assert (found[0] is not None) is used and found[1] is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_parameters_of_torchscript_stay_themselves() -> None:
    module: Any = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))
    x, parameters = torch.randn(3, 2), list(module.parameters())
    expected = torch.autograd.grad(module(x).sum(), parameters)
    with aliased(module) as aliases:
        assert [one is other for one, other in zip(module.parameters(), parameters, strict=True)] == [True] * 2 + [
            False
        ] * 2
        wanted = [*aliases.of(parameters), *parameters]
        grads = torch.autograd.grad(module(x).sum(), wanted, allow_unused=True)
    found = aliases.one_each(grads, 4)
    assert all(one is not None and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_gradients_of_aliases_alone_are_the_parameters_and_those_of_inputs_stay_before_them() -> None:
    x, first, second = (torch.full((1,), float(number)) for number in range(3))
    assert Aliases.one_each([x, None, first, None, None], 2) == [x, None, first]
    found = Aliases.one_each([x, first, None, second, second], 2)
    assert found[0] is x and [float(one) for one in found[1:] if one is not None] == [3.0, 2.0]


def test_tied_parameters_have_one_alias_of_the_same_memory_and_kind() -> None:
    class Special(torch.nn.Parameter):
        pass

    first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    weight = second.weight = first.weight = Special(torch.ones(2, 2))
    with aliased(torch.nn.ModuleList([first, second])) as aliases:
        alias = first.weight
        assert alias is second.weight is not weight and aliases.of([weight])[0] is alias
        assert type(alias) is Special and alias.data_ptr() == weight.data_ptr() and alias.requires_grad
    assert first.weight is second.weight is weight


def test_frozen_parameters_have_frozen_aliases() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    with aliased(layer):
        assert [one.requires_grad for one in layer.parameters()] == [False, True]


def test_a_quantized_weight_has_an_alias_over_its_buffers() -> None:
    holder = Holder(fp8_weight())
    weight: Any = holder.weight
    with aliased(holder):
        alias: Any = holder.weight
        assert type(alias) is type(weight) and isinstance(alias, torch.nn.Parameter) and alias is not weight
        assert alias._data is weight._data and alias._transpose is weight._transpose
        alias._transpose = None
    assert holder.weight is weight and weight._transpose is None  # as if it had been set there


def test_what_is_set_on_an_alias_is_set_on_its_parameter() -> None:
    layer = torch.nn.Linear(2, 2)
    weight: Any = layer.weight
    weight.kept, weight.changed = "kept", "before"
    with aliased(layer):
        alias: Any = layer.weight
        assert (alias.kept, alias.changed) == ("kept", "before")
        weight.kept = "by somebody else"
        alias.changed, alias.new = "after", "new"
    assert (weight.kept, weight.changed, weight.new) == ("by somebody else", "after", "new")


def test_a_parameter_that_the_forward_itself_replaces_stays_replaced() -> None:
    layer, other = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.zeros(2, 2))
    with aliased(layer):
        layer.weight = other
    assert layer.weight is other


@pytest.mark.parametrize("known", [True, False], ids=["a pipeline that ran", "a pipeline that is made meanwhile"])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("grouped", [False, True], ids=["separate", "grouped"])
@pytest.mark.filterwarnings("ignore:.*single_grouped_weight")
def test_pipelines_pass_aliases_and_then_the_parameters_again(
    monkeypatch: pytest.MonkeyPatch, *, known: bool, fused: bool, grouped: bool
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1" if grouped else "0")
    monkeypatch.setenv(hopper.SWITCH, "reference" if fused else "0")
    module = make_mlp(single_grouped_weight=grouped)
    x, sizes, scales = make_inputs([3, 0, 4])
    if known:
        module(x, sizes, scales, sizes)
    with aliased(module) as aliases:
        parameters = list(module.parameters())
        y = module(x, sizes, scales, sizes)
        found = torch.autograd.grad(y.sum(), parameters)
    (pipeline,) = module._module_groups
    own = list(module.parameters())
    assert [id(one) for one in pipeline._flat_basic_op_params] == list(map(id, own))
    assert [id(one) for params in pipeline._basic_op_params for one in params] == list(map(id, own))
    assert not {id(one) for one in aliases.of(own)} & set(map(id, own))
    assert (fusions_in(module)[0].fused > 0) is fused
    expected = torch.autograd.grad(module(x, sizes, scales, sizes).sum(), own)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_parameters_are_back_after_a_capture_that_fails(machine: Machine) -> None:
    stack = layers(machine, 1)
    weight = stack[0].weight
    machine.fails_at = "backward"
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(3):
            run(stack, x)
            assert stack[0].weight is weight
        assert graphs.scopes["layer0"].state is CaptureState.EAGER


@pytest.fixture
def asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it was in a capture, each time that a stream was noted."""
    found: list[bool] = []
    monkeypatch.setattr(toy_layer.FakeGround, "note_reader", lambda _: found.append(machine.capturing))
    return found


def test_streams_that_read_gradients_are_noted_until_the_capture_and_once_after_it(
    machine: Machine, asked: list[bool]
) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=2) as graphs:
        for number, x in enumerate(batches(5)):
            run(stack, x)
            assert len(asked) == min(number + 1, 3)
        assert graphs.captured and not stack[0].weight._backward_hooks and asked == [False] * 3


def test_streams_are_noted_of_warm_ups_whose_backward_comes_after_the_capture(
    machine: Machine, asked: list[bool]
) -> None:
    """As under a pipeline's schedule."""
    (layer,) = layers(machine, 1)
    with capture_layers(layer, warmup=2) as graphs:
        first, *rest = [layer(x).sum() for x in batches(3)]
        assert graphs.captured and not asked
        first.backward()
        assert asked == [False]
        for loss in rest:
            loss.backward()
        assert asked == [False] and not layer.weight._backward_hooks


def test_nothing_is_noted_any_more_when_graphs_are_closed(machine: Machine, asked: list[bool]) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=2):
        run(stack, batches(1)[0])
    assert asked == [False] and not stack[0].weight._backward_hooks
