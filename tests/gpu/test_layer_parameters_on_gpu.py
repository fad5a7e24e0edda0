"""Parameters of layers that are graphs of their own on a GPU: who else holds autograd's nodes of them, hooks, and memory in
which they are for a while.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_offload import OffloadSession
from te_offload.graphs import CaptureState, capture_layers
from tests.gpu.test_layer_graphs_on_gpu import fused as fused
from tests.support import process_groups
from tests.support.layer_stack import EXPERTS, Model, batches, captured, loss_of, train, weights
from tests.support.mlp import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*experts lie up to"),  # small ones, where the driver happens to put them
]


class KeepsItsWeight(torch.nn.Module):
    """Where nobody looks for it, as `torch.nn.LSTM` does, and as a parameter too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(512, 512, device="cuda"))
        self.kept = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.kept[0])


def test_capture_that_an_older_loss_forbids_is_made_when_that_is_gone() -> None:
    layer = KeepsItsWeight()
    x = torch.ones(256, 512, device="cuda")
    loss = layer(x).sum()  # on the default stream
    with capture_layers(layer, warmup=1) as graphs:
        scope = graphs.scopes["layer0"]
        for _ in range(2):
            layer(x).sum().backward()
        assert scope.state is CaptureState.WARMING_UP and "is tried again" in graphs.report()
        del loss
        for _ in range(3):
            layer.zero_grad()
            layer(x).sum().backward()
        captured(graphs)
        assert scope.replays == 2 and sum(scope.eager.values()) == 1
        torch.cuda.synchronize()
        assert layer.weight.grad is not None and torch.equal(layer.weight.grad, torch.full_like(layer.weight, 256))


def test_older_loss_does_not_forbid_the_capture_of_parameters_where_modules_keep_them() -> None:
    layer = torch.nn.Linear(512, 512, device="cuda")
    x = torch.ones(256, 512, device="cuda")
    loss = layer(x).sum()  # on the default stream
    with capture_layers(layer, warmup=1) as graphs:
        for _ in range(4):
            layer.zero_grad()
            layer(x).sum().backward()
        captured(graphs)
        scope = graphs.scopes["layer0"]
        assert scope.replays == 3 and not scope.eager
        torch.cuda.synchronize()
        assert layer.weight.grad is not None and torch.equal(layer.weight.grad, torch.full_like(layer.weight, 256))
    loss.backward()
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 512))


def test_hook_of_a_parameter_runs_once_for_each_backward() -> None:
    eager, model = Model(), Model()
    seen: list[bool] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.is_current_stream_capturing())
        return grad * 2

    hooked = [parameter for one in (eager, model) for parameter in one.parameters()]
    for parameter in hooked:
        parameter.register_hook(double)
    with capture_layers(model.layers, warmup=2) as graphs:
        for batch in batches(5):
            assert torch.equal(train(eager, batch), train(model, batch))
        captured(graphs)
        assert_same_bits(weights(eager), weights(model))
    assert seen == [False] * 5 * len(hooked)


@pytest.fixture
def process_group() -> Iterator[None]:
    with process_groups.alone("nccl"):
        yield


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("offloads", [False, True], ids=["no offload", "offload"])
def test_layers_inside_of_distributed_data_parallel_are_graphs(offloads: bool) -> None:
    """Which holds autograd's nodes of all parameters, on the stream on which it was made."""
    eager, model = Model(), Model()
    both = [torch.nn.parallel.DistributedDataParallel(one) for one in (eager, model)]
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0) if offloads else None
    with capture_layers(model.layers, session=session, warmup=2) as graphs:
        for batch in batches(6):
            expected, found = train(both[0], batch), train(both[1], batch, session)
            assert torch.equal(expected, found)
        captured(graphs)
        assert [scope.replays for scope in graphs.scopes.values()] == [4] * len(graphs.scopes), graphs.report()
        assert_same_bits(weights(eager), weights(model))
        if session is not None:
            assert session.records[-1].bytes_out > 0
    if session is not None:
        session.close()


@pytest.mark.parametrize(("what", "cases", "ranks"), [("torch", 3, 2), ("megatron", 12, 1), ("megatron", 12, 2)])
def test_layers_inside_of_data_parallelism_have_the_bits_of_eager_steps(
    what: str, cases: int, ranks: int, tmp_path: Path
) -> None:
    """Megatron-core's with the hooks that wait for parameters, too."""
    if what == "megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is not installed here")
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    script = [sys.executable, "-m", "tests.support.data_parallel", str(ranks), str(tmp_path / "meeting"), what]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count(": as it should be: same bits True, captured True") == cases * ranks, done.stdout


@pytest.mark.parametrize("grads", [False, True], ids=["evaluation", "gradients of averages"])
def test_weights_that_lie_elsewhere_for_a_while_are_read_where_they_are_back(grads: bool) -> None:
    eager, model = Model(), Model()
    average = [[parameter.detach() * 0.5 for parameter in one.parameters()] for one in (eager, model)]
    with capture_layers(model.layers, warmup=2, on_mismatch="eager") as graphs:
        for batch in batches(6):
            assert torch.equal(train(eager, batch), train(model, batch))
            found = []
            for one, others in zip((eager, model), average, strict=True):
                kept = [parameter.data for parameter in one.parameters()]
                for parameter, other in zip(one.parameters(), others, strict=True):
                    parameter.data = other
                with torch.set_grad_enabled(grads):
                    loss = loss_of(one, batch)
                if grads:
                    loss.backward()
                found.append(loss.detach())
                del loss
                for parameter, data in zip(one.parameters(), kept, strict=True):
                    parameter.data = data
            assert torch.equal(*found)
            over = [torch.zeros(EXPERTS, dtype=torch.int32, device="cuda") for _ in range(4096)]  # what is free
            del over
        captured(graphs)
        replays = {scope.replays for scope in graphs.scopes.values()}
        assert replays == ({5} if grads else {4}), graphs.report()  # warmed up and captured sooner
        assert_same_bits(weights(eager), weights(model))
