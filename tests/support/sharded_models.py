"""Models whose parameters are DTensors, compiled with the CUDA graph pass, beside the same trace without graphs.

    python -m tests.support.sharded_models RANKS DEVICE FILE WHAT...   # cpu|cuda; fsdp|tp-llama|moe|titan

Exits with 0 if losses and gradients have the same bits in each step, and prints what rank 0 reports: what is captured, and
on a GPU how memory and time compare. `fsdp`: as SimpleFSDP does, each parameter is sharded over the ranks and gathered by a
functional collective where it is used, its gradient reduced and scattered. `tp`: linear layers are split by columns and
rows. On the CPU the backend of captures runs functions again, and collectives are gloo's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize

from te_offload.graphs import CudagraphBackend
from tests.support.fake_graphs import FakeBackend

HIDDEN, HEADS, EXPERTS, LAYERS, STEPS = 64, 4, 4, 2, 8
HIDDEN_ON_GPU, LAYERS_ON_GPU, LENGTH_ON_GPU = 1024, 4, 512
GROWTH, SLACK = 0.03, 64 << 20  # what graphs may take more than the same trace without, and bytes beside it
TITAN_WORDS = 256


class Attention(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, x.shape[-1] // HEADS).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        found: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return found


class Gated(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return found


class Experts(torch.nn.Module):
    """Every token goes through each expert; what its two best say counts."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(hidden, EXPERTS, bias=False)
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, hidden, 2 * hidden) / hidden**0.5)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, 2 * hidden, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scores = self.router(rows).softmax(-1)
        best = scores.topk(2, -1).values[:, -1:]
        scores = torch.where(scores >= best, scores, 0.0)
        inner = torch.relu(torch.matmul(rows, self.up)).square()
        found = (torch.matmul(inner, self.down) * scores.t().unsqueeze(-1)).sum(0)
        return found.view_as(x)


