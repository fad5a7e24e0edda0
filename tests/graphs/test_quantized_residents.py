"""Parameters that are quantized themselves, in graphs: buffers that moved, and bytes that are out of date one way round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import Float8Tensor
from transformer_engine.pytorch.tensor.storage import float8_tensor_storage

from te_offload.errors import InputMismatchError
from te_offload.graphs import CaptureState, capture_layers
from te_offload.graphs.residents import Residents
from te_offload.ops import te_adapter
from tests.graphs.test_capture import ready
from tests.support.mlp import make_mlp
from tests.support.toy_layer import Machine, Toy, install

ROWS, COLUMNS, WIDTH = 2, 3, 256


@pytest.fixture(autouse=True)
def turned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the weights that were turned, by a stand-in for Transformer Engine's kernel."""
    log: list[int] = []

    def transpose(data: torch.Tensor, dtype: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        log.append(data.data_ptr())
        return data.t().contiguous() if out is None else out.copy_(data.t())

    monkeypatch.setattr(float8_tensor_storage.tex, "fp8_transpose", transpose)
    monkeypatch.setattr(float8_tensor_storage, "is_non_tn_fp8_gemm_supported", lambda: False)  # as on a Hopper GPU
    return log


def fp8_weight(*, both_ways: bool = True) -> Any:
    """As `te.quantized_model_init` leaves a weight. ``both_ways``: its bytes are there the other way round too."""
    data = torch.arange(ROWS * COLUMNS, dtype=torch.uint8).view(ROWS, COLUMNS)
    weight = Float8Tensor(
        shape=data.shape,
        dtype=torch.float32,
        data=data,
        data_transpose=data.t().contiguous() if both_ways else None,
        fp8_scale_inv=torch.ones(1),
        fp8_dtype=DType.kFloat8E4M3,
        device=torch.device("cpu"),
    )
    return torch.nn.Parameter(weight, requires_grad=False)


class Holder(torch.nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight


def write_rows(weight: Any) -> None:
    """As an optimizer does that knows nothing of columns."""
    weight._data += 1
    weight._reset_caches()


def is_right(weight: Any) -> bool:
    return bool(te_adapter.is_turned(weight)) and torch.equal(weight._transpose, weight._data.t())


def captured(weight: Any, during: Callable[[], None] = lambda: None) -> Residents:
    residents = Residents([Holder(weight)])
    residents.look()
    during()
    residents.note()
    return residents


def test_weights_of_which_rows_alone_were_written_are_turned_before_a_replay(turned: list[int]) -> None:
    weight = fp8_weight()
    residents = captured(weight)
    residents.refresh()
    assert not turned
    place = weight._transpose.data_ptr()
    for step in (1, 2):
        write_rows(weight)
        assert residents.moved() is None and not is_right(weight)
        residents.refresh()
        assert is_right(weight) and len(turned) == step
    assert weight._transpose.data_ptr() == place  # where the graph reads


def test_weights_that_are_out_of_date_are_turned_before_the_capture_and_not_in_it(turned: list[int]) -> None:
    weight = fp8_weight()
    write_rows(weight)
    seen: list[bool] = []
    captured(weight, lambda: seen.append(is_right(weight)))
    assert seen == [True] and len(turned) == 1


def test_weights_that_the_graph_itself_writes_are_turned_before_each_replay(turned: list[int]) -> None:
    weight = fp8_weight()
    residents = captured(weight, lambda: write_rows(weight))
    for step in (1, 2):
        weight._data += 1  # by the graph: the host's flag says nothing
        residents.refresh()
        assert is_right(weight) and len(turned) == step


def test_bytes_that_only_the_capture_made_are_the_graphs_and_not_the_weights() -> None:
    weight = fp8_weight(both_ways=False)
    residents = captured(weight, lambda: te_adapter.turn(weight))
    assert weight._transpose is None and weight._transpose_invalid
    te_adapter.turn(weight)  # by an eager call
    assert residents.moved() is None  # the graph has its own


def test_a_capture_that_failed_leaves_weights_and_gradients_as_they_were() -> None:
    weight, dense = fp8_weight(both_ways=False), torch.nn.Parameter(torch.ones(2))
    module = torch.nn.ModuleList([Holder(weight), Holder(dense)])
    residents = Residents([module])
    residents.look()
    te_adapter.turn(weight)
    dense.grad = torch.ones(2)
    residents.restore()
    assert weight._transpose is None and weight._transpose_invalid and dense.grad is None


def test_gradients_that_the_capture_made_are_the_graphs() -> None:
    dense = torch.nn.Parameter(torch.ones(2))
    residents = Residents([Holder(dense)])
    residents.look()
    dense.grad = torch.ones(2)
    residents.note()
    assert dense.grad is not None and residents.moved() is None


def test_a_look_that_fails_restores_nothing_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, dense = fp8_weight(), torch.nn.Parameter(torch.ones(2))
    residents = Residents([torch.nn.ModuleList([Holder(weight), Holder(dense)])])
    residents.look()
    residents.restore()  # that capture failed
    dense.grad = torch.ones(2)
    write_rows(weight)

    def fail(weight: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(te_adapter, "turn", fail)
    with pytest.raises(RuntimeError, match="injected"):
        residents.look()
    residents.restore()
    assert dense.grad is not None


@pytest.mark.parametrize("name", ["_data", "_transpose", "_scale_inv"])
def test_a_buffer_of_a_quantized_weight_that_moved_is_noticed(name: str) -> None:
    weight = fp8_weight()
    residents = captured(weight)
    setattr(weight, name, getattr(weight, name).clone())
    assert str(residents.moved()).startswith("a buffer of weight was at 0x")


def test_a_buffer_of_a_quantized_weight_that_is_gone_is_noticed() -> None:
    weight = fp8_weight()
    residents = captured(weight)
    weight.update_usage(columnwise_usage=False)  # as an evaluation leaves it
    assert str(residents.moved()).endswith("is at 0x0 (0: it is gone)")


def test_the_buffer_of_one_grouped_weight_that_moved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    module: Any = make_mlp(single_grouped_weight=True)[0]
    residents = Residents([module])
    residents.look()
    residents.note()
    assert residents.moved() is None
    module.weight.rowwise_data = module.weight.rowwise_data.clone()
    assert "a buffer of weight" in str(residents.moved())


class Fp8Toy(Toy):
    """A layer that also turns a weight where Transformer Engine would, and notes whether it had to."""

    def __init__(self, machine: Machine, weight: Any) -> None:
        super().__init__(WIDTH, machine)
        self.quantized = weight
        self.had_to: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.had_to.append(not te_adapter.is_turned(self.quantized))
        self.quantized.update_usage(columnwise_usage=True)
        return super().forward(x)


def train(layer: Fp8Toy) -> None:
    layer.zero_grad()
    layer(torch.ones(4, WIDTH)).sum().backward()


def test_graphs_of_layers_have_weights_turned_before_each_replay(
    monkeypatch: pytest.MonkeyPatch, turned: list[int]
) -> None:
    layer = Fp8Toy(install(monkeypatch), fp8_weight())
    with capture_layers(layer, warmup=2) as graphs:
        for step in range(5):
            train(layer)
            assert is_right(layer.quantized)
            assert len(turned) == step
            write_rows(layer.quantized)
        (scope,) = graphs.scopes.values()
        assert scope.replays == 3
    assert layer.had_to == [False, True, False, False]  # warm-up, warm-up, rehearsal, capture


def test_a_rehearsal_does_not_keep_the_capture_from_making_what_the_weight_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Fp8Toy(install(monkeypatch), fp8_weight(both_ways=False))
    with capture_layers(layer, warmup=1):
        train(layer)
        layer.quantized.remove_caches()
        train(layer)
        assert layer.had_to == [True, True, True] and layer.quantized._transpose is None


def test_a_capture_of_a_layer_that_failed_leaves_its_weight_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = install(monkeypatch)
    layer = Fp8Toy(machine, fp8_weight(both_ways=False))
    with capture_layers(layer, warmup=1) as graphs:
        train(layer)
        layer.quantized.remove_caches()
        machine.fails_at = "backward"
        train(layer)
        (scope,) = graphs.scopes.values()
        assert scope.state is CaptureState.EAGER
        assert layer.had_to[-1]  # the eager call made the bytes, which a capture does not
        assert is_right(layer.quantized)


def test_a_captured_function_has_weights_turned_before_each_replay(turned: list[int]) -> None:
    holder = Holder(fp8_weight())
    capture, _ = ready(lambda x: x * 2, torch.ones(3), modules=[holder])
    for step in (1, 2):
        write_rows(holder.weight)
        capture(torch.ones(3))
        assert is_right(holder.weight) and len(turned) == step
    holder.weight._data = holder.weight._data.clone()
    with pytest.raises(InputMismatchError, match="a buffer of weight"):
        capture(torch.ones(3))
