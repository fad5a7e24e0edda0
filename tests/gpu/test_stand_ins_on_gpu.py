"""What passes autograd for the weights of an op is of the stream on which a forward runs, and of no CUDA graph."""

from __future__ import annotations

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload.fused import fusions_in, hopper
from te_offload.fused.stand_ins import StandIns
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")

SPLITS = (300, 0, 700, 24)


class Trained:
    """A small MLP with inputs that stay where they are."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        options = {"experts": len(SPLITS), "hidden": 128, "ffn": 192}
        self.module: te.ops.Sequential = make_mlp(**options, device="cuda", dtype=torch.bfloat16)  # type: ignore[arg-type]
        self.x, self.sizes, self.scales = make_inputs(SPLITS, 128, device="cuda", dtype=torch.bfloat16)

    def step(self) -> None:
        """Forward and backward; gradients are added to what is there."""
        self.module(self.x, self.sizes, self.scales, self.sizes).square().sum().backward()

    def results(self) -> dict[str, torch.Tensor]:
        torch.cuda.synchronize()
        return gradients(self.module, self.x, self.scales)

    def forget(self) -> None:
        for tensor in (*self.module.parameters(), self.x, self.scales):
            tensor.grad = None


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Gradients where parameters pass autograd themselves."""
    monkeypatch.setenv(hopper.SWITCH, "1")
    trained = Trained()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIns, "of", lambda *_, **__: None)
        trained.step()
    assert [fusion.fused for fusion in fusions_in(trained.module)] == [1]
    return trained.results()


def test_step_is_captured_after_eager_ones_on_another_stream_and_trains_eagerly_afterwards(
    expected: dict[str, torch.Tensor],
) -> None:
    trained = Trained()
    for _ in range(2):
        trained.forget()
        trained.step()
    assert_same_bits(expected, trained.results())
    trained.forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trained.step()
    for tensor in (*trained.module.parameters(), trained.x, trained.scales):
        assert tensor.grad is not None
        tensor.grad.fill_(float("nan"))
    graph.replay()
    assert_same_bits(expected, trained.results())
    trained.forget()
    trained.step()
    assert_same_bits(expected, trained.results())


def test_steps_that_alternate_between_streams_keep_their_bits(expected: dict[str, torch.Tensor]) -> None:
    trained, streams = Trained(), [torch.cuda.Stream(), torch.cuda.Stream()]
    for number in range(4):
        trained.forget()
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[number % 2]):
            trained.step()
        assert_same_bits(expected, trained.results())
