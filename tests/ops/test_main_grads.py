"""``main_grad`` of many weights at once, and what stands for their gradients: what Transformer Engine gives for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformer_engine.pytorch.module import base

from te_offload.ops import te_adapter

SHAPE = (2, 3)


def weights_of(count: int = 3) -> list[Any]:
    found = [torch.nn.Parameter(torch.ones(SHAPE)) for _ in range(count)]
    for number, weight in enumerate(found):
        weight.main_grad = torch.full(SHAPE, float(number))  # type: ignore[attr-defined]
    return found


def test_main_grads_are_the_very_tensors_of_the_weights() -> None:
    weights = weights_of()
    found = te_adapter.main_grads_of(weights, SHAPE)
    assert all(one is weight.main_grad for one, weight in zip(found, weights, strict=True))


def test_main_grads_of_another_shape_are_views_of_the_same_memory() -> None:
    weights = weights_of()
    weights[1].main_grad = torch.zeros(6)
    found = te_adapter.main_grads_of(weights, SHAPE)
    assert [one.shape for one in found] == [torch.Size(SHAPE)] * 3
    assert [one.data_ptr() for one in found] == [weight.main_grad.data_ptr() for weight in weights]


def test_main_grads_are_asked_of_fsdp_where_it_has_the_weight() -> None:
    weights = weights_of()
    asked = torch.full(SHAPE, 7.0)
    weights[2].__fsdp_param__ = True
    weights[2].get_main_grad = lambda: asked
    assert te_adapter.main_grads_of(weights, SHAPE)[2].data_ptr() == asked.data_ptr()
    assert weights[2].main_grad is asked


def without(weight: Any) -> None:
    del weight.main_grad


def with_none(weight: Any) -> None:
    weight.main_grad = None


@pytest.mark.parametrize("change", [without, with_none])
def test_a_weight_without_main_grad_is_the_error_that_transformer_engine_raises(change: Callable[[Any], None]) -> None:
    weights = weights_of()
    change(weights[1])
    with pytest.raises(RuntimeError, match="GroupedLinear operation is configured with accumulate_into_main_grad=True"):
        te_adapter.main_grads_of(weights, SHAPE)


class OnGpu(torch.nn.Parameter):
    """A parameter that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def gpu_weights(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weights in Megatron's protocol; Transformer Engine's dummies are on the CPU."""
    monkeypatch.setattr(base, "_dummy_wgrads", {(*SHAPE, torch.float32): torch.full(SHAPE, 5.0)})
    weights = [OnGpu(torch.ones(SHAPE)) for _ in range(3)]
    for weight in weights:
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return weights


def test_dummies_are_tensors_of_their_own_over_the_one_that_transformer_engine_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = gpu_weights(monkeypatch)
    found: list[Any] = te_adapter.dummy_grads(weights)
    assert len({id(one) for one in found}) == 3
    (kept,) = base._dummy_wgrads.values()
    assert {one.data_ptr() for one in found} == {kept.data_ptr()}
    assert all(weight.grad_added_to_main_grad is True for weight in weights)


def test_dummies_are_zeroed_if_one_weight_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = gpu_weights(monkeypatch)
    weights[1].zero_out_wgrad = True
    found: list[Any] = te_adapter.dummy_grads(weights)
    assert not found[1].any() and all(weight.grad_added_to_main_grad is True for weight in weights)


def test_a_weight_outside_of_the_protocol_has_no_dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = gpu_weights(monkeypatch)
    del weights[0].grad_added_to_main_grad
    assert [one is None for one in te_adapter.dummy_grads(weights)] == [True, False, False]
    for weight in weights[1:]:
        del weight.grad_added_to_main_grad
    assert te_adapter.dummy_grads(weights) == [None] * 3
