"""A grouped MLP sharded by FSDP2, three steps with offloading, beside the same one unsharded.

    python -m tests.support.fsdp2 RANKS DEVICE FILE      # FILE: where the ranks meet

Exits with 0 if outputs and input gradients have the same bits, and weights after each step are close; prints what rank 0
reports. The ranks have the same input, so the mean of their gradients is each one's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from te_offload import OffloadSession
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp

EXPERTS, HIDDEN, FFN = 3, 64, 128


def work(rank: int, ranks: int, device: str, file: str) -> None:
    """One rank."""
    faulthandler.enable()  # where a rank was, should it abort
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{file}", rank=rank, world_size=ranks
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if device == "cuda":
        torch.cuda.set_device(rank)
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, device=device, dtype=dtype))
    sharded, whole = modules
    fully_shard(sharded, mesh=init_device_mesh(device, (ranks,)), reshard_after_forward=True)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in modules]
    with OffloadSession([sharded], min_bytes=0) as session:
        for number in range(3):
            found = []
            for module, optimizer in zip(modules, optimizers, strict=True):
                x, sizes, scales = make_inputs((50, 7, 40), HIDDEN, device=device, dtype=dtype, seed=number)
                with session.step() if module is sharded else contextlib.nullcontext():
                    output = module(x, sizes, scales, sizes)
                    output.float().square().sum().backward()
                assert x.grad is not None and scales.grad is not None
                found.append({"output": output.detach(), "x": x.grad, "scales": scales.grad})
                optimizer.step()
                optimizer.zero_grad()
            if number == 0:  # later weights differ by how the mean of the ranks was rounded
                assert_same_bits(*found)
            for one, other in zip(sharded.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(one.full_tensor(), other.data, rtol=1e-2, atol=1e-2)
        if rank == 0:
            print(session.report())
            print(session.records[-1].bytes_out, "bytes out")
    dist.barrier()  # no rank takes its threads down while another one still talks to it
    dist.destroy_process_group()
    sys.stdout.flush()
    # All is compared. A rank aborted once ("terminate called without an active exception"; not again in 860 more): the mesh
    # keeps gloo's threads past the group, autograd has its own, and how an interpreter ends beside them is not asked here.
    os._exit(0)


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(int(sys.argv[1]), sys.argv[2], sys.argv[3]), nprocs=int(sys.argv[1]))  # type: ignore[attr-defined, no-untyped-call]
