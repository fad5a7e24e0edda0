"""Compiles every Hopper kernel on a machine without a GPU: ``python -m tests.support.compile_sm90 PART``, which is bf16,
others, glu, fp8 or blocks.

QuACK traces and compiles for ``sm_90a`` with fake tensors; what needs a driver is replaced: the number of clusters that a
card runs at once, which is no part of a kernel, and the launch. Prints how many stages of operands each product has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}

import quack.gemm_runtime.host
import torch
from quack.gemm_runtime.host import GemmEpiPlan, run_gemm_epi_plan
from quack.gemm_sm90 import GemmSm90
from torch._subclasses.fake_tensor import FakeTensorMode

from te_offload.fused.kernels import (
    blocks,
    fp8,
    fp8_current,
    fp8_glu,
    sm90,
    sm90_block_glu,
    sm90_blocks,
    sm90_compile,
    sm90_fp8,
    sm90_fp8_glu,
    sm90_glu,
    sm90_launch,
)
from te_offload.fused.kernels.block_interface import BlockNumbers, BlockWeights
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.fp8_interface import QuantizedRows, QuantizedWeights
from te_offload.fused.kernels.interface import Activation, Gate, Gated, SquaredReLU, TileCount
from te_offload.fused.kernels.sm90_launch import Tile
from te_offload.fused.kernels.sm90_tiles import tile_for, tiles_of
from te_offload.ops.scaling import BlockFormat, BlockScaling, Scaling

EXPERTS, HIDDEN, FFN, DEEP_FFN = 4, 2048, 1408, 2688
FEW, USUAL, MANY = 512, 2048, 8192  # tokens, for which other tiles are taken
Choice = Callable[..., Tile]
H200 = tiles_of(quick_memory=True)
# Of sums of float32, for other widths or fewer tokens.
OTHERS = Tile(128, 128), Tile(128, 128, 1, 2, apart=True), Tile(128, 192, 1, 2, apart=True)


class Launches:
    """Counts launches in place of those that need a driver."""

    def __init__(self) -> None:
        self.count = 0

        def any_number(*_: object, **__: object) -> int:
            return 66

        def compile_only(real: Callable[..., object]) -> Callable[..., object]:
            return lambda *args, **ways: (real(*args, **ways), self)[1]

        compiled = SimpleNamespace(
            CAPABILITY=sm90_compile.CAPABILITY,
            source_key=sm90_compile.source_key,
            compiled_wgrad=compile_only(sm90_compile.compiled_wgrad),
            compiled_rows=compile_only(sm90_compile.compiled_rows),
            compiled_row_parts=compile_only(sm90_compile.compiled_row_parts),
            compiled_part_totals=compile_only(sm90_compile.compiled_part_totals),
            compiled_row_quantizer=compile_only(sm90_compile.compiled_row_quantizer),
            compiled_weight_quantizer=compile_only(sm90_compile.compiled_weight_quantizer),
            compiled_scaled_weights=compile_only(sm90_compile.compiled_scaled_weights),
            compiled_scaled_rows=compile_only(sm90_compile.compiled_scaled_rows),
            compiled_pair_quantizer=compile_only(sm90_compile.compiled_pair_quantizer),
        )
        vars(fp8_glu)["sm90_compile"] = compiled
        vars(fp8_current).update({"sm90_compile": compiled, "aligned": lambda x: x})
        vars(blocks).update({"sm90_compile": compiled, "aligned": lambda x: x})  # a fake one has no address
        vars(sm90).update({"get_max_active_clusters": any_number, "sm90_compile": compiled})
        vars(sm90_launch)["Ready"] = lambda plan: _Checked(self, plan)
        quack.gemm_runtime.host.get_max_active_clusters = any_number

    def __call__(self, *_: object, **__: object) -> None:
        self.count += 1


class _Checked(sm90_launch.Ready):
    """A launch that hands a kernel what QuACK's own would."""

    def __init__(self, launches: Launches, plan: GemmEpiPlan) -> None:
        self._launches = launches
        self._given: list[tuple[Any, ...]] = []
        self._plan = plan._replace(compiled_fn=lambda *given: self._given.append(given))
        super().__init__(self._plan)

    def __call__(self, a: Any, b: Any, d: Any, c: Any, values: Any, offsets: Any, count: Any) -> None:
        pointer = None if count is None else SimpleNamespace(data_ptr=lambda: 4096)  # a fake tensor has none
        super().__call__(a, b, d, c, values, offsets, pointer)  # type: ignore[arg-type]
        run_gemm_epi_plan(self._plan, a, b, d, c, values, cu_seqlens_m=offsets, tile_count_semaphore=pointer)
        ours, quacks = self._given
        self._given.clear()
        assert list(map(type, ours)) == list(map(type, quacks))
        for one, other in zip(_parts(ours), _parts(quacks), strict=True):
            assert one is other or (type(one), str(one)) == (type(other), str(other)), (one, other)
        self._launches.count += 1


