"""Gradients that go into ``main_grad``, in graphs on a GPU: the bits of eager steps, with Megatron-core's hooks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe

from te_offload import OffloadSession
from te_offload.errors import InputMismatchError
from te_offload.graphs import CaptureState, capture, capture_layers
from te_offload.offload.streams import new_stream
from tests.gpu.test_fp8_on_gpu import on_hopper as on_hopper
from tests.support.layer_stack import HIDDEN, Batch, Dense, Layer, batches, captured
from tests.support.mlp import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*experts lie up to"),  # small ones, where the driver happens to put them
]
RECIPES: dict[str, Any] = {"bf16": None, "current": te_recipe.Float8CurrentScaling()}
LAYERS = 2


KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "our ops": functools.partial(Layer, accumulate_into_main_grad=True),
    "Transformer Engine's modules": functools.partial(Dense, fuse_wgrad_accumulation=True),
}


class Trainer(torch.nn.Module):
    """Layers whose gradients are kept as Megatron's DistributedDataParallel keeps them, in float32."""

    def __init__(self, kind: str, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(KINDS[kind]() for _ in range(LAYERS))
        self.before: Any = torch.nn.Parameter(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16))
        self._recipe = RECIPES[recipe]
        for parameter in self.every():
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
            parameter.grad_added_to_main_grad = False

    def every(self) -> list[Any]:
        return list(self.parameters())

    def hook(self, stream: torch.cuda.Stream | None = None) -> None:
        """On the nodes that add to ``.grad``, of a stream, where Megatron-LM makes them, or of the default one."""
        self._nodes = []
        with torch.cuda.stream(stream):
            for parameter in self.every():
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                node.register_hook(lambda *_, parameter=parameter: _after(parameter))
                self._nodes.append(node)

    def zero(self) -> None:
        for parameter in self.every():
            parameter.main_grad.zero_()
            parameter.grad_added_to_main_grad = False

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The loss, whose backward has run."""
        x = x * self.before
        with te.autocast(enabled=self._recipe is not None, recipe=self._recipe):
            for layer in self.layers:
                x = layer(x, sizes, scales)
        loss = x.float().square().mean()
        loss.backward()
        return loss.detach()

    def main_grads(self) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = dict(self.named_parameters())
        return {name: parameter.main_grad.clone() for name, parameter in found.items()}


def _after(parameter: Any) -> None:
    if not parameter.grad_added_to_main_grad:
        torch.cuda._sleep(400_000)  # so that whoever does not wait for this stream writes over the gradient first
        parameter.main_grad.add_(parameter.grad)
    elif parameter.grad is not None:
        parameter.grad.fill_(torch.nan)  # a dummy: who adds it shows
    parameter.grad = None


def steps(count: int) -> list[tuple[Batch, Batch]]:
    found = list(batches(2 * count))
    return list(zip(found[::2], found[1::2], strict=True))


def run(trainer: Trainer, pair: tuple[Batch, Batch], session: OffloadSession | None = None) -> list[torch.Tensor]:
    trainer.zero()
    with contextlib.nullcontext() if session is None else session.step():
        return [trainer(*batch) for batch in pair]


@pytest.mark.parametrize("aside", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("offloads", [False, True], ids=["no offload", "offload"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_layers_add_what_eager_steps_add(kind: str, recipe: str, offloads: bool, aside: bool) -> None:
    eager, trainer = Trainer(kind, recipe), Trainer(kind, recipe)
    for one in (eager, trainer):
        one.hook(new_stream(0) if aside else None)
    session = OffloadSession(trainer.layers, min_bytes=0, max_in_flight=0) if offloads else None
    with capture_layers(trainer.layers, session=session, warmup=2) as graphs:
        for number, pair in enumerate(steps(6)):
            for expected, found in zip(run(eager, pair), run(trainer, pair, session), strict=True):
                assert torch.equal(expected, found), number
            assert_same_bits(eager.main_grads(), trainer.main_grads())
        captured(graphs)
        assert [scope.replays for scope in graphs.scopes.values()] == [10] * LAYERS, graphs.report()
        if session is not None:
            assert session.records[-1].bytes_out > 0
    if session is not None:
        session.close()


@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_that_moved_is_an_error_or_captured_anew(kind: str) -> None:
    eager, trainer = Trainer(kind, "bf16"), Trainer(kind, "bf16")
    for on_mismatch in ("raise", "recapture"):
        with capture_layers(trainer.layers, warmup=1, on_mismatch=on_mismatch) as graphs:
            for pair in steps(2):
                run(eager, pair), run(trainer, pair)
            captured(graphs)
            for parameter in trainer.every():
                parameter.main_grad = torch.full_like(parameter.main_grad, torch.nan)
            if on_mismatch == "raise":
                with pytest.raises(InputMismatchError, match="main_grad was at"):
                    run(trainer, pair)
                continue
            for pair in steps(3):
                run(eager, pair), run(trainer, pair)
                assert_same_bits(eager.main_grads(), trainer.main_grads())
            captured(graphs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_adds_what_eager_steps_add(kind: str, recipe: str) -> None:
    eager, trainer = Trainer(kind, recipe), Trainer(kind, recipe)
    for one in (eager, trainer):
        for parameter in one.every():
            parameter.grad = torch.zeros_like(parameter)
    with capture(trainer, next(batches(1)), modules=[trainer], warmup=2) as replay:
        for batch in batches(5):
            for one in (eager, trainer):
                one.zero()
            assert torch.equal(eager(*batch), replay(*batch) + 0)
            assert_same_bits(eager.main_grads(), trainer.main_grads())
            added = [parameter.grad_added_to_main_grad for parameter in eager.every()]
            assert added == [parameter.grad_added_to_main_grad for parameter in trainer.every()] and True in added
        assert replay.state is CaptureState.CAPTURED, replay.reason
