"""Parameters that are quantized themselves in graphs, and Transformer Engine's own modules in FP8: the bits of eager steps,
also after an optimizer that writes the rows of FP8 weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.tensor import Float8Tensor, QuantizedTensor

from te_offload.graphs import CaptureState, capture, capture_layers
from te_offload.ops import te_adapter
from tests.gpu.test_fp8_on_gpu import on_hopper as on_hopper
from tests.support.layer_stack import Dense, Layer, batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Quantizer is being updated"),  # by Transformer Engine, for weights that are FP8
    pytest.mark.filterwarnings("ignore:.*experts lie up to"),  # small ones, where the driver happens to put them
]
RECIPES: dict[str, Any] = {"current": te_recipe.Float8CurrentScaling(), "by blocks": te_recipe.Float8BlockScaling()}
STEPS, LAYERS = 7, 2


KINDS: dict[str, type[torch.nn.Module]] = {"our ops": Layer, "Transformer Engine's modules": Dense}
EVERY = [
    pytest.mark.parametrize("recipe", RECIPES),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("primary", [True, False], ids=["parameters quantized", "parameters in bf16"]),
]


class Model(torch.nn.Module):
    def __init__(self, kind: str, recipe: str, *, primary: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=primary, recipe=RECIPES[recipe]):
            self.layers = torch.nn.ModuleList(KINDS[kind]() for _ in range(LAYERS))
        self.recipe = RECIPES[recipe]

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The loss, whose backward has run."""
        with te.autocast(enabled=True, recipe=self.recipe):
            for layer in self.layers:
                x = layer(x, sizes, scales)
        loss = x.float().square().mean()
        loss.backward()
        return loss.detach()


def write_rows(model: torch.nn.Module) -> None:
    """A step of SGD, which leaves the bytes of FP8 weights the other way round to whoever reads them next."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            if not isinstance(parameter, QuantizedTensor):
                parameter.sub_(0.5 * parameter.grad)
                continue
            parameter.quantize_(parameter.dequantize() - 0.5 * parameter.grad)
            if isinstance(parameter, Float8Tensor) and parameter._transpose is not None:
                parameter._transpose.zero_()
                parameter._reset_caches()


def zero(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros(parameter.shape, dtype=torch.bfloat16, device="cuda")
        parameter.grad.zero_()


def assert_same_grads(one: torch.nn.Module, other: torch.nn.Module, number: int) -> None:
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        assert torch.equal(found.grad, expected.grad), (number, name)


def microbatches() -> Iterator[tuple[int, Any]]:
    """Two a step, with the number of the step."""
    for number, batch in enumerate(batches(2 * STEPS)):
        yield number // 2, batch


def every(function: Any) -> Any:
    for mark in EVERY:
        function = mark(function)
    return function


@every
def test_graphs_of_layers_have_the_bits_of_eager_steps(recipe: str, kind: str, primary: bool) -> None:
    eager, model = (Model(kind, recipe, primary=primary) for _ in range(2))
    before = -1
    with capture_layers(model.layers, warmup=2) as graphs:
        for number, batch in microbatches():
            if number != before:
                for one in (eager, model):
                    zero(one)
            assert torch.equal(eager(*batch), model(*batch)), number
            assert_same_grads(eager, model, number)
            if number == before:
                for one in (eager, model):
                    write_rows(one)
            before = number
        assert [scope.replays for scope in graphs.scopes.values()] == [2 * STEPS - 2] * LAYERS, graphs.report()


@every
def test_a_captured_step_without_its_optimizer_has_the_bits_of_eager_steps(
    recipe: str, kind: str, primary: bool
) -> None:
    eager, model = (Model(kind, recipe, primary=primary) for _ in range(2))
    sample = next(batches(1))
    for one in (eager, model):
        zero(one)
    with capture(model, sample, modules=[model], warmup=2) as replay:
        for number, batch in enumerate(batches(STEPS)):
            for one in (eager, model):
                zero(one)
            assert torch.equal(eager(*batch), replay(*batch) + 0), number
            assert_same_grads(eager, model, number)
            for one in (eager, model):
                write_rows(one)
        assert replay.state is CaptureState.CAPTURED, replay.reason


def test_weights_are_out_of_date_after_that_optimizer_or_these_tests_say_nothing() -> None:
    model = Model("our ops", "current", primary=True)
    zero(model)
    model(*next(batches(1)))
    weights = [one for one in model.parameters() if isinstance(one, Float8Tensor)]
    assert weights and all(te_adapter.is_turned(weight) for weight in weights)
    write_rows(model)
    assert not any(te_adapter.is_turned(weight) for weight in weights)
