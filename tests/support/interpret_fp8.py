"""Runs the kernels of `fp8_device` on the CPU, by Triton's interpreter: ``python -m tests.support.interpret_fp8``.

Exits with 0 if scales, numbers and columns are those of `ReferenceFp8Kernels`. Two things of the interpreter (Triton 3.6)
are replaced: how it makes an index of a number, which numpy refuses, and its rounding, which loses carries.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import functools
import itertools
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from te_offload.fused.kernels import fp8
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.fp8_interface import QuantizedRows, QuantizedWeights
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.fused.kernels.reference_fp8 import ReferenceFp8Kernels
from te_offload.ops.scaling import BlockFormat, BlockScaling, Scaling
from tests.support.mlp import seeded

DTYPES = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
EXPERTS, TOKENS, COLUMNS = 4, 450, 96
SIZES = (100, 0, 300, 7)


def replace_in_interpreter() -> None:
    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def convert_float(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source is not tl.float32 or target not in (*DTYPES, tl.bfloat16, tl.float16):
            return convert(numbers, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(numbers))
        if target is tl.bfloat16:
            return wide.bfloat16().view(torch.uint16).numpy()
        if target is tl.float16:
            return wide.half().numpy()
        dtype = DTYPES[target]
        return wide.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).view(torch.uint8).numpy()

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_tensor, convert_float


def same(one: torch.Tensor, other: torch.Tensor, what: object) -> None:
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), what


def same_rows(found: QuantizedRows, expected: QuantizedRows, offsets: torch.Tensor, what: object) -> None:
    """Of experts' rows; what is between them in columns is zero."""
    end = int(offsets[-1])
    same(found.inverses, expected.inverses, what)
    same(found.scales[:end], expected.scales[:end], what)
    if found.factors is not None and expected.factors is not None:
        same(found.factors[:end], expected.factors[:end], what)
    if found.rows is not None and expected.rows is not None:
        same(found.rows[:end], expected.rows[:end], what)
    if found.columns is None or expected.columns is None:
        return
    places = fp8.padded_offsets(offsets)
    for (begin, stop), place, after in zip(itertools.pairwise(offsets.tolist()), places, places[1:], strict=False):
        upto = int(place) + stop - begin
        same(found.columns[:, int(place) : upto], expected.columns[:, begin:stop], what)
        assert not found.columns[:, upto : int(after)].view(torch.uint8).any(), what


