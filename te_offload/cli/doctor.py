"""`te-offload doctor`: what this machine can do, and why not the rest.

In: nothing. Out: a table or JSON; status 0 if the ops work here, 1 if they do not. Keeps true: each "no" has a reason;
nothing is changed. Does not: measure.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformer_engine.common import recipe as te_recipe

from te_offload import ops
from te_offload.errors import CaptureError, UnsupportedError, UnsupportedReleaseError
from te_offload.fused import Window, blackwell, hopper_choice
from te_offload.graphs.collectives import conflict
from te_offload.graphs.layers.virtual import CudaVirtualMemory
from te_offload.offload import cuda_queue
from te_offload.offload.allocator import check_captures
from te_offload.ops import te_adapter
from te_offload.report.as_json import SCHEMA
from te_offload.units import format_bytes


@dataclass(frozen=True)
class Finding:
    """One row: what, whether it works here, and the details or the reason why not."""

    what: str
    ok: bool
    detail: str


def findings() -> Iterator[Finding]:
    """What there is, from the release to the kernels."""
    yield Finding("Python, torch", True, f"{platform.python_version()}, {torch.__version__}")
    version = te_adapter.installed_version()
    try:
        te_adapter.require_supported_release()
        yield Finding("Transformer Engine", True, f"{version}, its saved layouts are known")
    except UnsupportedReleaseError as error:
        yield Finding("Transformer Engine", False, str(error))
        return
    yield Finding("ops and sessions on the CPU", True, "torch arithmetic, any floating dtype, no quantization")
    if not torch.cuda.is_available():
        yield Finding("GPU", False, "torch sees no CUDA device")
        for what in (
            "unfused grouped path",
            "FP8 current scaling",
            "compiled copies",
            "pinned memory",
            "memory back under CUDA graphs",
        ):
            yield Finding(what, False, "needs a GPU")
    else:
        yield from _gpu_findings()
    yield from _fused_findings()
    v1 = os.environ.get("NVTE_CPU_OFFLOAD_V1", "0") == "1"
    yield Finding(
        "Transformer Engine's offloading context",
        True,
        "v1 (NVTE_CPU_OFFLOAD_V1=1): the per-op arguments work in it, mark_not_offload on other tensors does not"
        if v1
        else "v2, which honours the per-op arguments",
    )


def _gpu_findings() -> Iterator[Finding]:
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    yield Finding(
        "GPU",
        True,
        f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
    )
    number = te_adapter.cublaslt_version()
    cublas = f"cuBLASLt {number // 10000}.{number // 100 % 100}"
    for what, recipe in (
        ("unfused grouped path, bf16", None),
        ("unfused grouped path, FP8 current scaling", te_recipe.Float8CurrentScaling()),
        ("unfused grouped path, FP8 block scaling", te_recipe.Float8BlockScaling()),
        ("unfused grouped path, MXFP8", te_recipe.MXFP8BlockScaling()),
        ("unfused grouped path, NVFP4", te_recipe.NVFP4BlockScaling()),
    ):
        taken = te_adapter.grouped_path_supported(recipe, torch.bfloat16)
        no = f"{cublas}, compute capability {major}.{minor}: the split path runs, a GEMM an expert, not capturable"
        if recipe is None:  # in which it was seen
            no += _beside_gemms(os.environ)
        yield Finding(what, taken, cublas if taken else no)
    yield _allocator_finding()
    built = cuda_queue.build()
    detail = f"torch's calls and ctypes' queue copies, at more of the host's time: {built.reason}"
    yield Finding("compiled copies", built.module is not None, detail if built.module is None else "built by Triton")
    yield Finding(
        "pinned memory", torch.empty(1, device="cpu", pin_memory=True).is_pinned(), "page-locked host memory for copies"
    )
    what = "memory back under CUDA graphs"
    try:
        granule = CudaVirtualMemory(torch.device("cuda")).granule
        yield Finding(what, True, f"virtual memory management, in pages of {format_bytes(granule)}")
    except UnsupportedError as error:
        yield Finding(what, False, f"{error} Graphs of layers keep all of their memory.")
    hangs = conflict(os.environ)
    yield Finding("collectives in CUDA graphs", hangs is None, hangs or "no setting is known against them")


def _beside_gemms(environment: Mapping[str, str]) -> str:
    """What copies meet beside the split path's GEMMs, which run on four streams (docs/results/, offload)."""
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections == "1":
        return "; copies beside it have the link (CUDA_DEVICE_MAX_CONNECTIONS=1)"
    return f"; copies beside it are slower than with CUDA_DEVICE_MAX_CONNECTIONS=1 (now {connections or 'unset'})"


def _allocator_finding() -> Finding:
    try:
        check_captures(torch.device("cuda"))
    except CaptureError as error:
        return Finding("torch's native allocator", False, str(error))
    return Finding("torch's native allocator", True, "CUDA graphs can be captured")


def _fused_findings() -> Iterator[Finding]:
    fc1, fc2 = (ops.GroupedLinear(2, 64, 64, bias=False, device="cpu", dtype=torch.bfloat16) for _ in range(2))
    window = Window(0, fc1, ops.ScaledSReLU(), fc2)
    support = blackwell.explain(window, te_recipe.MXFP8BlockScaling(fp8_format=te_recipe.Format.E4M3))
    detail = support.reason or "Transformer Engine's kernels, with slots"
    yield Finding("Blackwell fused grouped MLP", support.ok, detail)
    support = hopper_choice.explain(window)
    yield Finding("Hopper fused grouped MLP", support.ok, support.reason or "te_offload's kernels, through QuACK")


def run_doctor(*, as_json: bool) -> int:
    """Print the findings; returns the exit status."""
    found = list(findings())
    console = Console()
    if as_json:
        console.print_json(json.dumps({"schema": SCHEMA, "findings": [asdict(finding) for finding in found]}))
    else:
        table = Table(show_header=False)
        for finding in found:
            table.add_row("[green]yes[/]" if finding.ok else "[yellow]no[/]", finding.what, finding.detail)
        console.print(table)
    return 0 if found[1].ok else 1
