"""A mixture-of-experts language model of Megatron-core's: its own experts and offloading, beside our experts and a session.

    ./run benchmarks.megatron_core [--layers 8] [--sequence 4096] [--fp8 RECIPE] [--rounds 10] [--only TEXT ...]
    ./run torch.distributed.run --nproc-per-node 2 -m benchmarks.megatron_core --microbatches 4

Megatron-core's `GPTModel` with Transformer Engine's modules, its router, its dispatcher (alltoall, permuted by Transformer
Engine's kernels), rotary positions and SwiGLU experts, on one GPU, or on several of one host that share the experts
(expert parallelism), each with microbatches of its own. Parameters are the same ones in every way, and gradients go into
the float32 ``main_grad`` buffers of its DistributedDataParallel, by Transformer Engine's modules and by our ops themselves.
A step is all microbatches in `get_forward_backward_func()`'s schedule, timed from idle GPUs to idle GPUs, without the
optimizer and what data parallelism reduces; all ways take their turns in each round. Where there are several ranks, some
ways are in the schedule that runs layers of one microbatch between those of another's backward
(``overlap_moe_expert_parallel_comm`` with ``delay_wgrad_compute``); times, peaks and bytes are the most of any rank.

The manager of Megatron-core (``fine_grained_activation_offloading``) has its warm-up behind it, as each way has.
``bits``: whether the loss, and the sum of the bits of every gradient, are those of the same experts without offloading.
``peak`` is over what torch had allocated at the step's begin; ``between steps`` is what is freed with a way: quantized
weights that it kept.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.stack_runs import parser_of_sizes, setting
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
        planned: its policy, which keeps the last slots that could not be back in time; else all go.
        fc1_again: `recompute_act_input`. weights_again: no `keep_quantized_weight`; in FP8 alone.
        overlapped: microbatches, layer by layer; with several ranks alone. Layers are never called there, so that a session
            around them is around attention and experts.
    """

    name: str
    ours: bool = False
    modules: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    session: str = ""
    planned: bool = False
    fc1_again: bool = False
    weights_again: bool = False
    overlapped: bool = False


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
    Way("our experts, a session: layers, planned", ours=True, session="layers", planned=True),
    Way("our experts, a session: layers; norms again", ours=True, session="layers", again=("layernorm",)),
    Way("our experts, a session: layers; FC1 again", ours=True, session="layers", fc1_again=True),
    Way(
        "our experts, a session: layers, planned; FC1 again", ours=True, session="layers", planned=True, fc1_again=True
    ),
    Way("our experts; quantized weights again", ours=True, weights_again=True),
    Way(
        "our experts, a session: layers; FC1, quantized weights again",
        ours=True,
        session="layers",
        fc1_again=True,
        weights_again=True,
    ),
    Way("Megatron-core's experts, overlapped", overlapped=True),
    Way("its manager: experts; overlapped", modules=EXPERTS, overlapped=True),
    Way("its manager: experts, attention; overlapped", modules=(*EXPERTS, *ATTENTION), overlapped=True),
    Way("our experts, overlapped", ours=True, overlapped=True),
    Way("our experts, a session: experts; overlapped", ours=True, session="experts", overlapped=True),
    Way("our experts, a session: layers; overlapped", ours=True, session="layers", overlapped=True),
    Way("our experts, FC1 again; overlapped", ours=True, fc1_again=True, overlapped=True),
    Way(
        "our experts, a session: layers; FC1 again; overlapped",
        ours=True,
        session="layers",
        fc1_again=True,
        overlapped=True,
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
    overlap = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True} if way.overlapped else {}
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top,
        expert_model_parallel_size=dist.get_world_size(),
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
        **overlap,
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
        first: the parameters that all share. batches: of each microbatch, words (1, sequence), as are the positions.
    """

    def __init__(
        self, way: Way, shape: Shape, fp8: str | None, first: dict[str, torch.nn.Parameter], batches: list[torch.Tensor]
    ) -> None:
        from megatron.core.pipeline_parallel import fine_grained_activation_offload, get_forward_backward_func

        self.way = way
        self._batches, self._positions = batches, torch.arange(shape.sequence, device="cuda")[None]
        self._schedule = get_forward_backward_func()
        self._managers = fine_grained_activation_offload.PipelineOffloadManager
        self._manager: Any = None  # of this way; Megatron-core has one for all
        self.model = make_model(shape, way, fp8)
        share(self.model, first)
        self.session: OffloadSession | None = None
        if way.session:
            layers = self.model.decoder.layers
            around = layers if way.session == "layers" else [layer.mlp.experts for layer in layers]
            if way.session == "layers" and way.overlapped:
                around = [part for layer in layers for part in (layer.self_attention, layer.mlp.experts)]
            self.session = OffloadSession(around, policy="planned" if way.planned else None)

    def _forward_step(
        self, batches: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[[torch.Tensor], Any]]:
        batch = next(batches)
        call = model.build_schedule_plan if return_schedule_plan else model
        found = call(batch, self._positions, None, labels=batch)
        return found, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    def _run(self) -> torch.Tensor:
        found = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=iter(self._batches),
            model=self.model,
            num_microbatches=len(self._batches),
            seq_length=self._batches[0].shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
        return torch.stack([each["loss"] for each in found]).mean()

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
    row["peak_bytes"] = most(torch.cuda.max_memory_allocated() - before)
    expected, of_expected = kept.setdefault(variant.way.ours, (loss, gradients))
    same = torch.equal(loss, expected) and all(map(torch.equal, gradients, of_expected))
    return variant, {**row, "loss": loss.item(), "same_bits": most(not same) == 0}


def most(of_rank: float) -> float:
    """The largest number of any rank."""
    if dist.get_world_size() == 1:
        return of_rank
    found = torch.empty(dist.get_world_size(), dtype=torch.float64, device="cuda")
    dist.all_gather_into_tensor(found, torch.tensor([of_rank], dtype=torch.float64, device="cuda"))
    return float(found.amax())


def measure(
    shape: Shape, fp8: str | None, rounds: int, only: Sequence[str], microbatches: int = 1
) -> list[dict[str, Any]]:
    """Every way's times, peak and bytes. In a process of ``torch.distributed.run``, or in one by itself."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(rank)
    meeting = "env://" if ranks > 1 else "tcp://127.0.0.1:29537"
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    owner = make_model(shape, WAYS[0], fp8)
    parallel = DistributedDataParallel(owner.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), owner)
    first = dict(owner.named_parameters())
    generator = torch.Generator("cuda").manual_seed(rank)
    size = (microbatches, 1, shape.sequence)
    words = list(torch.randint(VOCABULARY, size, device="cuda", generator=generator))
    kept: dict[bool, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    plain = {WAYS[0].name, "our experts"}  # to which the others are compared
    chosen = [
        way
        for way in WAYS
        if not (way.weights_again and fp8 is None)
        and not (way.overlapped and ranks == 1)
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
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            variant.step()
            torch.cuda.synchronize()
            row["ms"].append(most((time.perf_counter() - begin) * 1e3))
    gc.unfreeze()
    while running:
        variant, row = running.pop()
        row["bytes_out"] = most(variant.bytes_out())
        if variant.session is not None:
            variant.session.close()
        before = torch.cuda.memory_allocated()
        del variant
        gc.collect()
        row["between_bytes"] = most(before - torch.cuda.memory_allocated())
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return rows


def table(
    shape: Shape, fp8: str | None, rows: Sequence[dict[str, Any]], *, ranks: int = 1, microbatches: int = 1
) -> str:
    """As Markdown."""
    head = ", ".join(f"{name} {size}" for name, size in shape._asdict().items())
    lines = [
        f"{head}; {'bf16' if fp8 is None else 'FP8, ' + fp8}; ranks {ranks}, microbatches of each {microbatches}.",
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
    sizes = {"layers": 8, "experts": 64, "top": 8, "hidden": 2048, "ffn": 1408, "heads": 16, "sequence": 4096}
    parser = parser_of_sizes(__doc__, "the two without offloading", sizes)
    parser.add_argument(
        "--fp8", choices=("tensorwise", "blockwise", "delayed"), help="the recipe of Megatron-core's --fp8-recipe"
    )
    parser.add_argument("--microbatches", type=int, default=1, help="of each rank, in a step")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device; torch sees none here.")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    warnings.simplefilter("ignore")  # of packages that Megatron-core would like to find
    shape = Shape(*(getattr(arguments, name) for name in Shape._fields))
    head = setting(arguments.rounds)
    of_run = {"ranks": int(os.environ.get("WORLD_SIZE", "1")), "microbatches": arguments.microbatches}
    rows = measure(shape, arguments.fp8, arguments.rounds, arguments.only, arguments.microbatches)
    if int(os.environ.get("RANK", "0")) > 0:
        return
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    print("\n" + table(shape, arguments.fp8, rows, **of_run), flush=True)
    if arguments.json:
        found = {"setting": head, "shape": shape._asdict(), "fp8": arguments.fp8, **of_run, "results": rows}
        arguments.json.write_text(json.dumps({"schema": "1.3"} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
