"""Trains the demo's model, and writes down every loss and gradient bit.

In: a `TrainingConfig`. Out: a `RunResult` a run. Keeps true: deterministic algorithms are forced while a run lasts and
put back afterwards; two runs of one configuration see the same text in the same order. Does not: compare runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload.demo.model import ByteModel, ModelConfig
from te_offload.demo.recipes import Recipe
from te_offload.offload import OffloadSession, StepRecord


@dataclass(frozen=True)
class TrainingConfig:
    """One training run.

    Attributes:
        model: sizes. steps, batch, seed, learning_rate: the training. device, dtype: where and in what.
        min_bytes: slots smaller than this stay; for the session. recipe: under which the grouped MLPs compute.
    """

    model: ModelConfig
    steps: int = 48
    batch: int = 16
    seed: int = 0
    learning_rate: float = 3e-3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    min_bytes: int = 64 * 1024
    recipe: Recipe = field(default_factory=Recipe)


@dataclass
class RunResult:
    """What a run left behind.

    Attributes:
        losses: a loss a step, in nats a byte.
        digests: for each step, a SHA-256 of the loss and of each parameter's gradient.
        record: of the last step, where a session recorded.
        bytes_out, bytes_back: copied over all steps, where a session recorded.
        seconds: wall time. cuda_peak: most bytes that torch had allocated, where there is a GPU.
    """

    losses: list[float] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    record: StepRecord | None = None
    bytes_out: int = 0
    bytes_back: int = 0
    seconds: float = 0.0
    cuda_peak: int | None = None


def read_text() -> bytes:
    """Real English text that every Python brings: the help texts of `pydoc`, about half a megabyte."""
    from pydoc_data import topics

    return "\n".join(topics.topics.values()).encode()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Force deterministic algorithms, and put the settings back."""
    before = torch.are_deterministic_algorithms_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


def train(config: TrainingConfig, *, offload: bool | None, progress: Callable[[float], None]) -> RunResult:
    """Train from the seed.

    Args:
        offload: ``True``: with a session that offloads; ``False``: with one that only records; ``None``: with none.
        progress: called after each step with its loss.
    """
    result = RunResult()
    with deterministic():
        torch.manual_seed(config.seed)
        model = ByteModel(replace(config.model, rows=config.recipe.rows), config.device, config.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)
        order = torch.Generator().manual_seed(config.seed)
        if config.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            session = None
            if offload is not None:
                session = stack.enter_context(
                    OffloadSession(model.layers, min_bytes=config.min_bytes, max_in_flight="8MiB", enabled=offload)
                )
            for _ in range(config.steps):
                starts = torch.randint(
                    len(text) - config.model.context - 1, (config.batch,), generator=order, device="cpu"
                )
                rows = torch.stack([text[s : s + config.model.context + 1] for s in starts.tolist()])
                optimizer.zero_grad()
                with session.step() if session is not None else contextlib.nullcontext():
                    with _autocast(config.recipe):
                        loss = model(rows.long().to(config.device))
                    loss.backward()
                result.losses.append(loss.item())
                result.digests.append(_digests(model, loss))
                if session is not None:
                    result.record = session.records[-1]
                    result.bytes_out += result.record.bytes_out
                    result.bytes_back += result.record.bytes_back
                optimizer.step()
                progress(result.losses[-1])
        result.seconds = time.perf_counter() - start
        if config.device.type == "cuda":
            result.cuda_peak = torch.cuda.max_memory_allocated()
    return result


def _autocast(recipe: Recipe) -> contextlib.AbstractContextManager[Any]:
    if recipe.make is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = te.autocast(enabled=True, recipe=recipe.make())
    return context


def first_difference(one: RunResult, other: RunResult) -> str | None:
    """The first loss or gradient whose bits differ between two runs, in words; ``None`` if all are equal."""
    if len(one.digests) != len(other.digests):
        return f"the number of steps ({len(one.digests)} and {len(other.digests)})"
    for step, (a, b) in enumerate(zip(one.digests, other.digests, strict=True)):
        for name in a:
            if a[name] != b.get(name):
                return f"{name} in step {step}"
    return None


def _digests(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, str]:
    named = {"the loss": loss.detach()}
    named |= {f"the gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: hashlib.sha256(_bytes_of(tensor)).hexdigest() for name, tensor in named.items()}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
