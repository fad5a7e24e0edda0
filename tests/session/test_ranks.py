"""Ranks: the same plan on each if asked, and no collective otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.process_groups import on_two_ranks

PROGRAM = """
import sys, torch, torch.distributed as dist
from te_offload import OffloadSession
from tests.session.test_lifetime import Stack
from tests.support.mlp import run

rank, together, folder = int(sys.argv[1]), sys.argv[2] == "together", sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
calls = []
for name in ("all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "all_gather"):
    real = getattr(dist, name)
    setattr(dist, name, lambda *a, _real=real, _name=name, **k: (calls.append(_name), _real(*a, **k))[1])
model = Stack(3)
group = dist.group.WORLD if together else None
with OffloadSession(model.layers, min_bytes=0, fraction=0.4, same_on_every_rank=group) as session:
    for seed in range(67):
        with session.step():
            run(model, (4, 0, 6) if rank == 0 else (9, 2, 1), seed=seed)
    session.plan.save(f"{folder}/plan{rank}.json")
    assert session.records[-1].rank == rank and session.records[-1].bytes_back > 0
    session.report()
print("calls", calls)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("how", "calls"), [("together", f"calls {2 * ['all_gather_object']}"), ("alone", "calls []")])
def test_ranks_share_a_plan_with_one_collective_in_64_steps_if_asked_and_none_if_not(
    tmp_path: Path, how: str, calls: str
) -> None:
    outputs = on_two_ranks(PROGRAM, how, str(tmp_path))
    assert [output.splitlines()[-1] for output in outputs] == [calls, calls]
    plans = [(tmp_path / f"plan{rank}.json").read_text() for rank in range(2)]
    assert (plans[0] == plans[1]) == (how == "together")
