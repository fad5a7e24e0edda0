"""Each product of the fused grouped MLP gets the count from which its clusters take their tiles, in every way it runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload.fused import hopper
from te_offload.fused.calls import calls_of
from te_offload.fused.kernels.interface import Counts, Orders, TileCount, TileOrder
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.fused.kernels.reference_blocks import ReferenceBlockKernels
from te_offload.fused.kernels.reference_fp8 import ReferenceFp8Kernels
from tests.support import te_on_cpu
from tests.support.mlp import make_inputs, make_mlp, run

HIDDEN, FFN, SPLITS = 128, 256, (128, 0, 384)
WORK = torch.zeros(5, dtype=torch.int32)
COUNTS = Counts(TileCount(WORK, 0), TileCount(WORK, 1))
ORDERS = Orders(TileOrder(WORK, 2), TileOrder(WORK, 3), TileCount(WORK, 4))
RECIPES: dict[str, Callable[[], Any]] = {
    "current": te_recipe.Float8CurrentScaling,
    "delayed": lambda: te_recipe.DelayedScaling(amax_history_len=4),
    "blocks": te_recipe.Float8BlockScaling,
}
Seen = list[tuple[str, TileCount]]


def noting(method: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name in ("order", "count"):
            if given.get(name) is not None:
                seen.append((method.__name__, given[name]))
        return method(*args, **kwargs)

    return call


def ordering(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (*method(*args, **kwargs)[:-1], ORDERS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Which method of the torch kernels got which count; those kernels have none of their own."""
    monkeypatch.setenv(hopper.SWITCH, "reference")
    te_on_cpu.unfused(monkeypatch, grouped=False)
    FP8GlobalStateManager.reset()
    found: Seen = []
    counting = ReferenceKernels.offsets
    monkeypatch.setattr(ReferenceKernels, "offsets", lambda *args: (counting(*args)[0], COUNTS))
    for kind in (ReferenceKernels, ReferenceFp8Kernels, ReferenceBlockKernels):
        for name, method in list(vars(kind).items()):
            if name.startswith("fc2_dgrad"):
                monkeypatch.setattr(kind, name, ordering(method))
            elif inspect.isfunction(method) and {"count", "order"} & inspect.signature(method).parameters.keys():
                monkeypatch.setattr(kind, name, noting(method, found))
    with torch._dynamo.config.patch(disable=True):  # the update of delayed scales would be compiled for 20 s
        yield found
    FP8GlobalStateManager.reset()


def fused(recipe: str | None, *, frozen: str = "", again: bool = False) -> te.ops.Sequential:
    """A step of one; ``frozen``: parameters whose names begin so need no gradient. ``again``: FC1 is computed again."""
    module = make_mlp(experts=len(SPLITS), hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16)
    module[1].recompute_act_input = again
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    with te.autocast(enabled=recipe is not None, recipe=None if recipe is None else RECIPES[recipe]()):
        run(module, SPLITS, hidden=HIDDEN)
    assert calls_of(module[0]).fused
    return module


def test_dense_products_get_one_each(seen: Seen) -> None:
    fused(None)
    assert seen == [
        ("fc1", COUNTS.fc1),
        ("fc2", COUNTS.fc2),
        ("wgrad", ORDERS.fc2_wgrad),
        ("fc1_backward", ORDERS.fc1_wgrad),
        ("fc1_backward", ORDERS.fc1_dgrad),
    ]


def test_forward_that_no_backward_follows_stores_no_input_of_the_activation(seen: Seen) -> None:
    with torch.no_grad():
        x, sizes, scales = make_inputs(SPLITS, HIDDEN)
        make_mlp(experts=len(SPLITS), hidden=HIDDEN, ffn=FFN)(x, sizes, scales, sizes)
    assert seen == [("fc1_activated", COUNTS.fc1), ("fc2", COUNTS.fc2)]


def test_fc1_dgrad_by_itself_gets_its_own(seen: Seen) -> None:
    fused(None, frozen="0.")
    assert seen[2:] == [("wgrad", ORDERS.fc2_wgrad), ("fc1_dgrad", ORDERS.fc1_dgrad)]


