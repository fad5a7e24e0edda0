"""A step of a Megatron-core model in its schedule, on one rank of several, with names and values of the whole model.

In: chunks, microbatches. Out: losses and gradients. Keeps true: a parameter, or its gradient, is whole whatever shares it.
Does not: reduce gradients over ranks that share the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron_model import BATCH, SEQUENCE, WORDS, make_config

MICROBATCHES, LAYERS = 4, 4


def config_of(device: str, **settings: Any) -> Any:
    exact = {"params_dtype": torch.float32, "bf16": False} if device == "cpu" else {}
    dtype = torch.float32 if exact else torch.bfloat16
    return make_config(device, num_layers=LAYERS, pipeline_dtype=dtype, **exact | settings)


def batches(device: str, rank: int = 0, ranks: int = 1) -> list[torch.Tensor]:
    """A rank's microbatches (BATCH, SEQUENCE); ``ranks`` share them."""
    words = torch.randint(WORDS, (MICROBATCHES, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3))
    return list(words[rank::ranks].to(device))


def run(chunks: list[Any], words: list[torch.Tensor]) -> list[float]:
    """Forwards and backwards of all microbatches; the losses, where this rank has them."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(SEQUENCE, device=words[0].device).expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=words[0].device).triu(1)

    def forward_step(
        data: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[[torch.Tensor], Any]]:
        batch = next(data)
        found = (model.build_schedule_plan if return_schedule_plan else model)(batch, positions, mask, labels=batch)
        return found, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    for chunk in chunks:
        chunk.zero_grad()
    data: Any = [iter(words) for _ in chunks]
    done = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(words),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return [each["loss"].item() for each in done]


def step(chunks: list[Any], words: list[torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """`run`, and gradients by names of the whole model."""
    losses = run(chunks, words)
    gradients = {
        whole_name(chunk, name): whole(name, parameter, parameter.grad.clone(), sums=True)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }
    return losses, gradients


def whole(name: str, parameter: Any, part: torch.Tensor, *, sums: bool = False) -> torch.Tensor:
    """What tensor parallelism shards of a parameter, or of its gradient.

    Args:
        sums: what has no shards is of some of the tokens on each rank.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or ".experts." in name:
        return part
    if getattr(parameter, "tensor_model_parallel", False):
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, parameter.partition_dim)
    if sums:
        dist.all_reduce(part, group=group)
    return part


def whole_name(chunk: Any, name: str) -> str:
    """Of a chunk's parameter in the whole model; a local expert has its number of all."""
    from megatron.core import parallel_state

    before, found, rest = name.partition("decoder.layers.")
    if found:
        number, _, rest = rest.partition(".")
        layer = chunk.decoder.layers[int(number)]
        name = f"{before}{found}{layer.layer_number - 1}.{rest}"
        if ".experts." in name:
            prefix, local = name.rsplit("weight", 1)
            first = parallel_state.get_expert_model_parallel_rank() * layer.mlp.experts.num_local_experts
            name = f"{prefix}weight{first + int(local)}"
    return name
