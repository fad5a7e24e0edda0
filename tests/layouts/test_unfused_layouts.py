"""Slots, marks and bits on Transformer Engine's own unfused code, split and grouped, with only kernels replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.ops.op import OperationContext

from te_offload import Fate, OffloadSession, Reason, SlotName
from te_offload.errors import UnknownLayoutError
from te_offload.ops import te_adapter
from te_offload.slots import SavedSlot, SlotObserver, Watch
from tests.support import te_on_cpu
from tests.support.mlp import assert_same_bits, make_mlp, run

EXPERTS, HIDDEN, FFN, SPLITS = 3, 64, 128, (128, 0, 384)
TOKENS = sum(SPLITS)
PATHS = pytest.mark.parametrize("grouped", [False, True], ids=["split", "grouped"])
RECIPES: dict[str, Callable[[], Any]] = {
    "bf16": lambda: None,
    "fp8-current": te_recipe.Float8CurrentScaling,
    "fp8-block": te_recipe.Float8BlockScaling,
    "mxfp8": te_recipe.MXFP8BlockScaling,
    "nvfp4": te_recipe.NVFP4BlockScaling,
}
FORMATS = pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
EVERY = pytest.mark.parametrize("recipe", RECIPES)


def mlp(**arguments: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16, **arguments)


def step(module: te.ops.Sequential, recipe: str = "bf16") -> dict[str, torch.Tensor]:
    with te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe]()):
        return run(module, SPLITS, hidden=HIDDEN)


class Listener(SlotObserver):
    """Collects what ops declare."""

    def __init__(self) -> None:
        self.saved: list[SavedSlot] = []

    def watch(self) -> Watch:
        return Watch.HOOKS

    def slot_saved(self, op: torch.nn.Module, saved: SavedSlot, *, take: bool) -> None:
        assert not take
        self.saved.append(saved)


def listen(module: te.ops.Sequential) -> Listener:
    listener = Listener()
    for op in module:
        op.observe_slot(listener)
    return listener


def marked(tensors: tuple[torch.Tensor, ...]) -> set[bool]:
    return {te_adapter.is_marked_not_offload(tensor) for tensor in tensors}


@PATHS
@EVERY
def test_offloading_changes_no_bit_and_moves_every_slot(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    expected = step(mlp(), recipe)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = step(module, recipe)
    assert_same_bits(expected, found)
    record = session.records[-1]
    assert {row.slot: row.fate for row in record.slots} == dict.fromkeys(
        (SlotName.FC1_INPUT, SlotName.ACT_INPUT, SlotName.FC2_INPUT), Fate.OFFLOADED
    )
    assert record.bytes_out == record.bytes_back > 0


@PATHS
@FORMATS
def test_bytes_of_each_slot_are_those_computed_by_hand(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, recipe)
    width = (
        1 if recipe == "fp8-current" else 2
    )  # bytes a number of the two GEMM inputs; the activation's input stays bf16
    assert {row.slot: row.nbytes for row in session.records[-1].slots} == {
        SlotName.FC1_INPUT: TOKENS * HIDDEN * width,
        SlotName.ACT_INPUT: TOKENS * FFN * 2,
        SlotName.FC2_INPUT: TOKENS * FFN * width,
    }


@PATHS
@EVERY
@pytest.mark.parametrize("keep", ["fc1_input", "act_input", "fc2_input"])
def test_mark_reaches_every_buffer_of_the_slot_that_stays_and_no_other(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str, keep: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp(keep=[keep])
    listener = listen(module)
    step(module, recipe)
    assert len(listener.saved) == 3
    for name, saved in zip(("fc1_input", "act_input", "fc2_input"), listener.saved, strict=True):
        assert saved.buffers
        assert marked(saved.buffers) == {name == keep}


@PATHS
@EVERY
def test_mark_always_reaches_weights_their_copies_and_metadata(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    listener = listen(module)
    step(module, recipe)
    for saved in listener.saved:
        assert marked(saved.exempt) == {True}
    weight_bytes = [sum(t.nbytes for t in saved.exempt if t.dim() == 2) for saved in listener.saved]
    least = EXPERTS * HIDDEN * FFN // (2 if recipe == "nvfp4" else 1)
    assert weight_bytes[0] >= least and weight_bytes[2] >= least


@PATHS
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
def test_quantized_weight_copies_never_move(monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, recipe)
    record = session.records[-1]
    assert record.bytes_out == sum(row.bytes_out for row in record.slots)
    gaps = record.bytes_out - sum(row.nbytes for row in record.slots)  # between buffers that are copied in one piece
    assert 0 <= gaps < 2 * EXPERTS * 512
    numbers = 2 * EXPERTS * HIDDEN * FFN
    assert record.exempt_bytes >= (numbers // 2 if recipe == "nvfp4" else numbers)


@PATHS
def test_kept_slot_moves_no_byte_of_it(monkeypatch: pytest.MonkeyPatch, grouped: bool) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp(keep=["act_input"])
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    rows = {row.slot: row for row in session.records[-1].slots}
    assert rows[SlotName.ACT_INPUT].fate is Fate.KEPT
    assert rows[SlotName.ACT_INPUT].reason is Reason.ASKED
    assert rows[SlotName.ACT_INPUT].bytes_out == 0
    assert session.records[-1].bytes_out == TOKENS * (HIDDEN + FFN) * 2


def test_one_grouped_weight_is_found_on_the_grouped_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    te_on_cpu.unfused(monkeypatch, grouped=True)
    expected = step(mlp(single_grouped_weight=True))
    module = mlp(single_grouped_weight=True)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        assert_same_bits(expected, step(module))
    assert session.records[-1].bytes_out == TOKENS * (HIDDEN + 2 * FFN) * 2


@PATHS
@pytest.mark.parametrize("change", ["one more in front", "one less", "input and metadata swapped"])
def test_unknown_layout_is_an_error_before_anything_is_offloaded(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, change: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    save = OperationContext.save_for_backward

    def save_otherwise(self: OperationContext, *tensors: Any) -> None:
        if len(tensors) > 2:
            if change == "one more in front":
                tensors = (None, *tensors)
            elif change == "one less":
                tensors = tensors[1:]
            else:
                tensors = (tensors[5], *tensors[1:5], tensors[0], *tensors[6:])
        save(self, *tensors)

    monkeypatch.setattr(OperationContext, "save_for_backward", save_otherwise)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session:
        with pytest.raises(UnknownLayoutError, match=r"GroupedLinear of Transformer Engine 2\.20"), session.step():
            step(module)
        assert session.records[-1].bytes_out == 0
