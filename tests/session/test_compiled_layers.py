"""Layers that torch.compile has traced, in sessions."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from te_offload import OffloadSession, dynamo
from te_offload.fused import fusions_in, hopper
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run
from tests.support.mlp import gradients as gradients_of
from tests.support.process_groups import alone

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
ROWS, WIDTH, SPLITS = 512, 64, ((4, 0, 6), (1, 8, 1), (5, 0, 0))


@pytest.fixture(autouse=True)
def nothing_traced() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,))))))


def layers() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(Layer() for _ in range(3))


def forward(layers: Sequence[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def gradients(layers: torch.nn.ModuleList, call: Any, seed: int) -> list[torch.Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    layers.zero_grad()
    call(layers, x).square().sum().backward()
    return [tensor.grad for tensor in (x, *layers.parameters()) if tensor.grad is not None]


def compiled_each(layers: torch.nn.ModuleList, how: str) -> torch.nn.ModuleList:
    if how == "wrapped":
        wrapped: Any = [torch.compile(layer, backend="aot_eager") for layer in layers]
        return torch.nn.ModuleList(wrapped)
    for layer in layers:
        layer.compile(backend="aot_eager")
    return layers


@pytest.mark.parametrize("place", ["begin_forward", "end_forward"])
def test_nothing_that_a_session_calls_is_traced_where_that_would_be_an_error(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As host memory is got with one, whose counter of all TorchDynamo cannot trace."""
    real, calls = getattr(OffloadSession, place), []

    def calling(self: OffloadSession, *args: Any, **kwargs: Any) -> None:
        calls.append(weakref.finalize(self, int))
        real(self, *args, **kwargs)

    monkeypatch.setattr(OffloadSession, place, calling)
    expected = gradients(layers(), forward, 0)
    model = layers()
    for layer in model:
        layer.compile(backend="aot_eager", fullgraph=True)
    with OffloadSession(model, min_bytes=0) as session, session.step():
        found = gradients(model, forward, 0)
    assert len(calls) == len(model) and session.records[-1].bytes_back > 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class Experts(torch.nn.Module):
    """A grouped MLP behind something dense."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.dense, self.mlp = torch.nn.Linear(16, 16), make_mlp(activation=activation)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.mlp(F.silu(self.dense(x)), *rest))


class Stack(torch.nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Experts(activation) for _ in range(3))

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(("activation", "switch"), [("srelu", "reference"), ("swiglu", "reference"), ("srelu", "0")])
def test_layers_with_grouped_mlps_have_the_bits_of_eager_ones(
    activation: str, switch: str, offloads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    expected, model = Stack(activation), Stack(activation)
    compiled_each(model.layers, "in place")
    with OffloadSession(model.layers, min_bytes=0, enabled=offloads) as session:
        for seed in range(6):
            splits = SPLITS[seed // 2]
            with session.step() if seed else contextlib.nullcontext():
                found = run(model, splits, seed=seed)
            assert_same_bits(run(expected, splits, seed=seed), found)
        assert (session.records[-1].bytes_back > 0) == offloads
        rows = {row.name for row in session.records[-1].slots}
        assert {"layer0/mlp.0.fc1_input", "layer2/mlp.1.act_input"} <= rows
    assert all(fusion.handed_over == 0 and (fusion.fused > 0) == (switch != "0") for fusion in fusions_in(model))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("again", [(1,), (0, 1, 2)], ids=["one again", "all again"])
def test_layers_as_torchtitan_has_them_go_bit_for_bit(
    again: tuple[int, ...], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrapped in checkpoints, compiled, then sharded by FSDP2."""
    monkeypatch.setenv(hopper.SWITCH, "reference")

    def make() -> Stack:
        model = Stack("srelu")
        for number in again:
            model.layers[number] = checkpoint_wrapper(model.layers[number])
        if compiles:
            compiled_each(model.layers, "in place")
        for layer in model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        return model

    def step(model: Stack, seed: int) -> dict[str, torch.Tensor]:
        x, sizes, scales = make_inputs(SPLITS[seed % 3], seed=seed)
        model.zero_grad()
        y = model(x, sizes, scales, sizes)
        y.square().sum().backward()
        found = gradients_of(model, x, scales)
        return {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in found.items()}

    with alone("gloo"):
        expected, model = make(), make()
        with OffloadSession(model.layers, min_bytes=0) as session:
            for seed in range(4):
                with session.step():
                    found = step(model, seed)
                assert_same_bits(step(expected, seed), found)
                assert not session.records[-1].raised
            record = session.records[-1]
        assert record.bytes_back > 0
        assert {row.layer for row in record.slots} == {"layer0", "layer1", "layer2"}


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_layers_compiled_by_themselves_go_bit_for_bit(how: str) -> None:
    expected, model = compiled_each(layers(), how), compiled_each(layers(), how)
    with OffloadSession(model, min_bytes=0) as session:
        for seed in range(3):
            with session.step():
                found = gradients(model, forward, seed)
            for one, other in zip(gradients(expected, forward, seed), found, strict=True):
                assert torch.equal(one, other)
            record = session.records[-1]
            assert record.bytes_out == record.bytes_back > 0
            assert {row.layer for row in record.slots} == {"layer0", "layer1", "layer2"}


def test_model_that_is_traced_when_the_session_is_there_is_traced_around_it() -> None:
    expected, model = layers(), layers()
    compiled = torch.compile(forward, backend="aot_eager")
    with OffloadSession(model, min_bytes=0) as session:
        for seed in range(3):
            with session.step():
                found = gradients(model, compiled, seed)
            for one, other in zip(gradients(expected, forward, seed), found, strict=True):
                torch.testing.assert_close(one, other)
            assert session.records[-1].bytes_out == session.records[-1].bytes_back > 0
    assert torch._dynamo.utils.counters["frames"]["total"] < 20  # none of the session's own code is traced


def test_report_says_that_no_layer_of_a_model_traced_before_is_seen() -> None:
    model = layers()
    compiled = torch.compile(forward, backend="aot_eager")
    expected = gradients(model, compiled, 0)
    with OffloadSession(model, min_bytes=0) as session:
        with session.step():
            found = gradients(model, compiled, 0)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert "None of the layers ran in this step" in session.report()
        with session.step():
            gradients(model, forward, 0)
        assert session.records[-1].bytes_back > 0
        assert "None of the layers ran in this step" not in session.report()


def test_torch_without_such_rules_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._dynamo.trace_rules, "add")
    with pytest.warns(UserWarning, match="has no rules by files for TorchDynamo"):
        dynamo.leave_alone.__wrapped__()
