"""Parameters that are others than when layers were given to `capture_layers`, that move in between, or come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from te_offload.errors import InputMismatchError
from te_offload.graphs import CaptureState, capture_layers
from te_offload.graphs.layers.aliases import aliased
from te_offload.graphs.residents import Residents
from tests.graphs.test_layer_graphs import WIDTH, batches, layers, run, same
from tests.support import process_groups
from tests.support.toy_layer import Machine, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


@pytest.fixture
def mesh() -> Iterator[Any]:
    with process_groups.alone("gloo"):
        yield init_device_mesh("cpu", (1,))


def test_parameters_that_were_replaced_before_the_capture_are_those_of_the_graph(machine: Machine) -> None:
    """As by ``load_state_dict(assign=True)``."""
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        for one in (eager, stack):
            one[0].weight = torch.nn.Parameter(torch.linspace(1, 2, WIDTH))
        for x in batches(4):
            assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        assert graphs.captured and graphs.scopes["layer0"].replays == 3


def test_parameters_that_move_between_a_forward_and_its_backward_are_an_error(machine: Machine) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1):
        first, second, third = batches(3)
        for x in (first, second):
            run(stack, x)
        weight, home = stack[0].weight, stack[0].weight.data
        y = stack[0](third)
        weight.data = home.clone()
        with pytest.raises(InputMismatchError, match=r"layer0: between a forward and its backward weight went from 0x"):
            y.sum().backward()
        weight.data = home
        del y
        assert torch.equal(run(eager, third), run(stack, third)) and same(eager, stack)


@pytest.mark.parametrize("around", ["the layer", "what holds it"])
def test_layers_sharded_by_fsdp2_are_no_graphs(machine: Machine, mesh: Any, around: str) -> None:
    """For the backward their weights are gathered again, anywhere."""
    eager, stack = layers(machine, 1), layers(machine, 1)
    outer = torch.nn.Sequential(stack[0])
    fully_shard(stack[0] if around == "the layer" else outer, mesh=mesh)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(3):
            y = outer(x)
            y.sum().backward()
            assert torch.equal(y, eager[0](x))
        scope = graphs.scopes["layer0"]
        assert scope.state is CaptureState.EAGER
        assert "weight is sharded between calls, and gathered anew" in str(scope.reason)


def test_layers_that_are_sharded_later_are_no_graphs_either(machine: Machine, mesh: Any) -> None:
    (layer,) = layers(machine, 1)
    with capture_layers(layer, warmup=1) as graphs:
        fully_shard(layer, mesh=mesh)
        for x in batches(3):
            layer(x).sum().backward()
        assert "its parameters are sharded by FSDP" in str(graphs.scopes["layer0"].reason)


def test_parameters_that_stay_sharded_within_a_call_may_be_in_graphs(mesh: Any) -> None:
    """As under tensor parallelism."""
    layer = torch.nn.Linear(2, 2)
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
    layer.bias = torch.nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Replicate()]))
    residents = Residents([layer])
    residents.look()
    assert residents.gathered() is None
    own = [layer.weight, layer.bias]
    with aliased(layer):
        others = [layer.weight, layer.bias]
        x = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
        found = torch.autograd.grad(layer(x).sum(), [*others, *own], allow_unused=True)
    assert all(isinstance(one, DTensor) and id(one) not in map(id, own) for one in others)
    assert [one is not None for one in found] == [True, True, False, False]


def test_memory_that_moved_is_named_with_the_first_tensor_that_lies_elsewhere() -> None:
    layer = torch.nn.Linear(2, 2)
    residents = Residents([layer])
    residents.look()
    residents.note()
    assert residents.moved_in_memory() is None
    layer.bias.data = layer.bias.data.clone()
    assert (residents.moved_in_memory() or "").startswith("bias went from 0x")