def main() -> None:
    replace_in_interpreter()
    x = seeded((TOKENS, COLUMNS), 0, dtype=torch.bfloat16) * 7
    x[3, 5], x[120, 1], x[sum(SIZES) :] = float("nan"), float("inf"), float("nan")
    router = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([0, *itertools.accumulate(SIZES)], dtype=torch.int32)
    weights = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(2)) + 1
    for dtype, clamp in itertools.product(DTYPES.values(), (None, 2.0)):
        activation = SquaredReLU(clamp)
        reference = ReferenceFp8Kernels(activation)
        given = torch.tensor([[1.5, 9.0], [2.0, 9.0], [0.25, 9.0], [30.0, 9.0]])  # with a stride, as a recipe's state
        for name, scaling in {
            "current": Scaling(dtype),
            "powers of two": Scaling(dtype, power_of_two=True),
            "epsilon": Scaling(dtype, epsilon=100.0),
            "delayed": Scaling(dtype, given=given[:, 0], kept=torch.tensor([[0.0, 9.0], [5.0, 9.0]] * 2)[:, 0]),
        }.items():
            what = dtype, clamp, name
            kept = None if scaling.kept is None else scaling.kept.clone()
            expected = reference.quantize(x, offsets, scaling, weights=weights, by_column=True)
            if scaling.kept is not None and kept is not None:
                kept, scaling.kept[:] = scaling.kept.clone(), kept
            found = fp8.quantize(x, offsets, scaling, weights=weights, by_column=True)
            assert kept is None or (scaling.kept is not None and torch.equal(kept, scaling.kept)), what
            same_rows(found, expected, offsets, what)
            assert found.rows is not None
            same_rows(fp8_columns(found, fp8.turn(found.rows, offsets)), expected, offsets, what)
            if scaling.kept is not None:  # in two steps, around a product that quantizes
                kept = scaling.kept.clone()
                inverses, scales, factors = fp8.given_scales(offsets, scaling, weights=weights, rows=TOKENS)
                same_rows(QuantizedRows(None, None, scales, inverses, factors), expected, offsets, what)
                assert torch.equal(kept, scaling.kept), what
                magnitudes = torch.full((TOKENS, 3), 50.3)
                magnitudes[sum(SIZES) :] = 1e9
                fp8.keep_magnitudes(magnitudes, offsets, scaling, torch.bfloat16)
                used = torch.tensor(SIZES) > 0
                assert torch.equal(scaling.kept, torch.where(used, kept.clamp(min=50.25), kept)), what
        for kind in (torch.bfloat16, torch.float16):
            finite = torch.where(x.isfinite(), x, torch.ones(()).to(x)).to(kind)
            exact = reference.quantize(finite, offsets, Scaling(dtype), weights=weights, router=router)
            magnitudes = reference._activate(finite, router).abs().amax(1, keepdim=True).float()
            magnitudes *= 1 + 2.0**-13  # as before they were rounded
            quantize = functools.partial(fp8.quantize, finite, offsets, Scaling(dtype), weights=weights)
            found = quantize(magnitudes=magnitudes, activation=(activation, router))
            if clamp is None:  # torch's tanh is another one
                same_rows(found, exact, offsets, ("activation", dtype))
            turned = fp8.turn(finite, offsets, activation=(activation, router, found.scales, dtype))
            by_row = ReferenceFp8Kernels(activation).turn(found, offsets)
            same_rows(fp8_columns(found, turned), by_row, offsets, ("rebuilt", dtype, clamp))
    packed = seeded((EXPERTS, 200, COLUMNS), 3, dtype=torch.bfloat16)
    packed[1, 150, 5] = -7.0
    table = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    given = torch.tensor([[300.0, 1.0], [0.5, 1.0], [1e9, 1.0], [40.0, 1.0]])[:, 0]
    before = torch.tensor([[0.0, 7.0], [0.0, 7.0], [99.0, 7.0], [0.5, 7.0]])
    one, other = (Scaling(torch.float8_e4m3fn, given=given, kept=before.clone()[:, 0]) for _ in range(2))
    found_weights = fp8.quantize_weights(Experts(packed, table), one)
    expected_weights = reference.quantize_weights([packed[int(place)] for place in table], other)
    same(found_weights.inverses, expected_weights.inverses, "weights")
    assert found_weights.columns is not None and expected_weights.columns is not None
    for expert in range(EXPERTS):
        same(found_weights.rows.view[expert], expected_weights.rows[expert], ("weights", expert))
        same(found_weights.columns.view[expert], expected_weights.columns[expert], ("weights turned", expert))
    assert one.kept is not None and other.kept is not None
    same(one.kept, other.kept, "magnitudes of weights")
    assert one.kept[2] == 99.0 and 0.5 < one.kept[3] < 99.0  # one was larger before
    assert fp8.quantize_weights(Experts(packed, table), one, by_column=False).columns is None
    assert found_weights.scales is not None
    for expert, turned in enumerate(fp8.weight_columns(Experts(packed, table), found_weights, one)):
        same(turned, expected_weights.columns[expert], ("weights turned later", expert))
    assert one.kept[2] == 99.0 and torch.equal(one.kept, other.kept)  # nothing is kept again
    made_again(seeded((EXPERTS, 200, 160), 4, dtype=torch.bfloat16), table)
    same(fp8.factors_of(weights, weights, 40), (weights * weights)[:, None].repeat(1, 40), "factors")
    print("the same")


def made_again(packed: torch.Tensor, table: torch.Tensor) -> None:
    """Weights turned alone: by their magnitudes, as current scaling has them, and by blocks."""
    for kind in (torch.bfloat16, torch.float16):
        numbers = packed.to(kind) * torch.tensor([1.0, 0.0, 1e-30, 300.0]).view(-1, 1, 1).to(kind)
        in_order = [numbers[int(place)] for place in table]
        experts = Experts(numbers, table)
        for dtype, power, epsilon in itertools.product(DTYPES.values(), (False, True), (0.0, 2.0)):
            scaling = Scaling(dtype, epsilon=epsilon, power_of_two=power)
            expected = ReferenceFp8Kernels(SquaredReLU()).quantize_weights(in_order, scaling)
            apart = torch.full((EXPERTS, 4), 50.0, dtype=kind)  # with a stride, as between a quantizer's own numbers
            apart[:, 2] = torch.stack([one.abs().amax() for one in in_order])
            known = QuantizedWeights(None, None, expected.inverses, magnitudes=apart.flatten()[2::4])
            for expert, turned in enumerate(fp8.weight_columns(experts, known, scaling)):
                assert expected.columns is not None
                same(turned, expected.columns[expert], ("made again", kind, dtype, power, epsilon, expert))
        for power, epsilon in itertools.product((False, True), (0.0, 2.0)):
            by_block = BlockScaling(BlockFormat.FP8, square=True, epsilon=epsilon, power_of_two=power)
            columns, inverses = fp8.block_weight_columns(experts, by_block)
            wide = inverses.repeat_interleave(128, 1)[:, : packed.shape[2]].repeat_interleave(128, 2)[
                :, :, : packed.shape[1]
            ]
            dense = (columns.view(torch.float8_e4m3fn).float() * wide).to(kind)
            expected_columns = ReferenceBlockKernels(SquaredReLU()).block_weight_columns(in_order, by_block).columns
            for expert, other in enumerate(expected_columns):
                same(dense[expert], other.to(kind), ("by blocks", kind, power, epsilon, expert))


def fp8_columns(rows: QuantizedRows, columns: torch.Tensor) -> QuantizedRows:
    return QuantizedRows(None, columns, rows.scales, rows.inverses, rows.factors)


if __name__ == "__main__":
    main()
