"""The floor of an offloaded step: the makespan of its dependency graph, with times measured in the same run.

In: a model, a record. Out: milliseconds. Keeps true: a layer's times are those of the layer alone, the link's those of
copies alone. Does not: know how a session schedules.
"""

from __future__ import annotations

import contextlib
import time

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from benchmarks.stack import Shape, Stack
from te_offload import StepRecord
from te_offload.offload.host_pool import HostPool
from te_offload.offload.link import probe_link
from te_offload.offload.timeline import Bounds, Key, Link, Parcel, Work, simulate
from te_offload.offload.transfer import make_transfer
from te_offload.slots import Fate


def time_layers(model: Stack, inputs: tuple[torch.Tensor, ...], shape: Shape) -> tuple[float, float]:
    """A layer's share of one forward and of one backward of the whole stack without offloading, in milliseconds.

    The stack is timed, not a single layer: a layer alone would not let the host run ahead as it does in a step. Called in
    every round, between the ways, so that the floor meets the same host as they do.
    """
    x, splits, scales, dy = inputs
    x.grad = None
    recipe = te.autocast(enabled=True, recipe=Float8CurrentScaling()) if shape.fp8 else contextlib.nullcontext()
    torch.cuda.synchronize()
    start = time.perf_counter()
    with recipe:
        y = model(x, splits, scales)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        y.backward(dy)
    torch.cuda.synchronize()
    forward, backward = middle - start, time.perf_counter() - middle
    return 1e3 * forward / shape.layers, 1e3 * backward / shape.layers


def time_link() -> Link:
    """The link's rates."""
    device = torch.device("cuda", torch.cuda.current_device())
    pool = HostPool(None, pinned=True)
    pool.reserve(256 << 20)
    link = probe_link(device, make_transfer(device), pool, 128 << 20)
    pool.close()
    return link


def floor_ms(record: StepRecord, layer_ms: tuple[float, float], link: Link, again: int = 0) -> float:
    """The makespan for the slots that went in a recorded step. ``again``: the backward of so many first layers begins with
    another forward.
    """
    keys: list[Key] = [(window.layer, window.forward) for window in record.windows]
    forward, backward = layer_ms
    backwards = [backward + forward] * again + [backward] * (len(keys) - again)
    work = [Work(key, False, forward) for key in keys]
    work += [Work(key, True, took) for key, took in reversed(list(zip(keys, backwards, strict=True)))]
    parcels: dict[Key, list[Parcel]] = {key: [] for key in keys}
    for row in record.slots:
        parcels[row.layer, row.forward].append(Parcel(row.bytes_out, row.fate is Fate.OFFLOADED))
    return simulate(work, parcels, link, Bounds()).step_ms
