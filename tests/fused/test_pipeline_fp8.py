"""Under a recipe, too, a pipeline that is one fused op passes by Transformer Engine's autograd function."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.ops.fuser import OperationFuser
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import OffloadSession
from te_offload.fused import fusions_in, hopper
from te_offload.ops.te_adapter import pipeline
from tests.fused.test_pipeline import OWN, by_transformer_engine
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp

pytestmark = pytest.mark.usefixtures("fp8_in_torch_arithmetic")
SPLITS, HIDDEN, FFN = (128, 0, 256), 128, 256
CURRENT, OTHER, BLOCKS = Float8CurrentScaling(), DelayedScaling(amax_history_len=3), Float8BlockScaling()
DELAYED = DelayedScaling(amax_history_len=2)
OVERRIDDEN = Float8CurrentScaling(backward_override="high_precision")


def mlp() -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=len(SPLITS), hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16)


def forward(modules: list[te.ops.Sequential], recipe: Any, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """The output of some layers, the input and the router scales."""
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, seed=seed, dtype=torch.bfloat16)
    y = x
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        for module in modules:
            y = module(y, sizes, scales, sizes)
    return y, x, scales


def is_own(module: te.ops.Sequential, recipe: Any) -> bool:
    """Whether a call does not run by Transformer Engine's function."""
    y, *_ = forward([module], recipe)
    assert y.grad_fn is not None
    return y.grad_fn.name() == OWN


@pytest.mark.parametrize(
    "recipes",
    [
        (CURRENT, CURRENT, None, None, CURRENT, CURRENT),
        (DELAYED, DELAYED, OTHER, OTHER),
        (CURRENT, CURRENT, BLOCKS, BLOCKS, DELAYED, DELAYED),
    ],
    ids=["and without", "another history", "other recipes"],
)
def test_first_call_under_another_recipe_goes_transformer_engines_way(recipes: tuple[Any, ...]) -> None:
    module = mlp()
    assert [is_own(module, recipe) for recipe in recipes] == [False, True] * (len(recipes) // 2)
    assert [fusion.handed_over for fusion in fusions_in(module)] == [0]


def test_call_with_an_overridden_backward_goes_transformer_engines_way() -> None:
    module = mlp()
    assert [is_own(module, recipe) for recipe in (CURRENT, CURRENT, OVERRIDDEN, OVERRIDDEN, CURRENT, CURRENT)] == [
        *(False, True, False, False, False, True)
    ]


def scales_of(module: te.ops.Sequential) -> dict[str, torch.Tensor]:
    """Of delayed scaling, as they are now."""
    found = {}
    for place in (0, 2):
        for mode, meta in module[place]._fp8_metas.items():
            state = meta[FP8GlobalStateManager.get_meta_tensor_key(forward=mode == "forward")]
            found[f"{place} {mode}"] = state.scale.clone()
    return found


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, BLOCKS], ids=["current", "delayed", "blocks"])
def test_steps_have_the_bits_of_transformer_engines_function(recipe: Any) -> None:
    names: list[str] = []

    def steps() -> dict[str, torch.Tensor]:
        FP8GlobalStateManager.reset()
        modules, found = [mlp(), mlp()], {}
        for step in range(4):
            y, x, scales = forward(modules, recipe, seed=step)
            assert y.grad_fn is not None
            names.append(y.grad_fn.name())
            (y.float().square().sum() * 10**step).backward()  # so that scales have something to follow
            found[f"{step} output"] = y.detach()
            for number, module in enumerate(modules):
                of_module = gradients(module, x, scales)
                if recipe is DELAYED:
                    of_module |= scales_of(module)
                found |= {f"{step} {number} {name}": each for name, each in of_module.items()}
                module.zero_grad()
        if recipe is DELAYED:
            first, last = (found[f"{step} 0 2 backward"] for step in (0, 3))
            assert not torch.equal(first, last)
        return found

    assert_same_bits(by_transformer_engine(steps), steps())
    assert [name == OWN for name in names] == [*[False] * 5, *[True] * 3]


