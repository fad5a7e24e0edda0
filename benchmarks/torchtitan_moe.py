"""A stack of torchtitan's MoE layers: its own experts, stock and fused, beside ours and a session.

    ./run benchmarks.torchtitan_moe [--layers 8] [--tokens 4096] [--rounds 10] [--only TEXT ...]

One GPU, torchtitan 0.3.0's `MoE` (its router, its dispatcher of one rank) in bf16, each layer added to its input; no
attention and no norms, since torchtitan's models need a newer torch than this package's tests have. Its experts are the
stock `GroupedExperts`, its ``fused_grouped_experts`` override, those of its `Float8GroupedExpertsConverter` with the
dispatcher that this brings (FP8 with a scale a row; needs torchao), or ours; ours and the fused ones have the same
parameters. Layers may be within torch's checkpoint, as torchtitan's full activation checkpointing has them, or compiled as
its `apply_compile` has blocks (``fullgraph=True``), and then in inductor's CUDA graphs (``mode="reduce-overhead"``), which
torchtitan does not ask for. A step is a forward and a backward from an idle GPU to an idle GPU; ways take turns in
each round. ``peak`` is over what torch had allocated at the step's begin; what is in CUDA graphs has its memory for good,
and no peak. A gradient is given up as soon as it is there, as FSDP does with whole ones. Bits are not compared: torch adds
up rows of a token in any order, with and without us; tests compare them with two experts a token, where none matters.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from benchmarks.stack_runs import parser_of_sizes, setting
from te_offload import OffloadSession

WARM = 4


class Shape(NamedTuple):
    """Sizes of the stack and of a step."""

    layers: int
    experts: int
    top: int
    dim: int
    ffn: int
    tokens: int


class Way(NamedTuple):
    """Whose experts, and what goes or is computed again.

    Attributes:
        experts: ``"stock"``, ``"fused"`` or ``"float8"``, torchtitan's, or ``"ours"``. again: layers are within torch's
            checkpoint.
        session: around what one is, ``"layers"`` or ``"experts"``. planned: its policy. fc1_again: `recompute_act_input`.
        recipe: of ours. compiled: each layer. graphs: in inductor's CUDA graphs.
    """

    name: str
    experts: str
    again: bool = False
    session: str = ""
    planned: bool = False
    fc1_again: bool = False
    recipe: str | None = None
    compiled: bool = False
    graphs: bool = False


WAYS = (
    Way("torchtitan's experts", "stock"),
    Way("torchtitan's experts, layers again", "stock", again=True),
    Way("torchtitan's fused experts", "fused"),
    Way("torchtitan's fused experts, layers again", "fused", again=True),
    Way("torchtitan's experts, compiled", "stock", compiled=True),
    Way("torchtitan's fused experts, compiled", "fused", compiled=True),
    Way("torchtitan's experts in CUDA graphs", "stock", compiled=True, graphs=True),
    Way("our experts in CUDA graphs", "ours", compiled=True, graphs=True),
    Way("our experts in FP8 in CUDA graphs", "ours", recipe="fp8", compiled=True, graphs=True),
    Way("torchtitan's experts, compiled, layers again", "stock", compiled=True, again=True),
    Way("our experts, compiled, layers again", "ours", compiled=True, again=True),
    Way("torchtitan's FP8 experts", "float8"),
    Way("torchtitan's FP8 experts, compiled", "float8", compiled=True),
    Way("our experts", "ours"),
    Way("our experts, compiled", "ours", compiled=True),
    Way("our experts, compiled, FC1 again", "ours", compiled=True, fc1_again=True),
    Way("our experts, compiled, a session: layers", "ours", compiled=True, session="layers"),
    Way("our experts, compiled, FC1 again, a session: layers", "ours", compiled=True, fc1_again=True, session="layers"),
    Way(
        "our experts, compiled, FC1 again, a session: layers, planned",
        "ours",
        compiled=True,
        fc1_again=True,
        session="layers",
        planned=True,
    ),
    Way("our experts in FP8", "ours", recipe="fp8"),
    Way("our experts in FP8, FC1 again", "ours", recipe="fp8", fc1_again=True),
    Way("our experts in FP8, compiled", "ours", recipe="fp8", compiled=True),
    Way("our experts in FP8, compiled, FC1 again", "ours", recipe="fp8", compiled=True, fc1_again=True),
    Way("our experts in FP8 by blocks", "ours", recipe="fp8-block"),
    Way("our experts in FP8 by blocks, compiled", "ours", recipe="fp8-block", compiled=True),
    Way("our experts, layers again", "ours", again=True),
    Way("our experts, FC1 again", "ours", fc1_again=True),
    Way("our experts, a session: experts", "ours", session="experts"),
    Way("our experts, a session: experts, planned; FC1 again", "ours", session="experts", planned=True, fc1_again=True),
    Way("our experts, a session: layers", "ours", session="layers"),
    Way("our experts, a session: layers, planned", "ours", session="layers", planned=True),
    Way("our experts, a session: layers, planned; FC1 again", "ours", session="layers", planned=True, fc1_again=True),
)


def fill(parameter: torch.Tensor) -> None:
    """With small numbers."""
    torch.nn.init.normal_(parameter, std=0.02)


def give_up_gradient(parameter: torch.Tensor) -> None:
    """As FSDP does, which has reduced it then."""
    parameter.grad = None


def make_layers(shape: Shape, way: Way, first: dict[str, torch.nn.Parameter], device: str) -> torch.nn.ModuleList:
    """MoE layers, with parameters of their own, or those of the first layers that had their names."""
    from torchtitan.models.common.config_utils import make_routed_experts_config
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
    from torchtitan.overrides.fused_swiglu import fused_grouped_experts

    from te_offload.torchtitan import grouped_experts

    layers = torch.nn.ModuleList()
    for number in range(shape.layers):
        routed = make_routed_experts_config(
            dim=shape.dim,
            hidden_dim=shape.ffn,
            num_experts=shape.experts,
            top_k=shape.top,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), fill),
            comm_backend="standard",
        )
        if way.experts == "fused":
            routed.inner_experts = fused_grouped_experts(routed.inner_experts)
        elif way.experts == "ours":
            ways: dict[str, Any] = {"recompute_act_input": way.fc1_again, "recipe": way.recipe}
            routed.inner_experts = grouped_experts(routed.inner_experts, **ways)
        gate = Linear.Config(in_features=shape.dim, out_features=shape.experts, param_init={"weight": fill})
        config = MoE.Config(
            num_experts=shape.experts,
            routed_experts=routed,
            router=TokenChoiceTopKRouter.Config(num_experts=shape.experts, gate=gate, top_k=shape.top),
            load_balance_coeff=None,
        )
        if way.experts == "float8":
            from torchtitan.components.quantization import float8

            converter = float8.Float8GroupedExpertsConverter
            config = converter(converter.Config(model_compile_enabled=way.compiled)).convert(config)
        with torch.device("meta"):
            layer = config.build()
        known = all(f"{number}.{name}" in first for name, _ in layer.named_parameters())
        if not known:
            layer.to(torch.bfloat16).to_empty(device=device)
            layer.init_states(buffer_device=torch.device(device))
            for name, parameter in layer.named_parameters():
                parameter.register_post_accumulate_grad_hook(give_up_gradient)
                first[f"{number}.{name}"] = parameter
        for prefix, module in layer.named_modules():
            for name in [name for name, parameter in module._parameters.items() if parameter is not None]:
                module._parameters[name] = first[".".join(filter(None, (str(number), prefix, name)))]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.zeros_like(buffer, device=device)
        if way.compiled:
            if way.again:
                layer = checkpoint_wrapper(layer, preserve_rng_state=False)
            layer.compile(fullgraph=True, mode="reduce-overhead" if way.graphs else None)
        layers.append(layer)
    return layers


class Variant:
    """A way, ready to run. ``x``: (1, tokens, dim); ``grad``: of the output."""

    def __init__(
        self, way: Way, shape: Shape, first: dict[str, torch.nn.Parameter], x: torch.Tensor, grad: torch.Tensor
    ) -> None:
        self.way, self._x, self._grad = way, x, grad
        self.layers = make_layers(shape, way, first, x.device.type)
        policy = "planned" if way.planned else None
        self.session: OffloadSession | None = None
        if way.session:
            layers: list[Any] = list(self.layers)
            around = layers if way.session == "layers" else [layer.routed_experts.inner_experts for layer in layers]
            self.session = OffloadSession(around, policy=policy)

    def _run(self) -> None:
        if self.way.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        h = self._x
        for layer in self.layers:
            again = self.way.again and not self.way.compiled
            h = h + (checkpoint(layer, h, use_reentrant=False) if again else layer(h))
        h.backward(self._grad)

    def step(self) -> None:
        """Forward and backward."""
        with contextlib.nullcontext() if self.session is None else self.session.step():
            self._run()


def measure(shape: Shape, rounds: int, only: Sequence[str]) -> list[dict[str, Any]]:
    """Every way's times, peak and bytes."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = 1, shape.tokens, shape.dim
    x, grad = (torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    x.requires_grad_()
    parameters: dict[str, dict[str, torch.nn.Parameter]] = {"stock": {}, "fused": {}, "float8": {}}
    rows, running = [], []
    for way in WAYS:
        if only and not any(text in way.name for text in only) and way.name not in (WAYS[0].name, "our experts"):
            continue
        if way.experts == "float8" and find_spec("torchao") is None:
            print(f"{way.name}: not run, torchao is not installed here.")
            continue
        variant = Variant(way, shape, parameters[way.experts if way.experts in parameters else "fused"], x, grad)
        for _ in range(WARM):
            variant.step()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        variant.step()
        torch.cuda.synchronize()
        row: dict[str, Any] = {**way._asdict(), "ms": [], "peak_bytes": torch.cuda.max_memory_allocated() - before}
        row["bytes_out"] = 0 if variant.session is None else variant.session.records[-1].bytes_out
        rows.append(row)
        running.append((variant, row))
    gc.collect()
    gc.freeze()
    gc.disable()  # as torchtitan trains: garbage is collected between steps
    for number in range(rounds):
        for variant, row in running[:: 1 if number % 2 == 0 else -1]:
            gc.collect()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            variant.step()
            torch.cuda.synchronize()
            row["ms"].append((time.perf_counter() - begin) * 1e3)
    for variant, _ in running:
        if variant.session is not None:
            variant.session.close()
    return rows


def table(shape: Shape, rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        ", ".join(f"{name} {size}" for name, size in shape._asdict().items()) + "; bf16.",
        "",
        "| way | ms, median (min, max) | peak MiB | MiB out |",
        "|---|---|---|---|",
    ]
    for row in rows:
        times = f"{statistics.median(row['ms']):.1f} ({min(row['ms']):.1f}, {max(row['ms']):.1f})"
        sizes = " | ".join(f"{row[kind] / 2**20:.0f}" for kind in ("peak_bytes", "bytes_out"))
        if row["graphs"]:
            sizes = " | ".join(("in the graphs", sizes.split(" | ")[1]))
        lines.append(f"| {row['name']} | {times} | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    """Run, print a table, write JSON if asked."""
    sizes = {"layers": 8, "experts": 64, "top": 8, "dim": 2048, "ffn": 1408, "tokens": 4096}
    parser = parser_of_sizes(__doc__, "torchtitan's and our experts without offloading", sizes)
    arguments = parser.parse_args()
    del sys.argv[1:]  # inductor looks for --only there, for the name of a program, and writes it into code
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device; torch sees none here.")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    warnings.simplefilter("ignore")
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan's apply_compile
    torch._dynamo.config.recompile_limit = len(WAYS)  # each way's layers are compiled once
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # of newer torches: a compiler's question, no here
        torch.compiler._is_non_strict_tracing = lambda: False  # type: ignore[attr-defined]
    shape = Shape(*(getattr(arguments, name) for name in Shape._fields))
    head = setting(arguments.rounds)
    rows = measure(shape, arguments.rounds, arguments.only)
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    print("\n" + table(shape, rows), flush=True)
    if arguments.json:
        found = {"schema": "1.0", "setting": head, "shape": shape._asdict(), "results": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
