"""Random grouped MLPs that run fused: near FP64, the same bits again and when offloaded, what they were given untouched."""

from __future__ import annotations

import random

import pytest
import torch

from te_offload import OffloadSession
from te_offload.fused import fusions_in, hopper
from tests.support.mlp import assert_same_bits
from tests.support.random_windows import Window, draw_window, make_inputs, make_module, step, step_in_fp64, widened
from tests.support.tolerances import assert_close_to_fp64


def check(window: Window, device: str) -> None:
    """Run a window's step without a session and in one, and in FP64."""
    module, inputs = make_module(window, device), make_inputs(window, device)
    given = {"x": inputs.x, "scales": inputs.scales, "dy": inputs.dy, "sizes": inputs.sizes}
    given |= {f"parameter {name}": parameter.detach() for name, parameter in module.named_parameters()}
    before = {name: tensor.clone() for name, tensor in given.items()}
    poison = [torch.full((size,), float("nan"), device=device) for size in (1 << 10, 1 << 16, 1 << 20) * 4]
    del poison
    found = step(window, module, inputs)
    fusions = fusions_in(module)
    assert len(fusions) == 1 and fusions[0].fused and not fusions[0].handed_over
    expected = step_in_fp64(window, module, inputs)
    assert found.keys() == expected.results.keys()
    for name, reference in expected.results.items():
        terms = expected.terms if name == "scales" else 0.0
        assert_close_to_fp64(found[name], reference, window.dtype, name, terms)
    for name in {"output", "x", "scales"} & found.keys():
        assert not found[name][window.tokens :].any(), f"{name}: rows of no expert are not zero"
    with OffloadSession([module], min_bytes=0, max_in_flight=0, verify=True) as session:
        for _ in range(2):
            with session.step():
                again = step(window, module, inputs)
            assert_same_bits(found, again)
        moved = session.records[-1].bytes_back
        module[1].recompute_act_input = True
        with session.step():
            assert_same_bits(found, step(window, module, inputs))
        assert session.records[-1].bytes_back == inputs.x.numel() * window.dtype.itemsize
    assert moved >= window.tokens * widened(window) * window.dtype.itemsize
    assert_same_bits(before, given)


def check_many(seeds: range, device: str, dtypes: tuple[torch.dtype, ...], most_work: float, most_tokens: int) -> int:
    """Check the windows of some seeds; how many rows of experts there were."""
    rows = 0
    for seed in seeds:
        window = draw_window(random.Random(seed), dtypes, most_work, most_tokens, may_leave_rows=device != "cpu")
        try:
            check(window, device)
        except BaseException as error:
            raise AssertionError(f"random window {seed}: {window}") from error
        rows += window.tokens
    return rows


@pytest.mark.parametrize("part", range(10))
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_random_windows_are_near_fp64_and_offloading_changes_no_bit(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    dtypes = torch.float32, torch.bfloat16
    assert check_many(range(6 * part, 6 * part + 6), "cpu", dtypes, most_work=3e6, most_tokens=400) > 0
