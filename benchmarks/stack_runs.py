"""A command line over shapes of a stack of grouped MLPs: what it takes, what it says of the run, and what it writes.

In: what measures a shape, and what makes a table of that. Out: tables as printed, and JSON. Does not: measure.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.stack import Shape
from te_offload.ops import te_adapter

SHAPES = {"64": (8, 64, 2048, 1408, 32768), "8": (6, 8, 4096, 14336, 16384)}


def parser_of(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """With what all such benchmarks take. ``rounds``: by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="64 or 8 experts; default: both")
    parser.add_argument("--fp8", action="store_true", help="under te.autocast with Float8CurrentScaling")
    parser.add_argument("--one-thread", action="store_true", help="autograd works in the calling thread, in all ways")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser


def parser_of_sizes(description: str | None, plain: str, sizes: dict[str, int]) -> argparse.ArgumentParser:
    """For one model of sizes that have defaults. ``plain``: the ways that always run."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--only", nargs="+", default=(), help=f"{plain}, and ways with one of these texts in their names"
    )
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser


def setting(rounds: int) -> dict[str, Any]:
    """Of a run: the card, the versions, the rounds."""
    number = te_adapter.cublaslt_version()
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": te_adapter.installed_version(),
        "cublaslt": f"{number // 10000}.{number // 100 % 100}",
        "backward": "in autograd's thread" if torch._C._is_multithreading_enabled() else "in the calling thread",
        "rounds": rounds,
    }


def run(
    arguments: argparse.Namespace,
    shape_of: Callable[..., Shape],
    measure: Callable[[Shape], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    *,
    schema: str,
) -> None:
    """Measure every shape that is asked for, of ``layers, experts, hidden, ffn, tokens``.

    Raises:
        SystemExit: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device; torch sees none here.")
    torch.autograd.set_multithreading_enabled(not arguments.one_thread)
    head = setting(arguments.rounds)
    print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    results = []
    for name in arguments.shape or SHAPES:
        results.append(measure(shape_of(*SHAPES[name])))
        print("\n" + table(results[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": schema, "setting": head, "results": results}, indent=1) + "\n")
