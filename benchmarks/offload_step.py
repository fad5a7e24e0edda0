"""One training step of a stack of grouped MLPs: without offloading, with ours, with Transformer Engine's own context.

    ./run benchmarks.offload_step [--layers 8] [--tokens 32768] [--fp8] ...

All variants run in one process, interleaved; each time is the median over the rounds, of the host's clock around work
that ends with a synchronization. Transformer Engine's context offloads all layers but the last two (it cannot offload
all, and advises against all but one), with its defaults and with retain_pinned_cpu_buffers; ours all layers, the same
ones, and of these all but the slot `act_input`. The ops are ours in every variant but the first, so that Transformer
Engine's context profits from their marks too; a last variant shows it with plain te.ops. Peak memory is torch's, over
one step, less what was there before it. Gradients of every variant are compared with the first one's, bit for bit,
before anything is timed. Weight gradients go to fp32 `main_grad` buffers that exist before the step, as in Megatron,
so that the peak is that of activations.
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

    def __init__(self, arguments: argparse.Namespace, *, keep_act: bool, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = te.ops.GroupedLinear if plain else ops.GroupedLinear
        size: dict[str, Any] = {
            "bias": False,
            "device": "cuda",
            "dtype": torch.bfloat16,
            "accumulate_into_main_grad": True,
        }
        self.layers = torch.nn.ModuleList(
            te.ops.Sequential(
                linear(arguments.experts, arguments.hidden, arguments.ffn, **size),
                te.ops.ScaledSReLU() if plain else ops.ScaledSReLU(no_offload_activation=keep_act),
                linear(arguments.experts, arguments.ffn, arguments.hidden, **size),
            )
            for _ in range(arguments.layers)
        )
        self.wrap: Callable[[torch.nn.Module, Callable[[], torch.Tensor]], torch.Tensor] = lambda layer, run: run()

    def share(self, first: Stack | None) -> None:
        """Use the weights and `main_grad` buffers of the first stack, so that many variants fit on one card."""
        for parameter, other in zip(self.parameters(), (first or self).parameters(), strict=True):
            if first is None:
                parameter.main_grad = torch.zeros(parameter.shape, device="cuda")  # type: ignore[attr-defined]
            else:
                parameter.data, parameter.main_grad = other.data, other.main_grad  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, splits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.wrap(layer, lambda layer=layer, x=x: layer(x, splits, scales, splits))  # type: ignore[misc]
        return x


class Variant:
    """One way to run the step. ``step`` leaves gradients on the model."""

    def __init__(
        self, name: str, arguments: argparse.Namespace, inputs: tuple[torch.Tensor, ...], first: Stack | None
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.inputs = inputs
        self.model = Stack(arguments, keep_act="keep act_input" in name, plain="plain te.ops" in name)
        self.model.share(first)
        self.session: OffloadSession | None = None
        self.te_context: Any = None
        if name.startswith("te_offload"):
            layers = list(self.model.layers)[: -2 if "all but the last two" in name else None]
            self.session = OffloadSession(layers, max_in_flight=arguments.max_in_flight)
        elif "Transformer Engine's context" in name:
            context, sync = te.get_cpu_offload_context(
                enabled=True,
                num_layers=arguments.layers - 2,
                model_layers=arguments.layers,
                offload_activations=True,
                offload_weights=False,
                retain_pinned_cpu_buffers="retained" in name,
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
        self.inputs[0].grad = None
        x, splits, scales, dy = self.inputs
        with self.around():
            self.model(x, splits, scales).backward(dy)

    def measure_memory(self) -> int:
        self.inputs[0].grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def digest(self) -> list[torch.Tensor]:
        grads = [parameter.main_grad for parameter in self.model.parameters()]  # type: ignore[attr-defined]
        for grad in grads:
            grad.zero_()
        self.step()
        assert self.inputs[0].grad is not None
        return [grad.cpu() for grad in (*grads, self.inputs[0].grad)]


NAMES = (
    "plain te.ops, no offload",
    "no offload",
    "te_offload, all layers",
    "te_offload, all but the last two layers",
    "te_offload, all but the last two layers, keep act_input",
    "Transformer Engine's context, all but the last two layers",
    "Transformer Engine's context, the same, retained pinned buffers",
    "plain te.ops, Transformer Engine's context, the same",
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
    parser.add_argument("--max-in-flight", default="256MiB")
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
    variants: list[Variant] = []
    reference: list[torch.Tensor] | None = None
    for name in NAMES:
        variant = Variant(name, arguments, inputs, variants[0].model if variants else None)
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
        variants.append(variant)
    for _ in range(arguments.rounds):
        for variant, result in zip(variants, results, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            variant.step()
            torch.cuda.synchronize()
            result["times"].append(time.perf_counter() - start)

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
        f"{'variant':<66} {'ms, median':>10} {'(min':>8} {'max)':>8} {'peak MiB':>9} {'out MiB':>8} {'copies':>6} bits"
    )
    for result in results:
        times = sorted(1e3 * seconds for seconds in result["times"])
        out = "-" if result["bytes_out"] is None else f"{result['bytes_out'] / 2**20:.0f}"
        copies = "-" if result["copies_out"] is None else str(result["copies_out"])
        print(
            f"{result['name']:<66} {statistics.median(times):>10.2f} {times[0]:>8.2f} {times[-1]:>8.2f} "
            f"{result['peak_bytes'] / 2**20:>9.0f} {out:>8} {copies:>6} {'same' if result['gradients_equal'] else 'DIFFER'}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "setting": head, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
