"""Products of FP8 by blocks on Hopper: Triton's, which the fused op launches, beside candidates in CuTe DSL.

    ./run benchmarks.block_products [--experts 64 --hidden 2048 --ffn 1408 --tokens 32768] [--rounds 10] [--json FILE]

FC1's product by row and its weight gradient, both without anything around them, interleaved; medians over the rounds by
events of the GPU, and TFLOP/s. A candidate whose result is not that of Triton's within 1% is not timed. The candidates are
those of `te_offload.fused.kernels.sm90_block_device`.
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
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import get_max_active_clusters
from quack.gemm_tvm_ffi_utils import (
    compile_gemm_kernel,
    make_fake_gemm_tensors,
    make_fake_scheduler_args,
    make_fake_varlen_args,
    make_scheduler_args,
    make_varlen_args,
)

from te_offload.fused.kernels import blocks, fp8, sm90_block_device, sm90_compile
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.sm90_launch import SWIZZLE, Launches, Tile
from te_offload.ops.scaling import BlockFormat, BlockScaling

SCALING = BlockScaling(BlockFormat.FP8, power_of_two=True)
E4M3 = torch.float8_e4m3fn
TILES = {
    "128 x 128": Tile(128, 128),
    "128 x 128, no cluster": Tile(128, 128, 1),
    "128 x 128, beside": Tile(128, 128, 1, 2),
    "192 x 128": Tile(192, 128),
    "192 x 128, no cluster": Tile(192, 128, 1),
}


def wgrad_of(tile: Tile) -> Callable[..., Any]:
    """The candidate for weight gradients in bf16, compiled."""
    a, b, d, c, _, _, k, experts = make_fake_gemm_tensors(
        Float8E4M3FN, Float8E4M3FN, BFloat16, None, "k", "k", "n", None, varlen_k=True
    )

    def fake(dtype: Any, rank: int) -> Any:
        shape = tuple(cute.sym_int() for _ in range(rank))
        return make_fake_tensor(dtype, shape, leading_dim=rank - 1, divisibility=1)

    kernel: Any = sm90_block_device.BlockWgradGemm
    values = {
        "table": fake(Int32, 1),
        "a_scales": fake(Float32, 2),
        "b_scales": fake(Float32, 2),
        "starts": fake(Int32, 1),
    }
    found: Callable[..., Any] = compile_gemm_kernel(
        kernel,
        Float8E4M3FN,
        (tile.rows, tile.columns),
        (tile.cluster_rows, tile.cluster_columns, 1),
        tile.pingpong,
        True,
        False,
        False,
        sm90_compile.CAPABILITY,
        a,
        b,
        d,
        c,
        kernel.EpilogueArguments(**values),
        make_fake_scheduler_args(False, False, experts),
        make_fake_varlen_args(False, True, False, k),
    )
    return found


class Products:
    """Operands of one shape, and what multiplies them.

    Args:
        experts, hidden, ffn, tokens: the shape; the same number of tokens for each expert.
    """

    def __init__(self, experts: int, hidden: int, ffn: int, tokens: int) -> None:
        torch.manual_seed(0)
        x, dy = (torch.randn(tokens, size, device="cuda").bfloat16() for size in (hidden, ffn))
        self.offsets = torch.arange(0, tokens + 1, tokens // experts, dtype=torch.int32, device="cuda")
        self.table = torch.arange(experts, dtype=torch.int32, device="cuda")
        weights = torch.randn(experts, ffn, hidden, device="cuda").bfloat16()
        self.weights = blocks.quantize_weights(Experts(weights, self.table), SCALING, by_column=False).rows
        rows, columns = blocks.quantize(x, self.offsets, SCALING, columns=blocks.TURNED)
        _, dy_columns = blocks.quantize(dy, self.offsets, SCALING, by_row=False, columns=blocks.TURNED)
        assert rows is not None and columns is not None and dy_columns is not None
        self.rows, self.columns, self.dy_columns = rows, columns, dy_columns
        self.out = torch.empty(tokens, ffn, dtype=torch.bfloat16, device="cuda")
        self.grads = torch.empty(experts, ffn, hidden, dtype=torch.bfloat16, device="cuda")
        self.padded = fp8.padded_offsets(self.offsets)
        self._launch = Launches()

    def triton_rows(self) -> torch.Tensor:
        """As the fused op has it."""
        blocks.linear(self.rows, self.weights, self.out, self.offsets)
        return self.out

    def triton_wgrad(self) -> torch.Tensor:
        """As the fused op has it."""
        experts = Experts(self.grads, self.table)
        blocks.wgrad(self.dy_columns, self.columns, self.offsets, experts, accumulate=False)
        return self.grads

    def cute_rows(self, tile: Tile) -> torch.Tensor:
        """A candidate."""
        values = {
            "a_scales": self.rows.scales,
            "b_scales": self.weights.inverses,
            "starts": self.offsets,
            "table": self.table,
        }
        kernel: Any = sm90_block_device.BlockGemm
        x, weights = self.rows.numbers.view(E4M3), self.weights.numbers.view(E4M3)
        self._launch(kernel, tile, x, weights, self.out, None, values, self.offsets)
        return self.out

    def cute_wgrad(self, tile: Tile, function: Callable[..., Any]) -> torch.Tensor:
        """A candidate."""
        kernel: Any = sm90_block_device.BlockWgradGemm
        clusters = get_max_active_clusters(tile.cluster_rows * tile.cluster_columns)
        values = kernel.EpilogueArguments(
            table=self.table, a_scales=self.dy_columns.scales, b_scales=self.columns.scales, starts=self.padded
        )
        schedule, varlen = make_scheduler_args(clusters, SWIZZLE, None), make_varlen_args(None, self.padded, None)
        one, other = self.dy_columns.numbers.view(E4M3), self.columns.numbers.view(E4M3)
        function(one, other, self.grads, None, values, schedule, varlen, None, None)
        return self.grads


def milliseconds(call: Callable[[], Any]) -> float:
    """GPU time of one of a few calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(4):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 4


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("experts", 64), ("hidden", 2048), ("ffn", 1408), ("tokens", 32768), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.block_products needs a Hopper GPU; torch sees none here.")
    size = arguments.experts, arguments.hidden, arguments.ffn, arguments.tokens
    products = Products(*size)
    ways: dict[tuple[str, str], Callable[[], torch.Tensor]] = {
        ("by row", "Triton"): products.triton_rows,
        ("wgrad", "Triton"): products.triton_wgrad,
    }
    for name, tile in TILES.items():
        ways["by row", f"CuTe, {name}"] = functools.partial(products.cute_rows, tile)
        ways["wgrad", f"CuTe, {name}"] = functools.partial(products.cute_wgrad, tile, wgrad_of(tile))
    failures: dict[str, str] = {}
    expected: dict[str, torch.Tensor] = {}
    for (kind, name), call in list(ways.items()):
        try:
            found = call().float()
            torch.cuda.synchronize()
        except RuntimeError as error:
            failures[f"{kind}, {name}"] = str(error).strip().splitlines()[0]
            del ways[kind, name]
            continue
        reference = expected.setdefault(kind, found.clone())
        off = float((found - reference).norm() / reference.norm())
        if not off <= 1e-2:
            failures[f"{kind}, {name}"] = f"another result: off by {off:.3g} of its norm"
            del ways[kind, name]
    times: dict[tuple[str, str], list[float]] = {key: [] for key in ways}
    for turn in range(arguments.rounds + 2):
        for key in ways if turn % 2 == 0 else reversed(ways):
            times[key].append(milliseconds(ways[key]))
    flop = 2 * arguments.tokens * arguments.hidden * arguments.ffn
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; E{size[0]} H{size[1]} F{size[2]} T{size[3]}\n")
    print("| product | kernel | ms | TFLOP/s |\n|---|---|---|---|")
    rows = []
    for (kind, name), spent in times.items():
        ms = statistics.median(spent[2:])
        rows.append({"product": kind, "kernel": name, "ms": ms})
        print(f"| {kind} | {name} | {ms:.3f} | {flop / ms / 1e9:.0f} |")
    for name, why in failures.items():
        print(f"\n{name}: {why}")
    if arguments.json:
        result = {"schema": "1.0", "shape": size, "rows": rows, "failures": failures}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
