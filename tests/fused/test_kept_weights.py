"""Quantized weights that the forward keeps for the dgrad, or that the dgrad makes again."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import OffloadSession, ops
from te_offload.errors import ArgumentTypeError, SavedTensorModifiedError
from te_offload.fused import fusions_in, hopper
from te_offload.fused.calls import calls_of
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.fused.kernels.reference_fp8 import ReferenceFp8Kernels
from te_offload.units import format_bytes
from tests.fused import test_block_pass, test_fp8_pass
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run

pytestmark = pytest.mark.usefixtures("fp8_in_torch_arithmetic")
EXPERTS, HIDDEN, FFN, SPLITS = 3, 128, 256, (130, 0, 384)
RECIPES: dict[str, Any] = test_fp8_pass.RECIPES | test_block_pass.RECIPES
EVERY = pytest.mark.parametrize("recipe", RECIPES)
ONE_EACH = pytest.mark.parametrize("recipe", ["current", "delayed", "fp8-block"])


def mlp(keep: tuple[bool, bool], **options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    one, other = ({"keep_quantized_weight": each} for each in keep)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16, fc1=one, fc2=other, **options)


def step(module: te.ops.Sequential, recipe: str, seed: int = 1, *, grows: float = 1.0) -> dict[str, torch.Tensor]:
    """One step; its weights are larger by a factor in the next one, as after an optimizer's."""
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        found = run(module, SPLITS, hidden=HIDDEN, seed=seed, extra=3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(grows)
    return found


@EVERY
@pytest.mark.parametrize("keep", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_gradients_have_the_same_bits_whether_quantized_weights_are_kept_or_made_again(
    recipe: str, keep: tuple[bool, bool], activation: str
) -> None:
    """Over steps in which delayed scaling's scales and magnitudes change, too."""
    found = []
    for which in ((True, True), keep):
        FP8GlobalStateManager.reset()
        module = mlp(which, activation=activation)
        found.append([step(module, recipe, seed, grows=1.5) for seed in range(4)])
        calls = calls_of(module[0])
        assert calls.fused and not calls.handed_over, calls
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


@EVERY
def test_none_of_the_quantized_weights_is_there_between_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """And each that the backward makes is there for its dgrad alone."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def noted(kernels: type[Any], name: str) -> None:
        make: Callable[..., Any] = getattr(kernels, name)

        def run(self: Any, *args: Any, **options: Any) -> Any:
            found = make(self, *args, **options)
            made.extend(weakref.ref(one) for one in (*(found.rows or ()), *(found.columns or ())))
            return found

        monkeypatch.setattr(kernels, name, run)

    def looked_at(kernels: type[Any], name: str) -> None:
        multiply: Callable[..., Any] = getattr(kernels, name)

        def run(self: Any, *args: Any, **options: Any) -> None:
            alive.append(sum(one() is not None for one in made))
            multiply(self, *args, **options)

        monkeypatch.setattr(kernels, name, run)

    for kernels, names in (
        (ReferenceFp8Kernels, ("quantize_weights", "weight_columns", "wgrad_fp8")),
        (ReferenceBlockKernels, ("block_weights", "block_weight_columns", "wgrad_blocks")),
    ):
        noted(kernels, names[0])
        noted(kernels, names[1])
        looked_at(kernels, names[2])
    module = mlp((False, False))
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        loss = module(x, sizes, scales, sizes).float().sum()
    assert len(made) == 2 * EXPERTS and not any(one() is not None for one in made)
    loss.backward()
    assert len(made) == 4 * EXPERTS and alive == [0, 0]


def test_magnitudes_of_delayed_scaling_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again by the dgrad, whose step may have begun another history."""
    module = mlp((False, False))
    step(module, "delayed")
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
        loss = module(x, sizes, scales, sizes).float().sum()
    weights = [module[place].get_quantizer("forward", 2 * expert + 1) for place in (0, 2) for expert in range(EXPERTS)]
    for quantizer in weights:
        quantizer.amax.fill_(-1.0)
    loss.backward()
    assert all(quantizer.amax.item() == -1.0 for quantizer in weights)


@ONE_EACH
def test_offloading_beside_it_changes_no_bit(recipe: str) -> None:
    module = mlp((True, True))
    expected = [step(module, recipe, seed) for seed in range(3)]
    FP8GlobalStateManager.reset()
    module = mlp((False, False))
    with OffloadSession(module, min_bytes=0, verify=True) as session:
        for seed in range(3):
            with session.step():
                assert_same_bits(expected[seed], step(module, recipe, seed))
    assert session.records[-1].bytes_back > 0


@ONE_EACH
def test_a_weight_that_changed_before_the_dgrad_reads_it_is_an_error(recipe: str) -> None:
    module = mlp((False, False))
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        loss = module(x, sizes, scales, sizes).float().sum()
    with torch.no_grad():
        module[0].weight1.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="a weight or a bias was written to"):
        loss.backward()


def test_unfused_calls_that_cannot_make_them_again_keep_them_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "0")
    expected = step(mlp((True, True)), "delayed")
    FP8GlobalStateManager.reset()
    module = mlp((False, True))
    why = r"keep_quantized_weight=False, but Float8Quantizer has scales that may be others.*3 x 256 x 128 weights stay"
    with pytest.warns(UserWarning, match=why) as said:
        assert_same_bits(expected, step(module, "delayed"))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(module, "delayed")
        step(mlp((False, False)), "current")  # can
        run(mlp((False, False)), SPLITS, hidden=HIDDEN)  # quantizes nothing