def _parts(given: Any) -> list[Any]:
    """All that is in tuples of tuples."""
    return [part for one in given for part in _parts(one)] if isinstance(given, tuple) else [given]


def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="cuda")


def compile_all(
    dtype: torch.dtype, activation: SquaredReLU, tokens: int, ffn: int = FFN, tiles: Choice = tile_for
) -> int:
    """Run forward and backward without launching; the number of launches that there would have been."""
    launches = Launches()
    kernels = sm90.Sm90Kernels(activation, tiles)
    table, sizes = empty(EXPERTS, dtype=torch.int32), empty(EXPERTS, dtype=torch.int64)
    offsets, counts = kernels.offsets(sizes, empty(tokens, HIDDEN, dtype=dtype))
    of_fc1, of_fc2 = [Experts(empty(EXPERTS, *shape, dtype=dtype), table) for shape in ((ffn, HIDDEN), (HIDDEN, ffn))]
    x, scales = empty(tokens, HIDDEN, dtype=dtype), empty(tokens, dtype=torch.float32)
    bias1, bias2 = empty(EXPERTS, ffn, dtype=dtype), empty(EXPERTS, HIDDEN, dtype=dtype)
    for bias in (bias1, None):
        kernels.fc1_activated(x, of_fc1, bias, scales, offsets, counts.fc1)
        _, fc2_input = kernels.fc1(x, of_fc1, bias, scales, offsets, counts.fc1)
        act_input = kernels.fc1_linear(x, of_fc1, bias, offsets, counts.fc1)
    for bias, bias_scales in ((None, None), (bias2, None), (bias2, scales)):
        kernels.fc2(fc2_input, of_fc2, bias, bias_scales, offsets, torch.empty_like(x), counts.fc2)
    kernels.bias_grads(x, offsets, bias2, scales)
    kernels.fc1_bias_grads(act_input, offsets)
    dact_input, fc2_input, _, orders = kernels.fc2_dgrad(x, of_fc2, act_input, scales, offsets)
    main1, main2 = [Experts(torch.empty_like(one.view, dtype=torch.float32), table) for one in (of_fc1, of_fc2)]
    for grads, accumulate in ((of_fc2, False), (main2, False), (main2, True)):
        kernels.wgrad(x, fc2_input, offsets, grads, accumulate=accumulate, order=orders.fc2_wgrad)
    dx, order, count = torch.empty_like(x), orders.fc1_wgrad, orders.fc1_dgrad
    for grads, accumulate in ((of_fc1, False), (main1, False), (main1, True)):
        ways: dict[str, Any] = {"accumulate": accumulate, "order": order, "count": count}
        kernels.fc1_backward(dact_input, x, of_fc1, offsets, dx, grads, **ways)
    return launches.count


def compile_wide_parts(dtype: torch.dtype) -> int:
    """FC1 with its activation in a tile of which the epilogue takes 32 columns at a time: those in use have 16."""
    launches = Launches()
    kernels = sm90.Sm90Kernels(SquaredReLU(), lambda *_: sm90_launch.Tile(128, 160, pingpong=True))
    weights = Experts(empty(EXPERTS, FFN, HIDDEN, dtype=dtype), empty(EXPERTS, dtype=torch.int32))
    x, scales = empty(USUAL, HIDDEN, dtype=dtype), empty(USUAL, dtype=torch.float32)
    offsets, count = empty(EXPERTS + 1, dtype=torch.int32), TileCount(empty(1, dtype=torch.int32), 0)
    kernels.fc1(x, weights, None, scales, offsets, count)
    return launches.count


