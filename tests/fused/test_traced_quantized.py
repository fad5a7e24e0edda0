"""`te_offload.functional.grouped_mlp` under recipes: eager and traced, beside the ops of te_offload."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.common import recipe as te_recipe

from te_offload import Fate, OffloadSession, Reason, ops
from te_offload.errors import ArgumentError, UnsupportedError
from te_offload.functional import RECIPES, grouped_mlp
from te_offload.fused import quantized, traced_quantized
from tests.support.mlp import assert_same_bits
from tests.support.traced import EXPERTS, FFN, HIDDEN, HOW, SPLITS, Layer, by_ops, run_layers, step, tensors

EVERY = pytest.mark.parametrize("recipe", RECIPES)
AGAIN = pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
TOKENS = sum(SPLITS)
# Bytes of FC1's input as it is saved: in FP8, and by blocks a scale for each 128 tokens besides.
SAVED = {"fp8": TOKENS * HIDDEN, "fp8-block": TOKENS * HIDDEN + (TOKENS // 128 + EXPERTS) * HIDDEN * 4}


@pytest.fixture(autouse=True)
def _fused_on_the_cpu(fp8_in_torch_arithmetic: None) -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


def compiled_if(compiled: bool) -> Any:
    return torch.compile(grouped_mlp, backend="aot_eager", fullgraph=True) if compiled else grouped_mlp


@EVERY
@AGAIN
@COMPILED
@pytest.mark.parametrize("activation", HOW)
def test_it_has_the_bits_of_the_ops_under_the_recipe(
    activation: str, recipe: str, *, again: bool, compiled: bool
) -> None:
    given = tensors(activation)
    expected = by_ops(activation, given, RECIPES[recipe]())
    found = step(compiled_if(compiled), given, activation, recompute_act_input=again, recipe=recipe)
    assert_same_bits(expected, found)
    dense = by_ops(activation, tensors(activation))
    errors = {name: float((found[name] - one).norm() / one.norm()) for name, one in dense.items()}
    assert min(errors.values()) > 1e-3 and max(errors.values()) < 0.25, errors  # in FP8


@EVERY
def test_scalings_are_those_that_transformer_engine_gives_linears(recipe: str) -> None:
    linear = ops.GroupedLinear(EXPERTS, HIDDEN, FFN, bias=False, device="cpu", dtype=torch.bfloat16)
    made = RECIPES[recipe]()
    with te.autocast(enabled=True, recipe=made):
        linear.reset_recipe_state(recipe=made)
        expected = quantized.scaling_of(quantized.way_of(made), linear, reference=True)
    assert quantized.scaling_of_recipe(made) == expected


@EVERY
@AGAIN
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_what_torch_asks_of_an_op_holds(activation: str, recipe: str, *, again: bool) -> None:
    given, (gate, numbers, interleave) = tensors(activation), HOW[activation]
    registered, how = torch.ops.te_offload, (gate, list(numbers), interleave, recipe)
    of_forward = *(given[name] for name in ("x", "w1", "w2", "split_sizes", "scales")), *how, not again, True, []
    torch.library.opcheck(registered.grouped_mlp_quantized.default, of_forward)
    x, w1, w2, scales = (given[name].detach() for name in ("x", "w1", "w2", "scales"))
    whole: Any = x, w1, w2, given["split_sizes"], scales, *how, not again, True, []
    torch.library.opcheck(registered.grouped_mlp_quantized_forward.default, whole)
    y, offsets, act_input, kept = registered.grouped_mlp_quantized_forward(*whole)
    saved = x if again and not kept else None
    if again:
        of_again = saved, w1, scales, offsets, kept, *how
        torch.library.opcheck(registered.grouped_mlp_quantized_fc1_again.default, of_again)
        act_input = registered.grouped_mlp_quantized_fc1_again(*of_again)
    of_fc2 = torch.ones_like(y), w2, scales, offsets, act_input, kept, *how, True
    torch.library.opcheck(registered.grouped_mlp_quantized_fc2_backward.default, of_fc2)
    dact_input, _, _, work, most = registered.grouped_mlp_quantized_fc2_backward(*of_fc2)
    of_fc1 = dact_input, most, saved, w1, offsets, kept, work, *how, True
    torch.library.opcheck(registered.grouped_mlp_quantized_fc1_backward.default, of_fc1)


@EVERY
def test_one_graph_serves_any_split_sizes_and_any_number_of_tokens_after_the_second(recipe: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(grouped_mlp, backend=counter, fullgraph=True)
    for splits in ((11, 0, 20), (1, 2, 28), (5, 0, 0), (0, 0, 12), (100, 7, 300)):
        given = tensors("swiglu", splits)
        expected = by_ops("swiglu", given, RECIPES[recipe]())
        assert_same_bits(expected, step(function, given, "swiglu", recipe=recipe))
    assert counter.frame_count == 2


@EVERY
@AGAIN
@COMPILED
def test_frozen_weights_take_no_gradient_and_fc1s_keep_no_input(recipe: str, *, again: bool, compiled: bool) -> None:
    given = tensors("swiglu")
    expected = step(grouped_mlp, tensors("swiglu"), "swiglu", recipe=recipe)
    for name in ("w1", "w2"):
        given[name].requires_grad_(False)
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
        found = step(compiled_if(compiled), given, "swiglu", recompute_act_input=again, recipe=recipe)
    assert_same_bits({name: expected[name] for name in ("y", "x", "scales")}, found)
    assert (TOKENS * HIDDEN in [tensor.numel() for tensor in saved]) is again


@EVERY
@AGAIN
def test_rows_of_no_expert_are_zero_and_take_no_gradient(recipe: str, *, again: bool) -> None:
    given = tensors("swiglu", more=6)
    found = step(grouped_mlp, given, "swiglu", recompute_act_input=again, recipe=recipe)
    for name in ("y", "x", "scales"):
        assert not found[name][TOKENS:].any() and found[name][:TOKENS].any()


@EVERY
@AGAIN
@COMPILED
def test_without_tokens_weights_have_gradients_of_zeros(recipe: str, *, again: bool, compiled: bool) -> None:
    given = tensors("swiglu", (0, 0, 0))
    found = step(compiled_if(compiled), given, "swiglu", recompute_act_input=again, recipe=recipe)
    assert found["y"].shape == (0, HIDDEN) and not found["w1"].any() and not found["w2"].any()


@EVERY
@COMPILED
def test_within_a_checkpoint_bits_are_the_same(recipe: str, *, compiled: bool) -> None:
    def function(**given: Any) -> torch.Tensor:
        found: torch.Tensor = checkpoint(functools.partial(grouped_mlp, **given), use_reentrant=False)
        return found

    expected = step(grouped_mlp, tensors("swiglu"), "swiglu", recipe=recipe)
    found: Any = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    assert_same_bits(expected, step(found, tensors("swiglu"), "swiglu", recipe=recipe))


@EVERY
def test_weights_that_change_between_steps_are_quantized_anew(recipe: str) -> None:
    given, changed = tensors("swiglu"), tensors("swiglu")
    function = compiled_if(True)
    step(function, given, "swiglu", recipe=recipe)
    for tensor in (given, changed):
        with torch.no_grad():
            tensor["w1"].mul_(1.3)
            tensor["w2"].mul_(0.7)
    for name in ("x", "w1", "w2", "scales"):
        given[name].grad = None
    assert_same_bits(
        step(grouped_mlp, changed, "swiglu", recipe=recipe), step(function, given, "swiglu", recipe=recipe)
    )


@EVERY
@COMPILED
@pytest.mark.parametrize("stays", [(), ("fc1_input",), ("act_input",)], ids=str)
def test_a_session_moves_its_slots_but_for_those_that_are_to_stay_and_changes_no_bit(
    recipe: str, stays: tuple[str, ...], *, compiled: bool
) -> None:
    layers = torch.nn.ModuleList(Layer(no_offload_activation=stays, recipe=recipe) for _ in range(2))
    expected = run_layers(layers)
    for layer in layers if compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    with OffloadSession(layers, min_bytes=0) as session:
        for _ in range(3):
            with session.step():
                found = run_layers(layers)
            assert_same_bits(expected, found)
            rows = [row for row in session.records[-1].slots if "grouped_mlp" in row.name]
            assert len(rows) == 4
            for row in rows:
                name = row.name.split(".")[1]
                fate, reason = (Fate.KEPT, Reason.ASKED) if name in stays else (Fate.OFFLOADED, Reason.NONE)
                nbytes = SAVED[recipe] if name == "fc1_input" else TOKENS * 2 * FFN * 2
                assert (row.fate, row.reason, row.nbytes) == (fate, reason, nbytes), row.name
            assert session.records[-1].bytes_back > 0


@EVERY
def test_with_fc1_again_a_session_moves_fc1s_input_alone(recipe: str) -> None:
    layers = torch.nn.ModuleList(Layer(recompute_act_input=True, recipe=recipe) for _ in range(2))
    expected = run_layers(layers)
    with OffloadSession(layers, min_bytes=0) as session:
        for _ in range(2):
            with session.step():
                found = run_layers(layers)
            assert_same_bits(expected, found)
        sizes = {row.name: row.nbytes for row in session.records[-1].slots if "grouped_mlp" in row.name}
    each = 2 if recipe == "fp8-block" else 1  # by blocks it is x itself
    assert sizes == {f"layer{number}/grouped_mlp.fc1_input": TOKENS * HIDDEN * each for number in range(2)}


def test_a_recipe_of_its_own_holds_inside_of_another_autocast() -> None:
    expected = step(grouped_mlp, tensors("swiglu"), "swiglu", recipe="fp8")
    with te.autocast(enabled=True, recipe=RECIPES["fp8-block"]()):
        found = step(grouped_mlp, tensors("swiglu"), "swiglu", recipe="fp8")
    assert_same_bits(expected, found)


# Bad input ---------------------------------------------------------------------------------------------------------------


def test_a_recipe_of_another_name_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="recipe is 'fp8-delayed', but must be one of fp8, fp8-block, or None"):
        grouped_mlp(**tensors("swiglu"), recipe="fp8-delayed")


def test_sizes_that_a_recipe_does_not_take_are_an_error() -> None:
    given: Any = tensors("swiglu")
    given |= {"w1": given["w1"][:, :48].contiguous(), "w2": given["w2"][:, :, :24].contiguous()}
    with pytest.raises(
        ArgumentError, match=r"recipe='fp8' does not take these sizes: FC2 is 24 x 16; FP8 takes multiples of 16"
    ):
        grouped_mlp(**given, recipe="fp8")


def test_a_recipe_whose_backward_is_another_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = functools.partial(te_recipe.Float8CurrentScaling, backward_override="high_precision")
    monkeypatch.setitem(quantized.RECIPES, "fp8", other)
    traced_quantized._scheme_of.cache_clear()
    with pytest.raises(
        UnsupportedError, match=r"recipe='fp8' is not computed here: .*backward_override=high_precision"
    ):
        grouped_mlp(**tensors("swiglu"), recipe="fp8")
    traced_quantized._scheme_of.cache_clear()
