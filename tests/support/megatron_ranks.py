"""A small language model of Megatron-core's on two ranks, and on one: losses, gradients and distributed checkpoints.

    python -c "from tests.support.megatron_ranks import main; main()" RANK DEVICE FOLDER

(Not as a module: what Megatron-core's checkpoints spawn would import all of it again.) In FOLDER is what one rank wrote
before: a checkpoint, ``one``, from which the two take their weights. For each way to share the model (`KINDS`) they train
a step without offloading and some in a session, in Megatron-core's schedule, then some with its optimizer, without a
session and in one, and write what each found (``KIND0.pt``, ``KIND1.pt``) and a checkpoint (``KIND``).
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from te_offload import OffloadSession
from te_offload.megatron import GroupedMLP
from tests.support.megatron_model import groups, make_model
from tests.support.megatron_optimizer import Optimized, optimize
from tests.support.megatron_steps import batches, config_of, step

_ROOT = Path(__file__).parents[2]


class Kind(NamedTuple):
    """How two ranks share a model.

    Attributes:
        sizes: of `initialize_model_parallel`, and settings. settings: more of these.
    """

    sizes: dict[str, int]
    settings: dict[str, Any] = {}  # noqa: RUF012

    @property
    def shares_microbatches(self) -> bool:
        """Whether each rank has others."""
        return self.sizes.keys() <= {"expert_model_parallel_size"}

    @property
    def overlapped(self) -> bool:
        """Whether layers of one microbatch run between those of another's backward, node by node."""
        return "overlap_moe_expert_parallel_comm" in self.settings


KINDS = {
    "data parallel": Kind({}),
    "expert parallel": Kind({"expert_model_parallel_size": 2}),
    "pipeline": Kind({"pipeline_model_parallel_size": 2}),
    "tensor and expert parallel": Kind(
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"sequence_parallel": True},
    ),
    "interleaved pipeline": Kind(
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"overlap_p2p_comm": True, "batch_p2p_comm": False},  # else two ranks cannot interleave
    ),
    "expert parallel, overlapped": Kind(
        {"expert_model_parallel_size": 2},
        {
            "overlap_moe_expert_parallel_comm": True,
            "delay_wgrad_compute": True,
            "moe_token_dispatcher_type": "alltoall",
            "bf16": True,
        },
    ),
}

SHARDED = ("data parallel", "expert parallel")  # by Megatron's FSDP, too


