"""Layers as graphs inside of data parallelism, beside eager ones: losses, weights and gradients.

    python -m tests.support.data_parallel RANKS MEETING [torch] [megatron]

One Hopper GPU a rank, which have other batches; MEETING is a file that is not there yet. Two microbatches a step, six
steps. torch's wrapper with gradients of their own and in its buckets; Megatron-core's with and without overlapped
reduction, the distributed optimizer's buffers and its overlapped parameter gather, and made on a stream of its own, as
Megatron-LM does; with and without offloading. Each rank prints a line a case; the exit status is 1 if bits differ or a
layer is no graph, or if two cases of one wrapper differ in their losses.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_offload import OffloadSession
from te_offload.fused import hopper
from te_offload.graphs import capture_layers
from tests.gpu.test_main_grads_in_graphs_on_gpu import KINDS
from tests.support import layer_stack
from tests.support.layer_stack import HIDDEN, Batch, batches

LAYERS, STEPS, RATE = 3, 6, 0.5


class Case(NamedTuple):
    """One way to train."""

    offloads: bool = False
    aside: bool = False  # the wrapper is made on another stream than the default one
    views: bool = False  # torch's: gradients are parts of its buckets
    overlap: bool = False  # Megatron's from here: reductions run beside the backward
    optimizer: bool = False  # the distributed optimizer's buffers
    gather: bool = False  # parameters are gathered beside the forward, for which its modules have hooks


TORCH = [Case(), Case(offloads=True, views=True), Case(aside=True)]
MEGATRON = [
    Case(overlap=True, aside=True),
    Case(overlap=True, offloads=True),
    Case(optimizer=True, aside=True, offloads=True),
    Case(overlap=True, optimizer=True),
    Case(overlap=True, optimizer=True, gather=True, aside=True),
    Case(overlap=True, optimizer=True, gather=True, offloads=True),
]


class Model(torch.nn.Module):
    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(make() for _ in range(LAYERS))
        self.before = torch.nn.Parameter(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        x = x * self.before
        for layer in self.layers:
            x = layer(x, sizes, scales)
        return x.float().square().mean()


@contextlib.contextmanager
def on_a_stream(*, aside: bool) -> Iterator[None]:
    """Another one than the default one if asked."""
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream if aside else None):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class Torchs:
    """A model in torch's wrapper, and its steps."""

    def __init__(self, case: Case, make: Callable[[], torch.nn.Module]) -> None:
        self.model: Any = Model(make)
        with on_a_stream(aside=case.aside):
            self.parallel: Any = torch.nn.parallel.DistributedDataParallel(
                self.model, gradient_as_bucket_view=case.views
            )

    def begin(self) -> None:
        self.parallel.zero_grad()

    def end(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=RATE)

    def numbers(self) -> list[torch.Tensor]:
        return [one for parameter in self.model.parameters() for one in (parameter, parameter.grad) if one is not None]


class Megatrons:
    """A model in Megatron-core's wrapper, and its steps."""

    def __init__(self, case: Case, make: Callable[[], torch.nn.Module]) -> None:
        distributed = importlib.import_module("megatron.core.distributed")
        config = importlib.import_module("megatron.core.transformer").TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=8,
            bf16=True,
            params_dtype=torch.bfloat16,
            gradient_accumulation_fusion=True,
        )
        options = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=case.overlap,
            use_distributed_optimizer=case.optimizer,
            overlap_param_gather=case.gather,
            bucket_size=2_000_000,  # several buckets, each of which is gathered when the one before it is there
        )
        self.case = case
        self.model: Any = Model(make)
        with on_a_stream(aside=case.aside):
            self.parallel = distributed.DistributedDataParallel(config, options, self.model)

    def begin(self) -> None:
        self.parallel.zero_grad_buffer()

    def end(self) -> None:
        """With the distributed optimizer's buffers a rank has the sums of its share alone, and changes that."""
        self.parallel.finish_grad_sync()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with torch.no_grad():
            if not self.case.optimizer:
                for parameter in self.model.parameters():
                    parameter.sub_(parameter.main_grad.to(parameter.dtype), alpha=RATE)
                return
            for buffer in (*self.parallel.buffers, *self.parallel.expert_parallel_buffers):
                for bucket in buffer.buckets:
                    weight, grad = (one.chunk(ranks)[rank] for one in (bucket.param_data, bucket.grad_data))
                    weight.sub_(grad.to(weight.dtype), alpha=RATE)
        if not self.case.gather:  # else the next forward's hooks do
            self.parallel.start_param_sync()

    def numbers(self) -> list[torch.Tensor]:
        """Weights of a rank's share alone where those of others may still be on their way."""
        grads: list[torch.Tensor] = [parameter.main_grad for parameter in self.model.parameters()]
        if not self.case.gather:
            return [*self.model.parameters(), *grads]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        buckets = [bucket for buffer in self.parallel.buffers for bucket in buffer.buckets]
        return [*(bucket.param_data.chunk(ranks)[rank] for bucket in buckets), *grads]