def test_fc1_that_is_computed_again_counts_from_a_zero_of_its_own(seen: Seen) -> None:
    fused(None, again=True)
    assert [name for name, _ in seen] == ["fc1_activated", "fc2", "fc1_linear", "wgrad", "fc1_backward", "fc1_backward"]
    count = seen.pop(2)[1]
    assert count.work.dtype is torch.int32 and count.work[count.place] == 0
    assert count.data_ptr() not in [other.data_ptr() for _, other in seen]


@pytest.mark.parametrize(
    ("recipe", "fc1"), [("current", "fc1_fp8"), ("delayed", "fc1_fp8"), ("blocks", "fc1_linear_blocks")], ids=str
)
def test_quantized_fc1_that_is_computed_again_does_too(seen: Seen, recipe: str, fc1: str) -> None:
    fused(recipe, again=True)
    assert len(seen) == 6 and seen[2][0] == fc1
    count = seen.pop(2)[1]
    assert count.work.dtype is torch.int32 and count.work[count.place] == 0
    assert count.data_ptr() not in [other.data_ptr() for _, other in seen]


@pytest.mark.parametrize(
    ("recipe", "fc1", "linear", "wgrad"),
    [
        ("current", "fc1_fp8", "linear_fp8", "wgrad_fp8"),
        ("delayed", "fc1_given", "linear_fp8", "wgrad_fp8"),
        ("blocks", "fc1_blocks", "linear_blocks", "wgrad_blocks"),
    ],
)
def test_quantized_products_get_one_each(seen: Seen, recipe: str, fc1: str, linear: str, wgrad: str) -> None:
    fused(recipe)
    assert seen == [
        (fc1, COUNTS.fc1),
        (linear, COUNTS.fc2),
        (wgrad, ORDERS.fc2_wgrad),
        (linear, ORDERS.fc1_dgrad),
        (wgrad, ORDERS.fc1_wgrad),
    ]


PADDED = torch.zeros(len(SPLITS) + 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("recipe", "kind", "name"),
    [
        ("current", ReferenceFp8Kernels, "wgrad_fp8"),
        ("delayed", ReferenceFp8Kernels, "wgrad_fp8"),
        ("blocks", ReferenceBlockKernels, "wgrad_blocks"),
    ],
)
@pytest.mark.parametrize(
    ("frozen", "two", "expected"),
    [("", False, [True, True]), ("", True, [True, False]), ("2.", False, [False]), ("0.", False, [True])],
    ids=["one split", "two splits", "FC2 frozen", "FC1 frozen"],
)
def test_where_experts_begin_in_columns_is_found_once_for_both_wgrads_of_one_split(
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    kind: Any,
    name: str,
    frozen: str,
    two: bool,
    expected: list[bool],
) -> None:
    asked: list[torch.Tensor] = []
    given: list[Any] = []
    multiply = getattr(kind, name)

    def padded_offsets(self: Any, offsets: torch.Tensor) -> torch.Tensor:
        asked.append(offsets)
        return PADDED

    def noted(self: Any, *args: Any, padded: torch.Tensor | None = None, **kwargs: Any) -> None:
        given.append(padded)
        multiply(self, *args, **kwargs)

    monkeypatch.setattr(kind, "padded_offsets", padded_offsets)
    monkeypatch.setattr(kind, name, noted)
    module = make_mlp(experts=len(SPLITS), hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16)
    for parameter_name, parameter in module.named_parameters():
        parameter.requires_grad_(not frozen or not parameter_name.startswith(frozen))
    x, sizes, scales = make_inputs(SPLITS, HIDDEN, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
        module(x, sizes, scales, sizes.clone() if two else sizes).float().sum().backward()
    assert [padded is PADDED for padded in given] == expected
    assert len(asked) == (0 if frozen == "2." else 1)
    assert all(padded is None for padded, one in zip(given, expected, strict=True) if not one)
