"""How often Transformer Engine's own split path asks for split sizes, with only its kernels replaced: once a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint

from te_offload import OffloadSession
from te_offload.errors import ArgumentError, SavedTensorModifiedError
from te_offload.ops import split_sizes
from tests.layouts.test_unfused_layouts import EXPERTS, FFN, FORMATS, HIDDEN, RECIPES, SPLITS, mlp
from tests.support import te_on_cpu
from tests.support.mlp import assert_same_bits, gradients, make_inputs

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that were asked for their numbers."""
    te_on_cpu.unfused(monkeypatch, grouped=False)
    tensors: list[torch.Tensor] = []
    real = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        tensors.append(tensor)
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    return tensors


def plain() -> te.ops.Sequential:
    torch.manual_seed(0)
    size: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.bfloat16}
    linear = te.ops.GroupedLinear
    return te.ops.Sequential(
        linear(EXPERTS, HIDDEN, FFN, **size), te.ops.ScaledSReLU(), linear(EXPERTS, FFN, HIDDEN, **size)
    )


def inputs(splits: tuple[int, ...] = SPLITS) -> Inputs:
    return make_inputs(splits, HIDDEN, dtype=torch.bfloat16)


def step(module: te.ops.Sequential, given: Inputs, recipe: str = "bf16") -> dict[str, torch.Tensor]:
    x, sizes, scales = given
    with te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe]()):
        y = module(x, sizes, scales, sizes)
    y.float().square().sum().backward()
    return {"y": y.detach()} | gradients(module, x, scales)


@FORMATS
def test_a_step_asks_once_where_transformer_engine_asks_four_times_and_has_its_bits(
    asked: list[torch.Tensor], recipe: str
) -> None:
    expected = step(plain(), inputs(), recipe)
    assert len(asked) == 4
    asked.clear()
    given = inputs()
    found = step(mlp(), given, recipe)
    assert [tensor is given[1] for tensor in asked] == [True]
    assert_same_bits(expected, found)
    assert not vars(given[1]).keys() & {"tolist"}  # nothing is set on the caller's


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_asks_again_when_it_is_computed_again(asked: list[torch.Tensor], reentrant: bool) -> None:
    expected, module, (x, sizes, scales) = step(mlp(), inputs()), mlp(), inputs()
    asked.clear()
    y = checkpoint(module, x, sizes, scales, sizes, use_reentrant=reentrant)
    assert isinstance(y, torch.Tensor) and len(asked) == 1
    y.float().square().sum().backward()
    assert 2 <= len(asked) <= 4  # such a checkpoint may give the backward other objects than those that were saved
    assert_same_bits(expected, {"y": y.detach()} | gradients(module, x, scales))


@FORMATS
def test_in_a_session_a_step_asks_once_and_all_slots_go(asked: list[torch.Tensor], recipe: str) -> None:
    expected, module = step(mlp(), inputs(), recipe), mlp()
    asked.clear()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = step(module, inputs(), recipe)
    assert len(asked) == 1
    assert_same_bits(expected, found)
    record = session.records[-1]
    assert record.bytes_out == record.bytes_back > 0


def test_each_call_asks_anew_for_sizes_that_a_kernel_wrote_without_a_version(asked: list[torch.Tensor]) -> None:
    module, given = mlp(), inputs()
    step(module, given)
    version = given[1]._version
    given[1].data.copy_(torch.tensor([512, 0, 0]))
    assert given[1]._version == version
    module.zero_grad()
    given[0].grad = given[2].grad = None
    assert_same_bits(step(mlp(), inputs((512, 0, 0))), step(module, given))


def test_sizes_that_differ_between_fc1_and_fc2_are_both_asked_for(asked: list[torch.Tensor]) -> None:
    x, sizes, scales = inputs()
    other = sizes.clone()
    mlp()(x, sizes, scales, other)
    assert [tensor is one for tensor, one in zip(asked, (sizes, other), strict=True)] == [True, True]


def test_wrong_sizes_are_refused_and_not_remembered(asked: list[torch.Tensor]) -> None:
    module, (x, sizes, scales) = mlp(), inputs()
    sizes[0] += 1
    with pytest.raises(ArgumentError, match="sum to 513 tokens"):
        module(x, sizes, scales, sizes)
    sizes[0] -= 1
    assert module(x, sizes, scales, sizes).shape == x.shape and len(asked) == 2


def test_sizes_that_are_written_to_before_the_backward_are_an_error_as_before(asked: list[torch.Tensor]) -> None:
    module, (x, sizes, scales) = mlp(), inputs()
    y = module(x, sizes, scales, sizes)
    sizes += 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        y = module(x, sizes, scales, sizes)
        sizes += 0
        with pytest.raises(SavedTensorModifiedError):
            y.sum().backward()


def test_evaluation_in_inference_mode_asks_once(asked: list[torch.Tensor]) -> None:
    module = mlp()
    with torch.inference_mode():
        x, sizes, scales = (tensor.detach().clone() for tensor in inputs())
        assert module(x, sizes, scales, sizes).shape == x.shape
    assert len(asked) == 1


# The room by itself


def _written(sizes: torch.Tensor) -> None:
    sizes += 1


@pytest.mark.parametrize(
    ("between", "reads"), [(lambda _: None, 1), (_written, 2), (lambda _: split_sizes.begin_call(), 2)]
)
def test_what_was_read_is_read_again_after_a_write_and_in_another_call(
    asked: list[torch.Tensor], between: Callable[[torch.Tensor], None], reads: int
) -> None:
    sizes = torch.tensor([3, 4])
    split_sizes.begin_call()
    split_sizes.read(sizes)
    between(sizes)
    assert split_sizes.read(sizes) == tuple(sizes.numpy()) and len(asked) == reads


def test_nothing_of_another_tensor_is_taken_for_one_that_is_gone(asked: list[torch.Tensor]) -> None:
    split_sizes.begin_call()
    for number in range(20):  # each may lie where the one before lay
        assert split_sizes.read(torch.tensor([number, 1])) == (number, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_answers_is_of_int64_and_shares_memory_and_version_where_it_can(dtype: torch.dtype) -> None:
    sizes = torch.tensor([3, 4], dtype=dtype)
    known = split_sizes.answering(sizes, (3, 4), sizes.device)
    assert known is not sizes and known.dtype is torch.int64 and known.tolist() == [3, 4]
    assert (known.data_ptr() == sizes.data_ptr()) is (dtype is torch.int64)
    first = known.tolist()
    first.append(5)
    assert known.tolist() == [3, 4]  # a list of its own each time
    sizes += 1
    assert (known._version == sizes._version) is (dtype is torch.int64)
    assert sizes.tolist() == [4, 5]  # the caller's own answers for itself
