"""Slots, marks and bits on Transformer Engine's own unfused code, split and grouped, with only kernels replaced."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
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
FORMATS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8-current"])


def mlp(**arguments: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16, **arguments)


def step(module: te.ops.Sequential, fp8: bool) -> dict[str, torch.Tensor]:
    recipe = te.autocast(enabled=True, recipe=Float8CurrentScaling()) if fp8 else contextlib.nullcontext()
    with recipe:
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
@FORMATS
def test_offloading_changes_no_bit_and_moves_every_slot(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, fp8: bool
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    expected = step(mlp(), fp8)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = step(module, fp8)
    assert_same_bits(expected, found)
    record = session.records[-1]
    assert {row.slot: row.fate for row in record.slots} == dict.fromkeys(
        (SlotName.FC1_INPUT, SlotName.ACT_INPUT, SlotName.FC2_INPUT), Fate.OFFLOADED
    )
    assert record.bytes_out == record.bytes_back > 0


@PATHS
@FORMATS
def test_bytes_of_each_slot_are_those_computed_by_hand(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, fp8: bool
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, fp8)
    width = 1 if fp8 else 2  # bytes a number of the two GEMM inputs; the activation's input stays bf16
    assert {row.slot: row.nbytes for row in session.records[-1].slots} == {
        SlotName.FC1_INPUT: TOKENS * HIDDEN * width,
        SlotName.ACT_INPUT: TOKENS * FFN * 2,
        SlotName.FC2_INPUT: TOKENS * FFN * width,
    }


@PATHS
@FORMATS
@pytest.mark.parametrize("keep", ["fc1_input", "act_input", "fc2_input"])
def test_mark_reaches_every_buffer_of_the_slot_that_stays_and_no_other(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, fp8: bool, keep: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp(keep=[keep])
    listener = listen(module)
    step(module, fp8)
    assert len(listener.saved) == 3
    for name, saved in zip(("fc1_input", "act_input", "fc2_input"), listener.saved, strict=True):
        assert saved.buffers
        assert marked(saved.buffers) == {name == keep}


@PATHS
@FORMATS
def test_mark_always_reaches_weights_their_copies_and_metadata(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, fp8: bool
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    listener = listen(module)
    step(module, fp8)
    for saved in listener.saved:
        assert marked(saved.exempt) == {True}
    weight_bytes = [sum(t.nbytes for t in saved.exempt if t.dim() == 2) for saved in listener.saved]
    assert weight_bytes[0] >= EXPERTS * HIDDEN * FFN and weight_bytes[2] >= EXPERTS * HIDDEN * FFN


@PATHS
def test_quantized_weight_copies_never_move(monkeypatch: pytest.MonkeyPatch, grouped: bool) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, fp8=True)
    record = session.records[-1]
    assert record.bytes_out == sum(row.bytes_out for row in record.slots)
    assert sum(row.bytes_out for row in record.slots) == sum(row.nbytes for row in record.slots)
    assert record.exempt_bytes >= 2 * EXPERTS * HIDDEN * FFN


@PATHS
def test_kept_slot_moves_no_byte_of_it(monkeypatch: pytest.MonkeyPatch, grouped: bool) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp(keep=["act_input"])
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, fp8=False)
    rows = {row.slot: row for row in session.records[-1].slots}
    assert rows[SlotName.ACT_INPUT].fate is Fate.KEPT
    assert rows[SlotName.ACT_INPUT].reason is Reason.ASKED
    assert rows[SlotName.ACT_INPUT].bytes_out == 0
    assert session.records[-1].bytes_out == TOKENS * (HIDDEN + FFN) * 2


def test_one_grouped_weight_is_found_on_the_grouped_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    te_on_cpu.unfused(monkeypatch, grouped=True)
    expected = step(mlp(single_grouped_weight=True), fp8=False)
    module = mlp(single_grouped_weight=True)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        assert_same_bits(expected, step(module, fp8=False))
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
            step(module, fp8=False)
        assert session.records[-1].bytes_out == 0
