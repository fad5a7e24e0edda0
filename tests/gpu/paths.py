"""The two unfused paths of GroupedLinear on a GPU, how to ask for each, the model that runs on them, and slow copies."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ops.basic.grouped_linear as te_grouped_linear
from transformer_engine.common.recipe import Float8CurrentScaling

from te_offload import Outcome, StepRecord
from te_offload.offload.transfer import CudaTransfer
from te_offload.ops import te_adapter
from tests.support.mlp import make_mlp, run

PATHS = pytest.mark.parametrize("path", ["split", "grouped"])
FORMATS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8-current"])
EXPERTS, HIDDEN, FFN = 4, 256, 512
SPLITS = {
    "even": (128, 128, 128, 128),
    "ragged": (16, 304, 48, 144),
    "empty-expert": (0, 352, 160, 0),
    "one-expert": (0, 512, 0, 0),
}


def choose_path(monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool) -> None:
    """Make GroupedLinear take a path; skips with the reason where Transformer Engine has it not."""
    recipe = Float8CurrentScaling() if fp8 else None
    if path == "split":
        monkeypatch.setattr(te_grouped_linear, "is_op_fuser_grouped_tensor_path_supported", lambda recipe, dtype: False)
    elif not te_adapter.grouped_path_supported(recipe, torch.bfloat16):
        number = te_adapter.cublaslt_version()
        needed = "13.5" if fp8 else "13.4"
        pytest.skip(
            f"the grouped path in {'FP8' if fp8 else 'bf16'} needs cuBLASLt {needed} on Hopper; "
            f"here it is {number // 10000}.{number // 100 % 100}"
        )


def autocast(fp8: bool) -> contextlib.AbstractContextManager[Any]:
    context: contextlib.AbstractContextManager[Any] = (
        te.autocast(enabled=True, recipe=Float8CurrentScaling()) if fp8 else contextlib.nullcontext()
    )
    return context


def step(module: Any, splits: tuple[int, ...], fp8: bool, **arguments: Any) -> dict[str, torch.Tensor]:
    """One forward and backward under the recipe; output and gradients."""
    with autocast(fp8):
        return run(module, splits, hidden=HIDDEN, **arguments)


def slot_bytes(tokens: int, fp8: bool, hidden: int = HIDDEN, ffn: int = FFN) -> dict[str, int]:
    """Bytes of each slot by hand; act_input is bf16 in both formats.

    FP8 inputs have a byte a number; the few bytes of their scales stay on the device.
    """
    width = 1 if fp8 else 2
    return {
        "fc1_input": tokens * hidden * width,
        "act_input": tokens * ffn * 2,
        "fc2_input": tokens * ffn * width,
    }


def mlp(**arguments: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    size = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN} | arguments
    return make_mlp(device="cuda", dtype=torch.bfloat16, **size)


def came_back_or_never_left(record: StepRecord) -> bool:
    """Whether every byte that went was copied back, or read before its memory had been given up; and some was copied."""
    never_left = sum(row.bytes_out for row in record.slots if row.outcome is Outcome.RECALLED)
    return record.bytes_back > 0 and record.bytes_back + never_left == record.bytes_out


class Stack(torch.nn.Module):
    """Grouped MLPs, one behind the other."""

    def __init__(self, layers: int, **arguments: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(mlp(**arguments) for _ in range(layers))

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def slow_copies(monkeypatch: pytest.MonkeyPatch, cycles: int, *names: str) -> None:
    """Have each copy, "copy_out" or "copy_back", begin so many cycles late on its stream: a missing wait is a wrong bit."""
    for name in names:
        copy, way = getattr(CudaTransfer, name), "_out" if name == "copy_out" else "_back"

        def slow(self: CudaTransfer, pieces: Any, after: Any, copy: Any = copy, way: str = way) -> Any:
            for stream in filter(None, (getattr(self, way).stream, getattr(self, way).beside)):  # whose turn it may be
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(cycles)
            return copy(self, pieces, after)

        monkeypatch.setattr(CudaTransfer, name, slow)
