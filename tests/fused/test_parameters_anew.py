"""Parameters that are registered anew after a first step: they get the gradients, and nothing reads the old ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

from te_offload import OffloadSession
from te_offload.errors import ArgumentError
from te_offload.fused import hopper
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp

pytestmark = [
    pytest.mark.usefixtures("fp8_in_torch_arithmetic"),
    pytest.mark.filterwarnings("ignore:GroupedLinear"),
]
SPLITS, HIDDEN, FFN = (128, 0, 256), 128, 256
WAYS = ["alone", "behind another op", "op by op"]
RECIPES = {"bf16": None, "FP8": Float8CurrentScaling(), "blocks": Float8BlockScaling()}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(way: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., te.ops.Sequential]:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    if way == "op by op":
        monkeypatch.setenv(hopper.SWITCH, "0")

    def module(**options: Any) -> te.ops.Sequential:
        if way == "op by op" and (options.keys() & {"bias", "single_grouped_weight"}):
            pytest.skip("Transformer Engine's grouped path, which has these, is not replaced here")
        torch.manual_seed(0)
        made = make_mlp(experts=len(SPLITS), hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16, **options)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "bias" in name:  # which are zero at first
                    parameter.normal_()
        return te.ops.Sequential(te.ops.Identity(), *made) if way == "behind another op" else made

    return module


def train(
    module: te.ops.Sequential, call: Callable[..., torch.Tensor] | None = None, recipe: Any = None, extra: int = 3
) -> dict[str, torch.Tensor]:
    """Output and gradients of the inputs; those of the parameters are theirs, anew."""
    module.zero_grad()
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = (call or module)(x, *(sizes, scales, sizes, scales)[:extra])
    y.float().square().sum().backward()
    assert x.grad is not None and scales.grad is not None
    return {"output": y.detach(), "x": x.grad, "scales": scales.grad}


def gradients(module: te.ops.Sequential) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def scaled(module: te.ops.Sequential, by: float = 0.75) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() * by for name, tensor in module.named_parameters()}


@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"single_grouped_weight": True}], ids=["plain", "bias", "grouped"]
)
def test_assigned_state_is_trained(make: Callable[..., te.ops.Sequential], options: dict[str, Any]) -> None:
    module, expected, other = (make(**options) for _ in range(3))
    state = scaled(module)
    before = list(module.parameters())
    train(module)
    module.zero_grad()
    for each in (expected, other):
        with torch.no_grad():
            for name, parameter in each.named_parameters():
                parameter.copy_(state[name])
    if "single_grouped_weight" in options:  # no plain tensor stands for such a weight
        for index in (-3, -1):
            module[index].weight = other[index].weight
    else:
        module.load_state_dict(state, strict=False, assign=True)
    assert not set(map(id, before)) & set(map(id, module.parameters()))
    assert_same_bits(train(expected), train(module))
    assert_same_bits(gradients(expected), gradients(module))
    assert not any(parameter.grad is not None for parameter in before)


def test_one_new_weight_among_those_of_all_experts_is_trained(make: Callable[..., te.ops.Sequential]) -> None:
    module, expected = make(), make()
    train(module)
    module.zero_grad()
    linear, other = (each[-1] for each in (module, expected))
    before = linear.weight2
    linear.weight2 = torch.nn.Parameter(before.detach() * 0.5)
    with torch.no_grad():
        other.weight2.mul_(0.5)
    assert_same_bits(train(expected), train(module))
    assert_same_bits(gradients(expected), gradients(module))
    assert linear.weight2.grad is not None and before.grad is None


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("keeps", [True, False], ids=["quantized weights kept", "made again"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_call_with_computed_parameters_reads_and_trains_those_alone(
    make: Callable[..., te.ops.Sequential], recipe: Any, keeps: bool, biased: bool
) -> None:
    options: dict[str, Any] = {"keep_quantized_weight": keeps}
    options |= {"bias": True, "fc2": {"scale_bias": True}} if biased else {}
    module, expected = make(**options), make(**options)
    expected.load_state_dict(scaled(module), strict=False)
    inputs = 4 if biased else 3

    def call(*given: torch.Tensor) -> torch.Tensor:
        computed = {name: parameter * 0.75 for name, parameter in module.named_parameters()}
        result: torch.Tensor = torch.func.functional_call(module, computed, given)
        return result

    with OffloadSession(module, min_bytes=0) as session:
        for step in range(4):
            with session.step():
                found = train(module, call if step % 2 else None, recipe, inputs)  # with its own in between
            if step % 2:
                assert_same_bits(train(expected, None, recipe, inputs), found)
                own = {name: grad * 0.75 for name, grad in gradients(expected).items()}
                assert_same_bits(own, gradients(module))
            assert session.records[-1].bytes_back > 0


def test_computed_parameters_are_given_up_after_the_backward_though_its_graph_lives_on(
    make: Callable[..., te.ops.Sequential], way: str
) -> None:
    module = make()
    known: list[weakref.ref[torch.Tensor]] = []
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        computed = {name: parameter * 0.75 for name, parameter in module.named_parameters()}
        known += map(weakref.ref, computed.values())
        y: torch.Tensor = torch.func.functional_call(module, computed, (x, sizes, scales, sizes))
        y.float().square().sum().backward()
        del computed
        if way == "op by op":  # Transformer Engine keeps weights by the graph's nodes
            del y
        gc.collect()
        assert not any(reference() is not None for reference in known)


def test_parameter_that_an_op_is_given_beside_its_own_is_left_alone(make: Callable[..., te.ops.Sequential]) -> None:
    module = make()
    expected = train(module)
    module[-1].register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
    assert_same_bits(expected, train(module))
    assert module[-1].extra.grad is None and module[-1].weight0.grad is not None


class _Halved(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("before", ["nothing", "a step"])
@pytest.mark.parametrize("by", ["parametrization", "pruning"])
def test_weight_that_torch_computes_in_its_place_is_an_error_in_training(
    make: Callable[..., te.ops.Sequential], number: int, before: str, by: str
) -> None:
    module = make()
    if before == "a step":
        train(module)
    linear = next(op for op in module if hasattr(op, "num_groups"))
    if by == "parametrization":
        torch.nn.utils.parametrize.register_parametrization(linear, f"weight{number}", _Halved())
    else:
        torch.nn.utils.prune.l1_unstructured(linear, f"weight{number}", amount=0.5)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"weight{number} is not among its parameters.*functional_call"):
            train(module)


@pytest.mark.parametrize("before", ["nothing", "an evaluation"])
def test_weights_that_torch_computes_in_their_place_are_evaluated_and_an_error_in_training(
    make: Callable[..., te.ops.Sequential], before: str
) -> None:
    module, halved = make(), make()
    linear, other = [next(op for op in one if hasattr(op, "num_groups")) for one in (module, halved)]
    for number in range(len(SPLITS)):
        torch.nn.utils.parametrize.register_parametrization(linear, f"weight{number}", _Halved())
        getattr(other, f"weight{number}").data.mul_(0.5)
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = halved(x, sizes, scales, sizes)
        if before != "nothing":
            assert torch.equal(module(x, sizes, scales, sizes), expected)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"weight0 is not among its parameters.*functional_call"):
            train(module)
    with torch.no_grad():
        assert torch.equal(module(x, sizes, scales, sizes), expected)
