"""Sessions of one process on two GPUs: the current GPU is not always the one that a model is on."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from te_offload import OffloadSession, StepRecord
from te_offload.fused.calls import calls_of
from tests.gpu.paths import HIDDEN, SPLITS, autocast, came_back_or_never_left, mlp, slow_copies
from tests.support.mlp import assert_same_bits, make_inputs
from tests.support.mlp import run as run_mlp
from tests.support.process_groups import on_two_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LAYERS, ROWS, WIDTH = 4, 4096, 1024


class Block(torch.nn.Module):
    """A dense MLP of torch's own parts, which find their GPU by their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )
        self.session: OffloadSession | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.session is None:
            return torch.add(x, self.parts(x))
        with self.session.region("mlp"):
            y: torch.Tensor = self.parts(x)
        return torch.add(x, y)


def blocks(gpu: int) -> torch.nn.ModuleList:
    torch.manual_seed(gpu)
    return torch.nn.ModuleList(Block() for _ in range(LAYERS)).to(torch.device("cuda", gpu))


def train(layers: torch.nn.ModuleList, gpu: int) -> dict[str, torch.Tensor]:
    """Output and gradients of one forward and backward."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(gpu)).to(torch.device("cuda", gpu))
    layers.zero_grad()
    y = x.requires_grad_()
    for layer in layers:
        y = layer(y)
    y.square().mean().backward()
    found = {
        name: parameter.grad.clone() for name, parameter in layers.named_parameters() if parameter.grad is not None
    }
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **found}


def offloaded(
    layers: torch.nn.ModuleList, gpu: int, steps: int = 3, *, verify: bool = False
) -> tuple[list[dict[str, torch.Tensor]], StepRecord]:
    """What each of some steps gives in a session that keeps little on the GPU, and the record of the last one."""
    with OffloadSession(layers, min_bytes=0, max_in_flight="1MiB", verify=verify) as session:
        for layer in layers:
            layer.session = session  # type: ignore[assignment]
        found = []
        for _ in range(steps):
            with session.step():
                found.append(train(layers, gpu))
        return found, session.records[-1]


@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("gpu", [0, 1])
def test_model_is_on_another_gpu_than_the_current_one(
    monkeypatch: pytest.MonkeyPatch, gpu: int, current: int, verify: bool
) -> None:
    """The default stream of every GPU has the same handle."""
    expected = train(blocks(gpu), gpu)
    slow_copies(monkeypatch, 2_000_000, "copy_out", "copy_back")
    with torch.cuda.device(current):
        found, record = offloaded(blocks(gpu), gpu, verify=verify)
        assert torch.cuda.current_device() == current
    for one in found:
        assert_same_bits(expected, one)
    assert came_back_or_never_left(record)
    assert verify or record.throttled_ms > 0  # to verify, the host waits in between


def test_two_sessions_train_on_two_gpus_in_two_threads() -> None:
    """Nothing is shared between them."""
    expected = [train(blocks(gpu), gpu) for gpu in range(2)]
    models = [blocks(gpu) for gpu in range(2)]  # not in the threads, which share torch's generator
    results: dict[int, Any] = {}

    def run(gpu: int) -> None:
        torch.cuda.set_device(gpu)
        results[gpu] = offloaded(models[gpu], gpu, steps=8)

    threads = [threading.Thread(target=run, args=(gpu,)) for gpu in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for gpu in range(2):
        found, record = results[gpu]
        for one in found:
            assert_same_bits(expected[gpu], one)
        assert came_back_or_never_left(record)


def test_layers_of_one_session_on_two_gpus_go_from_the_first_alone() -> None:
    """A pipeline in one process: what lies elsewhere stays, and says so."""
    first, second = blocks(0), blocks(1)

    def both(layers: torch.nn.ModuleList) -> dict[str, torch.Tensor]:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).cuda(0).requires_grad_()
        y = x
        for layer in layers:
            y = layer(y.to(next(layer.parameters()).device))
        y.square().mean().backward()
        assert x.grad is not None
        grads = {name: one.grad.clone() for name, one in layers.named_parameters() if one.grad is not None}
        layers.zero_grad()
        return {"y": y.detach(), "x": x.grad, **grads}

    layers = torch.nn.ModuleList([*first, *second])
    expected = both(layers)
    with OffloadSession(layers, min_bytes=0, max_in_flight=0) as session:
        for _ in range(2):
            with session.step():
                assert_same_bits(expected, both(layers))
        record = session.records[-1]
    assert came_back_or_never_left(record)
    fates = {(row.name.split("/")[0], row.fate.value, row.reason.value) for row in record.slots if row.nbytes}
    gone = {layer for layer, fate, _ in fates if fate == "offloaded"}
    stayed = {layer for layer, _, reason in fates if reason == "on another device"}
    assert len(gone) == len(stayed) == LAYERS and not gone & stayed


@pytest.mark.usefixtures("copies_out_end")
@pytest.mark.parametrize("path", ["ops", "plain"])
def test_grouped_mlp_trains_on_the_second_gpu_when_that_is_current(path: str) -> None:
    """Fused where there is a Hopper GPU, and op by op."""

    def run(module: Any) -> dict[str, torch.Tensor]:
        x, counts, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_()
        y = module(x, counts, scales, counts)
        y.backward(torch.ones_like(y))
        grads = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
        module.zero_grad()
        assert x.grad is not None
        return {"y": y.detach(), "x": x.grad, **grads}

    with torch.cuda.device(1), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TE_OFFLOAD_FUSED_MLP", "1" if path == "ops" else "0")
        expected = run(mlp())
        module = mlp()
        with OffloadSession(module, min_bytes=0, max_in_flight=0, verify=True) as session:
            for _ in range(2):
                with session.step():
                    assert_same_bits(expected, run(module))
        assert next(module.parameters()).device.index == 1
        assert came_back_or_never_left(session.records[-1])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper GPUs"
)
def test_fused_fp8_gives_the_same_bits_on_two_gpus_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled on one GPU, Triton's kernels among it, is not launched on another."""
    monkeypatch.setenv("TE_OFFLOAD_FUSED_MLP", "1")
    found = []
    for gpu in (0, 1, 0, 1):
        with torch.cuda.device(gpu):
            module = mlp()
            with autocast(fp8=True):
                results = run_mlp(module, SPLITS["ragged"], hidden=HIDDEN)
            assert calls_of(module[0]).fused and next(module.parameters()).device.index == gpu
            found.append({name: tensor.cpu() for name, tensor in results.items()})
    for other in found[1:]:
        assert_same_bits(found[0], other)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper GPUs"
)
def test_two_ranks_keep_one_limit_of_the_device_with_one_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rank with more tokens decides how much goes."""
    monkeypatch.setenv("TE_OFFLOAD_FUSED_MLP", "1")
    program = "from tests.support.limit_on_ranks import main; main()"
    ranks = [json.loads(output.splitlines()[-1]) for output in on_two_ranks(program, str(tmp_path))]
    print(ranks)
    plans = [(tmp_path / f"plan{rank}.json").read_text() for rank in range(2)]
    assert plans[0] == plans[1]
    for rank in ranks:
        assert rank["same"] and 0 < rank["out"] < rank["all_out"]
        assert rank["peak"] <= rank["limit"]
    assert ranks[1]["limit"] < ranks[1]["most"]
