"""Slots, bytes and bits of block-scaled recipes on Transformer Engine's own unfused code, with only kernels replaced."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ops.basic.grouped_linear as te_grouped_linear

from te_offload import Fate, OffloadSession, SlotName
from te_offload.errors import ArgumentError
from tests.layouts.test_unfused_layouts import PATHS, RECIPES, listen
from tests.support import block_formats, te_on_cpu
from tests.support.mlp import assert_same_bits, make_mlp, run

EXPERTS, HIDDEN, FFN, SPLITS = 3, 128, 256, (128, 0, 384)
TOKENS = sum(SPLITS)
FORMATS = pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "nvfp4"])


def mlp(**arguments: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, dtype=torch.bfloat16, **arguments)


def step(module: te.ops.Sequential, recipe: str) -> dict[str, torch.Tensor]:
    with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
        return run(module, SPLITS, hidden=HIDDEN)


def bytes_by_column(recipe: str, columns: int) -> int:
    """Of what a backward reads of one input: numbers and scales of each expert, for the wgrad alone."""
    total = 0
    for tokens in SPLITS:
        if recipe == "fp8-block":
            total += tokens * columns + -(-tokens // 128) * columns * 4  # a scale for 128 tokens
        elif recipe == "mxfp8":
            total += tokens * columns + rounded(-(-tokens // 32), 4) * rounded(columns, 128)
        else:
            total += tokens * columns // 2 + rounded(columns, 128) * rounded(-(-tokens // 16), 4)
    return total


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@PATHS
@FORMATS
def test_bytes_of_each_slot_are_those_that_the_backward_reads(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module, recipe)
    record = session.records[-1]
    amax = 4 * EXPERTS if recipe == "nvfp4" and not grouped else 0  # it lies in the allocation of what goes
    assert {row.slot: row.nbytes for row in record.slots} == {
        SlotName.FC1_INPUT: bytes_by_column(recipe, HIDDEN) + amax,
        SlotName.ACT_INPUT: TOKENS * FFN * 2,
        SlotName.FC2_INPUT: bytes_by_column(recipe, FFN) + amax,
    }
    name = {"fp8-block": "FP8 by blocks", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}[recipe] + " by column"
    assert [row.format for row in record.slots] == [name, "bf16", name]
    assert record.bytes_by_format == {
        name: sum(row.bytes_out for row in record.slots if row.slot is not SlotName.ACT_INPUT),
        "bf16": TOKENS * FFN * 2,
    }
    gaps = record.bytes_out - sum(row.nbytes for row in record.slots)  # between buffers that are copied in one piece
    assert 0 <= gaps < 2 * EXPERTS * 512


@FORMATS
def test_nothing_keeps_the_allocation_that_all_experts_share(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """`tex.split_quantize` lays all experts in one: a single buffer that stays would keep the memory of all."""
    bulk = te_on_cpu.unfused(monkeypatch, grouped=False)
    module = mlp()
    held: dict[bool, int] = {}
    for offloads in (False, True):
        session = OffloadSession(module, min_bytes=0, max_in_flight=0) if offloads else None
        with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
            x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            splits, scales = torch.tensor(SPLITS), torch.rand(TOKENS)
            with session.step() if session is not None else contextlib.nullcontext():
                y = module(x, splits, scales, splits)
                if session is not None:
                    session._engine.mover.drain()  # type: ignore[union-attr]
                held[offloads] = bulk.nbytes
                y.sum().backward()
        del y
    saved = bytes_by_column(recipe, HIDDEN) + bytes_by_column(recipe, FFN)
    assert held[False] >= saved and held[True] == 0


@PATHS
@FORMATS
@pytest.mark.parametrize("keep", ["fc1_input", "act_input", "fc2_input"])
def test_slot_that_is_kept_stays_whole_and_the_others_go(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str, keep: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    expected = step(mlp(), recipe)
    module = mlp(keep=[keep])
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = step(module, recipe)
    assert_same_bits(expected, found)
    fates = {row.slot.value: row.fate for row in session.records[-1].slots}
    assert fates.pop(keep) is Fate.KEPT and set(fates.values()) == {Fate.OFFLOADED}


def expose(monkeypatch: pytest.MonkeyPatch) -> set[type[Any]]:
    """Have quantizers make wrappers, as those do that are not internal; the types that they made."""
    quantize, kinds = block_formats.quantize, set[type[Any]]()

    def exposed(quantizer: Any, x: torch.Tensor, buffers: Any = None) -> Any:
        quantizer.internal = False
        found = quantize(quantizer, x, buffers)
        kinds.add(type(found))
        return found

    monkeypatch.setattr(block_formats, "quantize", exposed)
    for kind in block_formats.QUANTIZERS:
        monkeypatch.setattr(kind, "quantize_impl", exposed)
    return kinds


@FORMATS
def test_exposed_quantizers_give_the_bytes_and_bits_of_internal_ones(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    found = []
    for exposes in (False, True):
        kinds = expose(monkeypatch) if exposes else set()
        module = mlp()
        with OffloadSession(module, min_bytes=0) as session, session.step():
            grads = step(module, recipe)
        found.append((grads, [(row.slot, row.fate, row.nbytes) for row in session.records[-1].slots]))
    assert kinds and all(issubclass(kind, torch.Tensor) for kind in kinds)
    assert_same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] and {fate for _, fate, _ in found[0][1]} == {Fate.OFFLOADED}


@FORMATS
def test_hooks_see_the_buffers_of_a_wrapper_one_by_one(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    expose(monkeypatch)
    module = mlp()
    listener = listen(module)
    seen: list[torch.Tensor] = []

    def pack(one: torch.Tensor) -> torch.Tensor:
        seen.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        step(module, recipe)
    addresses = {one.data_ptr() for one in seen if type(one) is torch.Tensor}
    for saved in listener.saved:
        assert saved.buffers
        assert all(type(one) is torch.Tensor and one.data_ptr() in addresses for one in saved.buffers)


@PATHS
def test_recipe_may_change_from_step_to_step(monkeypatch: pytest.MonkeyPatch, grouped: bool) -> None:
    """A plan was made for other bytes; what it foresaw is not what is there, and every bit is."""
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    order = ["mxfp8"] * 4 + ["nvfp4", "fp8-block", "mxfp8", "nvfp4"]
    expected = [step(mlp(), recipe) for recipe in order]
    module = mlp()
    with OffloadSession(module, min_bytes=0, fraction=0.6) as session:
        for recipe, bits in zip(order, expected, strict=True):
            for parameter in module.parameters():
                parameter.grad = None
            with session.step():
                found = step(module, recipe)
            assert_same_bits(bits, found)
            record = session.records[-1]
            assert record.bytes_out == record.bytes_back > 0
    assert session.records[-1].planned


class Fails:
    """Stands for a kernel that fails, in the forward or where the gradient comes in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at_call: int) -> None:
        self.calls, self.at_call = 0, at_call
        self.gemm = te_grouped_linear.general_grouped_gemm
        monkeypatch.setattr(te_grouped_linear, "general_grouped_gemm", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at_call:
            raise RuntimeError("cuBLAS: unsupported dimensions")
        return self.gemm(*args, **kwargs)


@pytest.mark.parametrize("at_call", [1, 3], ids=["forward", "backward"])
@pytest.mark.parametrize(("recipe", "multiple"), [("fp8-block", 16), ("mxfp8", 32), ("nvfp4", 128)])
def test_failure_over_token_counts_is_a_named_error(
    monkeypatch: pytest.MonkeyPatch, recipe: str, multiple: int, at_call: int
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    module = mlp()
    Fails(monkeypatch, at_call=at_call)
    uneven = f"1 of 3 experts have token counts that are no multiples of {multiple}, the first expert 2 with 20"
    with pytest.raises(ArgumentError, match=uneven) as caught, te.autocast(enabled=True, recipe=RECIPES[recipe]()):
        run(module, (128, 0, 20), hidden=HIDDEN)
    assert "cuBLAS: unsupported dimensions" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)


def test_failure_over_columns_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    module = make_mlp(experts=EXPERTS, hidden=40, ffn=FFN, dtype=torch.bfloat16)
    Fails(monkeypatch, at_call=1)
    wrong = pytest.raises(ArgumentError, match="in_features=40 is no multiple of 16")
    with wrong, te.autocast(enabled=True, recipe=RECIPES["fp8-block"]()):
        run(module, SPLITS, hidden=40)


@pytest.mark.parametrize("at_call", [1, 3], ids=["forward", "backward"])
def test_failure_over_something_else_passes_as_it_is(monkeypatch: pytest.MonkeyPatch, at_call: int) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    for recipe in ("mxfp8", None):
        module = mlp()
        Fails(monkeypatch, at_call=at_call)
        quantized = te.autocast(enabled=recipe is not None, recipe=RECIPES[recipe or "mxfp8"]())
        with pytest.raises(RuntimeError, match=r"^cuBLAS: unsupported dimensions$"), quantized:
            run(module, SPLITS if recipe else (128, 0, 20), hidden=HIDDEN)
