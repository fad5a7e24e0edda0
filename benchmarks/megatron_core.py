"""A mixture-of-experts language model of Megatron-core's: its own experts and offloading, beside our experts and a session.

    ./run benchmarks.megatron_core [--layers 8] [--sequence 4096] [--fp8 RECIPE] [--rounds 10] [--only TEXT ...]

One GPU, one rank, Megatron-core's `GPTModel` with Transformer Engine's modules, its router, its dispatcher (alltoall,
permuted by Transformer Engine's kernels), rotary positions and SwiGLU experts. Parameters are the same ones in every way,
and gradients go into the float32 ``main_grad`` buffers of its DistributedDataParallel, by Transformer Engine's modules and
by our ops themselves. A step is one microbatch in `get_forward_backward_func()`'s schedule, timed from an idle GPU to an
idle GPU, without the optimizer; all ways take their turns in each round. The manager of Megatron-core's
``fine_grained_activation_offloading`` has its warm-up behind it, and each way one of its own. ``bits``: whether the loss,
and the sum of the bits of every gradient, are those of the same experts without offloading. ``peak`` is over what torch
had allocated at the step's begin; ``between steps`` is what is freed with a way: quantized weights that it kept.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.stack_runs import setting
from te_offload import OffloadSession
from te_offload.megatron import GroupedMLP

VOCABULARY = 32_768
EXPERTS = ("expert_fc1", "moe_act")
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
WARM = 4


class Shape(NamedTuple):
    """Sizes of the model and of a step."""

    layers: int
    experts: int
    top: int
    hidden: int
    ffn: int
    heads: int
    sequence: int


class Way(NamedTuple):
    """Whose experts, and what goes or is computed again.

    Attributes:
        ours: our experts. modules: that Megatron-core's manager offloads. again: what it computes again.
        session: around what one is, and offloads what that saves: ``"layers"`` or ``"experts"``; empty: there is none.
        fc1_again: `recompute_act_input`. weights_again: no `keep_quantized_weight`; in FP8 alone.
    """

    name: str
    ours: bool = False
    modules: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    session: str = ""
    fc1_again: bool = False
    weights_again: bool = False


WAYS = (
    Way("Megatron-core's experts"),
    Way("its manager: experts", modules=EXPERTS),
    Way("its manager: experts; activation again", modules=EXPERTS, again=("moe_act",)),
    Way("its manager: experts, attention; activation again", modules=(*EXPERTS, *ATTENTION), again=("moe_act",)),
    Way("all but attention again", again=("moe", "layernorm")),
    Way("our experts", ours=True),
    Way("our experts, a session: experts", ours=True, session="experts"),
    Way("our experts, its manager: attention, a session: experts", ours=True, session="experts", modules=ATTENTION),
    Way("our experts, a session: layers", ours=True, session="layers"),
    Way("our experts, a session: layers; norms again", ours=True, session="layers", again=("layernorm",)),
    Way("our experts, a session: layers; FC1 again", ours=True, session="layers", fc1_again=True),
    Way("our experts; quantized weights again", ours=True, weights_again=True),
    Way(
        "our experts, a session: layers; FC1, quantized weights again",
        ours=True,
        session="layers",
        fc1_again=True,
        weights_again=True,
    ),
)


class Experts(GroupedMLP):
    """With gradients into ``main_grad``, for which Megatron-core's output layer would need Apex if the config said so."""

    def __init__(self, number: int, config: Any, *args: Any, **keywords: Any) -> None:
        config = copy.copy(config)
        config.gradient_accumulation_fusion = True
        super().__init__(number, config, *args, **keywords)


