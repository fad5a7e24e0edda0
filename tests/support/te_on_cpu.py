"""Runs Transformer Engine's own op code on the CPU, with nothing but its kernels replaced.

What is real: te.ops.GroupedLinear (split and grouped path), the scaled activations, GroupedMLP_CuTeGEMMUnary and GLU, the
fuser, autocast, recipe state, quantizers' usage flags, what is saved and how. What is replaced: GEMMs, quantization and
activation kernels. Unfused kernels compute real numbers (FP8 current scaling quantizes to E4M3 and E5M2 for real); the
Blackwell kernels return numbers that depend on nothing, so that only layout, marks and bytes can be judged there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch.module.base as te_base
import transformer_engine.pytorch.ops.basic.activation as te_activation
import transformer_engine.pytorch.ops.basic.grouped_linear as te_grouped_linear
import transformer_engine.pytorch.ops.fused.grouped_mlp as te_grouped_mlp
import transformer_engine.pytorch.quantization as te_quantization
import transformer_engine.pytorch.tensor.float8_tensor as te_float8
import transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage as te_blockwise_storage
import transformer_engine.pytorch.tensor.storage.float8_tensor_storage as te_float8_storage
import transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage as te_mxfp8_storage
import transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage as te_nvfp4_storage
import transformer_engine.pytorch.utils as te_utils
import transformer_engine_torch as tex
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.ops.fuser import OperationFuser
from transformer_engine.pytorch.tensor import (
    Float8Quantizer,
    GroupedTensor,
    GroupedTensorStorage,
    MXFP8Quantizer,
    MXFP8TensorStorage,
    NVFP4Quantizer,
)
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from te_offload.fused.blackwell import BlackwellGLUGroupedMLP, BlackwellUnaryGroupedMLP
from te_offload.ops import arithmetic
from te_offload.ops.slot_owner import SlotOwner
from tests.support import block_formats
from tests.support.block_formats import FP8, Bulk


class Tex:
    """Transformer Engine's extension module with some functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(tex, name)


# Quantization to FP8, one scale a tensor


def _to_fp8(x: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = FP8[DType.cast(quantizer.dtype)]
    most = torch.finfo(dtype).max
    amax = x.detach().abs().max().float() if x.numel() else torch.tensor(0.0)
    if isinstance(quantizer, Float8Quantizer):  # delayed scaling: the scale is of steps before
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        scale = quantizer.scale
    else:
        scale = torch.tensor(most) / amax.clamp(min=1e-12)
        if quantizer.force_pow_2_scales:
            scale = torch.exp2(scale.log2().floor())
    return (x.float() * scale).clamp(-most, most).to(dtype).view(torch.uint8), (1 / scale).reshape(1)


def quantize(quantizer: Any, x: torch.Tensor) -> Float8TensorStorage:
    data, scale_inv = _to_fp8(x, quantizer)
    return Float8TensorStorage(
        data=data if quantizer.rowwise_usage else None,
        fp8_scale_inv=scale_inv,
        fp8_dtype=quantizer.dtype,
        fake_dtype=x.dtype,
        data_transpose=data.t().contiguous() if quantizer.columnwise_usage else None,
        quantizer=quantizer,
    )


def split_quantize_into(bulk: Bulk) -> Callable[..., list[Any]]:
    """``bulk``: what the block formats allocate for all experts."""

    def split_quantize(
        x: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Any], disable_bulk_allocation: bool = False
    ) -> list[Any]:
        if isinstance(quantizers[0], block_formats.QUANTIZERS):
            return block_formats.split_quantize(x, splits, quantizers, bulk, separate=disable_bulk_allocation)
        return [quantizer(part) for part, quantizer in zip(x.split(list(splits)), quantizers, strict=True)]

    return split_quantize


