"""Compiles the products of `block_device` for Hopper, without a GPU: ``python -m tests.support.compile_blocks``.

Prints for each its name, the tensor cores' instructions in its PTX, and the bytes of shared memory that it takes.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from te_offload.fused.kernels import block_device, blocks

POINTERS = {
    "x": "*u8",
    "weights": "*u8",
    "dy": "*u8",
    "by_row": "*u8",
    "out": "*bf16",
    "bias": "*bf16",
    "act_input": "*bf16",
    "offsets": "*i32",
    "table": "*i32",
}
FLOATS = ("clamp", "epsilon", "most")
ARRAYS = ("x_scales", "w_scales", "dy_scales", "row_factors", "row_scales", "parts")


def compile_for_hopper(kernel: Any, launch: blocks.Launch, constants: dict[str, Any]) -> None:
    constants = constants | {"EXPERTS": 64, "ROWS": launch.rows, "BLOCK": blocks.BLOCK}
    types = dict.fromkeys(kernel.arg_names, "i32") | POINTERS | dict.fromkeys(FLOATS, "fp32")
    types |= dict.fromkeys(ARRAYS, "*fp32") | {"stride": "i64"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("columns", "depth", "padded", "rows")
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    instructions = sorted(set(re.findall(r"wgmma\.mma_async\S+", found.asm["ptx"])))
    print(kernel.__name__, constants.get("AFTER"), *instructions, found.metadata.shared)


def main() -> None:
    plain = {"CLAMPS": False, "POWER_OF_TWO": True, "EVEN": True}
    for after, launch in blocks.LAUNCHES.items():
        with_bias = {"BIAS": True, "FACTORS": True, "AFTER": after}
        compile_for_hopper(block_device.multiply_rows, launch, plain | with_bias)
    compile_for_hopper(block_device.multiply_columns, blocks.WGRAD, {"ACCUMULATE": True})


if __name__ == "__main__":
    main()