def step(one: Any, pair: Sequence[Batch], session: OffloadSession | None = None) -> list[torch.Tensor]:
    """Two microbatches, their reduction, and SGD. The losses."""
    one.begin()
    losses = []
    with contextlib.nullcontext() if session is None else session.step():
        for number, batch in enumerate(pair):
            with one.parallel.no_sync() if number == 0 else contextlib.nullcontext():
                loss = one.parallel(*batch)
                loss.backward()
                losses.append(loss.detach())
    one.end()
    return losses


def compare(kind: str, case: Case, wrapper: Any, make: Callable[[], torch.nn.Module], losses: set[Any]) -> bool:
    """One case. Whether it is as it should be. ``losses``: of the cases so far, one element if all had the same."""
    eager, graphed = wrapper(case, make), wrapper(case, make)
    layers = graphed.model.layers
    session = OffloadSession(layers, min_bytes=0, max_in_flight=0) if case.offloads else None
    every = list(batches(2 * STEPS, seed=dist.get_rank()))
    equal, every_loss = True, []
    with capture_layers(layers, session=session, warmup=2) as graphs:
        for pair in zip(every[::2], every[1::2], strict=True):
            expected, found = step(eager, pair), step(graphed, pair, session)
            pairs = zip([*expected, *eager.numbers()], [*found, *graphed.numbers()], strict=True)
            equal &= all(torch.equal(one, other) for one, other in pairs)
            every_loss += found
        replays = [scope.replays for scope in graphs.scopes.values()]
        out = session.records[-1].bytes_out if session is not None else 0
        losses.add(tuple(torch.stack(every_loss).tolist()))
        good = (
            equal
            and len(losses) == 1
            and graphs.captured
            and replays == [2 * STEPS - 2] * LAYERS
            and (out > 0) is case.offloads
        )
        asked = [name for name, on in case._asdict().items() if on]
        print(
            f"{kind}, {', '.join(asked) or 'plain'}, rank {dist.get_rank()} of {dist.get_world_size()}: "
            f"{'as it should be' if good else 'NOT as it should be'}: same bits {equal}, captured {graphs.captured}, "
            f"{len(losses)} sets of losses so far, "
            f"replays {replays}, {out} bytes out",
            flush=True,
        )
        if not good:
            print(graphs.report(), flush=True)
    if session is not None:
        session.close()
    return bool(good)


def work(rank: int, ranks: int, meeting: str, what: Sequence[str]) -> None:
    """One rank."""
    os.environ[hopper.SWITCH] = "1"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    good = []
    if "torch" in what:
        losses: set[Any] = set()
        good += [compare("torch's", case, Torchs, layer_stack.Layer, losses) for case in TORCH]
    if "megatron" in what:
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
        for kind, make in KINDS.items():
            losses = set()
            good += [compare(f"Megatron-core's, {kind}", case, Megatrons, make, losses) for case in MEGATRON]
    torch.cuda.synchronize()
    dist.destroy_process_group()
    sys.exit(0 if good and all(good) else 1)


if __name__ == "__main__":
    count = int(sys.argv[1])
    torch.multiprocessing.spawn(work, (count, *sys.argv[2:3], sys.argv[3:]), count)  # type: ignore[no-untyped-call, attr-defined]
