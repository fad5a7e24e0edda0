"""The Python that the docs show and that needs a GPU."""

from __future__ import annotations

import pytest
import torch

from te_offload import OffloadSession
from te_offload.fused import hopper
from tests.support.docs_code import HIDDEN, LossOf, Model, batches, code_blocks, run

pytestmark = pytest.mark.gpu
LR, STEPS = 0.25, 7


@pytest.fixture(autouse=True)
def split_sizes_stay_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_offload.ops import te_adapter

    if te_adapter.cublaslt_version() < 130300:
        pytest.importorskip("quack", reason="quack-kernels, which has the fused GEMMs, is not installed here")
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("a graph needs split sizes on the GPU: Hopper's fused path, or cuBLAS 13.3")
        monkeypatch.setenv(hopper.SWITCH, "1")


def step_of(model: Model) -> dict[str, object]:
    """What the docs' step takes for granted, and the step."""
    code = code_blocks()["graphs.md 2"].split("with capture")[0]
    return run(code, "cuda", model=model, parameters=[*model.parameters()], lr=LR)


@pytest.mark.parametrize("block", ["README.md 1", "offloading.md 1"])
def test_session_s_loop_offloads_and_has_the_gradients_of_the_model_alone(block: str) -> None:
    model, twin = (LossOf(Model("cuda")) for _ in range(2))
    names = run(code_blocks()[block], "cuda", model=model, batches=batches(2, "cuda"))
    for batch in batches(2, "cuda"):
        twin(batch).backward()
    assert all(record.bytes_out > 0 for record in names["session"].records)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)


def test_preflight_says_what_a_graph_would_gain(capsys: pytest.CaptureFixture[str]) -> None:
    step, (batch,) = step_of(Model("cuda"))["step"], batches(1, "cuda")
    run(code_blocks()["graphs.md 1"], "cuda", step=step, batch=batch)
    said = capsys.readouterr().out
    assert "ms a call, the GPU busy for" in said and "Without a graph" in said


def test_captured_step_trains_as_an_eager_one(capsys: pytest.CaptureFixture[str]) -> None:
    model, twin, forwards = Model("cuda"), Model("cuda"), []
    model.register_forward_hook(lambda *_: forwards.append(1))
    session = OffloadSession(model.layers)
    parameters = [*model.parameters()]
    taken = {"model": model, "parameters": parameters, "lr": LR, "session": session, "batches": batches(STEPS, "cuda")}
    run(code_blocks()["graphs.md 2"], "cuda", **taken)
    step = step_of(twin)["step"]
    losses = [step(*batch).item() for batch in [*batches(STEPS, "cuda")][1:]]  # type: ignore[operator]
    assert [float(line) for line in capsys.readouterr().out.split()] == losses
    assert session.records[-1].bytes_out > 0
    assert len(forwards) == 4 < len(losses)  # three eager steps and the capture
    session.close()


def test_layers_captured_one_by_one_train_as_eager_ones(capsys: pytest.CaptureFixture[str]) -> None:
    def stack() -> torch.nn.ModuleList:
        torch.manual_seed(0)
        return torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(HIDDEN, 2 * HIDDEN), torch.nn.GELU(), torch.nn.Linear(2 * HIDDEN, HIDDEN)
            )
            for _ in range(3)
        ).cuda()

    def inputs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(1)
        x = torch.randn(STEPS, 2, 4096, HIDDEN, device="cuda")
        return [(one.requires_grad_(), target) for one, target in x]

    layers, twins = stack(), stack()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    loss = torch.nn.functional.mse_loss
    names = run(code_blocks()["graphs.md 3"], "cuda", layers=layers, optimizer=optimizer, loss=loss, batches=inputs())
    eager = torch.optim.SGD(twins.parameters(), lr=0.1)
    for x, target in inputs():
        eager.zero_grad()
        y = x
        for layer in twins:
            y = layer(y)
        loss(y, target).backward()
        eager.step()
    assert names["session"].records[-1].bytes_out > 0 and "captured" in capsys.readouterr().out
    for mine, other in zip(layers.parameters(), twins.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_backend_of_torch_compile_reports_its_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda(), torch.randn(8, 64, device="cuda")
    call = "for _ in range(6):\n    compiled(x).square().mean().backward()\n"
    code = code_blocks()["graphs.md 4"]
    assert "\n...\n" in code
    run(code.replace("\n...\n", f"\n{call}", 1), "cuda", model=model, x=x)
    said = capsys.readouterr().out
    assert "forward" in said and "backward" in said and "a CUDA graph" in said
    torch._dynamo.reset()


def test_weights_need_not_stay_quantized_until_the_backward() -> None:
    linear = run("linear = " + code_blocks()["offloading.md 5"], "cuda")["linear"]
    assert not linear.keep_quantized_weight
