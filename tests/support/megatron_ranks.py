"""A small language model of Megatron-core's on two ranks, and on one: losses, gradients and distributed checkpoints.

    python -m tests.support.megatron_ranks RANK DEVICE FOLDER

In FOLDER is what one rank wrote before: a checkpoint, ``one``, from which the two take their weights. For each way to share
the model (`KINDS`) they train a step without offloading and some in a session, in Megatron-core's schedule, and write what
each found (``KIND0.pt``, ``KIND1.pt``) and a checkpoint (``KIND``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from te_offload import OffloadSession
from tests.support.megatron_model import BATCH, SEQUENCE, WORDS, groups, make_config, make_model

_ROOT = Path(__file__).parents[2]
MICROBATCHES, LAYERS = 4, 4
KINDS: dict[str, dict[str, int]] = {
    "expert parallel": {"expert_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "tensor and expert parallel": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "interleaved pipeline": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


def config_of(device: str, **settings: Any) -> Any:
    exact = {"params_dtype": torch.float32, "bf16": False} if device == "cpu" else {}
    dtype = torch.float32 if exact else torch.bfloat16
    return make_config(device, num_layers=LAYERS, pipeline_dtype=dtype, **exact | settings)


def batches(device: str, rank: int = 0, ranks: int = 1) -> list[torch.Tensor]:
    """A rank's microbatches (BATCH, SEQUENCE); ``ranks`` share them."""
    words = torch.randint(WORDS, (MICROBATCHES, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3))
    return list(words[rank::ranks].to(device))


def step(chunks: list[Any], words: list[torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, where this rank has them, and gradients by names of the whole model."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(SEQUENCE, device=words[0].device).expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=words[0].device).triu(1)

    def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        batch = next(data)
        found = model(batch, positions, mask, labels=batch)
        return found, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    for chunk in chunks:
        chunk.zero_grad()
    data: Any = [iter(words) for _ in chunks]
    done = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(words),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    gradients = {
        whole_name(chunk, name): whole_gradient(name, parameter)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }
    return [each["loss"].item() for each in done], gradients


def whole_gradient(name: str, parameter: Any) -> torch.Tensor:
    """Of a parameter that tensor parallelism shards, or that each of its ranks uses for some of the tokens."""
    from megatron.core import parallel_state

    gradient: torch.Tensor = parameter.grad.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or ".experts." in name:
        return gradient
    if getattr(parameter, "tensor_model_parallel", False):
        parts = [torch.empty_like(gradient) for _ in range(group.size())]
        dist.all_gather(parts, gradient, group=group)
        return torch.cat(parts, parameter.partition_dim)
    dist.all_reduce(gradient, group=group)
    return gradient


def whole_name(chunk: Any, name: str) -> str:
    """Of a chunk's parameter in the whole model; a local expert has its number of all."""
    from megatron.core import parallel_state

    before, found, rest = name.partition("decoder.layers.")
    if found:
        number, _, rest = rest.partition(".")
        layer = chunk.decoder.layers[int(number)]
        name = f"{before}{found}{layer.layer_number - 1}.{rest}"
        if ".experts." in name:
            prefix, local = name.rsplit("weight", 1)
            first = parallel_state.get_expert_model_parallel_rank() * layer.mlp.experts.num_local_experts
            name = f"{prefix}weight{first + int(local)}"
    return name


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


def rank_of_two(rank: int, device: str, kind: str, folder: Path) -> None:
    """Train, save, and write what was found."""
    from megatron.core import parallel_state

    with groups(folder / f"{kind} meeting", device, rank, 2, **KINDS[kind]):
        sequence = {"sequence_parallel": "tensor_model_parallel_size" in KINDS[kind]}
        two = {"overlap_p2p_comm": True, "batch_p2p_comm": False}  # else two ranks cannot interleave
        config = config_of(device, **KINDS[kind], **sequence, **(two if kind == "interleaved pipeline" else {}))
        virtual = KINDS[kind].get("virtual_pipeline_model_parallel_size")
        chunks = []
        for number in range(virtual or 1):
            ends = {
                end: getattr(parallel_state, f"is_pipeline_{which}_stage")(
                    ignore_virtual=virtual is None, vp_stage=number if virtual else None
                )
                for end, which in (("pre_process", "first"), ("post_process", "last"))
            }
            chunks.append(make_model(device, config, of_model={**ends, "vp_stage": number if virtual else None}))
        load(chunks, folder / "one")
        shared = shares_microbatches(kind)
        words = batches(device, rank if shared else 0, 2 if shared else 1)
        losses, gradients = step(chunks, words)

        def is_same(found: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
            return found[0] == losses and all(torch.equal(found[1][name], gradients[name]) for name in gradients)

        repeats = is_same(step(chunks, words))
        same, moved = [], []
        with OffloadSession([layer for chunk in chunks for layer in chunk.decoder.layers], min_bytes=1024) as session:
            for _ in range(3):
                with session.step():
                    found = step(chunks, words)
                same.append(is_same(found))
                moved.append((session.records[-1].bytes_out, session.records[-1].bytes_back))
        save(chunks, folder / kind)
        found_here = {"losses": losses, "gradients": gradients, "repeats": repeats, "same": same, "moved": moved}
        torch.save(found_here, folder / f"{kind}{rank}.pt")


def on_two_ranks(device: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each of two processes found for each kind."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.megatron_ranks"]
    exactly = os.environ | {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    processes = []
    for rank in range(2):
        log = (folder / f"rank{rank}.log").open("w")  # no pipe: what Megatron-core forks would hold it open
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
    """One rank's model, losses and gradients; what two found, and the folder of their checkpoints."""

    def __init__(self, device: str, folder: Path) -> None:
        self.model = make_model(device, config_of(device))
        save([self.model], folder / "one")
        self.losses, self.gradients = step([self.model], batches(device))
        self.of_two, self.folder = on_two_ranks(device, folder), folder


def model_of_zeros(device: str, *, ours: bool = True, **settings: Any) -> Any:
    """With our experts or Megatron-core's, to be filled by a checkpoint."""
    model = make_model(device, config_of(device, **settings), ours=ours)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def losses_of_the_whole(kind: str, found: list[dict[str, Any]]) -> list[float]:
    """In the order of the microbatches; they are in the ranks' turns, or on one that has all, or each."""
    if shares_microbatches(kind):
        return [loss for losses in zip(*(rank["losses"] for rank in found), strict=True) for loss in losses]
    (losses, *others) = [rank["losses"] for rank in found if rank["losses"]]
    assert all(other == losses for other in others)
    return list(losses)


def gradients_of_the_whole(kind: str, found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As one rank would have them: the mean over ranks that share the microbatches; experts have all ranks' rows."""
    whole: dict[str, torch.Tensor] = {}
    for rank in found:
        for name, gradient in rank["gradients"].items():
            if shares_microbatches(kind):
                whole[name] = whole.get(name, 0) + gradient.float() / 2
            else:
                whole.setdefault(name, gradient.float())
    return whole


def shares_microbatches(kind: str) -> bool:
    """Whether each rank has others."""
    return KINDS[kind] == {"expert_model_parallel_size": 2}


if __name__ == "__main__":
    if sys.argv[2] != "cpu":
        torch.cuda.set_device(int(sys.argv[1]))
    for each in KINDS:
        rank_of_two(int(sys.argv[1]), sys.argv[2], each, Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
