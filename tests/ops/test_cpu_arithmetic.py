"""On the CPU the ops compute what the formulas say, forward and backward, in any floating dtype."""

from __future__ import annotations

import pytest
import torch

from te_offload.ops import arithmetic
from tests.support.mlp import ACTIVATIONS, make_inputs, make_mlp, seeded
from tests.support.reference import activate, grouped_linear
from tests.support.tolerances import assert_close_to_fp64

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SPLITS = {
    "even": (4, 4, 4),
    "ragged": (7, 1, 3),
    "empty-expert": (5, 0, 6),
    "one-token": (0, 1, 0),
    "no-token": (0, 0, 0),
}
IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "scale-bias"])
def test_output_and_gradients_match_fp64(
    dtype: torch.dtype, activation: str, splits: tuple[int, ...], bias: bool
) -> None:
    if activation.startswith("tight") and dtype.itemsize == 2:
        activation = "clamped-qgeglu"  # at a clamp the gradient jumps, and rounding alone would cross it
    module = make_mlp(activation=activation, bias=bias, fc2={"scale_bias": bias}).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(seeded(parameter.shape, number) * 0.3)
    x, sizes, scales = make_inputs(splits, dtype=dtype)
    y = module(x, sizes, scales, sizes, *([scales] if bias else []))
    dy = seeded(y.shape, 99, dtype=dtype)
    y.backward(dy)

    wide = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    x64, scales64 = (tensor.detach().double().requires_grad_() for tensor in (x, scales))
    weights = [[wide[f"{op}.weight{i}"] for i in range(3)] for op in (0, 2)]
    biases = [[wide[f"{op}.bias{i}"] for i in range(3)] if bias else None for op in (0, 2)]
    h = activate(activation, grouped_linear(x64, splits, weights[0], biases[0]), scales64)
    y64 = grouped_linear(h, splits, weights[1], biases[1], scales64 if bias else None)
    y64.backward(dy.double())

    assert y.dtype == dtype
    assert_close_to_fp64(y, y64, dtype, "output")
    for name, tensor, reference in [("x", x, x64), ("scales", scales, scales64)] + [
        (name, p, wide[name]) for name, p in module.named_parameters()
    ]:
        assert tensor.grad is not None, name
        expected = torch.zeros_like(reference) if reference.grad is None else reference.grad
        assert_close_to_fp64(tensor.grad, expected, dtype, f"gradient of {name}")


def test_activation_alone_matches_fp64_at_its_clamps() -> None:
    x = torch.tensor([[-3.0, 0.75, 0.8, 5.0, -0.8, 0.75, 0.2, -9.0]], dtype=torch.float64, requires_grad=True)
    scales = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    y = ACTIVATIONS["tight-clamped-qgeglu"]()(x, scales)
    y.sum().backward()
    x64, scales64 = x.detach().requires_grad_(), scales.detach().requires_grad_()
    activate("tight-clamped-qgeglu", x64, scales64).sum().backward()
    assert x64.grad is not None and x.grad is not None
    inside = torch.tensor([0, 2, 3, 4, 6, 7])  # at the clamp itself both one-sided derivatives are right
    torch.testing.assert_close(x.grad[:, inside], x64.grad[:, inside])
    torch.testing.assert_close(scales.grad, scales64.grad)


def test_input_of_three_dimensions_keeps_its_shape() -> None:
    module = make_mlp()
    x = seeded((5, 2, 16), 0).requires_grad_()
    sizes = torch.tensor([4, 0, 6])
    flat = x.detach().flatten(0, 1).requires_grad_()
    y = module[0](x, sizes)
    expected = module[0](flat, sizes)
    assert y.shape == (5, 2, 32)
    assert torch.equal(y.flatten(0, 1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x, dy, weight = (seeded(shape, 7, dtype=dtype) for shape in ((5, 48), (5, 32), (32, 48)))
    y, dx, grad, added = (
        torch.empty_like(dy),
        torch.empty_like(x),
        torch.empty(32, 48),
        seeded((32, 48), 8, dtype=dtype),
    )
    before = added.clone()
    arithmetic.grouped_forward([x], [weight], None, None, y)
    arithmetic.grouped_dgrad([dy], [weight], dx)
    arithmetic.grouped_wgrad([x], [dy], [grad], accumulate=False)
    arithmetic.grouped_wgrad([x], [dy], [added], accumulate=True)
    assert torch.equal(y, (x.float() @ weight.float().t()).to(dtype))
    assert torch.equal(dx, (dy.float() @ weight.float()).to(dtype))
    assert torch.equal(grad, dy.float().t() @ x.float())
    assert torch.equal(added, (before.float() + grad).to(dtype))
