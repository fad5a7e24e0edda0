"""On a GPU the ops are Transformer Engine's, bit for bit; the CPU's arithmetic agrees with its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload import ops
from tests.gpu.paths import EXPERTS, FFN, FORMATS, HIDDEN, PATHS, SPLITS, autocast, choose_path, step
from tests.support.mlp import ACTIVATIONS, assert_same_bits, gradients, is_glu, make_inputs, make_mlp, seeded
from tests.support.reference import activate
from tests.support.tolerances import assert_close_to_fp64

pytestmark = pytest.mark.gpu


def mlp(**arguments: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, device="cuda", dtype=torch.bfloat16, **arguments)


def plain(bias: bool) -> te.ops.Sequential:
    torch.manual_seed(0)
    size: dict[str, Any] = {"bias": bias, "device": "cuda", "dtype": torch.bfloat16}
    return te.ops.Sequential(
        te.ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **size),
        te.ops.ScaledSReLU(),
        te.ops.GroupedLinear(EXPERTS, FFN, HIDDEN, scale_bias=bias, **size),
    )


@PATHS
@FORMATS
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "scale-bias"])
def test_bits_are_those_of_te_ops(
    monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool, splits: tuple[int, ...], bias: bool
) -> None:
    choose_path(monkeypatch, path, fp8)
    extra = 4 if bias else 3
    expected = step(plain(bias), splits, fp8, extra=extra)
    assert_same_bits(expected, step(mlp(bias=bias, fc2={"scale_bias": bias}), splits, fp8, extra=extra))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if not name.startswith("tight")])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_activation_matches_fp64_on_both_devices(dtype: torch.dtype, activation: str, device: str) -> None:
    width = 2 * 64 if is_glu(activation) else 64
    x = seeded((37, width), 0, device=device, dtype=dtype).requires_grad_()
    scales = torch.rand(37, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype).requires_grad_()
    y = ACTIVATIONS[activation]()(x, scales)
    dy = seeded(y.shape, 2, device=device, dtype=dtype)
    y.backward(dy)
    x64, scales64 = (tensor.detach().cpu().double().requires_grad_() for tensor in (x, scales))
    y64 = activate(activation, x64, scales64)
    y64.backward(dy.cpu().double())
    assert x.grad is not None and scales.grad is not None and x64.grad is not None and scales64.grad is not None
    assert_close_to_fp64(y, y64, dtype, "output")
    assert_close_to_fp64(x.grad, x64.grad, dtype, "gradient of the input")
    assert_close_to_fp64(scales.grad, scales64.grad, dtype, "gradient of the scales")


@PATHS
def test_split_sizes_that_do_not_sum_to_the_tokens_are_refused_where_they_are_read(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    choose_path(monkeypatch, path, fp8=False)
    op = mlp()[0]
    x = seeded((512, HIDDEN), 0, device="cuda", dtype=torch.bfloat16)
    on_host = torch.tensor([128, 128, 128, 127])
    with pytest.raises(ValueError, match="the split sizes sum to 511 tokens"):
        op(x, on_host)
    if path == "split":
        with pytest.raises(ValueError, match="the split sizes sum to 511 tokens"):
            op(x, on_host.cuda())


def test_scales_on_the_cpu_are_refused() -> None:
    x = seeded((8, FFN), 0, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"router scales are on cpu, its input is on cuda:0"):
        ops.ScaledSReLU()(x, torch.ones(8, dtype=torch.bfloat16))


@PATHS
@FORMATS
def test_gradient_that_is_not_contiguous_gives_the_bits_of_its_contiguous_copy(
    monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool
) -> None:
    choose_path(monkeypatch, path, fp8)

    def grads(dy: Any) -> dict[str, torch.Tensor]:
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
        with autocast(fp8):
            y = module(x, sizes, scales, sizes)
        y.backward(dy(y))
        return gradients(module, x, scales)

    expanded = grads(lambda y: torch.ones((), dtype=y.dtype, device=y.device).expand_as(y))
    assert_same_bits(grads(torch.ones_like), expanded)