def test_a_copy_of_an_op_keeps_what_the_op_does() -> None:
    module = copy.deepcopy(mlp((False, True)))
    assert (module[0].keep_quantized_weight, module[2].keep_quantized_weight) == (False, True)


@pytest.mark.parametrize("switch", ["reference", "0"], ids=["fused", "unfused"])
def test_a_module_that_was_pickled_before_the_keyword_keeps_them(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    expected = step(mlp((True, True)), "delayed")
    FP8GlobalStateManager.reset()
    module = mlp((False, False))
    for place in (0, 2):
        del module[place].__dict__["keep_quantized_weight"]
    assert_same_bits(expected, step(module, "delayed"))


@pytest.mark.parametrize("value", [None, 0, "no"])
def test_anything_but_true_or_false_is_an_error_that_names_the_op(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="GroupedLinear: keep_quantized_weight must be True or False, but is"):
        ops.GroupedLinear(2, 16, 16, device="cpu", keep_quantized_weight=value)


@pytest.mark.parametrize("recipe", ["current", "fp8-block", "mxfp8"])
def test_fc2s_weights_are_quantized_when_those_of_fc1_are_gone(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """So the forward holds one linear's quantized weights at a time; with delayed scaling FC1's epilogue needs both."""
    rows: list[list[weakref.ref[torch.Tensor]]] = []
    alive: list[list[int]] = []

    for kernels, name in ((ReferenceFp8Kernels, "quantize_weights"), (ReferenceBlockKernels, "block_weights")):
        make: Callable[..., Any] = getattr(kernels, name)

        def noted(self: Any, *args: Any, make: Callable[..., Any] = make, **options: Any) -> Any:
            alive.append([sum(one() is not None for one in those) for those in rows])
            found = make(self, *args, **options)
            rows.append([weakref.ref(one) for one in found.rows])
            return found

        monkeypatch.setattr(kernels, name, noted)
    module = mlp((False, False))
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        module(x, sizes, scales, sizes)
    assert alive == [[], [0]]
    assert len(rows) == 2 and not any(one() is not None for those in rows for one in those)


@pytest.mark.parametrize("keep", [(True, True), (False, True), (False, False)])
@ONE_EACH
def test_report_says_how_many_bytes_stay_and_what_to_do(recipe: str, keep: tuple[bool, bool]) -> None:
    module = mlp(keep)
    with OffloadSession(module, min_bytes=0) as session:
        with session.step():
            step(module, recipe)
        kept = sum(keep) * EXPERTS * HIDDEN * FFN
        assert [fusion.kept_weight_bytes for _, fusion in session.fusions] == [kept]
        said = (
            f"{format_bytes(kept)} of quantized weights stay on the GPU from their forwards to their backwards; with "
        )
        assert (said in session.report()) is (kept > 0)
        with session.step():
            run(module, SPLITS, hidden=HIDDEN)
        assert [fusion.kept_weight_bytes for _, fusion in session.fusions] == [
            0
        ]  # without a recipe nothing is quantized


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # by Transformer Engine, for all weights that are FP8
def test_weights_that_are_fp8_are_not_counted_among_those_that_stay() -> None:
    module = mlp((True, True))
    for place in (0, 2):
        for number in range(EXPERTS):
            weight = getattr(module[place], f"weight{number}").detach()
            setattr(module[place], f"weight{number}", test_fp8_pass.fp8_parameter(weight))
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES["current"]):
        module(x, sizes, scales, sizes)
    assert [(fusion.fused, fusion.kept_weight_bytes) for fusion in fusions_in(module)] == [(1, 0)]
