"""Block-scaled recipes in the fused op's torch arithmetic on any GPU: what needs a Blackwell card elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.quantization as te_quantization

from te_offload import Fate, OffloadSession, SlotName
from te_offload.fused import hopper
from tests.fused.test_block_pass import EVERY, NEAR, RECIPES, assert_all_fused, assert_near, bytes_by_column
from tests.support.mlp import assert_same_bits, make_mlp, run

pytestmark = pytest.mark.gpu
HIDDEN, FFN, SPLITS = 128, 256, (130, 0, 384)


@pytest.fixture(autouse=True)
def in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    for support in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        monkeypatch.setattr(te_quantization, support, (True, ""))  # no kernel of Transformer Engine's runs


def mlp() -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=3, hidden=HIDDEN, ffn=FFN, device="cuda", dtype=torch.bfloat16)


def step(module: te.ops.Sequential, recipe: str) -> dict[str, Any]:
    with te.autocast(enabled=True, recipe=RECIPES[recipe]):
        found = run(module, SPLITS, hidden=HIDDEN)
    assert_all_fused(module)
    return found


@EVERY
def test_results_are_near_those_without_quantization(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    found = step(mlp(), recipe)
    monkeypatch.setenv(hopper.SWITCH, "0")
    assert_near(found, run(mlp(), SPLITS, hidden=HIDDEN), max(NEAR[recipe], 0.1))


@EVERY
@pytest.mark.usefixtures("copies_out_end")
def test_offloading_changes_no_bit_and_moves_the_bytes_that_the_backward_reads(recipe: str) -> None:
    expected, module = step(mlp(), recipe), mlp()
    with OffloadSession(module, min_bytes=0, max_in_flight=0, verify=True) as session:
        for _ in range(2):
            with session.step():
                found = step(module, recipe)
            assert_same_bits(expected, found)
    record = session.records[-1]
    rows = {row.slot: (row.fate, row.nbytes) for row in record.slots}
    assert rows[SlotName.FC1_INPUT] == (Fate.OFFLOADED, bytes_by_column(recipe, HIDDEN))
    assert rows[SlotName.ACT_INPUT] == (Fate.OFFLOADED, sum(SPLITS) * FFN * 2)
    assert record.bytes_out == record.bytes_back > 0