def make_model(shape: Shape, way: Way, fp8: str | None) -> Any:
    """With parameters of its own. ``fp8``: the recipe, as Megatron-core calls it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    again = {"recompute_granularity": "selective", "recompute_modules": list(way.again)} if way.again else {}
    offloading = (
        {"fine_grained_activation_offloading": True, "offload_modules": list(way.modules)} if way.modules else {}
    )
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top,
        moe_ffn_hidden_size=shape.ffn,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=True,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,  # of its output layer
        fp8=None if fp8 is None else "e4m3" if fp8 == "blockwise" else "hybrid",
        **({} if fp8 is None else {"fp8_recipe": fp8}),
        **again,
        **offloading,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=shape.experts, moe_grouped_gemm=True)
    if way.ours:
        spec.submodules.mlp.submodules.experts = ModuleSpec(
            module=Experts,
            params={"recompute_act_input": way.fc1_again, "keep_quantized_weight": not way.weights_again},
        )
    model = GPTModel(config, spec, VOCABULARY, shape.sequence, position_embedding_type="rope").cuda()
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    return model


def share(model: Any, first: dict[str, torch.nn.Parameter]) -> None:
    """Have a model use the parameters of the first one."""
    for prefix, module in model.named_modules():
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                full = f"{prefix}.{name}" if prefix else name
                assert module._parameters[name].shape == first[full].shape, full
                module._parameters[name] = first[full]


class Variant:
    """A way, ready to run.

    Args:
        first: the parameters that all share. batch: words (1, sequence), as are the positions.
    """

    def __init__(
        self, way: Way, shape: Shape, fp8: str | None, first: dict[str, torch.nn.Parameter], batch: torch.Tensor
    ) -> None:
        from megatron.core.pipeline_parallel import fine_grained_activation_offload, get_forward_backward_func

        self.way = way
        self._batch, self._positions = batch, torch.arange(shape.sequence, device="cuda")[None]
        self._schedule = get_forward_backward_func()
        self._managers = fine_grained_activation_offload.PipelineOffloadManager
        self._manager: Any = None  # of this way; Megatron-core has one for all
        self.model = make_model(shape, way, fp8)
        share(self.model, first)
        self.session: OffloadSession | None = None
        if way.session:
            layers = self.model.decoder.layers
            around = layers if way.session == "layers" else [layer.mlp.experts for layer in layers]
            self.session = OffloadSession(around)

    def _forward_step(self, _: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        loss = model(self._batch, self._positions, None, labels=self._batch)
        return loss, lambda found: (found.mean(), {"loss": found.detach().mean()})

    def _run(self) -> torch.Tensor:
        (found,) = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=None,
            model=self.model,
            num_microbatches=1,
            seq_length=self._batch.shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
        loss: torch.Tensor = found["loss"]
        return loss

    def step(self) -> torch.Tensor:
        """The loss."""
        self._managers.OFFLOAD_MGR = self._manager
        if self.session is None:
            loss = self._run()
        else:
            with self.session.step():
                loss = self._run()
        self._manager = self._managers.OFFLOAD_MGR
        return loss

    def bytes_out(self) -> int:
        """Of the last step."""
        ours = 0 if self.session is None else self.session.records[-1].bytes_out
        return ours + (self._manager.offload_summary_total_bytes if self.way.modules else 0)


def warmed_up(
    way: Way,
    make: Callable[[Way], Variant],
    parallel: Any,
    parameters: dict[str, Any],
    kept: dict[bool, tuple[torch.Tensor, list[torch.Tensor]]],
) -> tuple[Variant | None, dict[str, Any]]:
    """A way and its row, but for its times: loss, bits against those that are ``kept``, bytes; or why it fails."""
    row: dict[str, Any] = {**way._asdict(), "ms": []}
    gc.collect()
    try:
        variant = make(way)
        for _ in range(WARM):
            parallel.zero_grad_buffer()
            loss = variant.step()
        gradients = [parameter.main_grad.view(torch.int32).sum(dtype=torch.int64) for parameter in parameters.values()]
        parallel.zero_grad_buffer()
        torch.cuda.synchronize()
        gc.collect()  # the parameters that it was made with
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        variant.step()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:  # of what Transformer Engine cannot multiply, Megatron-core not combine
        return None, {**row, "error": str(error).splitlines()[0]}
    row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    expected, of_expected = kept.setdefault(variant.way.ours, (loss, gradients))
    same = torch.equal(loss, expected) and all(map(torch.equal, gradients, of_expected))
    return variant, {**row, "loss": loss.item(), "same_bits": same}


def measure(shape: Shape, fp8: str | None, rounds: int, only: Sequence[str]) -> list[dict[str, Any]]:
    """Every way's times, peak and bytes."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29537", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    owner = make_model(shape, WAYS[0], fp8)
    parallel = DistributedDataParallel(owner.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), owner)
    first = dict(owner.named_parameters())
    words = torch.randint(
        VOCABULARY, (1, shape.sequence), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    kept: dict[bool, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    plain = {WAYS[0].name, "our experts"}  # to which the others are compared
    chosen = [
        way
        for way in WAYS
        if not (way.weights_again and fp8 is None)
        and (not only or way.name in plain or any(text in way.name for text in only))
    ]
    found = [
        warmed_up(way, lambda way: Variant(way, shape, fp8, first, words), parallel, first, kept) for way in chosen
    ]
    rows = [row for _, row in found]
    running = [(variant, row) for variant, row in found if variant is not None]
    found.clear()
    gc.collect()
    gc.freeze()
    gc.disable()  # as Megatron-LM (--manual-gc) trains: garbage is collected between steps
    for number in range(rounds):
        for variant, row in running[:: 1 if number % 2 == 0 else -1]:
            parallel.zero_grad_buffer()
            gc.collect()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            variant.step()
            torch.cuda.synchronize()
            row["ms"].append((time.perf_counter() - begin) * 1e3)
    gc.unfreeze()
    while running:
        variant, row = running.pop()
        row["bytes_out"] = variant.bytes_out()
        if variant.session is not None:
            variant.session.close()
        before = torch.cuda.memory_allocated()
        del variant
        gc.collect()
        row["between_bytes"] = before - torch.cuda.memory_allocated()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return rows


def table(shape: Shape, fp8: str | None, rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    head = ", ".join(f"{name} {size}" for name, size in shape._asdict().items())
    lines = [
        f"{head}; {'bf16' if fp8 is None else 'FP8, ' + fp8}.",
        "",
        "| way | ms, median (min, max) | peak MiB | between steps | MiB out | loss | bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['name']} | fails: {row['error']} | | | | | |")
            continue
        times = f"{statistics.median(row['ms']):.1f} ({min(row['ms']):.1f}, {max(row['ms']):.1f})"
        sizes = " | ".join(f"{row[kind] / 2**20:.0f}" for kind in ("peak_bytes", "between_bytes", "bytes_out"))
        bits = "same" if row["same_bits"] else "DIFFER"
        lines.append(f"| {row['name']} | {times} | {sizes} | {row['loss']:.5f} | {bits} |")
    return "\n".join(lines)


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {
        "layers": 8,
        "experts": 64,
        "top": 8,
        "hidden": 2048,
        "ffn": 1408,
        "heads": 16,
        "sequence": 4096,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--fp8", choices=("tensorwise", "blockwise", "delayed"), help="the recipe of Megatron-core's --fp8-recipe"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        help="the two without offloading, and those with one of these texts in their names",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device; torch sees none here.")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    warnings.simplefilter("ignore")  # of packages that Megatron-core would like to find
    shape = Shape(*(getattr(arguments, name) for name in Shape._fields))
    head = setting(arguments.rounds)
    print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    rows = measure(shape, arguments.fp8, arguments.rounds, arguments.only)
    print("\n" + table(shape, arguments.fp8, rows), flush=True)
    if arguments.json:
        found = {"schema": "1.2", "setting": head, "shape": shape._asdict(), "fp8": arguments.fp8, "results": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
