"""Steps of a Megatron-core model as it trains: data parallelism, gradients clipped by their norm, distributed optimizer.

In: chunks of a model, microbatches. Out: losses, gradient norms and weights. Keeps true: gradients are reduced beside the
backward, and parameters gathered beside the next forward. Does not: train a model for anything.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from te_offload import OffloadSession
from tests.support.megatron_steps import run, whole, whole_name

STEPS, CLIP = 3, 0.5


class Optimized(NamedTuple):
    """What some steps gave on one rank.

    Attributes:
        losses: of every step's microbatches, where this rank has them. norms: the whole model's, a number a step.
        weights: by names of the whole model, each whole; where there are shards, this rank's. moved: bytes out in each
            step, if there was a session.
    """

    losses: list[list[float]]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    moved: list[int]

    def has_bits_of(self, other: Optimized) -> bool:
        """But for what moved."""
        same = all(torch.equal(weight, other.weights[name]) for name, weight in self.weights.items())
        found, expected = (({*each.weights}, each.losses, each.norms) for each in (self, other))
        return bool(self.weights) and same and found == expected


def optimize(
    chunks: list[Any], words: list[torch.Tensor], around: list[Any] | None = None, *, shards: bool = False
) -> Optimized:
    """Train some steps.

    Args:
        around: what a session is around. shards: by Megatron's FSDP, parameters and gradients too.
    """
    from megatron.core import distributed
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = chunks[0].config
    of_parallel = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        delay_wgrad_compute=config.delay_wgrad_compute,
        bucket_size=50_000,  # several: the experts' parameters are not there when the first layer's are
        use_megatron_fsdp=shards,
        data_parallel_sharding_strategy="optim_grads_params" if shards else "no_shard",
        gradient_reduce_div_fusion=words[0].is_cuda,  # of NCCL
    )
    kind: Any = FullyShardedDataParallel if shards else distributed.DistributedDataParallel
    device = {"device": next(chunks[0].parameters()).device} if shards else {}
    parallel = [
        kind(config, of_parallel, chunk, disable_bucketing=number > 0, **device) for number, chunk in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            adam_eps=0.01,  # so that a gradient's rounding is not a weight's step
            weight_decay=0.0,
            clip_grad=CLIP,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            bf16=config.params_dtype is torch.bfloat16,
            params_dtype=config.params_dtype,
        ),
        parallel,
    )
    syncs = [each.no_sync for each in parallel]
    config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    config.finalize_model_grads_func = distributed.finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    session = None if around is None else OffloadSession(around, min_bytes=1024)
    found = Optimized([], [], {}, [])
    for _ in range(STEPS):
        for each in parallel:
            each.zero_grad_buffer()
        optimizer.zero_grad()
        with contextlib.nullcontext() if session is None else session.step():
            losses = run(parallel, words)
        if session is not None:
            found.moved.append(session.records[-1].bytes_out)
        done, norm, _ = optimizer.step()
        assert done and norm > CLIP, norm
        found.losses.append(losses)
        found.norms.append(norm)
    for each in parallel:
        if not shards:
            each.disable_forward_pre_hook()  # waits for the last step's weights
    if session is not None:
        session.close()
    if shards:
        for each in parallel:
            of_rank = each.param_and_grad_buffer.optimizer_named_parameters
            found.weights.update({name: shard.to_local().detach().clone() for name, shard in of_rank})
        return found
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            found.weights[whole_name(chunk, name)] = whole(name, parameter, parameter.detach().clone())
    return found


def whole_of(ranks: list[Optimized]) -> dict[str, torch.Tensor]:
    """The weights of the whole model, of ranks that have parts of it or all."""
    return {name: weight for rank in ranks for name, weight in rank.weights.items()}


def same_on_all(ranks: list[Optimized]) -> bool:
    """Whether ranks with the same weight have the same bits of it."""
    first, other = (rank.weights for rank in ranks)
    return all(torch.equal(first[name], other[name]) for name in first.keys() & other.keys())
