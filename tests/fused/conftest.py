"""What tests of the fused op in FP8 have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._dynamo
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload.fused import hopper
from tests.support import te_on_cpu


@pytest.fixture
def fp8_in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Grouped MLPs run fused, in torch arithmetic, under recipes too, and no state of recipes is left."""
    monkeypatch.setenv(hopper.SWITCH, "reference")
    te_on_cpu.unfused(monkeypatch, grouped=False)
    FP8GlobalStateManager.reset()
    with torch._dynamo.config.patch(disable=True):  # the update of scales would be compiled for 20 s
        yield
    FP8GlobalStateManager.reset()
