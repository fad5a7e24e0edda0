"""Bad input is refused with a sentence that names the op and the numbers."""

from __future__ import annotations

import pytest
import torch

from te_offload.errors import ArgumentError, ArgumentTypeError
from tests.support.mlp import make_inputs, make_mlp, seeded


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 0, 5), r"GroupedLinear: the split sizes sum to 9 tokens, but its input of shape \(10, 16\) has 10"),
        ((4, 0, 7), "sum to 11 tokens"),
        ((12, -2, 0), "split sizes must not be negative, but expert 1 has -2"),
        ((4, 6), "got 2 split sizes for 3 experts"),
    ],
    ids=["too-few", "too-many", "negative", "one-missing"],
)
def test_split_sizes_that_do_not_fit(sizes: tuple[int, ...], message: str) -> None:
    x, _, scales = make_inputs((4, 0, 6))
    splits = torch.tensor(sizes)
    with pytest.raises(ArgumentError, match=message):
        make_mlp()(x, splits, scales, splits)


@pytest.mark.parametrize("activation", ["srelu", "tanh-srelu", "swiglu", "clamped-qgeglu", "situ-glu"])
def test_scales_of_a_wrong_dtype(activation: str) -> None:
    x, sizes, _ = make_inputs((4, 0, 6))
    with pytest.raises(ArgumentTypeError, match=r"router scales must be a floating-point tensor, but are torch.int64"):
        make_mlp(activation=activation)(x, sizes, torch.ones(10, dtype=torch.int64), sizes)


def test_scales_on_another_device() -> None:
    with pytest.raises(ArgumentError, match="router scales are on meta, its input is on cpu"):
        make_mlp()[1](seeded((10, 32), 0), torch.ones(10, device="meta"))


def test_scales_of_a_wrong_shape() -> None:
    x, sizes, _ = make_inputs((4, 0, 6))
    with pytest.raises(ArgumentError, match=r"router scales have shape \(9,\).*one scale a row: \(10,\)"):
        make_mlp()(x, sizes, torch.ones(9), sizes)


def test_bias_scales_of_a_wrong_shape() -> None:
    x, sizes, scales = make_inputs((4, 0, 6))
    module = make_mlp(bias=True, fc2={"scale_bias": True})
    with pytest.raises(ArgumentError, match="bias scales must be 10 floating-point numbers"):
        module(x, sizes, scales, sizes, torch.ones(3))


def test_input_of_a_wrong_width() -> None:
    with pytest.raises(ArgumentError, match="has 8 columns, but in_features=16"):
        make_mlp()[0](seeded((20, 8), 0), torch.tensor([4, 0, 6]))


def test_gated_input_that_cannot_be_halved() -> None:
    op = make_mlp(activation="swiglu-interleaved")[1]
    with pytest.raises(ArgumentError, match="has 96 columns, which is no multiple of 64"):
        op(seeded((10, 96), 0), torch.ones(10))


def test_weights_on_another_device() -> None:
    module = make_mlp()[0].to("meta")
    x, sizes, _ = make_inputs((4, 0, 6))
    module.pre_first_fuser_forward = lambda: None  # te.ops would give meta weights memory, on a GPU
    with pytest.raises(ArgumentError, match="its input is on the CPU, its weights are on meta"):
        module(x, sizes)
