"""Delayed scaling over ranks: a fused op's amaxes are reduced as Transformer Engine's function has them reduced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_offload.fused import hopper
from tests.support.mlp import assert_same_bits
from tests.support.process_groups import on_two_ranks

PROGRAM = """
import sys, pytest, torch, torch._dynamo, torch.distributed as dist
from te_offload import OffloadSession
from tests.fused import test_pipeline_fp8 as steps_of
from tests.fused.test_pipeline import OWN, by_transformer_engine
from tests.support import te_on_cpu
from tests.support.mlp import gradients

rank, folder = int(sys.argv[1]), sys.argv[2]
te_on_cpu.unfused(pytest.MonkeyPatch(), grouped=False)
torch._dynamo.config.disable = True

def steps(offloads):
    steps_of.FP8GlobalStateManager.reset()
    modules, found, names = [steps_of.mlp(), steps_of.mlp()], {}, []
    with OffloadSession(modules, min_bytes=0, enabled=offloads) as session:
        for step in range(4):
            with session.step():
                y, x, scales = steps_of.forward(modules, steps_of.DELAYED, seed=step + 10 * rank)
                names.append(y.grad_fn.name() == OWN)
                (y.float().square().sum() * 10 ** (step + rank)).backward()
            for number, module in enumerate(modules):
                of_module = gradients(module, x, scales) | steps_of.scales_of(module)
                found |= {f"{step} {number} {name}": each for name, each in of_module.items()}
                module.zero_grad()
        assert (session.records[-1].bytes_back > 0) == offloads
    return found, names

def both():
    (theirs, not_own), (ours, own) = by_transformer_engine(lambda: steps(False)), steps(True)
    assert (not_own, own) == ([False] * 4, [False, True, True, True])
    return theirs, ours

alone = both()
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.save((alone, both()), f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_scales_of_ranks_follow_the_amaxes_of_all_and_steps_have_the_bits_of_transformer_engines_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    on_two_ranks(PROGRAM, str(tmp_path))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for of_rank in found:
        for theirs, ours in of_rank:
            assert_same_bits(theirs, ours)
    (_, alone), (_, other_alone) = (of_rank[0] for of_rank in found)
    (_, together), (_, other) = (of_rank[1] for of_rank in found)
    scales = [name for name in together if name.endswith(("forward", "backward"))]
    assert len(scales) == 4 * 2 * 2 * 2  # steps, modules, linears, ways
    for name in scales:
        assert torch.equal(together[name], other[name]), name
        if name.startswith("0 "):  # later steps have other amaxes, by other scales
            assert torch.equal(together[name], torch.minimum(alone[name], other_alone[name])), name
    assert any(not torch.equal(together[name], alone[name]) for name in scales)
