"""`te_offload.functional.grouped_mlp` on a Hopper GPU: eager, compiled by inductor, and in its CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from te_offload import Fate, OffloadSession
from te_offload.errors import ArgumentError, UnsupportedError
from te_offload.functional import RECIPES, grouped_mlp
from te_offload.fused import hopper
from te_offload.graphs import CaptureState, CudagraphBackend
from tests.support.mlp import assert_same_bits, seeded
from tests.support.traced import FFN, HIDDEN, HOW, SPLITS, Layer, by_ops, run_layers, step, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
    pytest.mark.filterwarnings("ignore"),  # inductor's, of the card
]
pytest.importorskip("quack", reason="quack-kernels, which has the kernels, is not installed here")
AGAIN = pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(hopper.SWITCH, "1")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def poison() -> None:
    """What is free holds no number."""
    torch.full((64, 1024, 1024), float("nan"), device="cuda")


@AGAIN
@pytest.mark.parametrize("activation", HOW)
def test_it_has_the_bits_of_the_ops(activation: str, *, again: bool) -> None:
    expected = by_ops(activation, tensors(activation, device="cuda"))
    for function in (grouped_mlp, torch.compile(grouped_mlp, fullgraph=True)):
        poison()
        given = tensors(activation, device="cuda")
        assert_same_bits(expected, step(function, given, activation, recompute_act_input=again))


@AGAIN
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", HOW)
def test_under_a_recipe_it_has_the_bits_of_the_ops(activation: str, recipe: str, *, again: bool) -> None:
    expected = by_ops(activation, tensors(activation, device="cuda"), RECIPES[recipe]())
    options = {"recompute_act_input": again, "recipe": recipe}
    for function in (grouped_mlp, torch.compile(grouped_mlp, fullgraph=True)):
        poison()
        assert_same_bits(expected, step(function, tensors(activation, device="cuda"), activation, **options))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("splits", [(0, 0, 31), (1, 29, 1), (0, 0, 0), (300, 0, 7)])
def test_one_compiled_function_serves_any_split_sizes(splits: tuple[int, ...], recipe: str | None) -> None:
    function = torch.compile(grouped_mlp, fullgraph=True, dynamic=True)
    made = None if recipe is None else RECIPES[recipe]()
    for one in (SPLITS, splits):
        poison()
        expected = by_ops("swiglu", tensors("swiglu", one, device="cuda"), made)
        assert_same_bits(expected, step(function, tensors("swiglu", one, device="cuda"), "swiglu", recipe=recipe))


@AGAIN
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_in_inductors_cuda_graphs_other_splits_and_numbers_have_the_bits_of_eager_steps(
    recipe: str | None, *, again: bool
) -> None:
    made = None if recipe is None else RECIPES[recipe]()
    function = torch.compile(grouped_mlp, fullgraph=True, mode="reduce-overhead")
    given = tensors("swiglu", device="cuda")
    for number, splits in enumerate(((11, 0, 20), (0, 31, 0), (10, 10, 11), (1, 2, 28), (31, 0, 0))):
        with torch.no_grad():
            given["split_sizes"].copy_(torch.tensor(splits))
            given["x"].mul_(1 + number / 7)
        for one in given.values():
            one.grad = None
        expected = by_ops("swiglu", given, made)
        torch.compiler.cudagraph_mark_step_begin()
        found = step(function, given, "swiglu", recompute_act_input=again, recipe=recipe)
        assert_same_bits(expected, found)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_the_first_call_of_all_may_be_in_inductors_cuda_graphs(recipe: str | None) -> None:
    experts = 5 + [None, *RECIPES].index(recipe)  # as many as no other test has
    x = seeded((40, HIDDEN), 1, dtype=torch.bfloat16, device="cuda").requires_grad_()
    w1 = seeded((experts, 2 * FFN, HIDDEN), 2, dtype=torch.bfloat16, device="cuda").requires_grad_()
    w2 = seeded((experts, HIDDEN, FFN), 3, dtype=torch.bfloat16, device="cuda").requires_grad_()
    given = {"x": x, "w1": w1, "w2": w2, "split_sizes": torch.full((experts,), 40 // experts, device="cuda")}
    function, found = torch.compile(grouped_mlp, fullgraph=True, mode="reduce-overhead"), []
    for _ in range(4):
        for one in (x, w1, w2):
            one.grad = None
        torch.compiler.cudagraph_mark_step_begin()
        found.append({name: one.clone() for name, one in step(function, given, "swiglu", recipe=recipe).items()})
    for one in (x, w1, w2):
        one.grad = None
    expected = step(grouped_mlp, given, "swiglu", recipe=recipe)
    for later in found:
        assert_same_bits(expected, later)


@AGAIN
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_rows_of_no_expert_are_zero_and_take_no_gradient(recipe: str | None, *, again: bool) -> None:
    poison()
    given = tensors("swiglu", more=6, device="cuda")
    with torch.no_grad():
        given["x"][sum(SPLITS) :] = float("nan")
    found = step(grouped_mlp, given, "swiglu", recompute_act_input=again, recipe=recipe)
    for name in ("y", "x", "scales"):
        assert not found[name][sum(SPLITS) :].any() and found[name][: sum(SPLITS)].any()
    assert not any(one.isnan().any() for one in found.values())


@pytest.mark.parametrize("stays", [(), ("act_input",)], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_session_moves_its_slots_but_for_those_that_are_to_stay(
    stays: tuple[str, ...], recipe: str | None, *, compiled: bool
) -> None:
    options = {"no_offload_activation": stays, "recipe": recipe}
    layers = torch.nn.ModuleList(Layer(device="cuda", **options) for _ in range(2))
    scales = (sum(SPLITS) // 128 + len(SPLITS)) * HIDDEN * 4  # by blocks
    of_fc1 = {None: 2 * sum(SPLITS) * HIDDEN, "fp8": sum(SPLITS) * HIDDEN, "fp8-block": sum(SPLITS) * HIDDEN + scales}
    expected = run_layers(layers)
    for layer in layers if compiled else ():
        layer.compile(fullgraph=True)
    if compiled:  # inductor's silu has other bits
        expected = run_layers(layers)
    with OffloadSession(layers, min_bytes=0) as session:
        for _ in range(3):
            poison()
            with session.step():
                found = run_layers(layers)
            assert_same_bits(expected, found)
            rows = {row.name: row for row in session.records[-1].slots}
            for name, nbytes in (("fc1_input", of_fc1[recipe]), ("act_input", sum(SPLITS) * 4 * FFN)):
                row = rows[f"layer1/grouped_mlp.{name}"]
                fate = Fate.KEPT if name in stays else Fate.OFFLOADED
                assert (row.fate, row.nbytes) == (fate, nbytes)
            assert session.records[-1].bytes_back > 0


def test_what_its_kernels_do_not_take_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = tensors("swiglu", device="cuda")
    with pytest.raises(
        UnsupportedError, match="its kernels do not run here: glu_interleave_size=64, which does not divide 32"
    ):
        grouped_mlp(**given, interleave=64)
    with pytest.raises(ArgumentError, match=r"torch\.float32; its kernels take multiples of 8, in bf16 and fp16"):
        grouped_mlp(**{name: one if name == "split_sizes" else one.float() for name, one in given.items()})
    monkeypatch.setenv(hopper.SWITCH, "0")
    with pytest.raises(UnsupportedError, match="its kernels do not run here: TE_OFFLOAD_FUSED_MLP is 0"):
        grouped_mlp(**given)


@AGAIN
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_in_graphs_of_our_own_backend_steps_have_the_bits_of_eager_ones(recipe: str | None, *, again: bool) -> None:
    made = None if recipe is None else RECIPES[recipe]()
    backend = CudagraphBackend(min_ops=1, warmup=1)
    function = torch.compile(grouped_mlp, fullgraph=True, backend=backend)
    given = tensors("swiglu", device="cuda")
    for splits in ((11, 0, 20), (0, 31, 0), (10, 10, 11), (1, 2, 28)):
        poison()
        with torch.no_grad():
            given["split_sizes"].copy_(torch.tensor(splits))
        for one in given.values():
            one.grad = None
        found = step(function, given, "swiglu", recompute_act_input=again, recipe=recipe)
        assert_same_bits(by_ops("swiglu", given, made), found)
    captures: list[Any] = [*backend.forwards[0].captures, *backend.backwards[0].captures]  # type: ignore[union-attr]
    assert all(one.state is CaptureState.CAPTURED and one._graph.replays > 1 for one in captures), backend.report()
    backend.close()
