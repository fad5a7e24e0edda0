"""A small language model of Megatron-core's with our experts or its own, its losses and gradients.

In: a device, whose experts. Out: a model, and what training steps of it give. Keeps true: the process has a
rank, which is there inside of `groups` alone. Does not: run Megatron-core's CUDA kernels on a CPU; there the attention,
and the norms, are torch's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from te_offload import OffloadSession
from te_offload.megatron import GroupedMLP
from tests.support.megatron_on_cpu import Attention, Norm, on_the_cpu

EXPERTS, HIDDEN, FFN, LAYERS, SEQUENCE, BATCH, WORDS = 4, 128, 128, 3, 64, 2, 128
TOP = 2


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Megatron-core warns of each package that it would have liked to find."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def groups(meeting: Path, device: str, rank: int = 0, ranks: int = 1, **sizes: int) -> Iterator[None]:
    """Megatron-core's groups, of this process alone if not told else.

    Args:
        meeting: a file that is not there yet. sizes: of `initialize_model_parallel`.
    """
    with quietly():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random as their_random
        from megatron.core.transformer.moe import moe_utils

        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        parallel_state.initialize_model_parallel(**sizes)
        if device != "cpu":
            their_random.model_parallel_cuda_manual_seed(1)
        here = on_the_cpu(reduces="tensor_model_parallel_size" in sizes)
        try:
            with here if device == "cpu" else contextlib.nullcontext():
                yield
        finally:
            their_random.get_cuda_rng_tracker().reset()
            moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of a schedule, by its shape
            moe_utils.get_moe_layer_wise_logging_tracker().clear()  # by the number of layers
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


AGAIN: dict[str, dict[str, Any]] = {
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "experts with router": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "layers": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
"""What Megatron-core computes again, as settings."""


def make_config(device: str, **settings: Any) -> Any:
    """Of a small model. ``settings``: others, or more of them."""
    with quietly():
        from megatron.core.transformer.transformer_config import TransformerConfig

    on_cpu = device == "cpu"
    sizes: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "moe_ffn_hidden_size": FFN,
    }
    of_router = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP, "moe_aux_loss_coeff": 0.01}
    of_bf16 = {"params_dtype": torch.bfloat16, "bf16": True}
    plain = {"add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    with quietly():
        return TransformerConfig(
            **{
                "moe_grouped_gemm": True,
                "moe_token_dispatcher_type": "allgather" if on_cpu else "alltoall",
                "gated_linear_unit": True,
                "activation_func": torch.nn.functional.silu,
                "bias_dropout_fusion": not on_cpu,
                "use_cpu_initialization": on_cpu,
                "gradient_accumulation_fusion": False,
                **sizes,
                **of_router,
                **of_bf16,
                **plain,
                **settings,
            }
        )


def make_spec(device: str, config: Any) -> Any:
    """Of its layers, with Megatron-core's own experts; on a CPU ungrouped ones if ``config`` says so."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.spec_utils import ModuleSpec

    size = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if device != "cpu":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**size)
    with quietly():
        spec = gpt_layer_specs.get_gpt_layer_local_spec(**size)
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=Attention)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return spec


def names_taken(device: str, config: Any) -> dict[str, Any]:
    """What the docs' code takes for granted of Megatron-core."""
    with quietly():
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.spec_utils import ModuleSpec

    def gpt_model(*args: Any) -> Any:  # its other positions are in float32, for which Megatron-core has a wrapper
        return GPTModel(*args, position_embedding_type="rope")

    return {
        "GPTModel": gpt_model,
        "ModuleSpec": ModuleSpec,
        "get_gpt_layer_with_transformer_engine_spec": lambda **_: make_spec(device, config),
        "vocab_size": WORDS,
        "max_sequence_length": SEQUENCE,
        "config": config,
    }


def make_model(
    device: str,
    config: Any,
    *,
    ours: bool = True,
    experts: type[GroupedMLP] = GroupedMLP,
    of_model: dict[str, Any] | None = None,
    **keywords: Any,
) -> Any:
    """With `te_offload.megatron.GroupedMLP`, which takes the ``keywords``, or Megatron-core's own experts.

    Args:
        experts: ours. of_model: of `GPTModel`: which chunk it is of a pipeline.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    torch.manual_seed(0)
    place = of_model or {}
    spec = make_spec(device, config)
    if ours:
        spec.submodules.mlp.submodules.experts = ModuleSpec(module=experts, params=keywords)
    return GPTModel(config, spec, WORDS, SEQUENCE, position_embedding_type="rope", **place).to(device)


def name_in_ours(name: str) -> str:
    """Of a parameter of Megatron-core's ungrouped experts, ``local_experts.N.linear_fc1.weight``; others' are the same."""
    before, found, rest = name.partition("local_experts.")
    if not found:
        return name
    expert, linear, kind = rest.split(".")
    return f"{before}{linear}.{kind}{expert}"


def share_weights(ours: Any, theirs: Any) -> None:
    """Give a model with our experts the weights of one with Megatron-core's own."""
    ours.load_state_dict({name_in_ours(name): weight for name, weight in theirs.state_dict().items()}, strict=False)


def train(
    model: Any, session: OffloadSession | None = None, microbatches: int = 2, around: Any = None
) -> tuple[list[float], list[Any]]:
    """One step's losses, and the gradients. ``around``: Megatron-core's manager, if it offloads, too."""
    device = next(model.parameters()).device
    words = torch.randint(WORDS, (microbatches, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3)).to(device)
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    model.zero_grad()
    losses = []
    with contextlib.nullcontext() if session is None else session.step():
        for batch in words:
            loss = model(batch, positions, mask, labels=batch).mean() / microbatches
            loss.backward()
            losses.append(loss.detach())
    if around is not None:
        around.reset()
    gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    return [loss.item() for loss in losses], gradients