class Layer(torch.nn.Module):
    def __init__(self, kind: str, hidden: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(2))
        self.attention = Attention(hidden)
        self.mlp: torch.nn.Module = Gated(hidden) if kind == "llama" else Experts(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        found: torch.Tensor = x + self.mlp(self.norms[1](x))
        return found


class Gathered(torch.nn.Module):
    """A parameter where it is used: all of it; its gradient is averaged and scattered."""

    def forward(self, parameter: DTensor) -> torch.Tensor:
        whole = parameter.redistribute(placements=[Replicate()])
        found: torch.Tensor = whole.to_local(grad_placements=[Partial("avg")])
        return found


def shard(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """As SimpleFSDP shards."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)


def split(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism of attention, and of a gated MLP."""
    for layer in model:  # type: ignore[attr-defined]
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan["attention.out"] = RowwiseParallel()
        if isinstance(layer.mlp, Gated):
            plan |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def make_titan(sharding: str, device: str, mesh: DeviceMesh, hidden: int) -> torch.nn.Module:
    """Torchtitan's Llama 3 (0.2.2), with its own SimpleFSDP or its own tensor parallelism."""
    from torchtitan.experiments.simple_fsdp.llama3.model import SimpleFSDPTransformer
    from torchtitan.experiments.simple_fsdp.simple_fsdp import data_parallel
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_tp

    size = {"dim": hidden, "n_layers": layers_on(device), "n_heads": HEADS, "vocab_size": TITAN_WORDS}
    size["max_seq_len"] = LENGTH_ON_GPU
    model: Any = SimpleFSDPTransformer(TransformerModelArgs(**size)).to(device)
    if sharding == "tp":
        apply_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False)
    found: torch.nn.Module = data_parallel(model, mesh, mode="fully_shard") if sharding == "fsdp" else model
    with torch.no_grad():
        model.init_weights(torch.device(device))
    return found


def make(sharding: str, kind: str, device: str, mesh: DeviceMesh, hidden: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "titan":
        return make_titan(sharding, device, mesh, hidden)
    model = torch.nn.Sequential(*(Layer(kind, hidden) for _ in range(layers_on(device)))).to(device)
    (shard if sharding == "fsdp" else split)(model, mesh)
    return model


def layers_on(device: str) -> int:
    return LAYERS_ON_GPU if device == "cuda" else LAYERS


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def join(rank: int, ranks: int, device: str, file: str) -> DeviceMesh:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
    return init_device_mesh(device, (ranks,))


def work(rank: int, ranks: int, device: str, file: str, what: list[str]) -> None:
    """One rank."""
    mesh = join(rank, ranks, device, file)
    for one in what:
        compare(rank, device, mesh, *one.split("-"))
    dist.destroy_process_group()


def hold(rank: int, ranks: int, file: str, one: str, way: str) -> None:
    """One rank of a run for memory alone: in a process of its own, since what ran before leaves segments half used."""
    mesh = join(rank, ranks, "cuda", file)
    backend = CudagraphBackend()
    sharding, kind = one.split("-")
    model = make(sharding, kind, "cuda", mesh, HIDDEN_ON_GPU)
    compiled: Any = torch.compile(model, backend=backend if way == "with" else "aot_eager")
    for number, x in enumerate(batches_of(rank, sharding, kind, "cuda")):
        if number == STEPS // 2:  # warmed up, and captured
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        compiled(x).square().mean().backward()
    torch.cuda.synchronize()
    if rank == 0:
        Path(f"{file}-bytes").write_text(str(torch.cuda.max_memory_reserved()))
    backend.close()
    dist.destroy_process_group()


def check_memory(ranks: int, file: str, what: list[str]) -> None:
    """That graphs take little more than the same trace without."""
    large = []
    for one in what:
        held = {}
        for way in ("without", "with"):
            meeting = f"{file}-{one}-{way}"
            torch.multiprocessing.spawn(hold, (ranks, meeting, one, way), ranks)  # type: ignore[no-untyped-call, attr-defined]
            held[way] = int(Path(f"{meeting}-bytes").read_text())
        print(
            f"{one.replace('-', ' ')}: memory {held['without'] >> 20} MiB without, {held['with'] >> 20} MiB with graphs"
        )
        if held["with"] > (1 + GROWTH) * held["without"] + SLACK:
            large.append(one)
    assert not large, f"graphs hold too much: {large}"


def batches_of(rank: int, sharding: str, kind: str, device: str) -> list[torch.Tensor]:
    """Of each step; ranks that share their parameters by tensor parallelism have the same."""
    random = torch.Generator().manual_seed(rank if sharding == "fsdp" else 0)
    length, hidden = (LENGTH_ON_GPU, HIDDEN_ON_GPU) if device == "cuda" else (8, HIDDEN)
    if kind == "titan":
        return [torch.randint(TITAN_WORDS, (2, length), generator=random).to(device) for _ in range(STEPS)]
    return [torch.randn(2, length, hidden, generator=random).to(device) for _ in range(STEPS)]


def compare(rank: int, device: str, mesh: DeviceMesh, sharding: str, kind: str) -> None:
    """With graphs, and without."""
    on_gpu = device == "cuda"
    hidden = HIDDEN_ON_GPU if on_gpu else HIDDEN
    make_backend = None if on_gpu else lambda _: FakeBackend()
    batches = batches_of(rank, sharding, kind, device)
    steps: dict[str, list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
    for name in ("without", "with"):
        backend = CudagraphBackend(make_backend=make_backend)
        torch._dynamo.reset()
        model = make(sharding, kind, device, mesh, hidden)
        compiled: Any = torch.compile(model, backend=backend if name == "with" else "aot_eager")
        steps[name] = []
        for x in batches:
            model.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            grads = [local(one.grad) for one in model.parameters() if one.grad is not None]
            steps[name].append((loss.detach().to("cpu", copy=True), [one.to("cpu", copy=True) for one in grads]))
            del loss, grads
        if name == "with":
            assert not _elsewhere(model, backend), (
                "autograd copied gradients, whose memory in the graph is of no use then"
            )
    for number, (one, other) in enumerate(zip(steps["without"], steps["with"], strict=True)):
        assert torch.equal(one[0], other[0]), f"loss of step {number}"
        assert len(one[1]) == len(other[1]) > 10
        for a, b in zip(one[1], other[1], strict=True):
            assert torch.equal(a, b), f"a gradient of step {number}"
    replays = [
        capture._graph.replays
        for graphed in (*backend.forwards, *backend.backwards)
        if graphed is not None
        for capture in graphed.captures
        if capture is not None
    ]
    assert replays and min(replays) >= STEPS - 4, replays
    moving = _moving(backend)
    if rank == 0:
        print(backend.report())
        collectives = sum("c10d_functional" in str(node.target) for node in _captured_nodes(backend))
        print(f"{collectives} collectives and waits in graphs; replays {min(replays)} or more")
        print(f"{sharding} {kind}: inputs of forward and backward that are copied: {moving}")
        assert collectives > 0
        assert moving == [1, 1], "parameters, or what the forward saved, are copied"
    backend.close()
    if on_gpu:
        backend = CudagraphBackend()
        times = _milliseconds(lambda: make(sharding, kind, device, mesh, hidden), backend, batches)
        if rank == 0:
            print(f"{sharding} {kind}: {times['without']:.3f} ms without, {times['with']:.3f} ms with graphs")
        backend.close()


def _milliseconds(
    make_model: Callable[[], torch.nn.Module], backend: CudagraphBackend, batches: list[torch.Tensor]
) -> dict[str, float]:
    """A step of each way: medians, interleaved, in both orders."""
    torch._dynamo.reset()
    ways: dict[str, tuple[torch.nn.Module, Any]] = {}
    for name, compiler in (("without", "aot_eager"), ("with", backend)):
        model = make_model()
        ways[name] = model, torch.compile(model, backend=compiler)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(7):
        for name in list(ways) if turn % 2 == 0 else reversed(ways):
            model, compiled = ways[name]
            torch.cuda.synchronize()
            began = time.perf_counter()
            for x in batches:
                model.zero_grad()
                compiled(x).square().mean().backward()
            torch.cuda.synchronize()
            found[name].append(1e3 * (time.perf_counter() - began) / len(batches))
    return {name: statistics.median(all_of[2:]) for name, all_of in found.items()}  # two to warm up and capture


def _elsewhere(model: torch.nn.Module, backend: CudagraphBackend) -> list[str]:
    """Parameters whose gradients are not what the graphs returned."""
    returned = {
        one.untyped_storage().data_ptr()
        for graphed in backend.backwards
        if graphed is not None
        for capture in graphed.captures
        if capture is not None
        for one in capture._graph._outputs
        if isinstance(one, torch.Tensor)
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and local(parameter.grad).untyped_storage().data_ptr() not in returned
    ]


def _moving(backend: CudagraphBackend) -> list[int]:
    """How many inputs of each graph are copied."""
    return [
        sum(leaf.kind.name == "MOVES" for leaf in capture._signature.leaves)
        for graphed in (*backend.forwards, *backend.backwards)
        if graphed is not None
        for capture in graphed.captures
        if capture is not None
    ]


def _captured_nodes(backend: CudagraphBackend) -> list[torch.fx.Node]:
    return [
        node
        for graphed in (*backend.forwards, *backend.backwards)
        if graphed is not None
        for replayed in graphed._replayed
        for node in replayed._part.graph.nodes
    ]


if __name__ == "__main__":
    count, kind_of_device, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    arguments = count, kind_of_device, place, sys.argv[4:]
    torch.multiprocessing.spawn(work, arguments, count)  # type: ignore[no-untyped-call, attr-defined]
    if kind_of_device == "cuda":
        check_memory(count, place, sys.argv[4:])
