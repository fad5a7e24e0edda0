"""torch's FullyShardedDataParallel around layers with grouped MLPs, over two ranks, in sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_offload.errors import ArgumentError
from te_offload.fused import hopper
from tests.support.mlp import make_inputs, make_mlp
from tests.support.process_groups import on_two_ranks

PROGRAM = """
import os, sys, warnings, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as Sharded, ShardingStrategy
from te_offload import OffloadSession
from te_offload.fused import fusions_in
from tests.support.mlp import make_inputs, make_mlp

warnings.simplefilter("ignore")  # torch's, of a later name
rank, store = int(sys.argv[1]), sys.argv[2]

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.shared = make_mlp(), torch.nn.Linear(16, 16)

    def forward(self, x, *rest):
        return self.mlp(x, *rest) + self.shared(x)

class Model(torch.nn.Module):
    def __init__(self, strategy=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        for number, layer in enumerate(self.layers if strategy else ()):
            self.layers[number] = shard(layer, strategy)

    def forward(self, x, *rest):
        for layer in self.layers:
            x = layer(x, *rest)
        return x

def shard(module, strategy):
    return Sharded(module, use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=strategy)

def step(model, optimizer, seed):
    optimizer.zero_grad()
    x, sizes, scales = make_inputs((4, 0, 6), seed=seed)
    model(x, sizes, scales, sizes).square().sum().backward()
    optimizer.step()
    return x.grad, scales.grad

dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
    plain, sharded = Model(), shard(Model(strategy), strategy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (plain, sharded)]
    with OffloadSession(sharded.layers, min_bytes=0) as session:
        for seed in range(4):  # both ranks have the same tokens, so that all gradients are those of one
            expected = step(plain, optimizers[0], seed)
            with session.step():
                found = step(sharded, optimizers[1], seed)
            assert all(map(torch.equal, expected, found))
            with Sharded.summon_full_params(sharded):
                assert all(map(torch.equal, plain.parameters(), sharded.parameters()))
            assert session.records[-1].bytes_back > 3000
    assert [fusion.handed_over for fusion in fusions_in(sharded)] == [0, 0]
    print([fusion.fused for fusion in fusions_in(sharded)])
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process that ends
"""


@pytest.mark.parametrize("switch", ["reference", "0"], ids=["fused", "op by op"])
def test_sharded_layers_train_as_they_do_unsharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    forwards = [4, 4] if switch == "reference" else [0, 0]
    for output in on_two_ranks(PROGRAM, str(tmp_path / "store")):
        assert output.splitlines()[-2:] == [str(forwards)] * 2


def test_weights_that_are_kept_elsewhere_are_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    module = make_mlp()
    for name in list(module[0]._parameters):  # as it does with use_orig_params=False
        weight = module[0]._parameters.pop(name)
        vars(module[0])[name] = None if weight is None else weight.detach()
    x, sizes, scales = make_inputs((4, 0, 6))
    with pytest.raises(ArgumentError, match=r"weight0 is not among its parameters.*use_orig_params=True"):
        module(x, sizes, scales, sizes)
