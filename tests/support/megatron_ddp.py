"""Layers as graphs inside of Megatron-core's DistributedDataParallel, beside eager ones: losses, weights and `main_grad`.

    python -m tests.support.megatron_ddp

In a process group of one rank; needs megatron-core and a Hopper GPU. Two microbatches a step, six steps; with and without
overlapped reduction, the distributed optimizer's buffers, offloading, and the wrapper made on a stream of its own, as
Megatron-LM does. Prints a line a case, and exits with 1 if bits differ or a layer is no graph.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from te_offload import OffloadSession
from te_offload.fused import hopper
from te_offload.graphs import capture_layers
from tests.gpu.test_main_grads_in_graphs_on_gpu import KINDS
from tests.support import process_groups
from tests.support.layer_stack import HIDDEN, Batch, batches

LAYERS, STEPS = 3, 6
CASES = [(True, False, True, False), (True, False, False, True), (False, True, True, True), (True, True, False, False)]


class Model(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(KINDS[kind]() for _ in range(LAYERS))
        self.before = torch.nn.Parameter(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        x = x * self.before
        for layer in self.layers:
            x = layer(x, sizes, scales)
        return x.float().square().mean()


def wrapped(kind: str, *, overlap: bool, optimizer: bool, aside: bool) -> Any:
    """A model in its wrapper. ``aside``: made on another stream than the default one."""
    distributed = importlib.import_module("megatron.core.distributed")
    transformer = importlib.import_module("megatron.core.transformer")
    config = transformer.TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=True,
    )
    options = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=optimizer
    )
    model = Model(kind)
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream if aside else None):
        found = distributed.DistributedDataParallel(config, options, model)
    torch.cuda.current_stream().wait_stream(stream)
    return found


def step(parallel: Any, pair: Sequence[Batch], session: OffloadSession | None = None) -> list[torch.Tensor]:
    """Two microbatches, their reduction, and SGD. The losses."""
    parallel.zero_grad_buffer()
    losses = []
    with contextlib.nullcontext() if session is None else session.step():
        for number, batch in enumerate(pair):
            with parallel.no_sync() if number == 0 else contextlib.nullcontext():
                loss = parallel(*batch)
                loss.backward()
                losses.append(loss.detach())
    parallel.finish_grad_sync()
    with torch.no_grad():
        for parameter in parallel.module.parameters():
            parameter.sub_(parameter.main_grad.to(parameter.dtype), alpha=0.5)
    return losses


def same(eager: Any, graphed: Any) -> bool:
    """Weights and their ``main_grad``, bit by bit."""
    pairs = zip(eager.module.parameters(), graphed.module.parameters(), strict=True)
    return all(torch.equal(one, other) and torch.equal(one.main_grad, other.main_grad) for one, other in pairs)


def compare(kind: str, overlap: bool, optimizer: bool, aside: bool, offloads: bool) -> bool:
    """One case. Whether it is as it should be."""
    options = {"overlap": overlap, "optimizer": optimizer, "aside": aside}
    eager, graphed = wrapped(kind, **options), wrapped(kind, **options)
    layers = graphed.module.layers
    session = OffloadSession(layers, min_bytes=0, max_in_flight=0) if offloads else None
    every = list(batches(2 * STEPS))
    equal = True
    with capture_layers(layers, session=session, warmup=2) as graphs:
        for pair in zip(every[::2], every[1::2], strict=True):
            expected, found = step(eager, pair), step(graphed, pair, session)
            equal &= all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
            equal &= same(eager, graphed)
        replays = [scope.replays for scope in graphs.scopes.values()]
        out = session.records[-1].bytes_out if session is not None else 0
        print(
            f"{kind}, {options}: same bits {equal}, captured {graphs.captured}, replays {replays}, {out} bytes out",
            flush=True,
        )
        good = equal and graphs.captured and replays == [2 * STEPS - 2] * LAYERS and (out > 0) is offloads
    if session is not None:
        session.close()
    return good


def main() -> None:
    """All cases."""
    os.environ[hopper.SWITCH] = "1"
    with process_groups.alone("nccl"):
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
        good = [compare(kind, *case) for kind in KINDS for case in CASES]
        torch.cuda.synchronize()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