def compile_glu(dtype: torch.dtype, activation: Gated, tokens: int, tiles: Choice = tile_for) -> int:
    """The same of what a gated activation takes beside that."""
    launches = Launches()
    kernels = sm90_glu.Sm90GluKernels(activation, tiles)
    table, sizes = empty(EXPERTS, dtype=torch.int32), empty(EXPERTS, dtype=torch.int64)
    offsets, counts = kernels.offsets(sizes, empty(tokens, HIDDEN, dtype=dtype))
    of_fc1, of_fc2 = [
        Experts(empty(EXPERTS, *shape, dtype=dtype), table) for shape in ((2 * FFN, HIDDEN), (HIDDEN, FFN))
    ]
    x, scales = empty(tokens, HIDDEN, dtype=dtype), empty(tokens, dtype=torch.float32)
    for bias in (empty(EXPERTS, 2 * FFN, dtype=dtype), None):
        kernels.fc1_activated(x, of_fc1, bias, scales, offsets, counts.fc1)
        _, fc2_input = kernels.fc1(x, of_fc1, bias, scales, offsets, counts.fc1)
        act_input = kernels.fc1_linear(x, of_fc1, bias, offsets, counts.fc1)
    assert (act_input.shape, fc2_input.shape) == ((tokens, 2 * FFN), (tokens, FFN))
    kernels.fc2(fc2_input, of_fc2, None, None, offsets, x, counts.fc2)
    dact_input, fc2_input, _, orders = kernels.fc2_dgrad(x, of_fc2, act_input, scales, offsets)
    kernels.wgrad(x, fc2_input, offsets, of_fc2, accumulate=False, order=orders.fc2_wgrad)
    dx, count, main = torch.empty_like(x), orders.fc1_dgrad, torch.empty_like(of_fc1.view, dtype=torch.float32)
    main1 = Experts(main, table)
    for grads, accumulate in ((of_fc1, False), (main1, False), (main1, True)):
        ways: dict[str, Any] = {"accumulate": accumulate, "order": orders.fc1_wgrad}
        kernels.fc1_backward(dact_input, x, of_fc1, offsets, dx, grads, count=count, **ways)
        kernels.fc1_wgrad(dact_input, x, offsets, grads, **ways)
    kernels.fc1_bias_grads(dact_input, offsets)
    return launches.count


def in_others(kernels: Any, activation: Activation, tokens: int) -> list[Any]:
    """Such kernels in tiles for all products; of one number of tokens."""
    if kernels._tile_for is H200 or tokens != USUAL:
        return []
    return [type(kernels)(activation, lambda *_, tile=tile: tile) for tile in OTHERS]


