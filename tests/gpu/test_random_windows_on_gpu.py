"""Random grouped MLPs on a Hopper GPU, of all widths and numbers of tokens at which the kernels' tiles change."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import OffloadSession
from te_offload.fused import fusions_in, hopper
from tests.fused.test_fp8_pass import RECIPES
from tests.fused.test_random_windows import check_many
from tests.gpu.test_fp8_on_gpu import on_hopper
from tests.gpu.test_hopper_on_gpu import of_whole_ops
from tests.support.mlp import assert_same_bits
from tests.support.random_windows import (
    Expected,
    Window,
    draw_window,
    make_inputs,
    make_module,
    quantizable,
    step,
    step_in_fp64,
    widened,
)

__all__ = ["on_hopper"]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")]
DTYPES = torch.bfloat16, torch.float16
NEAR_FP64 = 0.15  # what E4M3 and E5M2 make of sums of products, in the mean
NEAR_REFERENCE = {  # what is rounded the other way; with it a largest magnitude and, but for powers of two, all numbers
    "current, powers of two": 0.03,
    "current, E4M3": 0.08,
    "delayed": 0.08,
    "blocks": 0.03,
}
OF_AN_EXPERT = 3  # times as far: it may have one token


@pytest.mark.parametrize("part", range(16))
@pytest.mark.usefixtures("copies_out_end")
def test_random_windows_are_near_fp64_and_offloading_changes_no_bit(part: int) -> None:
    assert check_many(range(1000 + 12 * part, 1012 + 12 * part), "cuda", DTYPES, most_work=6e9, most_tokens=30_000) > 0


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("recipe", NEAR_REFERENCE)
@pytest.mark.usefixtures("copies_out_end")
def test_random_windows_in_fp8_are_near_fp64_and_the_reference(
    monkeypatch: pytest.MonkeyPatch, recipe: str, part: int
) -> None:
    first = 5000 + 1000 * list(NEAR_REFERENCE).index(recipe) + 6 * part
    for seed in range(first, first + 6):
        window = quantizable(draw_window(random.Random(seed), DTYPES, 2e9, 20_000, may_leave_rows=True))
        try:
            check_quantized(monkeypatch, window, recipe)
        except BaseException as error:
            raise AssertionError(f"random window {seed}, {recipe}: {window}") from error


def check_quantized(monkeypatch: pytest.MonkeyPatch, window: Window, recipe: str) -> None:
    """Run a window's step with the kernels, without a session and in one, with the reference, and in FP64."""
    inputs, recipes = make_inputs(window, "cuda"), RECIPES | {"blocks": te_recipe.Float8BlockScaling()}

    def run(
        switch: str, steps: int, *, offload: bool = False, saves: bool = True
    ) -> tuple[dict[str, torch.Tensor], te.ops.Sequential, int]:
        monkeypatch.setenv(hopper.SWITCH, switch)
        FP8GlobalStateManager.reset()
        module, moved = make_module(window, "cuda"), 0
        module[1].recompute_act_input = not saves
        session = OffloadSession([module], min_bytes=0, max_in_flight=0, verify=True) if offload else None
        for _ in range(steps):
            with warnings.catch_warnings(), te.autocast(enabled=True, recipe=recipes[recipe]):
                warnings.simplefilter("ignore")
                if session is None:
                    found = step(window, module, inputs)
                else:
                    with session.step():
                        found = step(window, module, inputs)
        (fusion,) = fusions_in(module)
        assert fusion.fused and not fusion.handed_over
        if session is not None:
            moved = session.records[-1].bytes_back
            session.close()
        return found, module, moved

    steps = 3 if recipe == "delayed" else 1  # until it has scales
    found, module, _ = run("1", steps)
    for name in {"output", "x", "scales"} & found.keys():
        assert not found[name][window.tokens :].any(), f"{name}: rows of no expert are not zero"
    again, _, moved = run("1", steps, offload=True)
    assert_same_bits(found, again)
    assert moved >= window.tokens * widened(window)
    again, _, moved = run("1", steps, offload=True, saves=False)
    assert_same_bits(found, again)
    assert moved == inputs.x.numel() * (inputs.x.element_size() if recipe == "blocks" else 1)
    reference, _, _ = run("reference", steps)
    exact = step_in_fp64(window, module, inputs)
    for expected, most in ((exact.results, NEAR_FP64), (reference, NEAR_REFERENCE[recipe])):
        assert found.keys() == expected.keys()
        assert_near(window, found, expected, exact, OF_AN_EXPERT * most)
        assert_near(window, of_whole_ops(found), of_whole_ops(expected), exact, most)


def assert_near(
    window: Window, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: Expected, most: float
) -> None:
    """In the mean of each result's numbers."""
    for name, value in found.items():
        reference = expected[name].double()
        norm = reference.norm().item()
        if name == "scales":
            norm = max(norm, exact.terms * window.tokens**0.5)
        off = (value.double() - reference).norm().item()
        assert off <= most * max(norm, 1e-3), f"{name}: off by {off:.3e} of {norm:.3e}"
