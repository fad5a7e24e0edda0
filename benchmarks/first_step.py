"""How long the first step of a fresh process with the fused grouped MLP takes, with compiled kernels on disk and without.

    ./run benchmarks.first_step [--json FILE]

Two processes, one behind the other, with one empty folder for compiled kernels. Each prints its imports, its first forward
and backward, and its second one, in seconds of the host's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXPERTS, HIDDEN, FFN, TOKENS = 64, 2048, 1408, 32768


def child() -> None:
    """The measured process."""
    begin = time.perf_counter()
    import torch
    import transformer_engine.pytorch as te

    from te_offload import ops

    imported = time.perf_counter()
    size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    module = te.ops.Sequential(
        ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **size),
        ops.ScaledSReLU(),
        ops.GroupedLinear(EXPERTS, FFN, HIDDEN, **size),
    )
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales = torch.rand(TOKENS, device="cuda", requires_grad=True)
    sizes = torch.full((EXPERTS,), TOKENS // EXPERTS, device="cuda")
    torch.cuda.synchronize()
    seconds = {"imports": imported - begin}
    for name in ("first step", "second step"):
        begin = time.perf_counter()
        module(x, sizes, scales, sizes).sum().backward()
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - begin
    print(json.dumps(seconds))


def main() -> None:
    """Run both, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("nothing on disk", "kernels on disk"):
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.first_step", "--child"],
                env=os.environ | {"QUACK_CACHE_DIR": folder, "TE_OFFLOAD_FUSED_MLP": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            results[name] = json.loads(ran.stdout.splitlines()[-1])
    print("| seconds | imports | first step | second step |\n|---|---|---|---|")
    for name, seconds in results.items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in seconds.values())} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
