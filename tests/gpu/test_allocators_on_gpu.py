"""Torch's other device allocators: memory in expandable segments, as torchtitan trains, and CUDA's own pools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
ALLOCATORS = pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])


def run_under(setting: str, *command: str) -> str:
    """What a fresh Python prints: the allocator is chosen when the first device memory is taken."""
    environment = os.environ | {"PYTORCH_ALLOC_CONF": setting}
    environment.pop("TE_OFFLOAD_FUSED_MLP", None)
    found = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return found.stdout


@ALLOCATORS
def test_demo_trains_with_equal_bits(setting: str, tmp_path: Path) -> None:
    text = run_under(setting, "te_offload", "demo", "--device", "cuda", "--steps", "4", "--out", str(tmp_path))
    assert "offloaded" in text


@ALLOCATORS
def test_captured_step_trains(setting: str) -> None:
    text = run_under(setting, "examples.capture_step")
    assert "; captured; " in text and " 0 bytes" not in text


@ALLOCATORS
def test_layers_as_graphs_train_and_offload(setting: str) -> None:
    text = run_under(setting, "examples.capture_layers")
    assert text.count(": captured, ") == 4 and "; 0 bytes" not in text, text
