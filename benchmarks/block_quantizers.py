"""Quantizers of FP8 by blocks on Hopper: Triton's, which the fused op launches, beside candidates in CuTe DSL.

    ./run benchmarks.block_quantizers [--experts 64 --hidden 2048 --ffn 1408 --tokens 32768] [--rounds 10] [--json FILE]

What a forward and a backward quantize: rows, rows and columns as they lie, rows and columns turned, what the activation
makes of rows, its columns turned, and weights both ways round; interleaved, medians over the rounds by events of the GPU.
A candidate whose bytes or scales are not Triton's is not timed; that is looked at with ragged experts too, some of them
empty, and in fp16. `bytes` is what is read and written at the least. The candidates are those of
`benchmarks.block_quantizers_device`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from quack.compile_utils import make_fake_tensor

from benchmarks import block_quantizers_device as device
from te_offload.fused.kernels import blocks, fp8
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.ops.scaling import BlockFormat, BlockScaling

SCALING = BlockScaling(BlockFormat.FP8, power_of_two=True)
WAYS = {
    "rows": (True, device.NOT, False),
    "rows and columns": (True, device.SAVED, False),
    "rows and turned columns": (True, device.TURNED, False),
    "rows of the activation": (True, device.NOT, True),
    "turned columns of the activation": (False, device.TURNED, True),
}
RESIDENT = (2, 3, 4)
Found = dict[str, torch.Tensor]


def _fake(dtype: Any, *shape: Any) -> Any:
    return make_fake_tensor(dtype, shape, leading_dim=len(shape) - 1, divisibility=4 if dtype is Int32 else 1)


def _single(dtype: Any) -> Any:
    return make_fake_tensor(dtype, (cute.sym_int(),), leading_dim=0, divisibility=1)


@functools.cache
def compiled_rows(way: str, half: bool, resident: int) -> Callable[..., None]:
    """A candidate, for any sizes."""
    by_row, columns, activated = WAYS[way]
    kernel = device.RowQuantizer(
        by_row=by_row, columns=columns, activated=activated, half=half, power_of_two=True, resident=resident
    )
    matrix = _fake(Int32, cute.sym_int(), cute.sym_int())
    scales = _fake(Float32, cute.sym_int(), cute.sym_int())
    found: Callable[..., None] = cute.compile(
        kernel,
        matrix,
        _single(Float32) if activated else None,
        _single(Int32),
        _single(Int32),
        _fake(Int32, cute.sym_int(), cute.sym_int()) if by_row else None,
        scales if by_row else None,
        _fake(Int32, cute.sym_int(), cute.sym_int()) if columns != device.NOT else None,
        _fake(Float32, cute.sym_int(), cute.sym_int()) if columns != device.NOT else None,
        Float32(0.0),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
    return found


@functools.cache
def compiled_weights(half: bool, resident: int) -> Callable[..., None]:
    """A candidate for weights both ways round."""
    kernel = device.WeightQuantizer(both=True, half=half, power_of_two=True, resident=resident)
    sizes = [cute.sym_int() for _ in range(11)]
    found: Callable[..., None] = cute.compile(
        kernel,
        _fake(Int32, *sizes[:3]),
        _single(Int32),
        _fake(Int32, sizes[3], sizes[1], sizes[4]),
        _fake(Float32, sizes[3], sizes[5], sizes[6]),
        _fake(Int32, sizes[3], sizes[7], sizes[8]),
        _fake(Float32, sizes[3], sizes[9], sizes[10]),
        Float32(0.0),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
    return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


class Case:
    """Rows of experts, and weights.

    Args:
        sizes: tokens of each expert. columns: of the rows. rows: of a weight. dtype: of both.
    """

    def __init__(self, sizes: list[int], columns: int, rows: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.experts, self.tokens, self.columns, self.rows = len(sizes), sum(sizes), columns, rows
        self.x = torch.randn(self.tokens, columns, device="cuda").to(dtype)
        self.router = torch.rand(self.tokens, device="cuda")
        self.weights = torch.randn(self.experts, rows, columns, device="cuda").to(dtype)
        self.table = torch.arange(self.experts, dtype=torch.int32, device="cuda")
        self.offsets = torch.tensor([0, *sizes], device="cuda").cumsum(0).to(torch.int32)
        self.padded = fp8.padded_offsets(self.offsets)
        self.room = fp8.padded_tokens(self.tokens, self.experts)
        self.used = int(self.padded[-1])
        self.half = dtype is torch.float16
        self.most = torch.finfo(dtype).max

    def triton(self, way: str) -> Found:
        """As the fused op has it."""
        by_row, columns, activated = WAYS[way]
        after = (SquaredReLU(), self.router) if activated else None
        rows, found = blocks.quantize(self.x, self.offsets, SCALING, activation=after, by_row=by_row, columns=columns)
        return self._of(rows, found, columns)

    def cute(self, way: str, resident: int) -> Found:
        """A candidate."""
        by_row, columns, activated = WAYS[way]
        parts = -(-self.columns // blocks.BLOCK)
        shape = (self.columns, self.room) if columns == device.TURNED else (self.tokens, self.columns)

        def made(size: tuple[int, int], dtype: torch.dtype, there: bool) -> torch.Tensor | None:
            return torch.empty(size, dtype=dtype, device="cuda") if there else None

        rows = made((self.tokens, self.columns), torch.uint8, by_row)
        row_scales = made((parts, self.tokens), torch.float32, by_row)
        turned = made(shape, torch.uint8, columns != device.NOT)
        scales = made((self.room // blocks.BLOCK, self.columns), torch.float32, columns != device.NOT)
        compiled_rows(way, self.half, resident)(
            _words(self.x),
            self.router if activated else None,
            self.offsets,
            self.padded,
            None if rows is None else _words(rows),
            row_scales,
            None if turned is None else _words(turned),
            scales,
            0.0,
            self.most,
        )
        found = {"rows": rows, "row scales": row_scales, "columns": turned, "column scales": scales}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def triton_weights(self) -> Found:
        """As the fused op has it."""
        found = blocks.quantize_weights(Experts(self.weights, self.table), SCALING, by_column=True)
        rows, columns = found.rows, found.columns
        return {
            "rows": rows.numbers,
            "row scales": rows.inverses,
            "columns": columns.numbers,
            "scales": columns.inverses,
        }

    def cute_weights(self, resident: int) -> Found:
        """A candidate."""
        count, rows, columns = self.weights.shape
        parts, others = -(-rows // blocks.BLOCK), -(-columns // blocks.BLOCK)
        numbers = torch.empty(count, rows, columns, dtype=torch.uint8, device="cuda")
        turned = torch.empty(count, columns, rows, dtype=torch.uint8, device="cuda")
        inverses = torch.empty(count, parts, others, device="cuda")
        back = torch.empty(count, others, parts, device="cuda")
        compiled_weights(self.half, resident)(
            _words(self.weights), self.table, _words(numbers), inverses, _words(turned), back, 0.0, self.most
        )
        return {"rows": numbers, "row scales": inverses, "columns": turned, "scales": back}

    def kept(self, found: Found, way: str) -> Found:
        """Without what is room for other split sizes."""
        turned = WAYS.get(way, (True, device.NOT, False))[1] == device.TURNED
        cut = dict(found)
        if "column scales" in cut:
            cut["column scales"] = cut["column scales"][: self.used // blocks.BLOCK]
        if turned:
            cut["columns"] = cut["columns"][:, : self.used]
        return cut

    def _of(self, rows: Any, found: Any, columns: int) -> Found:
        result: Found = {}
        if rows is not None:
            result |= {"rows": rows.numbers, "row scales": rows.scales}
        if columns != device.NOT:
            result |= {"columns": found.numbers, "column scales": found.scales}
        return result

    def least_bytes(self, way: str) -> int:
        """Read and written."""
        if way == "weights":
            return self.weights.numel() * 4
        by_row, columns, _ = WAYS[way]
        return self.x.numel() * (2 + by_row + (columns != device.NOT))


def difference(one: Found, other: Found) -> str | None:
    """Which tensor differs, and in how many bytes."""
    for name, tensor in one.items():
        off = int((tensor.contiguous().view(torch.uint8) != other[name].contiguous().view(torch.uint8)).sum())
        if off:
            return f"{name}: {off} of {tensor.nbytes} bytes differ"
    return None


def milliseconds(call: Callable[[], Any]) -> float:
    """GPU time of one of a few calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(4):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 4


