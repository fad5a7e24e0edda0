"""A small language model of Megatron-core's with experts of one's choice, its losses and gradients.

In: a device, the class of its experts. Out: a model, and what training steps of it give. Keeps true: the process has one
rank, which is there inside of `one_rank` alone. Does not: run Megatron-core's CUDA kernels on a CPU; there the attention,
and the norms, are torch's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_offload import OffloadSession

EXPERTS, HIDDEN, FFN, LAYERS, SEQUENCE, BATCH, WORDS = 4, 128, 128, 3, 64, 2, 128
TOP = 2


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Megatron-core warns of each package that it would have liked to find."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def one_rank(meeting: Path, device: str) -> Iterator[None]:
    """Megatron-core's groups, of this process alone; ``meeting``: a file that is not there yet."""
    with pytest.MonkeyPatch.context() as patch, quietly():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random as their_random
        from megatron.core.transformer import transformer_block
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        if device == "cpu":
            patch.setattr(
                torch.cuda, "current_device", lambda: torch.device("cpu")
            )  # its router moves its weights there
            patch.setattr(transformer_block, "LayerNormImpl", WrappedTorchNorm)
            patch.setattr(
                their_random, "fp8_autocast", lambda **_: contextlib.nullcontext()
            )  # asks what the GPU can do
            patch.setattr(their_random, "_get_cuda_rng_state", lambda **_: None)  # of its checkpoints
            patch.setattr(their_random, "_set_cuda_rng_state", lambda *_, **__: None)
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        if device != "cpu":
            their_random.model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class _Attention(torch.nn.Module):
    """For Megatron-core's core attention, which takes memory of a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2)


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
    spec = gpt_layer_specs.get_gpt_layer_local_spec(**size)
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=_Attention)
    return spec


def names_taken(device: str, config: Any = None) -> dict[str, Any]:
    """What the docs' code takes for granted of Megatron-core."""
    with quietly():
        from megatron.core.models.gpt import GPTModel
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
        from megatron.core.transformer.spec_utils import ModuleSpec

    found = (GPTModel, ModuleSpec, get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name)
    names: dict[str, Any] = {each.__name__: each for each in found}
    spec = {"get_gpt_layer_with_transformer_engine_spec": lambda **_: make_spec(device, config)}
    sizes = {"vocab_size": WORDS, "max_sequence_length": SEQUENCE}
    return names | spec | sizes | {"contextlib": contextlib, "config": config}


def make_model(device: str, config: Any, experts: type[torch.nn.Module] | None = None) -> Any:
    """``experts``: of its layers; ``None``: Megatron-core's own."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    torch.manual_seed(0)
    spec = make_spec(device, config)
    if experts is not None:
        spec.submodules.mlp.submodules.experts = ModuleSpec(module=experts)
    return GPTModel(config, spec, WORDS, SEQUENCE, position_embedding_type="rope").to(device)


def share_weights(ours: Any, theirs: Any) -> None:
    """Give a model with the docs' experts the weights of one with Megatron-core's own."""
    state = theirs.state_dict()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if ".experts." not in name:
                parameter.copy_(state[name])
    for number, layer in enumerate(ours.decoder.layers):
        prefix = f"decoder.layers.{number}.mlp.experts."
        found = {}
        for key, weight in state.items():
            rest = key.removeprefix(prefix)
            if rest == key:
                continue
            if rest.startswith("local_experts."):  # of ungrouped ones: local_experts.N.linear_fc1.weight
                _, expert, linear, name = rest.split(".")
                rest = f"{linear}.{name}{expert}"
            found[rest] = weight
        layer.mlp.experts.load_their_weights(found)


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