def checkpoint(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def load(chunks: list[Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load(checkpoint(chunks), str(folder))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(found[f"model{number}"])


def save(chunks: list[Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(checkpoint(chunks), str(folder))


class _IntoMainGrad(GroupedMLP):
    """Its ops add to ``main_grad`` themselves. Its own ``config`` says so: Megatron-core's output layer would need Apex."""

    def __init__(self, number: int, config: Any, *args: Any, **keywords: Any) -> None:
        config = copy.copy(config)
        config.gradient_accumulation_fusion = True
        super().__init__(number, config, *args, **keywords)


def chunks_of(device: str, kind: Kind, like: list[Any] | None = None) -> list[Any]:
    """A rank's. ``like``: others of this rank, whose weights they take; their wgrads go into a buffer."""
    from megatron.core import parallel_state

    config = config_of(device, **kind.sizes, **kind.settings)
    experts = GroupedMLP if like is None else _IntoMainGrad
    virtual = kind.sizes.get("virtual_pipeline_model_parallel_size")
    chunks = []
    for number in range(virtual or 1):
        ends = {
            end: getattr(parallel_state, f"is_pipeline_{which}_stage")(
                ignore_virtual=virtual is None, vp_stage=number if virtual else None
            )
            for end, which in (("pre_process", "first"), ("post_process", "last"))
        }
        place = {**ends, "vp_stage": number if virtual else None}
        chunks.append(make_model(device, config, experts=experts, of_model=place))
    for chunk, other in zip(chunks, like or (), strict=bool(like)):
        chunk.load_state_dict(other.state_dict())
    return chunks


def offloaded(kind: Kind, chunks: list[Any]) -> list[Any]:
    """What a session is around: layers, or their parts where a schedule calls these by themselves."""
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    if kind.overlapped:
        return [part for layer in layers for part in (layer.self_attention, layer.mlp.experts)]
    return layers


def rank_of_two(rank: int, device: str, name: str, folder: Path) -> None:
    """Train, save, and write what was found."""
    kind = KINDS[name]
    with groups(folder / f"{name} meeting", device, rank, 2, **kind.sizes):
        chunks = chunks_of(device, kind)
        load(chunks, folder / "one")
        words = batches(device, rank, 2) if kind.shares_microbatches else batches(device)
        losses, gradients = step(chunks, words)

        def is_same(found: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
            return found[0] == losses and all(torch.equal(found[1][name], gradients[name]) for name in gradients)

        repeats = is_same(step(chunks, words))
        same, moved = [], []
        with OffloadSession(offloaded(kind, chunks), min_bytes=1024) as session:
            for _ in range(3):
                with session.step():
                    found = step(chunks, words)
                same.append(is_same(found))
                moved.append((session.records[-1].bytes_out, session.records[-1].bytes_back))
        save(chunks, folder / name)

        def optimized(*, shards: bool) -> dict[str, Any]:
            plain, others = chunks_of(device, kind, chunks), chunks_of(device, kind, chunks)
            found = optimize(plain, words, shards=shards)
            in_session = optimize(others, words, offloaded(kind, others), shards=shards)
            return {"found": tuple(found), "same": in_session.has_bits_of(found) and min(in_session.moved) > 0}

        found_here = {
            "losses": losses,
            "gradients": gradients,
            "repeats": repeats,
            "same": same,
            "moved": moved,
            "optimized": optimized(shards=False),
            "sharded": optimized(shards=True) if name in SHARDED else None,
        }
        torch.save(found_here, folder / f"{name}{rank}.pt")


def on_two_ranks(device: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each of two processes found for each kind."""
    run = "from tests.support.megatron_ranks import main; main()"
    command = [sys.executable, "-W", "ignore", "-c", run]
    exactly = os.environ | {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(2):
        with (folder / f"rank{rank}.log").open("w") as log:  # no pipe: what Megatron-core forks would hold it open
            processes.append(
                subprocess.Popen([*command, str(rank), device, folder], stdout=log, stderr=log, cwd=_ROOT, env=exactly)
            )
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(2))
    return {kind: [torch.load(folder / f"{kind}{rank}.pt", map_location=device) for rank in range(2)] for kind in KINDS}


class Trained:
    """One rank's model, losses and gradients; what an optimizer made of a copy; what two found, and their folder."""

    def __init__(self, device: str, folder: Path) -> None:
        self.model = make_model(device, config_of(device))
        save([self.model], folder / "one")
        self.losses, self.gradients = step([self.model], batches(device))
        self.optimized = optimize(chunks_of(device, Kind({}), [self.model]), batches(device))
        self.of_two, self.folder = on_two_ranks(device, folder), folder

    def optimized_on_two(self, kind: str, way: str = "optimized") -> list[Optimized]:
        """Each rank's. ``way``: or ``"sharded"``."""
        return [Optimized(*rank[way]["found"]) for rank in self.of_two[kind]]

    def assert_losses_of_one(self, kind: str, ranks: list[Optimized], *, rel: float) -> None:
        """Of each step. Nothing but weights changes from step to step, so losses are others in each."""
        for number, expected in enumerate(self.optimized.losses):
            found = losses_of_the_whole(kind, [rank.losses[number] for rank in ranks])
            assert found == pytest.approx(expected, rel=rel)
        assert len(set(map(tuple, self.optimized.losses))) == len(self.optimized.losses)

    def assert_norms_of_one(self, ranks: list[Optimized], *, rel: float) -> None:
        """Of each step's gradients, on each rank."""
        assert all(rank.norms == pytest.approx(self.optimized.norms, rel=rel) for rank in ranks)

    def assert_same_in_a_session(self, kind: str, way: str = "optimized") -> None:
        """No bit was another, and bytes moved in each step."""
        assert all(rank[way]["same"] for rank in self.of_two[kind])


def model_of_zeros(device: str, *, ours: bool = True, **settings: Any) -> Any:
    """With our experts or Megatron-core's, to be filled by a checkpoint."""
    model = make_model(device, config_of(device, **settings), ours=ours)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def losses_of_the_whole(kind: str, of_ranks: list[list[float]]) -> list[float]:
    """In the order of the microbatches; they are in the ranks' turns, or on one that has all, or each."""
    if KINDS[kind].shares_microbatches:
        return [loss for losses in zip(*of_ranks, strict=True) for loss in losses]
    (losses, *others) = [losses for losses in of_ranks if losses]
    assert all(other == losses for other in others)
    return list(losses)


def gradients_of_the_whole(kind: str, found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As one rank would have them: the mean over ranks that share the microbatches; experts have all their rows."""
    gradients: dict[str, torch.Tensor] = {}
    for rank in found:
        for name, gradient in rank["gradients"].items():
            if KINDS[kind].shares_microbatches:
                gradients[name] = gradients.get(name, 0) + gradient.float() / 2
            else:
                gradients.setdefault(name, gradient.float())
    return gradients


def main() -> None:
    """One rank of two, for each kind."""
    rank, device, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if device != "cpu":
        torch.cuda.set_device(rank)
    for kind in KINDS:
        rank_of_two(rank, device, kind, folder)
    for child in multiprocessing.active_children():  # of Megatron-core's checkpoints, which would outlive this
        child.terminate()
    sys.stdout.flush()
    os._exit(0)