def group_quantize(
    x: torch.Tensor, quantizer: Any, num: int, first_dims: Any, tensor_offsets: Any = None
) -> GroupedTensorStorage:
    splits = [x.shape[0] // num] * num if first_dims is None else [int(size) for size in first_dims]
    if isinstance(quantizer, block_formats.QUANTIZERS):
        return block_formats.group_quantize(x, quantizer, splits, first_dims, tensor_offsets)
    parts = [_to_fp8(part, quantizer) for part in x.split(splits)]
    scales = torch.cat([scale for _, scale in parts])
    return GroupedTensorStorage(
        shape=tuple(x.shape),
        dtype=x.dtype,
        num_tensors=num,
        quantizer=quantizer,
        data=torch.cat([data.flatten() for data, _ in parts]) if quantizer.rowwise_usage else None,
        columnwise_data=torch.cat([data.t().flatten() for data, _ in parts]) if quantizer.columnwise_usage else None,
        scale_inv=scales if quantizer.rowwise_usage else None,
        columnwise_scale_inv=scales.clone() if quantizer.columnwise_usage else None,
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
    )


# GEMMs over whatever an operand is


def _dense(operand: Any) -> torch.Tensor:
    if isinstance(operand, block_formats.STORAGES):
        return block_formats.dense(operand)
    if not isinstance(operand, Float8TensorStorage):
        return operand.detach().float()  # type: ignore[no-any-return]
    dtype = FP8[operand._fp8_dtype]
    data = operand._data if operand._data is not None else operand._transpose.t()
    return data.contiguous().view(dtype).float() * operand._scale_inv  # type: ignore[no-any-return]


def _matrices(operand: Any) -> list[torch.Tensor]:
    if isinstance(operand, (list, tuple)):
        return [_dense(matrix) for matrix in operand]
    rows, columns = operand.logical_shape
    splits = [rows // operand.num_tensors] * operand.num_tensors
    if operand.first_dims is not None:
        splits = [int(size) for size in operand.first_dims]
    sizes = [size * columns for size in splits]
    if operand.quantizer is None:
        return [part.view(-1, columns) for part in operand.rowwise_data.split(sizes)]
    if isinstance(operand.quantizer, block_formats.QUANTIZERS):
        return block_formats.dense_parts(operand, splits)
    dtype = FP8[DType.cast(operand.quantizer.dtype)]
    if operand.rowwise_data is not None:
        parts = [part.view(-1, columns) for part in operand.rowwise_data.split(sizes)]
        scales = operand.scale_inv
    else:
        parts = [part.view(columns, -1).t().contiguous() for part in operand.columnwise_data.split(sizes)]
        scales = operand.columnwise_scale_inv
    return [part.view(dtype).float() * scale for part, scale in zip(parts, scales, strict=True)]


def _products(a: list[torch.Tensor], b: list[torch.Tensor], layout: str) -> list[torch.Tensor]:
    if layout == "TN":
        return [y.float() @ w.float().t() for w, y in zip(a, b, strict=True)]
    if layout == "NN":
        return [y.float() @ w.float() for w, y in zip(a, b, strict=True)]
    return [y.float().t() @ x.float() for x, y in zip(a, b, strict=True)]


def split_gemm(
    a: Any,
    b: Any,
    out: Any,
    quantization_params: Any,
    out_dtype: Any,
    layout: str = "TN",
    single_output: bool = False,
    accumulate: bool = False,
    bias: Any = None,
    use_bias: bool = False,
    **_: Any,
) -> None:
    products = _products(_matrices(list(a)), _matrices(list(b)), layout)
    if use_bias:
        products = [product + one.float() for product, one in zip(products, bias, strict=True)]
    targets = out[0].view(-1, out[0].shape[-1]).split([p.shape[0] for p in products]) if single_output else out
    for target, product in zip(targets, products, strict=True):
        target.add_(product) if accumulate else target.copy_(product)


def grouped_gemm(a: Any, b: Any, out: Any, layout: str = "TN", accumulate: bool = False, **_: Any) -> None:
    for operand in (a, b, out):  # Transformer Engine tells matrices that lie apart by this, and a tuple is none of both
        assert isinstance(operand, (list, GroupedTensorStorage)), type(operand)
    products = _products(_matrices(a), _matrices(b), layout)
    targets = list(out) if isinstance(out, (list, tuple)) else _matrices(out)
    for target, product in zip(targets, products, strict=True):
        target.add_(product) if accumulate else target.copy_(product)


def dummy_wgrad(shape: list[int], dtype: torch.dtype, *, zero: bool = False) -> torch.Tensor:
    return (torch.zeros if zero else torch.empty)(shape, dtype=dtype)


def grouped_dbias(dy: torch.Tensor, offsets: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(num_groups, columns), float32: each expert's rows of ``dy``, (tokens, columns), summed."""
    sizes = offsets.diff().tolist()
    assert len(sizes) == num_groups
    return torch.stack(arithmetic.grouped_bias_grads(dy[: sum(sizes)].float().split(sizes), None, None)[0])


def grouped_dbias_dscales(
    dy: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, *, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows times their scales, (tokens,); and (tokens,), float32: each row's product with its expert's bias."""
    sizes = offsets.diff().tolist()
    rows, factors = (one[: sum(sizes)].float().split(sizes) for one in (dy, scales))
    dbias, of_rows = arithmetic.grouped_bias_grads(rows, bias.float().unbind(), factors)
    assert of_rows is not None
    return torch.stack(dbias), F.pad(of_rows, (0, len(dy) - len(of_rows)))


def splits_to_offsets(
    split_sizes: Any, device: Any, strides: Any, include_leading_zero: Any, dtypes: Any, **_: Any
) -> Any:
    offsets = []
    for stride, leading, dtype in zip(strides, include_leading_zero, dtypes, strict=True):
        total = torch.cumsum(split_sizes * stride, 0)
        offsets.append((torch.cat([total.new_zeros(1), total]) if leading else total).to(dtype))
    return split_sizes, offsets


def unfused(monkeypatch: pytest.MonkeyPatch, *, grouped: bool) -> Bulk:
    """Replace the kernels of the unfused ops, and choose the path of GroupedLinear."""
    bulk = Bulk()
    _autocast_anywhere(monkeypatch)
    monkeypatch.setattr(SlotOwner, "computes_on_cpu", staticmethod(lambda tensor: False))
    monkeypatch.setattr(te_grouped_linear, "is_op_fuser_grouped_tensor_path_supported", lambda recipe, dtype: grouped)
    monkeypatch.setattr(te_grouped_linear, "general_grouped_gemm", split_gemm)
    monkeypatch.setattr(te_grouped_linear, "general_grouped_gemm_for_grouped_tensor", grouped_gemm)
    kernels = Tex(
        splits_to_offsets_multi=splits_to_offsets,
        split_quantize=split_quantize_into(bulk),
        group_quantize=group_quantize,
    )
    monkeypatch.setattr(te_grouped_linear, "tex", kernels)
    monkeypatch.setattr(te_base, "get_dummy_wgrad", dummy_wgrad)
    monkeypatch.setattr(te_grouped_linear, "compute_grouped_dbias", grouped_dbias)
    monkeypatch.setattr(te_grouped_linear, "compute_grouped_dbias_dscales", grouped_dbias_dscales)
    srelu = Tex(
        scaled_srelu=lambda x, scales, _: arithmetic.scaled_srelu(x, scales),
        scaled_dsrelu=lambda dy, x, scales, _, need: arithmetic.scaled_dsrelu(dy, x, scales, need_scales=need),
    )
    monkeypatch.setattr(te_activation, "tex", srelu)
    monkeypatch.setattr(te_float8.Float8CurrentScalingQuantizer, "quantize_impl", quantize)
    monkeypatch.setattr(Float8Quantizer, "quantize_impl", quantize)
    for kind in block_formats.QUANTIZERS:
        monkeypatch.setattr(kind, "quantize_impl", block_formats.quantize)
    return bulk


def _autocast_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for support in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        monkeypatch.setattr(te_quantization, support, (True, ""))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where NVFP4's quantizer makes a matrix
    make_state = te_quantization.DelayedScalingRecipeState.__init__
    monkeypatch.setattr(
        te_quantization.DelayedScalingRecipeState,
        "__init__",
        lambda self, recipe, **kw: make_state(self, recipe, **{**kw, "device": torch.device("cpu")}),
    )
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")  # Transformer Engine's own update of scales, in torch
    for module in (te_utils, te_float8_storage, te_mxfp8_storage, te_blockwise_storage, te_nvfp4_storage):
        monkeypatch.setattr(module, "_empty_tensor", lambda: torch.Tensor())
    for module in (te_float8_storage, te_float8):
        monkeypatch.setattr(module, "is_non_tn_fp8_gemm_supported", lambda: False)


# The Blackwell fused op


def _bytes(*shape: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.int64) * 2654435761 % 251).to(torch.uint8).view(shape)


def _scale_factors(rows: int, columns: int) -> torch.Tensor:
    raw = _bytes(1, -(-rows // 128), -(-columns // 128), 32, 4, 4)
    return raw.view(torch.float8_e8m0fnu).permute(3, 4, 1, 5, 2, 0)


def _fp8_bytes(rows: int, columns: int) -> torch.Tensor:
    return _bytes(rows, columns, 1).view(torch.float8_e4m3fn)


def mxfp8_quantize(quantizer: Any, x: torch.Tensor) -> MXFP8TensorStorage:
    buffers = quantizer.alloc_tensors(tuple(x.shape), device="cpu")
    buffers = {name: _bytes(*buffer.shape) for name, buffer in buffers.items()}
    metadata = quantizer.create_metadata(tuple(x.shape), dtype=x.dtype)
    return MXFP8TensorStorage.__tensor_unflatten__(buffers, metadata, tuple(x.shape), None)


def fused_group_quantize(x: torch.Tensor, quantizer: Any, num: int, first_dims: Any, tensor_offsets: Any = None) -> Any:
    """MXFP8 bytes that depend on nothing; NVFP4 for real."""
    if isinstance(quantizer, NVFP4Quantizer):
        return group_quantize(x, quantizer, num, first_dims, tensor_offsets)
    rows, columns = x.shape
    scales = -(-rows // 128) * -(-columns // 128) * 512
    kind = GroupedTensorStorage if quantizer.internal else GroupedTensor
    by_row, by_column = quantizer.rowwise_usage, quantizer.columnwise_usage
    return kind(
        shape=(rows, columns),
        dtype=x.dtype,
        num_tensors=num,
        quantizer=quantizer,
        data=_bytes(x.numel()) if by_row else None,
        columnwise_data=_bytes(x.numel()) if by_column else None,
        scale_inv=_bytes(scales) if by_row else None,
        columnwise_scale_inv=_bytes(scales) if by_column else None,
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
        with_gemm_swizzled_scales=quantizer.optimize_for_gemm,
    )


def _glu_kernel(
    a_tensor: Any = None, n: Any = None, b_tensor: Any = None, d_dtype: Any = None, **_: Any
) -> dict[str, torch.Tensor]:
    return _activation_kernel(a_tensor, n, b_tensor, d_dtype, gates=2)


def _activation_kernel(
    a_tensor: Any = None, n: Any = None, b_tensor: Any = None, d_dtype: Any = None, gates: int = 1, **_: Any
) -> dict[str, torch.Tensor]:
    rows, columns = a_tensor.shape[0], n if n is not None else b_tensor.shape[0]
    pre = torch.linspace(-1, 1, rows * columns, dtype=torch.bfloat16).view(rows, columns, 1)
    columns //= gates
    if d_dtype is torch.bfloat16:  # NVFP4, quantized afterwards
        return {"c_tensor": pre, "d_tensor": pre[:, :columns].contiguous()}
    return {
        "c_tensor": pre,
        "d_tensor": _fp8_bytes(rows, columns),
        "sfd_row_tensor": _scale_factors(rows, columns),
        "d_col_tensor": _fp8_bytes(rows, columns),
        "sfd_col_tensor": _scale_factors(rows, columns),
    }


def _dactivation_kernel(
    a_tensor: Any = None,
    c_tensor: Any = None,
    dprob_tensor: Any = None,
    use_dsrelu_reuse: bool = False,
    d_dtype: Any = None,
    **_: Any,
) -> dict[str, torch.Tensor | None]:
    rows, columns = a_tensor.shape[0], c_tensor.shape[1]
    if d_dtype is torch.bfloat16:
        return {
            "d_row_tensor": torch.linspace(-1, 1, rows * columns, dtype=torch.bfloat16).view(rows, columns, 1),
            "dprob_tensor": dprob_tensor,
            "dbias_tensor": None,
        }
    return {
        "d_row_tensor": _fp8_bytes(rows, columns),
        "sfd_row_tensor": _scale_factors(rows, columns),
        "d_col_tensor": _fp8_bytes(rows, columns),
        "sfd_col_tensor": _scale_factors(rows, columns),
        "dprob_tensor": dprob_tensor,
        "dbias_tensor": None,
        "d_srelu_tensor": _fp8_bytes(rows, columns) if use_dsrelu_reuse else None,
        "sfd_col_d_srelu_tensor": _scale_factors(rows, columns) if use_dsrelu_reuse else None,
    }


def _fill_zero(name: str) -> Callable[..., None]:
    def kernel(**arguments: Any) -> None:
        if arguments.get(name) is not None:
            arguments[name].zero_()

    return kernel


def fused(monkeypatch: pytest.MonkeyPatch, *, rebuilds_fc2_input: bool = False) -> None:
    """Make the Blackwell fused op selectable here, with its kernels replaced."""
    unfused(monkeypatch, grouped=True)
    monkeypatch.setattr(
        te_grouped_linear, "tex", Tex(splits_to_offsets_multi=splits_to_offsets, group_quantize=fused_group_quantize)
    )
    packed = SimpleNamespace(
        swizzle_scales_and_pack_ptrs_for_discrete_weights=lambda d, s, m, device: (
            torch.zeros(len(d)),
            torch.zeros(len(d)),
            None,
        )
    )
    kernels = Tex(
        splits_to_offsets_multi=splits_to_offsets,
        group_quantize=fused_group_quantize,
        bgrad_group_quantize=lambda x, *a, **k: (fused_group_quantize(x, *a, **k), torch.zeros(2, x.shape[1])),
        grouped_mlp_experimental=packed,
        grouped_swizzle_for_gemm=lambda *a, **k: None,
        copy_data_ptrs_to_device=lambda tensors, device: torch.zeros(len(tensors)),
    )
    monkeypatch.setattr(te_grouped_mlp, "tex", kernels)
    monkeypatch.setattr(te_grouped_mlp, "general_grouped_gemm_for_grouped_tensor", grouped_gemm)
    monkeypatch.setattr(te_grouped_mlp, "_cudnn_frontend_supports_grouped_gemm_srelu_hadamard", lambda: False)
    monkeypatch.setattr(MXFP8Quantizer, "quantize_impl", mxfp8_quantize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (10, 0))
    replaced: dict[str, Any] = {
        "is_supported": True,
        "grouped_gemm_act_hadamard_kernel": None,
        "grouped_gemm_dactivation_kernel": _dactivation_kernel,
        "grouped_gemm_quant_kernel": _fill_zero("d_tensor"),
        "grouped_gemm_wgrad_kernel": _fill_zero("wgrad_tensor"),
    }
    for kind, activation in ((BlackwellUnaryGroupedMLP, _activation_kernel), (BlackwellGLUGroupedMLP, _glu_kernel)):
        for name, value in (replaced | {"grouped_gemm_activation_kernel": activation}).items():
            monkeypatch.setattr(kind, name, classmethod(lambda cls, value=value: value), raising=False)
    monkeypatch.setattr(te_grouped_mlp, "_grouped_gemm_dsrelu_backward_supported", lambda: rebuilds_fc2_input)
    monkeypatch.setattr(te_grouped_mlp, "_nvidia_cudnn_frontend_supports_wgrad", lambda: True)
    monkeypatch.setattr(te_grouped_mlp, "_cudnn_frontend_supports_grouped_gemm_srelu_tanh", lambda: False)
    monkeypatch.setattr(
        OperationFuser, "forward_backward_fusion_functions", list(OperationFuser.forward_backward_fusion_functions)
    )
