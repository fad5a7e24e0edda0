"""Compiles what QuACK has no host code for: wgrads into separate buffers, kernels over rows, quantizers.

In: names, dtypes and tiles. Out: functions that launch on the current stream. Keeps true: compiled kernels are kept on
disk by QuACK's cache, under a key of which our own source is part. Does not: look at shapes; one kernel serves all.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from quack.cache import jit_cache
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import torch2cute_dtype_map
from quack.gemm_tvm_ffi_utils import (
    compile_gemm_kernel,
    make_fake_gemm_tensors,
    make_fake_scheduler_args,
    make_fake_varlen_args,
)

from te_offload.fused.kernels import (
    bias_device,
    block_device,
    block_glu_device,
    fp8_current_device,
    fp8_glu_device,
    rows_device,
    sm90_apart,
    sm90_block_device,
    sm90_block_glu_device,
    sm90_device,
    sm90_experts,
    sm90_fp8_device,
    sm90_fp8_glu_device,
    sm90_glu_device,
    sm90_order,
    sm90_sums,
    tile_device,
)
from te_offload.fused.kernels.interface import Gate, Gated

CAPABILITY = (9, 0)


@functools.cache
def source_key() -> str:
    """Part of the key under which QuACK keeps a compiled kernel: its own code it knows, ours it does not."""
    gemms = sm90_apart, sm90_experts, sm90_order, sm90_device, sm90_fp8_device, sm90_block_device, sm90_sums
    gated = sm90_glu_device, sm90_fp8_glu_device, sm90_block_glu_device
    quantizers = tile_device, block_device, block_glu_device, fp8_glu_device, fp8_current_device
    modules = *gemms, *gated, *quantizers, rows_device, bias_device, sys.modules[__name__]
    sources = [inspect.getsource(module) for module in modules]
    return hashlib.sha256("".join(sources).encode()).hexdigest()


def compiled_wgrad(
    name: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
    tile: tuple[int, ...],
    cluster: tuple[int, int],
    *,
    pingpong: bool,
    ordered: bool,
    pairs: int | None = None,
    apart: bool = False,
) -> Any:
    """The wgrad kernel ``name`` of `sm90_device`, or of `sm90_fp8_device` or `sm90_block_device` for operands of 8 bits, or
    of `sm90_glu_device` with ``pairs``, its ``te_offload_interleave``.

    Args:
        dtypes: of A and B. tile: rows, columns, and how many tokens are loaded at once, if not QuACK's. ordered: the
            scheduler's arguments have a counter of tiles and an order of experts.

    Returns:
        A function of A (rows, T) and B (columns, T), each with stride 1 along its first dimension, or along its second one
        for 8 bits, D (J, rows, columns), ``None``, the epilogue's, the scheduler's and the varlen arguments, and twice
        ``None``.
    """
    a, b = [torch2cute_dtype_map[dtype] for dtype in dtypes]
    out = torch2cute_dtype_map[out_dtype]
    return _compile_expert_wgrad(name, a, b, out, tile, cluster, pingpong, ordered, pairs, apart, source_key())


@jit_cache  # type: ignore[untyped-decorator]
def _compile_expert_wgrad(
    name: str,
    a_dtype: Any,
    b_dtype: Any,
    out_dtype: Any,
    tile: Any,
    cluster: Any,
    pingpong: bool,
    ordered: bool,
    pairs: int | None,
    apart: bool,
    _source: str,
) -> Any:
    is_fp8 = a_dtype.width == 8
    by_block = hasattr(sm90_block_device, name)
    dense = sm90_device if pairs is None else sm90_glu_device
    module: Any = sm90_block_device if by_block else sm90_fp8_device if is_fp8 else dense
    kernel = getattr(module, name)

    def prepare(gemm: Any) -> None:
        gemm.te_offload_interleave, gemm.te_offload_apart = pairs, apart

    majors = ("k", "k") if is_fp8 else ("m", "n")
    a, b, d, c, _, columns, k, _ = make_fake_gemm_tensors(
        a_dtype, b_dtype, out_dtype, None, *majors, "n", None, varlen_k=True
    )
    values = {sm90_experts.TABLE: make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0, divisibility=1)}
    if by_block:
        values |= {argument.name: argument.fake() for argument in sm90_block_device.WGRAD_ARGUMENTS}
    elif is_fp8:
        values["factor"] = make_fake_tensor(Float32, (cute.sym_int(), columns), leading_dim=1, divisibility=4)
    return compile_gemm_kernel(
        kernel,
        a_dtype,
        tile,
        (*cluster, 1),
        pingpong,
        True,  # persistent
        False,  # A is not gathered
        ordered,  # taken one by one
        CAPABILITY,
        a,
        b,
        d,
        c,
        kernel.EpilogueArguments(**values),
        make_fake_scheduler_args(ordered, ordered, cute.sym_int()),
        make_fake_varlen_args(False, True, False, k),
        post_init=prepare,
    )


def compiled_rows(name: str, dtype: torch.dtype, sizes_dtype: torch.dtype | None = None) -> Any:
    """A kernel of `rows_device`.

    Args:
        name: in its ``KERNELS``. dtype: of the matrix. sizes_dtype: of the split sizes, if it takes them.

    Returns:
        A function of the tensors that the kernel takes.
    """
    sizes = None if sizes_dtype is None else torch2cute_dtype_map[sizes_dtype]
    return _compile_expert_rows(name, torch2cute_dtype_map[dtype], sizes, source_key())


@jit_cache  # type: ignore[untyped-decorator]
def _compile_expert_rows(name: str, dtype: Any, sizes_dtype: Any, _source: str) -> Any:
    rows = cute.sym_int()
    offsets = make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0, divisibility=1)
    matrix = make_fake_tensor(dtype, (rows, cute.sym_int()), leading_dim=1, divisibility=1)
    if name == "offsets":
        sizes = make_fake_tensor(sizes_dtype, (cute.sym_int(),), leading_dim=0, divisibility=1)
        arguments = [sizes, offsets, matrix]
    elif name == "clear":
        arguments = [offsets, matrix]
    else:
        sums = make_fake_tensor(Float32, (rows,), leading_dim=0, divisibility=1)
        arguments = [matrix, offsets, sums, make_fake_tensor(Int32, (cute.sym_int(),), leading_dim=0, divisibility=1)]
    return _compile(rows_device.KERNELS[name](), *arguments)


def compiled_row_parts(dtype: torch.dtype, *, factors: bool) -> Any:
    """`bias_device.RowParts`, as a function of what it takes but for the stream; matrices as words of int32, ``None`` for
    what is not there.

    Args:
        dtype: bf16 or fp16.
    """
    return _compile_row_parts(dtype is torch.float16, factors, source_key())


@jit_cache  # type: ignore[untyped-decorator]
def _compile_row_parts(half: bool, factors: bool, _source: str) -> Any:
    kernel = bias_device.RowParts(half=half, factors=factors)
    of_factors = (_numbers(Float32, 1), _words(2)) if factors else (None, None)
    dots = _numbers(Float32, 1) if factors else None
    return _compile(kernel, _words(2), _numbers(Int32, 1), *of_factors, _numbers(Float32, 2), dots, Int32(1))


def compiled_part_totals(dtype: torch.dtype, *, pairs: int | None) -> Any:
    """`bias_device.PartTotals`, as above. ``dtype``: of what is written."""
    return _compile_part_totals(torch2cute_dtype_map[dtype], pairs, source_key())


@jit_cache  # type: ignore[untyped-decorator]
def _compile_part_totals(dtype: Any, pairs: int | None, _source: str) -> Any:
    kernel = bias_device.PartTotals(pairs=pairs)
    return _compile(kernel, _numbers(Float32, 2), _numbers(Int32, 1), _numbers(dtype, 2))


def compiled_row_quantizer(
    dtype: torch.dtype,
    *,
    by_row: bool,
    columns: int,
    activated: bool,
    clamps: bool,
    gated: Gated | None,
    pairs: int | None,
    power_of_two: bool,
) -> Any:
    """`block_device.RowQuantizer`, or one of `block_glu_device` for what is gated or in pairs, as a function of what it
    takes but for the stream; matrices as words of int32, ``None`` for what is not there.

    Args:
        dtype: bf16 or fp16. pairs: the ``interleave``. others: of the class.
    """
    ways = {"by_row": by_row, "columns": columns, "half": dtype is torch.float16, "power_of_two": power_of_two}
    if gated is not None:
        of_gate = gated.gate.name, gated.numbers
        return _compile_row_quantizer("GatedRowQuantizer", of_gate, *ways.values(), source_key())
    if pairs is not None:
        return _compile_row_quantizer("HalvesRowQuantizer", (pairs,), *ways.values(), source_key())
    return _compile_row_quantizer("RowQuantizer", (activated, clamps), *ways.values(), source_key())


@jit_cache  # type: ignore[untyped-decorator]
def _compile_row_quantizer(
    name: str, kind: tuple[Any, ...], by_row: bool, columns: int, half: bool, power_of_two: bool, _source: str
) -> Any:
    by_column = columns != block_device.NOT
    ways: dict[str, Any] = {"by_row": by_row, "columns": columns, "half": half, "power_of_two": power_of_two}
    kernel: Any
    if name == "GatedRowQuantizer":
        gate, numbers = kind
        kernel = block_glu_device.GatedRowQuantizer(gated=Gated(Gate[gate], numbers), **ways)
    elif name == "HalvesRowQuantizer":
        kernel = block_glu_device.HalvesRowQuantizer(interleave=kind[0], **ways)
    else:
        kernel = block_device.RowQuantizer(activated=kind[0], clamps=kind[1], **ways)
    return _compile(
        kernel,
        _words(2),
        _numbers(Float32, 1) if kernel.activated else None,
        _numbers(Int32, 1),
        _words(2) if by_row else None,
        _numbers(Float32, 2) if by_row else None,
        _words(2) if by_column else None,
        _numbers(Float32, 2) if by_column else None,
        Float32(1.0),
        Float32(0.0),
        Float32(1.0),
    )


def compiled_pair_quantizer(
    dtype: torch.dtype, out: torch.dtype, *, by_column: bool, gated: Gated | None = None, pairs: int = 0
) -> Any:
    """`fp8_glu_device.ScaledGatedRows` with ``gated``, else `ScaledHalvesRows`, as above.

    Args:
        dtype: bf16 or fp16. out: of the numbers. pairs: the ``interleave``.
    """
    of_gate = None if gated is None else (gated.gate.name, gated.numbers)
    return _compile_pair_quantizer(of_gate, pairs, by_column, dtype is torch.float16, _form(out), source_key())


@jit_cache  # type: ignore[untyped-decorator]
def _compile_pair_quantizer(
    of_gate: tuple[str, tuple[float, ...]] | None, pairs: int, by_column: bool, half: bool, form: str, _source: str
) -> Any:
    ways: dict[str, Any] = {"by_column": by_column, "half": half, "form": form}
    kernel: Any
    if of_gate is None:
        kernel = fp8_glu_device.ScaledHalvesRows(interleave=pairs, **ways)
    else:
        gated = Gated(Gate[of_gate[0]], of_gate[1])
        kernel = fp8_glu_device.ScaledGatedRows(gated=gated, **ways)
    return _compile(
        kernel,
        _words(2),
        _numbers(Float32, 1) if kernel.activated else None,
        _numbers(Int32, 1),
        _words(2) if kernel.by_row else None,
        _numbers(Float32, 1),
        _words(2) if by_column else None,
        None,
        Float32(1.0),
        Float32(0.0),
        Float32(1.0),
    )


def compiled_weight_quantizer(dtype: torch.dtype, *, both: bool, power_of_two: bool) -> Any:
    """`block_device.WeightQuantizer`, as above."""
    return _compile_weight_quantizer(both, dtype is torch.float16, power_of_two, source_key())


@jit_cache  # type: ignore[untyped-decorator]
def _compile_weight_quantizer(both: bool, half: bool, power_of_two: bool, _source: str) -> Any:
    kernel = block_device.WeightQuantizer(both=both, half=half, power_of_two=power_of_two)
    turned = (_words(3), _numbers(Float32, 3)) if both else (None, None)
    return _compile(
        kernel,
        _words(3),
        _numbers(Int32, 1),
        _words(3),
        _numbers(Float32, 3),
        *turned,
        Float32(0.0),
        Float32(1.0),
    )


def compiled_scaled_weights(dtype: torch.dtype, out: torch.dtype, *, both: bool, power_of_two: bool) -> Any:
    """`fp8_current_device.ScaledWeights`, as above. ``out``: of the numbers."""
    return _compile_current("ScaledWeights", both, dtype is torch.float16, _form(out), power_of_two, source_key())


def compiled_scaled_rows(dtype: torch.dtype, out: torch.dtype, *, both: bool, power_of_two: bool) -> Any:
    """`fp8_current_device.ScaledRows`, as above."""
    return _compile_current("ScaledRows", both, dtype is torch.float16, _form(out), power_of_two, source_key())


@jit_cache  # type: ignore[untyped-decorator]
def _compile_current(name: str, both: bool, half: bool, form: str, power_of_two: bool, _source: str) -> Any:
    kernel = getattr(fp8_current_device, name)(both=both, form=form, half=half, power_of_two=power_of_two)
    rank, others, of_rows = 3, [], []
    if name == "ScaledRows":
        rank, others, of_rows = 2, [_numbers(Float32, 1)], [_numbers(Float32, 1), _numbers(Float32, 1)]
    numbers = _words(rank), _words(rank) if both else None
    of_scales = _numbers(Int32, 1), _numbers(Float32, 1), *of_rows
    return _compile(kernel, _words(rank), _numbers(Int32, 1), *others, *numbers, *of_scales, Float32(0.0), Float32(1.0))


def _form(dtype: torch.dtype) -> str:
    """As PTX calls it."""
    return "e5m2" if dtype is torch.float8_e5m2 else "e4m3"


def _words(rank: int) -> Any:
    """Rows of whole 16 bytes."""
    return make_fake_tensor(Int32, tuple(cute.sym_int() for _ in range(rank)), leading_dim=rank - 1, divisibility=4)


def _numbers(dtype: Any, rank: int) -> Any:
    return make_fake_tensor(dtype, tuple(cute.sym_int() for _ in range(rank)), leading_dim=rank - 1, divisibility=1)


def _compile(kernel: Any, *arguments: Any) -> Any:
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options="--enable-tvm-ffi")