def by_hooks(module: te.ops.Sequential, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return module(*inputs)  # type: ignore[no-any-return]


def after_an_evaluation(module: te.ops.Sequential, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        module(*inputs)
    return module(*inputs)  # type: ignore[no-any-return]


AROUND: dict[str, Callable[..., torch.Tensor]] = {
    "session": lambda module, *inputs: module(*inputs),
    "hooks": by_hooks,
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "evaluation before": after_an_evaluation,
}


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, BLOCKS], ids=["current", "delayed", "blocks"])
@pytest.mark.parametrize("way", AROUND)
def test_what_is_around_a_step_sees_the_same(way: str, recipe: Any) -> None:
    names: list[str] = []

    def steps() -> dict[str, torch.Tensor]:
        FP8GlobalStateManager.reset()
        module, found = mlp(), dict[str, torch.Tensor]()
        with OffloadSession(module, min_bytes=0) as session:
            for step in range(2):
                x, sizes, scales = make_inputs(SPLITS, HIDDEN, seed=step, dtype=torch.bfloat16)
                of_session = session.step() if way == "session" else contextlib.nullcontext()
                with of_session, te.autocast(enabled=True, recipe=recipe):
                    y = AROUND[way](module, x, sizes, scales, sizes)
                    assert y.grad_fn is not None
                    names.append(y.grad_fn.name())
                    y.float().square().sum().backward()
                of_step = gradients(module, x, scales) | {"output": y.detach()}
                found |= {f"{step} {name}": each for name, each in of_step.items()}
                module.zero_grad()
            assert way != "session" or session.records[-1].bytes_back > 0
        return found

    assert_same_bits(by_transformer_engine(steps), steps())
    assert [name == OWN for name in names] == [False, False, False, True]


@pytest.mark.parametrize("captures", [False, True])
def test_scales_of_the_backward_follow_once_a_step_but_in_no_capture(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [mlp(), mlp()]
    forward(modules, DELAYED)
    told: list[bool] = []
    y, *_ = forward(modules, DELAYED)
    monkeypatch.setattr(pipeline, "is_graph_capturing", lambda: captures)
    monkeypatch.setattr(FP8GlobalStateManager, "reduce_and_update_fp8_tensors", lambda *, forward: told.append(forward))
    y.float().sum().backward()
    assert told == ([] if captures else [False])


def compute_again(module: te.ops.Sequential, *, around: bool, inside: bool) -> None:
    """A step of a module that torch's checkpoint computes again, with te.autocast around that, inside of it, or both."""
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=CURRENT) if inside else contextlib.nullcontext():
            return module(*inputs)  # type: ignore[no-any-return]

    with te.autocast(enabled=around, recipe=CURRENT):
        y = checkpoint(run, x, sizes, scales, sizes, use_reentrant=True)
    y.float().sum().backward()


@pytest.mark.parametrize("switch", ["reference", "0"], ids=["fused", "op by op"])
def test_recipe_that_a_checkpoint_has_lost_is_warned_of(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    module = mlp()
    with pytest.warns(
        UserWarning, match="GroupedLinear - ScaledSReLU - GroupedLinear: its forward ran under Float8Cur"
    ):
        compute_again(module, around=True, inside=False)


@pytest.mark.filterwarnings("error")
def test_recipe_that_nobody_has_lost_is_not() -> None:
    module = mlp()
    compute_again(module, around=False, inside=True)
    compute_again(module, around=True, inside=True)
    forward([module], CURRENT)
    forward([module], None)[0].float().sum().backward()  # without a recipe on purpose


def test_call_passes_by_the_search_for_fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mlp()
    assert not is_own(module, CURRENT)
    monkeypatch.setattr(OperationFuser, "maybe_fuse_ops", None)
    assert is_own(module, CURRENT)
