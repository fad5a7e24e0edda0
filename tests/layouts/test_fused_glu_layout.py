"""Slots and marks of the Blackwell fused op with gated activations: Transformer Engine's own code, kernels replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ops.fused.grouped_mlp as te_grouped_mlp
from transformer_engine.common.recipe import NVFP4BlockScaling

from te_offload import Fate, OffloadSession, Reason, SlotName, ops
from te_offload.fused.blackwell import BlackwellGLUGroupedMLP
from te_offload.ops.row_check import RowCheck
from tests.layouts.test_fused_layout import (
    EXPERTS,
    FFN,
    HIDDEN,
    MXFP8,
    NAMES,
    TOKENS,
    buffers_seen,
    forward_ops,
    nvfp4_by_column,
    step,
)
from tests.layouts.test_unfused_layouts import listen, marked
from tests.support import te_on_cpu

GATED: dict[str, Callable[..., Any]] = {
    "swiglu": lambda **kw: ops.ScaledSwiGLU(glu_interleave_size=32, **kw),
    "clamped-qgeglu": lambda **kw: ops.ScaledClampedQGeGLU(glu_interleave_size=32, **kw),
    "situ-glu": lambda **kw: ops.ScaledSiTUGLU(glu_interleave_size=32, **kw),
}


@pytest.fixture(params=GATED)
def gated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., te.ops.Sequential]:
    """Makes the MLP; ``keep``: the slot whose op says no_offload_activation."""
    te_on_cpu.fused(monkeypatch)
    monkeypatch.setattr(te_grouped_mlp, "_cudnn_frontend_supports_grouped_gemm_situglu", lambda: True)

    def make(keep: str = "") -> te.ops.Sequential:
        torch.manual_seed(0)
        linear: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.bfloat16}
        return te.ops.Sequential(
            ops.GroupedLinear(EXPERTS, HIDDEN, 2 * FFN, no_offload_activation=keep == "fc1_input", **linear),
            GATED[request.param](no_offload_activation=keep == "act_input"),
            ops.GroupedLinear(EXPERTS, FFN, HIDDEN, no_offload_activation=keep == "fc2_input", **linear),
        )

    return make


def test_window_gets_our_fused_op_and_every_slot_goes_and_comes_back_bit_for_bit(
    gated: Callable[..., te.ops.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = buffers_seen(monkeypatch, BlackwellGLUGroupedMLP)
    module = gated()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    assert forward_ops(module) == [BlackwellGLUGroupedMLP]
    assert len(seen) == 2 and len(seen[0]) == len(seen[1]) > 10
    for before, after in zip(*seen, strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    record = session.records[-1]
    assert [(row.slot, row.fate) for row in record.slots] == [(name, Fate.OFFLOADED) for name in NAMES]
    assert record.bytes_out == record.bytes_back == sum(row.nbytes for row in record.slots)


def test_activation_input_is_twice_as_wide_as_what_fc2_reads(gated: Callable[..., te.ops.Sequential]) -> None:
    module = gated()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    quantized = {width: TOKENS * width + TOKENS * width // 32 for width in (HIDDEN, FFN)}  # MXFP8, by column
    assert {row.slot: row.nbytes for row in session.records[-1].slots} == {
        SlotName.FC1_INPUT: quantized[HIDDEN],
        SlotName.ACT_INPUT: TOKENS * 2 * FFN * 2,
        SlotName.FC2_INPUT: quantized[FFN],
    }


@pytest.mark.parametrize("keep", [name.value for name in NAMES])
def test_slot_that_is_asked_to_stays_with_all_its_buffers_and_no_other_does(
    gated: Callable[..., te.ops.Sequential], keep: str
) -> None:
    module = gated(keep)
    listener = listen(module)
    step(module)
    for name, saved in zip(NAMES, listener.saved, strict=True):
        assert marked(saved.buffers) == {name.value == keep}
        assert marked(saved.exempt) == {True}
    module = gated(keep)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    assert [row.reason is Reason.ASKED for row in session.records[-1].slots] == [name.value == keep for name in NAMES]
    assert session.records[-1].bytes_out > 0


def test_split_sizes_beyond_the_rows_are_cut_and_told_while_a_graph_is_captured(
    gated: Callable[..., te.ops.Sequential],
) -> None:
    """Transformer Engine's kernels would read beyond their inputs."""
    module, check = gated(), RowCheck(torch.device("cpu"))
    x, scales = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.ones(TOKENS)
    sizes = torch.tensor([TOKENS // 2, TOKENS])
    listener = listen(module)
    with check.watching(), te.autocast(enabled=True, recipe=MXFP8):
        module(x, sizes, scales, sizes)
    assert list(check.overflows().values()) == [TOKENS // 2]
    exempt = [tensor.tolist() for tensor in listener.saved[0].exempt if tensor.dtype is sizes.dtype]
    assert [TOKENS // 2, TOKENS // 2] in exempt and sizes.tolist() not in exempt


def test_nvfp4_slots_have_the_columns_alone(
    gated: Callable[..., te.ops.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = buffers_seen(monkeypatch, BlackwellGLUGroupedMLP)
    module = gated()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, NVFP4BlockScaling())
    assert forward_ops(module) == [BlackwellGLUGroupedMLP]
    for before, after in zip(*seen, strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert [(row.fate, row.format, row.nbytes) for row in session.records[-1].slots] == [
        (Fate.OFFLOADED, "NVFP4 by column", nvfp4_by_column(HIDDEN)),
        (Fate.OFFLOADED, "bf16", 2 * TOKENS * FFN * 2),
        (Fate.OFFLOADED, "NVFP4 by column", nvfp4_by_column(FFN)),
    ]
