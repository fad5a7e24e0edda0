"""FP8 with delayed scaling on Transformer Engine's own unfused code: scales and amaxes are what they are without us."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import Fate, OffloadSession, ops
from tests.support import te_on_cpu
from tests.support.mlp import assert_same_bits, run

EXPERTS, HIDDEN, FFN, SPLITS, STEPS = 3, 64, 128, (128, 0, 384), 12
TOKENS = sum(SPLITS)
RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    te_on_cpu.unfused(monkeypatch, grouped=False)
    with torch._dynamo.config.patch(disable=True):  # the update of scales would be compiled for 20 s
        yield
    FP8GlobalStateManager.reset()


def mlp(room: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    size: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.bfloat16}
    return te.ops.Sequential(
        room.GroupedLinear(EXPERTS, HIDDEN, FFN, **size),
        room.ScaledSReLU(),
        room.GroupedLinear(EXPERTS, FFN, HIDDEN, **size),
    )


def state(module: te.ops.Sequential) -> dict[str, torch.Tensor]:
    """Scales and amaxes of all quantizers."""
    found = {}
    for number in (0, 2):
        for mode in ("forward", "backward"):
            for index in range(module[number].num_quantizers(mode)):
                quantizer = module[number].get_quantizer(mode, index)
                found[f"{number} {mode} {index} scale"] = quantizer.scale.reshape(1).clone()
                found[f"{number} {mode} {index} amax"] = quantizer.amax.reshape(1).clone()
    return found


def train(module: te.ops.Sequential, session: OffloadSession | None) -> list[dict[str, torch.Tensor]]:
    """Some steps, each with other inputs and weights; what each leaves."""
    FP8GlobalStateManager.reset()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    found = []
    for number in range(STEPS):
        step = session.step() if session is not None else contextlib.nullcontext()
        with step, te.autocast(enabled=True, recipe=RECIPE):
            bits = run(module, SPLITS, hidden=HIDDEN, seed=number)
        found.append(bits | state(module))
        optimizer.step()
    return found


def test_training_with_offloading_has_the_bits_scales_and_amaxes_of_transformer_engine_alone() -> None:
    expected = train(mlp(te.ops), None)
    module = mlp(ops)
    with OffloadSession(module, min_bytes=0) as session:
        found = train(module, session)
        record = session.records[-1]
    for one, other in zip(expected, found, strict=True):
        assert_same_bits(one, other)
    scales = {name: value for name, value in found[-1].items() if name.endswith("scale")}
    assert len(scales) == 2 * 3 * EXPERTS and sum(bool(value != 1) for value in scales.values()) > EXPERTS
    assert [(row.fate, row.format) for row in record.slots] == [
        (Fate.OFFLOADED, "FP8 by column"),
        (Fate.OFFLOADED, "bf16"),
        (Fate.OFFLOADED, "FP8 by column"),
    ]
    assert [row.nbytes for row in record.slots] == [TOKENS * HIDDEN, TOKENS * FFN * 2, TOKENS * FFN]
    assert record.bytes_out == record.bytes_back == sum(row.nbytes for row in record.slots)
