"""One training step of a stack of grouped MLPs: without offloading, with ours, with Transformer Engine's own context.

    ./run benchmarks.offload_step [--layers 8] [--tokens 32768] [--fp8] ...

All variants run in one process, interleaved; each time is the median over the rounds, of the host's clock around work
that ends with a synchronization. Transformer Engine's context is measured with its defaults and with
retain_pinned_cpu_buffers, offloading all layers but the last two; ours offloads all layers, and all but the slot
`act_input`. Peak memory is torch's, over one step, less what was there before it. Gradients of every variant are
compared with the first one's, bit for bit, before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_offload import OffloadSession, ops
from te_offload.ops import te_adapter


class Stack(torch.nn.Module):
    """Grouped MLPs with residuals, one behind the other."""

    def __init__(self, arguments: argparse.Namespace, keep_act: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.layers = torch.nn.ModuleList(
            te.ops.Sequential(
                ops.GroupedLinear(arguments.experts, arguments.hidden, arguments.ffn, **size),
                ops.ScaledSReLU(no_offload_activation=keep_act),
                ops.GroupedLinear(arguments.experts, arguments.ffn, arguments.hidden, **size),
            )
            for _ in range(arguments.layers)
        )
        self.wrap: Callable[[torch.nn.Module, Callable[[], torch.Tensor]], torch.Tensor] = lambda layer, run: run()

    def forward(self, x: torch.Tensor, splits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.wrap(layer, lambda layer=layer, x=x: layer(x, splits, scales, splits))  # type: ignore[misc]
        return x


class Variant:
    """One way to run the step. ``step`` leaves gradients on the model."""

    def __init__(self, name: str, arguments: argparse.Namespace, inputs: tuple[torch.Tensor, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.inputs = inputs
        self.model = Stack(arguments, keep_act="keep act_input" in name)
        self.session: OffloadSession | None = None
        self.te_context: Any = None
        if name.startswith("te_offload"):
            self.session = OffloadSession(self.model.layers, max_in_flight=arguments.max_in_flight)
        elif name.startswith("Transformer Engine"):
            context, sync = te.get_cpu_offload_context(
                enabled=True,
                num_layers=arguments.layers - 2,
                model_layers=arguments.layers,
                offload_activations=True,
                offload_weights=False,
                retain_pinned_cpu_buffers="retain" in name,
            )
            self.te_context = context

            def wrap(layer: torch.nn.Module, run: Callable[[], torch.Tensor]) -> torch.Tensor:
                with context:
                    y = run()
                result: torch.Tensor = sync(y)
                return result

            self.model.wrap = wrap

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        recipe = (
            te.autocast(enabled=True, recipe=Float8CurrentScaling()) if self.arguments.fp8 else contextlib.nullcontext()
        )
        with self.session.step() if self.session else contextlib.nullcontext(), recipe:
            yield

    def step(self) -> None:
        self.model.zero_grad()
        x, splits, scales, dy = self.inputs
        with self.around():
            self.model(x, splits, scales).backward(dy)

    def measure_memory(self) -> int:
        self.model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        self.model.zero_grad()
        return peak

    def digest(self) -> list[torch.Tensor]:
        self.step()
        return [parameter.grad.detach().cpu() for parameter in self.model.parameters() if parameter.grad is not None]


NAMES = (
    "no offload",
    "te_offload",
    "te_offload, keep act_input",
    "Transformer Engine's context",
    "Transformer Engine's context, retain_pinned_cpu_buffers",
)


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 8),
        ("experts", 64),
        ("hidden", 2048),
        ("ffn", 1408),
        ("tokens", 32768),
        ("rounds", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--max-in-flight", default="512MiB")
    parser.add_argument("--fp8", action="store_true", help="under te.autocast with Float8CurrentScaling")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.offload_step needs a CUDA device; torch sees none here.")

    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(arguments.experts, generator=generator) + 0.5
    splits = (shares / shares.sum() * arguments.tokens).long()
    splits[-1] += arguments.tokens - splits.sum()
    rows = (arguments.tokens, arguments.hidden)
    inputs = (
        torch.randn(rows, device="cuda", dtype=torch.bfloat16).requires_grad_(),
        splits.cuda(),
        torch.rand(arguments.tokens, device="cuda", dtype=torch.bfloat16),
        torch.randn(rows, device="cuda", dtype=torch.bfloat16),
    )
    results: list[dict[str, Any]] = []
    variants = []
    reference: list[torch.Tensor] | None = None
    for name in NAMES:
        variant = Variant(name, arguments, inputs)
        for _ in range(2):
            variant.step()
        grads = variant.digest()
        reference = reference or grads
        same = all(torch.equal(a, b) for a, b in zip(reference, grads, strict=True))
        record = variant.session.records[-1] if variant.session else None
        results.append(
            {
                "name": name,
                "gradients_equal": same,
                "peak_bytes": variant.measure_memory(),
                "bytes_out": record.bytes_out if record else None,
                "copies_out": record.copies_out if record else None,
                "peak_in_flight": record.peak_in_flight if record else None,
                "times": [],
            }
        )
        variant.model.zero_grad()
        variants.append(variant)
    for _ in range(arguments.rounds):
        for variant, result in zip(variants, results, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            variant.step()
            torch.cuda.synchronize()
            result["times"].append(time.perf_counter() - start)
            variant.model.zero_grad()

    number = te_adapter.cublaslt_version()
    head = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": te_adapter.installed_version(),
        "cublaslt": f"{number // 10000}.{number // 100 % 100}",
        **{key: str(value) for key, value in vars(arguments).items() if key != "json"},
    }
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    print(
        f"{'variant':<58} {'ms, median':>10} {'(min':>8} {'max)':>8} {'peak MiB':>9} {'out MiB':>8} {'copies':>6} bits"
    )
    for result in results:
        times = sorted(1e3 * seconds for seconds in result["times"])
        out = "-" if result["bytes_out"] is None else f"{result['bytes_out'] / 2**20:.0f}"
        copies = "-" if result["copies_out"] is None else str(result["copies_out"])
        print(
            f"{result['name']:<58} {statistics.median(times):>10.2f} {times[0]:>8.2f} {times[-1]:>8.2f} "
            f"{result['peak_bytes'] / 2**20:>9.0f} {out:>8} {copies:>6} {'same' if result['gradients_equal'] else 'DIFFER'}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "setting": head, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
