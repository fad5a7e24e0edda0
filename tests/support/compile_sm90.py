"""Compiles every Hopper kernel on a machine without a GPU: ``python -m tests.support.compile_sm90 bf16|others``.

QuACK traces and compiles for ``sm_90a`` with fake tensors; what needs a driver is replaced: the number of clusters that a
card runs at once, which is no part of a kernel, and the launch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

os.environ |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}

import quack.gemm_runtime.host
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_offload.fused.kernels import sm90, sm90_compile, sm90_launch
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.interface import SquaredReLU

EXPERTS, HIDDEN, FFN = 4, 512, 384
FEW, USUAL, MANY = 512, 2048, 8192  # tokens, for which other tiles are taken


def compile_all(dtype: torch.dtype, activation: SquaredReLU, tokens: int) -> int:
    """Run forward and backward without launching; the number of launches that there would have been."""
    launches = 0

    def count(*_: object, **__: object) -> None:
        nonlocal launches
        launches += 1

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="cuda")

    def any_number(*_: object, **__: object) -> int:
        return 66

    def compile_only(real: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: (real(*args), count)[1]

    replaced: dict[str, object] = {"get_max_active_clusters": any_number}
    replaced["sm90_compile"] = SimpleNamespace(
        CAPABILITY=sm90_compile.CAPABILITY,
        source_key=sm90_compile.source_key,
        compiled_wgrad=compile_only(sm90_compile.compiled_wgrad),
        compiled_rows=compile_only(sm90_compile.compiled_rows),
    )
    vars(sm90).update(replaced)
    vars(sm90_launch)["run_gemm_epi_plan"] = count
    quack.gemm_runtime.host.get_max_active_clusters = any_number
    kernels = sm90.Sm90Kernels(activation)
    table, sizes = empty(EXPERTS, dtype=torch.int32), empty(EXPERTS, dtype=torch.int64)
    offsets = kernels.offsets(sizes, empty(tokens, HIDDEN))
    of_fc1, of_fc2 = Experts(empty(EXPERTS, FFN, HIDDEN), table), Experts(empty(EXPERTS, HIDDEN, FFN), table)
    x, scales = empty(tokens, HIDDEN), empty(tokens, dtype=torch.float32)
    bias1, bias2 = empty(EXPERTS, FFN), empty(EXPERTS, HIDDEN)
    for bias in (bias1, None):
        act_input, fc2_input = kernels.fc1(x, of_fc1, bias, scales, offsets)
    for bias, bias_scales in ((None, None), (bias2, None), (bias2, scales)):
        kernels.fc2(fc2_input, of_fc2, bias, bias_scales, offsets, torch.empty_like(x))
    kernels.bias_grads(x, bias2, scales, offsets)
    dact_input, fc2_input, _ = kernels.fc2_dgrad(x, of_fc2, act_input, scales, offsets)
    kernels.wgrad(x, fc2_input, offsets, of_fc2, accumulate=False)
    kernels.fc1_dgrad(dact_input, of_fc1, offsets, torch.empty_like(x))
    main_grad = Experts(empty(EXPERTS, FFN, HIDDEN, dtype=torch.float32), table)
    for accumulate in (False, True):
        kernels.wgrad(dact_input, x, offsets, main_grad, accumulate=accumulate)
    return launches


# Two parts, for two processes.
PARTS = {
    "bf16": [(torch.bfloat16, SquaredReLU(), USUAL), (torch.bfloat16, SquaredReLU(clamp=2.0), USUAL)],
    "others": [
        (torch.float16, SquaredReLU(), USUAL),
        (torch.float16, SquaredReLU(clamp=2.0), USUAL),
        (torch.bfloat16, SquaredReLU(), FEW),
        (torch.bfloat16, SquaredReLU(), MANY),
    ],
}

if __name__ == "__main__":
    with FakeTensorMode():
        for part in PARTS[sys.argv[1]]:
            print(*part, compile_all(*part), "launches")
