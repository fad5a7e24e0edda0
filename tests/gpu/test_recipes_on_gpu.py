"""Every quantized recipe that the GPU has, on both unfused paths: bits, bytes, memory; the activation's input in FP8."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ops.basic.grouped_linear as te_grouped_linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import Fate, OffloadSession, SlotName
from te_offload.demo.recipes import RECIPES
from te_offload.ops import te_adapter
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, FFN = 4, 1024, 2048
SPLITS = (512, 0, 1408, 128)
TOKENS = sum(SPLITS)
NAMES = [name for name, recipe in RECIPES.items() if recipe.make is not None]
EVERY = pytest.mark.parametrize("name", NAMES)
PATHS = pytest.mark.parametrize("path", ["split", "grouped"])


def choose(monkeypatch: pytest.MonkeyPatch, name: str, path: str) -> Any:
    """The recipe, and GroupedLinear made to take a path; skips with the reason where there is none."""
    available, reason = RECIPES[name].available()
    if not available:
        pytest.skip(f"{name}: {reason}")
    make = RECIPES[name].make
    assert make is not None
    recipe = make()
    if path == "split":
        monkeypatch.setattr(te_grouped_linear, "is_op_fuser_grouped_tensor_path_supported", lambda recipe, dtype: False)
    elif not te_adapter.grouped_path_supported(recipe, torch.bfloat16):
        number = te_adapter.cublaslt_version()
        pytest.skip(f"no grouped path in {name} here, with cuBLASLt {number // 10000}.{number // 100 % 100}")
    FP8GlobalStateManager.reset()
    if name == "fp8-block":
        skip_where_transformer_engine_fails(recipe)
    return recipe


def skip_where_transformer_engine_fails(recipe: Any) -> None:
    """Its own ops, without ours: FP8 by blocks finds no algorithm in some releases of cuBLAS."""
    size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    alone = te.ops.Sequential(te.ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **size))
    x, counts, _ = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    try:
        with te.autocast(enabled=True, recipe=recipe):
            alone(x, counts)
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.skip(f"Transformer Engine's own GroupedLinear fails here: {str(error)[-120:]}")


def mlp() -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, device="cuda", dtype=torch.bfloat16)


def steps(module: te.ops.Sequential, recipe: Any, session: OffloadSession | None) -> list[dict[str, torch.Tensor]]:
    """Some, from the recipe's state at the beginning on."""
    FP8GlobalStateManager.reset()
    found = []
    for number in range(4):
        with te.autocast(enabled=True, recipe=recipe):
            if session is None:
                found.append(run(module, SPLITS, hidden=HIDDEN, seed=number))
            else:
                with session.step():
                    found.append(run(module, SPLITS, hidden=HIDDEN, seed=number))
    return found


@PATHS
@EVERY
@pytest.mark.usefixtures("copies_out_end")
def test_offloading_changes_no_bit_and_every_slot_goes_in_one_direction(
    monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    recipe = choose(monkeypatch, name, path)
    expected = steps(mlp(), recipe, None)
    for one, other in zip(expected, steps(mlp(), recipe, None), strict=True):
        assert_same_bits(one, other)  # else a difference below would mean nothing
    module = mlp()
    with OffloadSession(module, min_bytes=0, max_in_flight=0, verify=True) as session:
        for one, other in zip(expected, steps(module, recipe, session), strict=True):
            assert_same_bits(one, other)
    record = session.records[-1]
    assert [row.fate for row in record.slots] == [Fate.OFFLOADED] * 3
    assert record.slots[1].format == "bf16" and record.slots[1].nbytes == TOKENS * FFN * 2
    for row, columns in ((record.slots[0], HIDDEN), (record.slots[2], FFN)):
        assert row.format.endswith(("by column", "by row")), row.format
        numbers = TOKENS * columns // (2 if name == "nvfp4" else 1)
        assert numbers <= row.nbytes <= 1.13 * numbers, row.name  # NVFP4 has a byte of scale for 8 of data
    assert record.bytes_out == record.bytes_back > 0


@EVERY
def test_memory_of_what_goes_is_free_when_the_forward_has_ended(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On the split path block formats lie in one allocation of all experts, which one buffer that stays would keep."""
    recipe = choose(monkeypatch, name, "split")
    module = mlp()
    x, counts, scales = make_inputs(SPLITS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    held = []
    for offloads in (False, True):
        session = OffloadSession(module, min_bytes=0, max_in_flight=0, enabled=offloads)
        for _ in range(3):
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            with session.step():
                with te.autocast(enabled=True, recipe=recipe):
                    y = module(x * 1, counts, scales, counts)
                assert session._engine is not None
                session._engine.mover.drain()
                torch.cuda.synchronize()
                saved = torch.cuda.memory_allocated() - before
                y.float().square().sum().backward()
                del y
        held.append(saved)
        record = session.records[-1]
        session.close()
    assert [row.fate for row in record.slots] == [Fate.OFFLOADED] * 3
    gone = sum(row.nbytes for row in record.slots)
    assert held[0] - held[1] > 0.95 * gone, (held, gone)


@PATHS
def test_act_input_in_fp8_keeps_the_forward_and_halves_the_slot(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    recipe = choose(monkeypatch, "fp8", path)
    exact = steps(mlp(), recipe, None)[-1]
    module = mlp()
    module[1].act_input_dtype = torch.float8_e4m3fn
    alone = steps(module, recipe, None)
    other = mlp()
    other[1].act_input_dtype = torch.float8_e4m3fn
    with OffloadSession(other, min_bytes=0) as session:
        for one, two in zip(alone, steps(other, recipe, session), strict=True):
            assert_same_bits(one, two)
    (row,) = [row for row in session.records[-1].slots if row.slot is SlotName.ACT_INPUT]
    assert row.fate is Fate.OFFLOADED and row.nbytes == TOKENS * FFN + 4 * TOKENS
    assert torch.equal(alone[-1]["output"], exact["output"])
    error = float((alone[-1]["input0"] - exact["input0"]).float().norm() / exact["input0"].float().norm())
    assert 1e-4 < error < 0.1
