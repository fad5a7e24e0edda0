"""Random layers through torch.compile: `CudagraphBackend` against ``aot_eager``, which traces them alike."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from te_offload.graphs import CudagraphBackend
from te_offload.graphs.handover import Handover
from tests.support.random_layers import PlainLayer, Twin


def run_compiled(seed: int, device: torch.device, make_backend: Callable[[torch.device], Any] | None = None) -> int:
    """Steps of a program whose layers are compiled; how often a graph was replayed.

    Raises:
        AssertionError: something differs by a bit.
    """
    torch._dynamo.reset()
    draw = random.Random(f"compiled {seed}")
    eager, twin = Twin(seed, device, PlainLayer), Twin(seed, device, PlainLayer)
    if device.type == "cpu":
        eager.rows = twin.rows = 16
    eager.asks_grads = twin.asks_grads = True  # reentrant checkpoints could not
    judge: Any = "aot_eager"
    options: dict[str, Any] = {} if make_backend is None else {"make_backend": make_backend}
    if draw.random() < 0.3:
        judge = aot_autograd(fw_compiler=_boxed, partition_fn=default_partition)
        options["partition_fn"] = default_partition
    backend = CudagraphBackend(warmup=draw.randint(1, 3), min_ops=draw.choice([1, 2]), **options)
    for mine, theirs in zip(eager.parts(), twin.parts(), strict=True):
        mine.compile(backend=judge, dynamic=False)
        theirs.compile(backend=backend, dynamic=False)
    around = contextlib.ExitStack()
    around.enter_context(torch._dynamo.config.patch(recompile_limit=64))  # all layers have one forward
    if make_backend is not None:
        around.enter_context(_lent_memory_stays())
    try:
        for number in range(draw.choice([5, 7, 9])):
            try:
                eager.step(number)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                break
            twin.step(number)
            difference = eager.difference(twin)
            assert difference is None, f"step {number}: {difference}"
        graphs = [graph for graph in (*backend.forwards, *backend.backwards) if graph is not None]
        return sum(one._graph.replays for graph in graphs for one in graph.captures if one is not None)
    finally:
        around.close()
        eager.held.clear()
        twin.held.clear()
        backend.close()
        torch._dynamo.reset()


@contextlib.contextmanager
def _lent_memory_stays() -> Iterator[None]:
    """As it does in a graph's pool, which a CPU has not."""
    kept: list[Any] = []
    lend = Handover.lend

    def keeping(self: Handover, *args: Any) -> list[Any]:
        found = lend(self, *args)
        kept.extend(self._owners.values())
        return found

    with mock.patch.object(Handover, "lend", keeping):
        yield


def _boxed(graph: torch.fx.GraphModule, _: Any) -> Any:
    def call(inputs: list[Any]) -> Any:
        return graph(*inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
