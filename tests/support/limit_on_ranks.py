"""Two ranks, of which one has more tokens, within one limit of the device's memory and with the same plan.

    python -c "from tests.support.limit_on_ranks import main; main()" RANK FOLDER

Each prints a line of JSON: the limit, the most bytes of its steps, and of a session that sends all, bytes that went, and
whether the gradients are those without offloading; its plan is in FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.device_peaks import backward_of_a_wide_loss, peak_of_steps
from tests.support.layer_stack import Model, batches, grads

LAYERS = 8


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = Model(LAYERS)
    (batch,) = batches(1)
    x, sizes, scales = batch
    if rank:
        x, sizes, scales = torch.cat([x, x]), 2 * sizes, torch.cat([scales, scales])

    def step(number: int) -> None:
        model.zero_grad(set_to_none=False)
        backward_of_a_wide_loss(model(x.detach().requires_grad_(), sizes, scales))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    most, _, _ = peak_of_steps(model.layers, step, enabled=False)
    expected = {name: grad.cpu() for name, grad in grads(model).items()}
    least, all_out, _ = peak_of_steps(model.layers, step)
    ends: list[Any] = [None, None]
    dist.all_gather_object(ends, (most, least))
    most_of_all, least_of_all = map(max, zip(*ends, strict=True))
    limit = int(most_of_all - 0.5 * (most_of_all - least_of_all))
    peak, out, session = peak_of_steps(model.layers, step, device_limit=limit, same_on_every_rank=dist.group.WORLD)
    same = all(torch.equal(expected[name], grad.cpu()) for name, grad in grads(model).items())
    assert session.plan is not None and session.plan.forecast is not None
    session.plan.save(f"{folder}/plan{rank}.json")
    found = {
        "limit": limit,
        "peak": peak,
        "foreseen": session.plan.forecast.device_bytes,
        "most": most,
        "least": least,
        "out": out,
        "all_out": all_out,
        "same": same,
    }
    print(json.dumps(found))
    dist.destroy_process_group()
