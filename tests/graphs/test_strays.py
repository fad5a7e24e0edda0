"""Layers that read what needs a gradient and is neither their parameter nor their input: no graph takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from te_offload.graphs import CaptureState, LayerGraphs, capture_layers
from te_offload.graphs.layers.strays import sequence_number, stray
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
