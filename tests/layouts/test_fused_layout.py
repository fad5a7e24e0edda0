"""Slots, marks and fallbacks of the Blackwell fused op: Transformer Engine's own forward and backward, kernels replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling
from transformer_engine.pytorch.ops.fuser import OperationFuser
from transformer_engine.pytorch.ops.op import OperationContext

from te_offload import Fate, OffloadSession, Reason, SlotName, ops
from te_offload.errors import UnknownLayoutError
from te_offload.fused import blackwell, explain, find_windows
from te_offload.fused.blackwell import BlackwellUnaryGroupedMLP
from te_offload.ops import te_adapter
from tests.layouts.test_unfused_layouts import listen, marked
from tests.support import te_on_cpu
from tests.support.mlp import assert_same_bits, make_mlp, run

EXPERTS, HIDDEN, FFN, SPLITS = 2, 128, 256, (128, 128)
TOKENS = sum(SPLITS)
MXFP8 = MXFP8BlockScaling(fp8_format=Format.E4M3)
NAMES = (SlotName.FC1_INPUT, SlotName.ACT_INPUT, SlotName.FC2_INPUT)


def mlp(**arguments: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16, **arguments)


def step(module: te.ops.Sequential, recipe: Any = MXFP8) -> dict[str, torch.Tensor]:
    with te.autocast(enabled=True, recipe=recipe):
        return run(module, SPLITS, hidden=HIDDEN)


def forward_ops(module: te.ops.Sequential) -> list[type]:
    return [type(op) for op, _ in module._module_groups[0]._forward_ops]


def buffers_seen(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> list[list[torch.Tensor]]:
    """Copies of all buffers that a fused op of this kind saves, and then of those that its backward finds."""
    seen: list[list[torch.Tensor]] = []
    read, backward = te_adapter.read_fused, kind.fuser_backward

    def buffers(entries: Any) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in te_adapter.buffers_of(*entries) if type(buffer) is torch.Tensor]

    def note_forward(basic_ops: Any, ctxs: Any, **arguments: Any) -> Any:
        seen.append(buffers(ctxs[0].to_save))
        return read(basic_ops, ctxs, **arguments)

    def note_backward(self: Any, ctxs: Any, *args: Any, **kwargs: Any) -> Any:
        te_adapter.bring_carried(self.basic_ops[0], ctxs[0])
        seen.append(buffers(ctxs[0].saved_tensors))
        return backward(self, ctxs, *args, **kwargs)

    monkeypatch.setattr(te_adapter, "read_fused", note_forward)
    monkeypatch.setattr(kind, "fuser_backward", note_backward)
    return seen


def test_window_of_our_ops_gets_our_fused_op(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    module = mlp()
    step(module)
    assert forward_ops(module) == [BlackwellUnaryGroupedMLP]


def test_window_with_one_op_of_ours_gets_our_fused_op_and_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    linear: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.bfloat16}
    activation = ops.ScaledSReLU(no_offload_activation=True)
    module = te.ops.Sequential(
        te.ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **linear),
        activation,
        te.ops.GroupedLinear(EXPERTS, FFN, HIDDEN, **linear),
    )
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    assert forward_ops(module) == [BlackwellUnaryGroupedMLP]
    rows = {row.slot: row for row in session.records[-1].slots}
    assert rows[SlotName.ACT_INPUT].reason is Reason.ASKED
    ours = mlp()
    with OffloadSession(ours, min_bytes=0) as other, other.step():
        step(ours)
    inputs = [row.nbytes for row in other.records[-1].slots if row.slot is not SlotName.ACT_INPUT]
    assert session.records[-1].bytes_out == sum(inputs) > 0  # no weight's copy among them
    assert Reason.MARKED in {row.reason for row in session.records[-1].slots}


def test_window_of_plain_te_ops_is_left_to_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    linear: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.bfloat16}
    window = [
        te.ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **linear),
        te.ops.ScaledSReLU(),
        te.ops.GroupedLinear(EXPERTS, FFN, HIDDEN, **linear),
    ]
    from te_offload.fused.blackwell import fuse_unary_windows

    assert fuse_unary_windows(window, recipe=MXFP8) == window


@pytest.mark.parametrize("single", [False, True], ids=["weights", "one-grouped-weight"])
def test_slots_move_and_come_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    te_on_cpu.fused(monkeypatch)
    seen = buffers_seen(monkeypatch, BlackwellUnaryGroupedMLP)
    module = mlp(single_grouped_weight=single)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    assert len(seen) == 2 and len(seen[0]) == len(seen[1]) > 10
    for before, after in zip(*seen, strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert [(row.slot, row.fate) for row in session.records[-1].slots] == [(name, Fate.OFFLOADED) for name in NAMES]


def test_bytes_of_each_slot_are_those_computed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    # MXFP8 by column: a byte a number and a byte of scale for each 32, in tiles of 128 x 128; activation input bf16
    quantized = {width: TOKENS * width + TOKENS * width // 32 for width in (HIDDEN, FFN)}
    assert {row.slot: row.nbytes for row in session.records[-1].slots} == {
        SlotName.FC1_INPUT: quantized[HIDDEN],
        SlotName.ACT_INPUT: TOKENS * FFN * 2,
        SlotName.FC2_INPUT: quantized[FFN],
    }


@pytest.mark.parametrize("keep", [name.value for name in NAMES])
def test_argument_means_the_same_as_in_the_unfused_path(monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    te_on_cpu.fused(monkeypatch)
    module = mlp(keep=[keep])
    listener = listen(module)
    step(module)
    for name, saved in zip(NAMES, listener.saved, strict=True):
        assert marked(saved.buffers) == {name.value == keep}
        assert marked(saved.exempt) == {True}


def test_recomputed_slot_is_reported_and_its_wish_moves_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch, rebuilds_fc2_input=True)
    torch.manual_seed(0)
    linear: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.bfloat16}
    module = te.ops.Sequential(
        ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **linear),
        ops.ScaledSReLU(activation_recompute_in_mlp=True),
        ops.GroupedLinear(EXPERTS, FFN, HIDDEN, no_offload_activation=True, **linear),
    )
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    fates = {row.slot: (row.fate, row.reason) for row in session.records[-1].slots}
    assert fates[SlotName.FC2_INPUT] == (Fate.RECOMPUTED, Reason.REBUILT)
    assert fates[SlotName.FC1_INPUT][0] is fates[SlotName.ACT_INPUT][0] is Fate.OFFLOADED
    assert session.records[-1].bytes_out > 0


def test_input_that_was_to_be_computed_again_is_saved_and_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    module = mlp()
    module[1].recompute_act_input = True
    with pytest.warns(
        UserWarning, match="but Transformer Engine's fused op for Blackwell runs, which saves it"
    ) as said:
        step(module)
    assert len(said) == 1
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)  # says nothing: a warning is an error here
    assert {row.slot: row.fate for row in session.records[-1].slots}[SlotName.ACT_INPUT] is Fate.OFFLOADED


def test_frozen_fc1_still_has_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    module = mlp()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    assert [row.slot for row in session.records[-1].slots] == list(NAMES)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (MXFP8BlockScaling(fp8_format=Format.HYBRID), "gradients in another format than E4M3"),
        (DelayedScaling(), "neither MXFP8 nor NVFP4"),
        (None, "no quantization recipe"),
    ],
    ids=["mxfp8-hybrid", "delayed", "bf16"],
)
def test_recipe_that_is_not_taken_has_a_reason(recipe: Any, reason: str) -> None:
    assert reason in (te_adapter.recipe_reason(recipe) or "")


def test_recipe_that_is_taken_has_none() -> None:
    assert te_adapter.recipe_reason(MXFP8) is None


def test_hybrid_recipe_runs_unfused_with_the_same_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    from te_offload.fused.blackwell import fuse_unary_windows

    window = list(mlp())
    assert fuse_unary_windows(window, recipe=MXFP8BlockScaling(fp8_format=Format.HYBRID)) == window
    assert [type(op) for op in fuse_unary_windows(window, recipe=MXFP8)] == [BlackwellUnaryGroupedMLP]


def test_dimensions_that_are_not_taken_have_a_reason() -> None:
    window = next(find_windows(list(make_mlp(hidden=96, ffn=64))))
    assert "Unsupported dims" in (te_adapter.dims_reason(*window.ops) or "")


def test_explain_names_the_environment_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", raising=False)
    support = explain(next(find_windows(list(mlp()))), MXFP8)
    assert not support.ok
    assert "NVTE_CUTEDSL_FUSED_GROUPED_MLP" in support.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a GPU")
def test_explain_names_the_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    support = explain(next(find_windows(list(mlp()))), MXFP8)
    assert support.reason == "Blackwell: there is no CUDA device; Hopper: TE_OFFLOAD_FUSED_MLP is 0"


def test_unknown_layout_is_an_error_before_anything_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    save = OperationContext.save_for_backward
    monkeypatch.setattr(OperationContext, "save_for_backward", lambda self, *t: save(self, None, None, *t))
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session:
        with pytest.raises(UnknownLayoutError, match="Blackwell fused path"), session.step():
            step(module)
        assert session.records[-1].bytes_out == 0


def test_window_that_saves_in_fp8_is_not_fused_by_transformer_engine_either(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    window = list(mlp())
    assert [type(op) for op in blackwell.fuse_unary_windows(window, recipe=MXFP8)] == [BlackwellUnaryGroupedMLP]
    window[1].act_input_dtype = torch.float8_e4m3fn
    apart = blackwell.fuse_unary_windows(window, recipe=MXFP8)
    assert [type(op) for op in apart] == [ops.GroupedLinear, blackwell.Apart, ops.GroupedLinear]
    found = te_adapter.fuse_windows(
        apart, recipe=MXFP8, fused_class=te_adapter.fused_unary_class(), activations=(te.ops.ScaledSReLU,)
    )
    assert [type(op) for op in found] == [type(op) for op in apart]


def test_op_that_stands_apart_computes_as_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fuse(found: list[Any], **_: Any) -> list[Any]:
        return [blackwell.Apart([op]) if isinstance(op, te.ops.ScaledSReLU) else op for op in found]

    torch.manual_seed(0)
    plain, other = (make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, dtype=torch.float32) for _ in range(2))
    other.load_state_dict(plain.state_dict())
    for one in (plain, other):
        one[1].act_input_dtype = torch.float8_e4m3fn
    expected = run(plain, SPLITS, hidden=HIDDEN)
    monkeypatch.setattr(OperationFuser, "forward_backward_fusion_functions", [fuse])
    with OffloadSession(other, min_bytes=0) as session, session.step():
        assert_same_bits(expected, run(other, SPLITS, hidden=HIDDEN))
    assert blackwell.Apart in forward_ops(other)
    assert [row.fate for row in session.records[-1].slots] == [Fate.OFFLOADED] * 3


def nvfp4_by_column(columns: int) -> int:
    """Half a byte a number, a byte of scale for each 16 tokens of a column, an amax an expert, which stays."""
    return sum(size * columns // 2 + columns * size // 16 for size in SPLITS)


def test_nvfp4_slots_have_the_columns_alone_and_come_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    seen = buffers_seen(monkeypatch, BlackwellUnaryGroupedMLP)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, NVFP4BlockScaling())
    assert forward_ops(module) == [BlackwellUnaryGroupedMLP]
    assert len(seen) == 2 and len(seen[0]) == len(seen[1]) > 10
    for before, after in zip(*seen, strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert [(row.slot, row.fate, row.format, row.nbytes) for row in session.records[-1].slots] == [
        (SlotName.FC1_INPUT, Fate.OFFLOADED, "NVFP4 by column", nvfp4_by_column(HIDDEN)),
        (SlotName.ACT_INPUT, Fate.OFFLOADED, "bf16", TOKENS * FFN * 2),
        (SlotName.FC2_INPUT, Fate.OFFLOADED, "NVFP4 by column", nvfp4_by_column(FFN)),
    ]


def test_nvfp4_keeps_both_directions_where_no_kernel_reads_the_columns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.fused(monkeypatch)
    monkeypatch.setattr(BlackwellUnaryGroupedMLP, "grouped_gemm_wgrad_kernel", classmethod(lambda cls: None))
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, NVFP4BlockScaling())
    assert [row.format for row in session.records[-1].slots] == [
        "NVFP4 by row and column",
        "bf16",
        "NVFP4 by row and column",
    ]