def compile_fp8(activation: Activation, tokens: int, tiles: Choice = tile_for) -> int:
    """The same of what FP8 takes beside that: sums in the tensor cores forward, in float32 backward."""
    launches = Launches()
    vars(fp8).update(dict.fromkeys(("factors_of", "padded_offsets", "keep_magnitudes"), launches_nothing))
    gated = isinstance(activation, Gated)
    kernels = (sm90_fp8_glu.Sm90Fp8GluKernels if gated else sm90_fp8.Sm90Fp8Kernels)(activation, tiles)
    wide = 2 * FFN if gated else FFN
    table, offsets = empty(EXPERTS, dtype=torch.int32), empty(EXPERTS + 1, dtype=torch.int32)
    scales, count = empty(tokens, dtype=torch.float32), TileCount(empty(1, dtype=torch.int32), 0)

    def rows(columns: int, dtype: torch.dtype) -> QuantizedRows:
        turned = empty(columns, fp8.padded_tokens(tokens, EXPERTS), dtype=dtype)
        return QuantizedRows(
            empty(tokens, columns, dtype=dtype), turned, scales, empty(EXPERTS, dtype=torch.float32), scales
        )

    def weights(one: int, other: int) -> QuantizedWeights:
        rows, columns = (empty(EXPERTS, *shape, dtype=torch.float8_e4m3fn) for shape in ((one, other), (other, one)))
        return QuantizedWeights(Experts(rows, table), Experts(columns, table), empty(EXPERTS, dtype=torch.float32))

    of_fc1, of_fc2 = weights(wide, HIDDEN), weights(HIDDEN, FFN)
    for by_column in (False, True):
        wide_weights = Experts(empty(EXPERTS, HIDDEN, FFN, dtype=torch.bfloat16), table)
        kernels.quantize_weights(wide_weights, Scaling(torch.float8_e4m3fn), by_column=by_column)
        dense, inverses = empty(tokens, HIDDEN, dtype=torch.bfloat16), empty(EXPERTS, dtype=torch.float32)
        kernels.quantize(dense, offsets, Scaling(torch.float8_e5m2), weights=inverses, by_column=by_column)
    x, dy = rows(HIDDEN, torch.float8_e4m3fn), rows(HIDDEN, torch.float8_e5m2)
    for bias in (None, empty(EXPERTS, wide, dtype=torch.bfloat16)):
        act_input, _ = kernels.fc1_fp8(x, of_fc1, bias, scales, offsets, torch.bfloat16, fast=True, count=count)
    vars(fp8)["given_scales"] = lambda *_, **__: (x.inverses, scales, scales)
    delayed = Scaling(torch.float8_e4m3fn, given=x.inverses, kept=x.inverses)
    plain = activation == SquaredReLU()
    if plain:  # else it is two passes
        given = x, of_fc1, None, scales, offsets, torch.bfloat16, delayed, x.inverses
        for stores in (True, False):
            kernels.fc1_given(*given, stores=stores, fast=True, count=count)
    dact_input, *_, orders = kernels.fc2_dgrad_fp8(dy, of_fc2, act_input, scales, offsets, fast=False)
    others = in_others(kernels, activation, tokens)
    for other in others:
        other.fc2_dgrad_fp8(dy, of_fc2, act_input, scales, offsets, fast=False)
    if gated:
        vars(fp8)["scales_of"] = lambda *_, **__: (x.inverses, scales, scales)
        found: dict[str, Any] = {"weights": x.inverses, "magnitudes": scales[:, None]}
        kernels.quantize(act_input, offsets, Scaling(torch.float8_e4m3fn), **found, router=scales)
        kernels.rebuild(act_input, scales, x, offsets, torch.float8_e4m3fn)
        for by_column in (False, True):
            kernels.quantize_dact(dact_input, offsets, Scaling(torch.float8_e5m2), **found, by_column=by_column)
    if not plain:
        return launches.count
    y, bias2 = empty(tokens, HIDDEN, dtype=torch.bfloat16), empty(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    hidden = rows(FFN, torch.float8_e4m3fn)
    for one, factors in ((None, None), (bias2, None), (bias2, scales)):
        ways: dict[str, Any] = {"bias": one, "bias_scales": factors, "count": count}
        kernels.linear_fp8(hidden, of_fc2.rows, y, offsets, **ways, fast=True)
    grads = rows(FFN, torch.float8_e5m2)
    for one in (kernels, *others):
        one.linear_fp8(grads, of_fc1.columns, y, offsets, fast=False, count=orders.fc1_dgrad)
    for out_dtype, accumulate in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        out = Experts(empty(EXPERTS, HIDDEN, FFN, dtype=out_dtype), table)
        of_grads: dict[str, Any] = {"accumulate": accumulate, "fast": False, "order": orders.fc2_wgrad}
        for one in (kernels, *others[1:]):  # whose warp groups are apart in all tiles that are taken
            one.wgrad_fp8(dy, hidden, offsets, out, **of_grads)
    return launches.count


def compile_blocks(activation: Activation, tokens: int, tiles: Choice = tile_for) -> int:
    """The same of FP8 by blocks; with many tokens sums are long."""
    launches = Launches()
    hidden_size, ffn = (HIDDEN, FFN) if tokens < MANY else (DEEP_FFN, DEEP_FFN)
    scaling = BlockScaling(BlockFormat.FP8)
    vars(fp8)["padded_offsets"] = launches_nothing
    gated = isinstance(activation, Gated)
    kernels = (sm90_block_glu.Sm90BlockGluKernels if gated else sm90_blocks.Sm90BlockKernels)(activation, tiles)
    wide = 2 * ffn if gated else ffn
    offsets, router = empty(EXPERTS + 1, dtype=torch.int32), empty(tokens, dtype=torch.float32)
    count = TileCount(empty(1, dtype=torch.int32), 0)

    def floats(*size: int) -> torch.Tensor:
        return empty(*(-(-one // blocks.BLOCK) for one in size[:-1]), size[-1], dtype=torch.float32)

    def rows(columns: int) -> BlockNumbers:
        numbers = empty(tokens, columns, dtype=torch.uint8)
        return BlockNumbers((tokens, columns), scaling, numbers, floats(columns, tokens))

    def turned(columns: int) -> BlockNumbers:
        padded = fp8.padded_tokens(tokens, EXPERTS)
        return BlockNumbers(
            (tokens, columns), scaling, empty(columns, padded, dtype=torch.uint8), floats(padded, columns)
        )

    def weights(one: int, other: int) -> blocks.Weights:
        parts = -(-one // blocks.BLOCK), -(-other // blocks.BLOCK)
        table, numbers = empty(EXPERTS, dtype=torch.int32), empty(EXPERTS, one, other, dtype=torch.uint8)
        return blocks.Weights(Experts(numbers, table), Experts(empty(EXPERTS, *parts, dtype=torch.float32), table))

    of_fc1 = BlockWeights(weights(wide, hidden_size), weights(hidden_size, wide))
    of_fc2 = BlockWeights(weights(hidden_size, ffn), weights(ffn, hidden_size))
    act_input, hidden = kernels.fc1_blocks(
        rows(hidden_size), of_fc1, None, router, (offsets, offsets), torch.bfloat16, scaling, count
    )
    *_, orders = kernels.fc2_dgrad_blocks(rows(hidden_size), of_fc2, act_input, router, offsets)
    for other in in_others(kernels, activation, tokens):
        other.fc2_dgrad_blocks(rows(hidden_size), of_fc2, act_input, router, offsets)
        if gated or activation == SquaredReLU():
            other.fc1_linear_blocks(rows(hidden_size), of_fc1, None, act_input, offsets, count)
    if gated:
        biases = empty(EXPERTS, wide, dtype=torch.bfloat16)
        ways: dict[str, Any] = {"offsets": (offsets, offsets), "dtype": torch.bfloat16, "scaling": scaling}
        kernels.fc1_blocks(rows(hidden_size), of_fc1, biases, router, **ways, count=count)
        for by_column in (False, True):
            kernels.block_dact_rows(act_input, offsets, scaling, by_column=by_column)
        kernels.rebuild_blocks(act_input, router, offsets, scaling)
    if activation != SquaredReLU():
        return launches.count
    y, bias = empty(tokens, hidden_size, dtype=torch.bfloat16), empty(EXPERTS, hidden_size, dtype=torch.bfloat16)
    for by_column, saved in ((False, False), (True, False), (True, True)):
        kernels.block_rows(y, offsets, scaling, by_column=by_column, saved=saved)
    kernels.rebuild_blocks(act_input, router, offsets, scaling)
    packed = Experts(empty(EXPERTS, ffn, hidden_size, dtype=torch.bfloat16), empty(EXPERTS, dtype=torch.int32))
    for by_column in (False, True):
        kernels.block_weights(packed, scaling, by_column=by_column)
    for factors in (None, router):
        kernels.linear_blocks(hidden, of_fc2.rows, y, offsets, bias=bias, bias_scales=factors, count=count)
    for dtype, accumulate in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        out = Experts(empty(EXPERTS, hidden_size, ffn, dtype=dtype), empty(EXPERTS, dtype=torch.int32))
        kernels.wgrad_blocks(
            turned(hidden_size), turned(ffn), offsets, out, accumulate=accumulate, order=orders.fc2_wgrad
        )
    return launches.count


def compile_short_blocks(part: str) -> None:
    """Quantizers of pairs of which halves alternate in blocks of few columns."""
    for pairs in (1, 2, 4):
        if part == "fp8":
            sm90_compile.compiled_pair_quantizer(torch.bfloat16, torch.float8_e5m2, by_column=True, pairs=pairs)
        else:
            ways: dict[str, Any] = {"by_row": True, "columns": blocks.TURNED, "power_of_two": True}
            plain: dict[str, Any] = {"activated": False, "clamps": False, "gated": None}
            sm90_compile.compiled_row_quantizer(torch.bfloat16, **ways, **plain, pairs=pairs)


def launches_nothing(*_: object, **__: object) -> None:
    """In place of a kernel of Triton's."""


def say_stages() -> None:
    """Of each product, when it is compiled."""
    real = GemmSm90._compute_stages.__func__

    def compute(cls: type[Any], tile: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(cls, tile, *args, **kwargs)
        print(f"{cls.__name__} {'x'.join(map(str, tile))}: {found[0]} stages")
        return found

    GemmSm90._compute_stages = classmethod(compute)


# Parts, for a process each.
PARTS: dict[str, list[tuple[Any, ...]]] = {
    "bf16": [
        (torch.bfloat16, SquaredReLU(), USUAL),
        (torch.bfloat16, SquaredReLU(clamp=2.0), USUAL),
        (torch.bfloat16, SquaredReLU(), USUAL, FFN, H200),
    ],
    "others": [
        (torch.float16, SquaredReLU(), USUAL),
        (torch.float16, SquaredReLU(clamp=2.0), USUAL),
        (torch.bfloat16, SquaredReLU(), FEW),
        (torch.bfloat16, SquaredReLU(), MANY, DEEP_FFN),
    ],
}

GLU: list[tuple[Any, ...]] = [
    (torch.bfloat16, Gated(Gate.SWIGLU), USUAL),
    (torch.bfloat16, Gated(Gate.SWIGLU), USUAL, H200),
    (torch.float16, Gated(Gate.SWIGLU), USUAL),
    (torch.bfloat16, Gated(Gate.SWIGLU, (), 32), MANY),
    (torch.bfloat16, Gated(Gate.CLAMPED_QGEGLU, (7.0, 1.702, 1.0)), USUAL),
    (torch.bfloat16, Gated(Gate.SITU_GLU, (4.0, 25.0)), USUAL),
]
FP8 = [(SquaredReLU(), USUAL), (SquaredReLU(clamp=2.0), USUAL), (SquaredReLU(), MANY)]
QUANTIZED: dict[str, Callable[..., int]] = {"fp8": compile_fp8, "blocks": compile_blocks}
QUANTIZED_GLU = [
    Gated(Gate.SWIGLU),
    Gated(Gate.CLAMPED_QGEGLU, (7.0, 1.702, 1.0), 32),
    Gated(Gate.SITU_GLU, (4.0, 25.0)),
]

if __name__ == "__main__":
    say_stages()
    with FakeTensorMode():
        if sys.argv[1] in QUANTIZED:
            for activation, tokens in FP8:
                print(activation, QUANTIZED[sys.argv[1]](activation, tokens), "launches")
            for gated in QUANTIZED_GLU:
                print(gated, QUANTIZED[sys.argv[1]](gated, USUAL), "launches")
            for of_h200 in (SquaredReLU(), Gated(Gate.SWIGLU)):
                print("H200", of_h200, QUANTIZED[sys.argv[1]](of_h200, USUAL, H200), "launches")
            compile_short_blocks(sys.argv[1])
        for part in PARTS.get(sys.argv[1], []):
            print(*part, compile_all(*part), "launches")
        for dtype in (torch.bfloat16, torch.float16) if sys.argv[1] == "others" else ():
            print("wide parts", dtype, compile_wide_parts(dtype), "launches")
        for part in GLU if sys.argv[1] == "glu" else []:
            print(*part, compile_glu(*part), "launches")