def check(way: str, resident: int) -> str | None:
    """What is wrong with a candidate, with ragged experts in both dtypes."""
    for dtype in (torch.bfloat16, torch.float16):
        case = Case([130, 0, 200, 7, 128, 0], 272, 400, dtype)
        case.x[3, 5], case.x[150, 2], case.x[140:145] = float("nan"), float("inf"), 0
        theirs = case.triton_weights() if way == "weights" else case.triton(way)
        ours = case.cute_weights(resident) if way == "weights" else case.cute(way, resident)
        wrong = difference(case.kept(theirs, way), case.kept(ours, way))
        if wrong:
            return f"{dtype}: {wrong}"
    return None


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("experts", 64), ("hidden", 2048), ("ffn", 1408), ("tokens", 32768), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.block_quantizers needs a Hopper GPU; torch sees none here.")
    size = arguments.experts, arguments.hidden, arguments.ffn, arguments.tokens
    case = Case([size[3] // size[0]] * size[0], size[1], size[2], torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; E{size[0]} H{size[1]} F{size[2]} T{size[3]}\n")
    print("| quantizer | kernel | ms | bytes, GB/s |\n|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for way in (*WAYS, "weights"):
        theirs: Callable[[], Any] = case.triton_weights if way == "weights" else functools.partial(case.triton, way)
        calls: dict[str, Callable[[], Any]] = {"Triton": theirs}
        for resident in RESIDENT:
            name = f"CuTe, {resident} tiles an SM"
            ours = functools.partial(
                case.cute_weights if way == "weights" else functools.partial(case.cute, way), resident
            )
            wrong = check(way, resident) or difference(case.kept(theirs(), way), case.kept(ours(), way))
            if wrong:
                failures[f"{way}, {name}"] = wrong
            else:
                calls[name] = ours
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(arguments.rounds + 2):
            for name in calls if turn % 2 == 0 else reversed(calls):
                times[name].append(milliseconds(calls[name]))
        for name, spent in times.items():
            ms = statistics.median(spent[2:])
            rate = case.least_bytes(way) / ms / 1e6
            rows.append({"quantizer": way, "kernel": name, "ms": ms, "rate": rate})
            print(f"| {way} | {name} | {ms:.3f} | {rate:.0f} |", flush=True)
    for name, why in failures.items():
        print(f"\n{name}: {why}")
    if arguments.json:
        result = {"schema": "1.0", "shape": size, "rows": rows, "failures": failures}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
