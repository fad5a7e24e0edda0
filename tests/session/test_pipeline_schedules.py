"""torch's own pipeline schedules over two ranks, the layers of each rank in a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_offload import OffloadSession
from te_offload.errors import BackwardTwiceError
from te_offload.fused import hopper
from tests.support.mlp import make_inputs, make_mlp
from tests.support.process_groups import on_two_ranks

PROGRAM = """
import os, sys, torch, torch.distributed as dist, torch.nn.functional as F
import torch.distributed.pipelining as pipelining
from te_offload import OffloadSession
from tests.support.mlp import make_mlp

rank, store, name, grouped = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "grouped"
WIDTH, ROWS, BATCHES, STAGES = 16, 10, 4, 2 if name in ("ScheduleGPipe", "Schedule1F1B") else 4

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)
        self.router, self.mlp = torch.nn.Linear(WIDTH, 1), make_mlp() if grouped else None

    def forward(self, x):
        y = x + self.down(F.silu(self.up(x)))
        if self.mlp is None:
            return y
        sizes = torch.tensor([4, 0, 6])
        return y + self.mlp(y, sizes, torch.sigmoid(self.router(y)).flatten(), sizes)

def make():
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(Layer(), Layer()) for _ in range(STAGES)]
    mine = [number for number in range(STAGES) if number % 2 == rank]
    stages = [pipelining.PipelineStage(parts[number], number, STAGES, torch.device("cpu")) for number in mine]
    schedule = getattr(pipelining, name)(
        stages[0] if len(stages) == 1 else stages, BATCHES, loss_fn=lambda out, target: (out - target).square().sum()
    )
    return schedule, torch.nn.ModuleList(layer for number in mine for layer in parts[number]), mine

def step(schedule, layers, mine, seed):
    numbers = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(ROWS * BATCHES, WIDTH, generator=numbers) for _ in range(2))
    losses = []
    last = {"target": target, "losses": losses} if STAGES - 1 in mine else {}
    schedule.step(*[x] * (0 in mine), **last)
    found = [loss.detach().clone() for loss in losses]
    found += [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
    layers.zero_grad()
    return found

dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
alone, offloaded = make(), make()
moved = []
with OffloadSession(offloaded[1], min_bytes=0, max_in_flight="4KiB") as session:
    for seed in range(5):
        expected = step(*alone, seed)
        with session.step():
            found = step(*offloaded, seed)
        assert len(expected) == len(found) > 8, len(found)
        for one, other in zip(expected, found):
            assert torch.equal(one, other)
        record = session.records[-1]
        assert not record.raised
        moved.append((record.bytes_out, record.bytes_back))
print(moved[-1])
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process that ends
"""


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("ScheduleGPipe", "grouped"),
        ("Schedule1F1B", "grouped"),
        ("ScheduleLoopedBFS", "grouped"),
        ("ScheduleInterleaved1F1B", "grouped"),
        ("ScheduleInterleavedZeroBubble", "plain"),
    ],
)
def test_schedule_of_torch_has_the_bits_of_one_without_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, kind: str
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    for output in on_two_ranks(PROGRAM, str(tmp_path / "store"), schedule, kind):
        out, back = (int(number) for number in output.splitlines()[-1].strip("()").split(", "))
        assert out > 20_000
        if kind == "grouped":
            assert back == out
        else:  # inputs' gradients first, then the weights': some slots are read twice
            assert out < back <= 2 * out


@pytest.mark.parametrize("offload", [False, True], ids=["without a session", "in one"])
def test_backward_that_is_split_as_zero_bubble_does_is_a_named_error_with_te_ops(
    monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    module = make_mlp()
    x, sizes, scales = make_inputs((4, 0, 6))
    with OffloadSession(module, min_bytes=0, enabled=offload) as session, session.step():
        y = module(x, sizes, scales, sizes).sum()
        torch.autograd.grad(y, x, retain_graph=True)
        with pytest.raises(BackwardTwiceError, match="does not split the backward"):
            torch.autograd.grad(y, list(module.parameters()))
