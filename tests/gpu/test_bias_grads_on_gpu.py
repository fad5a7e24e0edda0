"""Gradients of biases and of their scales on a GPU: near FP64, deterministic, nothing read that is no expert's."""

from __future__ import annotations

import pytest
import torch

from te_offload.fused.kernels.interface import Activation, Gate, Gated, SquaredReLU
from te_offload.ops import arithmetic
from tests.support.mlp import seeded
from tests.support.tolerances import assert_close_to_fp64

pytestmark = pytest.mark.gpu

SPLITS = {
    "ragged": (16, 301, 47, 148),
    "empty and one-token": (0, 355, 1, 0),
    "one expert": (8192,),
    "many of few tokens": (3, 0, 1, 7) * 40,
    "ends of tiles": (64, 128, 63, 1),
}


@pytest.fixture(autouse=True)
def on_a_gpu_with_the_packages() -> None:
    pytest.importorskip("quack", reason="quack-kernels, which has the DSL, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are compiled for Hopper (compute capability 9.0)")


def poisoned(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(size, float("nan"), dtype=dtype, device="cuda")


def bias_grads(
    dy: torch.Tensor,
    splits: tuple[int, ...],
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from te_offload.fused.kernels import sm90

    kernels = sm90.Sm90Kernels(activation or SquaredReLU())
    offsets = torch.tensor([0, *splits], device="cuda").cumsum(0).to(torch.int32)
    poisoned(2048, 2048, dtype=torch.float32)  # what is allocated next holds no zeros
    if activation is not None:
        return kernels.fc1_bias_grads(dy, offsets), None
    return kernels.bias_grads(dy, offsets, bias, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [8, 264, 2880])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_biases_and_their_scales_have_gradients_near_fp64_and_twice_the_same(
    splits: tuple[int, ...], columns: int, dtype: torch.dtype
) -> None:
    rows = sum(splits)
    dy = poisoned(rows + 70, columns, dtype=dtype)  # the last 70 are no expert's
    dy[:rows] = seeded((rows, columns), 1, device="cuda", dtype=dtype)
    bias = seeded((len(splits), columns), 2, device="cuda", dtype=dtype)
    scales = torch.rand(rows + 70, device="cuda")
    parts = dy[:rows].double().split(splits)
    expected, dscales = arithmetic.grouped_bias_grads(
        parts, list(bias.double().unbind(0)), scales[:rows].double().split(splits)
    )
    plain, _ = arithmetic.grouped_bias_grads(parts, None, None)
    assert dscales is not None
    found = [bias_grads(dy, splits, bias, scales) for _ in range(2)]
    assert_close_to_fp64(found[0][0], torch.stack(expected), dtype, "bias")
    assert_close_to_fp64(bias_grads(dy, splits)[0], torch.stack(plain), dtype, "bias without scales")
    of_scales = found[0][1]
    assert of_scales is not None and not of_scales[rows:].any()
    assert_close_to_fp64(of_scales[:rows], dscales, torch.float32, "scales", terms=columns**0.5)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True) if one is not None)


@pytest.mark.parametrize("interleave", [0, 1, 32])
def test_gated_activations_biases_have_their_gradients_in_the_order_of_the_weights(interleave: int) -> None:
    from te_offload.fused.kernels.pairs import to_pairs

    splits = SPLITS["ragged"]
    halves = seeded((sum(splits), 384), 1, device="cuda", dtype=torch.bfloat16)
    expected, _ = bias_grads(halves, splits)
    found, _ = bias_grads(to_pairs(halves, interleave), splits, activation=Gated(Gate.SWIGLU, (), interleave))
    assert torch.equal(found, expected)


def test_infinite_bias_of_one_expert_is_not_felt_by_another_ones_rows() -> None:
    splits, columns = (40, 40), 64
    dy = seeded((80, columns), 1, device="cuda", dtype=torch.bfloat16)
    bias = torch.zeros(2, columns, device="cuda", dtype=torch.bfloat16)
    bias[1] = float("inf")
    _, dscales = bias_grads(dy, splits, bias, torch.ones(80, device="cuda"))
    assert dscales is not None and not dscales[:40].any() and not dscales[40:].isfinite().any()
