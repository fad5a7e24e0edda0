"""`act_input_dtype`: half the bytes of the activation's input, the same forward, other gradients, and only if asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, SlotName, ops
from te_offload.errors import ArgumentError
from te_offload.fused import explain, find_windows, hopper
from te_offload.ops.act_input import dequantize, quantize
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run

SPLITS, HIDDEN, FFN = (48, 0, 80), 32, 64
TOKENS = sum(SPLITS)
FP8 = torch.float8_e4m3fn
KINDS = pytest.mark.parametrize("activation", ["srelu", "tanh-srelu", "swiglu", "clamped-qgeglu", "situ-glu"])


def mlp(activation: str = "srelu", *, fp8: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    module = make_mlp(experts=3, hidden=HIDDEN, ffn=FFN, activation=activation, dtype=dtype)
    module[1].act_input_dtype = FP8 if fp8 else None
    return module


def step(module: Any) -> dict[str, torch.Tensor]:
    return run(module, SPLITS, hidden=HIDDEN)


@KINDS
def test_forward_keeps_its_bits_and_gradients_are_near(activation: str) -> None:
    exact, found = step(mlp(activation, fp8=False)), step(mlp(activation))
    assert torch.equal(exact.pop("output"), found.pop("output"))
    assert exact.keys() == found.keys()
    errors = {name: float((found[name] - one).norm() / one.norm().clamp(min=1e-9)) for name, one in exact.items()}
    assert max(errors.values()) < 0.06, errors
    assert errors["input0"] > 1e-4, "nothing was rounded"


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_offloading_changes_no_bit_and_moves_a_byte_a_number(activation: str, dtype: torch.dtype) -> None:
    expected = step(mlp(activation, dtype=dtype))
    module = mlp(activation, dtype=dtype)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = step(module)
    assert_same_bits(expected, found)
    (row,) = [row for row in session.records[-1].slots if row.slot is SlotName.ACT_INPUT]
    columns = FFN if "relu" in activation else 2 * FFN
    assert row.fate is Fate.OFFLOADED and row.format == "FP8 by row"
    assert row.nbytes == row.bytes_out == TOKENS * columns + 4 * TOKENS


def test_it_is_off_unless_an_op_says_so() -> None:
    assert all(make().act_input_dtype is None for make in (ops.ScaledSReLU, ops.ScaledSwiGLU, ops.ScaledSiTUGLU))
    assert ops.ScaledSReLU(act_input_dtype=FP8).act_input_dtype is FP8
    assert ops.ScaledTanhSReLU(tanh_clamp_scale=2.0, act_input_dtype=FP8).act_input_dtype is FP8
    assert ops.ScaledClampedQGeGLU(act_input_dtype=FP8).act_input_dtype is FP8


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, "fp8"], ids=str)
def test_another_dtype_is_a_named_error(dtype: Any) -> None:
    with pytest.raises(ArgumentError, match="ScaledSReLU: act_input_dtype must be None"):
        ops.ScaledSReLU(act_input_dtype=dtype)


def test_fused_ops_leave_it_to_the_ops_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    (window,) = find_windows(list(mlp(dtype=torch.bfloat16)))
    assert "saves its input in FP8" in explain(window).reason
    (window,) = find_windows(list(mlp(fp8=False, dtype=torch.bfloat16)))
    assert "saves its input in FP8" not in explain(window).reason


def test_forward_without_a_backward_rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded.append(x)
        return quantize(x)

    monkeypatch.setattr("te_offload.ops.act_input.quantize", note)
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS, HIDDEN)
    with torch.no_grad():
        module(x, sizes, scales, sizes)
    assert not rounded
    module(x, sizes, scales, sizes)
    assert len(rounded) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_rounded_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 48) * torch.logspace(-4, 4, 64).unsqueeze(1)).to(dtype)
    back = dequantize(*quantize(x), dtype)
    large = x.abs() >= x.abs().amax(-1, keepdim=True) * 2.0**-13
    large &= x.abs() > torch.finfo(dtype).tiny * 2**9
    assert bool(large.float().mean() > 0.6)
    assert bool(back.isfinite().all())
    assert bool(((back - x).abs()[large] <= x.abs()[large] / 16).all())


def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_own_row_and_no_other() -> None:
    x = torch.ones(5, 8)
    x[0] = 0.0
    x[1, 3], x[2, 4], x[3, 5] = float("inf"), float("nan"), -float("inf")
    back = dequantize(*quantize(x), torch.float32)
    assert bool((back[0] == 0).all()) and bool((back[4] == 1).all())
    assert bool(back[1:4].isnan().all())  # whatever torch's cast makes of infinity


def test_numbers_and_scales_are_one_allocation() -> None:
    data, inverse = quantize(torch.randn(6, 5))
    assert data.untyped_storage().data_ptr() == inverse.untyped_storage().data_ptr()
    assert data.shape == (6, 5) and data.is_contiguous() and inverse.shape == (6,) and inverse.data_ptr() % 16 == 0
    empty, none = quantize(torch.randn(0, 5))
    assert empty.shape == (0, 5) and none.shape == (0,)
