"""Layers that read what needs a gradient and is neither their parameter nor their input: no graph takes them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from te_offload.graphs import CaptureState, LayerGraphs, capture_layers
from te_offload.graphs.layers.strays import Attributes, sequence_number, stray
from te_offload.graphs.residents import Residents
from tests.graphs.test_layer_graphs import WIDTH, batches
from tests.support import process_groups
from tests.support.toy_layer import Machine, Toy, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def reason(graphs: LayerGraphs) -> str:
    (scope,) = graphs.scopes.values()
    assert scope.state is CaptureState.EAGER and scope.replays == 0
    return str(scope.reason)


class Scaled(Toy):
    """Its input times what another module has, of which it does not know as a parameter."""

    def __init__(self, machine: Machine, scale: torch.Tensor) -> None:
        super().__init__(WIDTH, machine, "")
        self.others = [scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x * self.others[0])
        return found


def test_a_parameter_of_nobody_gets_its_gradient_since_the_layer_runs_eagerly(machine: Machine) -> None:
    scale, other = (torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) for _ in range(2))
    layer, eager = Scaled(machine, scale), Scaled(machine, other)
    with capture_layers(layer, warmup=1) as graphs:
        for x in batches(4):
            grads = []
            for one, leaf in ((layer, scale), (eager, other)):
                one(x).sum().backward()
                assert leaf.grad is not None
                grads.append(leaf.grad.clone())
            assert torch.equal(*grads)
        assert f"reads a tensor ({WIDTH},) that needs a gradient and is neither one of its parameters" in reason(graphs)
        assert machine.log == ["close"]  # of the forward's rehearsal


def test_the_same_parameter_without_a_gradient_forbids_nothing(machine: Machine) -> None:
    layer = Scaled(machine, torch.linspace(0.5, 1.5, WIDTH))
    with capture_layers(layer, warmup=1) as graphs:
        for x in batches(3):
            layer(x).sum().backward()
        assert graphs.captured


def test_a_weight_that_a_hook_of_the_layer_computes_is_that_of_each_call(machine: Machine) -> None:
    """As `torch.nn.utils.weight_norm` and `spectral_norm` do it."""

    def normed() -> Any:
        layer = Scaled(machine, torch.ones(WIDTH))
        layer.log_scale = torch.nn.Parameter(torch.linspace(-1, 1, WIDTH))
        layer.register_forward_pre_hook(lambda module, _: module.others.__setitem__(0, module.log_scale.exp()))
        return layer

    layer, eager = normed(), normed()
    with capture_layers(layer, warmup=1) as graphs:
        for x in batches(4):
            found = [one(x).square().sum() for one in (layer, eager)]
            assert torch.equal(*found)
            for one, loss in zip((layer, eager), found, strict=True):
                loss.backward()
                with torch.no_grad():
                    one.log_scale -= 1e-3 * one.log_scale.grad.sign()
                one.zero_grad()
        assert "reads what was computed before it (ExpBackward0), as by a hook of its own" in reason(graphs)


def test_an_input_inside_of_an_object_gets_its_gradient(machine: Machine) -> None:
    class Opens(Toy):
        def forward(self, held: Any) -> torch.Tensor:
            found: torch.Tensor = super().forward(held.x)
            return found

    layer = Opens(WIDTH, machine, "")
    held = SimpleNamespace()
    with capture_layers(layer, warmup=1) as graphs:
        for x in batches(3):
            x.requires_grad_()
            held.x = x + 0
            layer(held).sum().backward()
            assert x.grad is not None and x.grad.abs().sum() > 0
        assert "inside of an object that no pytree opens" in reason(graphs)


class Leaves(Toy):
    """What its weight costs, beside its output: in an attribute, in a list, or without a gradient."""

    def __init__(self, machine: Machine, way: str) -> None:
        super().__init__(WIDTH, machine, "")
        self.way = way
        self.losses: Any = {} if way == "dict" else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        cost = self.weight.square().sum()
        if self.way == "list":
            self.losses.append(cost)
        elif self.way == "dict":
            self.losses[len(self.losses)] = cost
        else:
            self.losses = cost.detach() if self.way == "detached" else cost
        return found

    def cost(self) -> torch.Tensor:
        if self.way == "list":
            (found,), self.losses = self.losses, []
        elif self.way == "dict":
            found = self.losses.pop(0)
            assert not self.losses
        else:
            found, self.losses = self.losses, None
        cost: torch.Tensor = found
        return cost


@pytest.mark.parametrize("way", ["attribute", "list", "dict"])
def test_what_a_layer_leaves_in_an_attribute_gets_its_gradient_since_it_runs_eagerly(
    machine: Machine, way: str
) -> None:
    layer, eager = Leaves(machine, way), Leaves(machine, way)
    (outer,) = torch.nn.ModuleList([torch.nn.Sequential(layer)])
    with capture_layers(outer, warmup=1) as graphs:
        for x in batches(4):
            for one, run in ((layer, outer), (eager, eager)):
                one.zero_grad()
                (run(x).sum() + one.cost()).backward()
            assert layer.weight.grad is not None and torch.equal(layer.weight.grad, eager.weight.grad)  # type: ignore[arg-type]
            with torch.no_grad():
                for one in (layer, eager):
                    one.weight.add_(0.1)
        assert "leaves a tensor that needs a gradient in 0.losses, which no replay" in reason(graphs)


def test_what_a_layer_leaves_without_a_gradient_or_had_before_forbids_nothing(machine: Machine) -> None:
    layer = Leaves(machine, "detached")
    had: Any = torch.ones(1, requires_grad=True) * 2
    layer.__dict__["had"] = (had, {})
    with capture_layers(layer, warmup=1) as graphs:
        for x in batches(3):
            layer(x).sum().backward()
        assert graphs.captured


@dataclasses.dataclass
class Opaque:
    y: torch.Tensor


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


@pytest.mark.parametrize("kind", [Opaque, Slotted])
def test_an_output_inside_of_an_object_is_that_of_each_call_since_the_layer_runs_eagerly(
    machine: Machine, kind: Any
) -> None:
    class Wraps(Toy):
        def forward(self, x: torch.Tensor) -> Any:
            return kind(super().forward(x))

    layer, eager = Wraps(WIDTH, machine, ""), Toy(WIDTH, machine, "")
    with capture_layers(layer, warmup=1) as graphs:
        for x in batches(3):
            assert torch.equal(layer(x).y, eager(x))
        assert f"output 0 is a {kind.__name__} with tensors inside" in reason(graphs)


def test_an_output_without_tensors_may_be_any_object(machine: Machine) -> None:
    class Names(Toy):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), SimpleNamespace(name="a layer")

    layer = Names(WIDTH, machine, "")
    with capture_layers(layer, warmup=1) as graphs:
        for x in batches(3):
            y, other = layer(x)
            assert other.name == "a layer"
            y.sum().backward()
            del y
        assert graphs.captured


def test_a_capture_that_is_not_taken_leaves_attributes_as_they_were() -> None:
    module: Any = torch.nn.Module()
    module.register_buffer("state", torch.zeros(1))
    computed = torch.ones(1, requires_grad=True)
    kept, state = computed * 1, module.state
    module.had, module.some, module.named, module.count = "before", [kept], {"kept": kept}, [0]
    some, named = module.some, module.named
    attributes = Attributes(module)
    module.had = computed * 2
    module.fresh = (computed * 3, 1)
    module.some.append(computed * 4)
    module.named["new"] = computed * 5
    module.state = computed * 6
    module.count.append(1)  # which no gradient depends on
    assert "in _buffers, had, some, named, fresh, which" in str(attributes.left_behind())
    assert module.had == "before" and module.some == [kept] and module.named == {"kept": kept}
    assert module.some is some and module.named is named and module.state is state and module.count == [0, 1]
    assert "fresh" not in module.__dict__ and attributes.left_behind() is None


def test_what_is_known_and_what_comes_later_is_no_stray() -> None:
    x, weight = (torch.ones(3, requires_grad=True) for _ in range(2))
    early = weight * 2
    since = sequence_number()
    y = (x * weight).exp()
    assert stray([y, x], [x, weight], since) is None
    assert "neither one of its parameters" in str(stray([y], [x], since))
    assert "MulBackward0" in str(stray([y + early], [x, weight], since))
    assert stray([y.detach()], [], since) is None
    with torch.no_grad():
        assert sequence_number() > since


def test_parameters_that_the_first_fsdp_has_sharded_are_gathered() -> None:
    with process_groups.alone("gloo"):
        wrapped = FullyShardedDataParallel(
            torch.nn.Linear(4, 4), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
        )
        why = Residents([torch.nn.Sequential(wrapped)]).gathered()
    assert why is not None and "sharded by FSDP" in why
