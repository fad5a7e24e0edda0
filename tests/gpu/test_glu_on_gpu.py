"""The kernels of gated activations on a Hopper GPU, one by one: what each makes of what the one before has made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload.fused.kernels.interface import Gate, Gated
from te_offload.fused.kernels.pairs import to_halves
from te_offload.fused.kernels.reference import ReferenceKernels
from tests.support.mlp import seeded
from tests.support.tolerances import assert_close_to_fp64

pytestmark = pytest.mark.gpu

HIDDEN, FFN = 256, 416  # of which no tile is a divisor
SPLITS = (16, 301, 0, 148)
ACTIVATIONS = {
    "SwiGLU": Gated(Gate.SWIGLU),
    "SwiGLU, interleaved": Gated(Gate.SWIGLU, (), 32),
    "SwiGLU, in eights": Gated(Gate.SWIGLU, (), 8),
    "SwiGLU, column by column": Gated(Gate.SWIGLU, (), 1),
    "clamped QGeGLU": Gated(Gate.CLAMPED_QGEGLU, (0.75, 1.702, 1.0)),
    "SiTUGLU, interleaved": Gated(Gate.SITU_GLU, (4.0, 25.0), 16),
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")


class Case:
    """Tensors of one step on the GPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        def made(*shape: int, seed: int) -> torch.Tensor:
            return seeded(shape, seed, device="cuda", dtype=dtype)

        experts, tokens = len(SPLITS), sum(SPLITS)
        self.sizes = torch.tensor(SPLITS, device="cuda")
        self.x, self.dy = made(tokens, HIDDEN, seed=1), made(tokens, HIDDEN, seed=2)
        self.scales = seeded((tokens,), 3, device="cuda").abs()
        self.w1 = made(experts, 2 * FFN, HIDDEN, seed=4) * HIDDEN**-0.5
        self.w2 = made(experts, HIDDEN, FFN, seed=5) * FFN**-0.5


def kernels_of(activation: Gated) -> Any:
    from te_offload.fused.kernels.sm90_glu import Sm90GluKernels

    return Sm90GluKernels(activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_every_product_is_near_fp64_from_the_same_bits(activation: Gated, dtype: torch.dtype) -> None:
    case, kernels, reference = Case(dtype), kernels_of(activation), ReferenceKernels(activation)
    w1, w2 = kernels.prepare("w1", case.w1), kernels.prepare("w2", case.w2)
    y, dx = torch.empty_like(case.x), torch.empty_like(case.x)
    offsets, counts = kernels.offsets(case.sizes, y)
    act_input, fc2_input = kernels.fc1(case.x, w1, None, case.scales, offsets, counts.fc1)
    ordered = to_halves(act_input, activation.interleave)
    wide = [one.double().cpu() for one in (case.x, case.dy, case.scales, case.w1, case.w2, ordered)]
    x, dy, scales, wide1, wide2, rounded = wide
    on_cpu = offsets.cpu()
    expected, _ = reference.fc1(x, list(wide1), None, scales, on_cpu)
    assert_close_to_fp64(ordered, expected, dtype, "act_input")
    assert_close_to_fp64(fc2_input, reference._activate(rounded, scales), dtype, "fc2_input")

    dact, rebuilt, dscales, orders = kernels.fc2_dgrad(case.dy, w2, act_input, case.scales, offsets)
    assert torch.equal(rebuilt, fc2_input), "the backward's bits are the forward's"
    expected, _, expected_scales, _ = reference.fc2_dgrad(dy, list(wide2), rounded, scales, on_cpu)
    in_order = to_halves(dact, activation.interleave)
    assert_close_to_fp64(in_order, expected, dtype, "gradient of act_input")
    assert_close_to_fp64(dscales, expected_scales, dtype, "gradient of the scales")

    dw1, dw2 = torch.empty_like(case.w1), torch.full_like(case.w1, float("nan"))
    grads = [kernels.prepare(name, one) for name, one in (("dw1", dw1), ("again", dw2))]
    ways = {"accumulate": False, "order": orders.fc1_wgrad}
    kernels.fc1_backward(dact, case.x, w1, offsets, dx, grads[0], count=orders.fc1_dgrad, **ways)
    kernels.fc1_wgrad(dact, case.x, offsets, grads[1], accumulate=False)
    assert torch.equal(dw1, dw2), "beside the dgrad or by itself"
    wide_dact = in_order.double().cpu()
    expected_dx, expected_dw1 = torch.empty_like(x), torch.zeros_like(wide1)
    reference.fc1_dgrad(wide_dact, list(wide1), on_cpu, expected_dx)
    reference.fc1_wgrad(wide_dact, x, on_cpu, list(expected_dw1), accumulate=False)
    assert_close_to_fp64(dx, expected_dx, dtype, "gradient of the input")
    assert_close_to_fp64(dw1, expected_dw1, dtype, "gradient of FC1's weights")


def test_pairs_are_rounded_to_fp16_as_they_are_stored() -> None:
    """FC1's epilogue rounds by sums; the backward reads what was stored: numbers of all sizes, beyond the largest too."""
    activation, rows = Gated(Gate.SWIGLU), 128
    kernels, generator = kernels_of(activation), torch.Generator().manual_seed(0)
    exponents = torch.randint(-26, 18, (rows, 1), generator=generator)
    x = torch.zeros(rows, HIDDEN)
    x[:, :2] = torch.cat([torch.ones(rows, 1), torch.rand(rows, 1, generator=generator)], 1) * 2.0 ** (exponents / 2)
    weights = torch.randn(1, 2 * FFN, HIDDEN, generator=generator) * 2.0 ** torch.randint(
        -12, 8, (1, 2 * FFN, 1), generator=generator
    )
    w1 = kernels.prepare("w1", weights.half().cuda())
    scales, sizes = torch.ones(rows, device="cuda"), torch.tensor([rows], device="cuda")
    x = x.half().cuda()
    offsets, counts = kernels.offsets(sizes, torch.empty_like(x))
    act_input, fc2_input = kernels.fc1(x, w1, None, scales, offsets, counts.fc1)
    w2 = kernels.prepare("w2", torch.ones(1, HIDDEN, FFN, dtype=torch.half, device="cuda"))
    _, rebuilt, _, _ = kernels.fc2_dgrad(torch.ones_like(x), w2, act_input, scales, offsets)
    found = act_input.float().abs()
    assert found.isinf().any() and (found < 2.0**-14).any()
    assert torch.equal(fc2_input.view(torch.int16), rebuilt.view(torch.int16))
