"""Torch's other device allocators: memory in expandable segments, as torchtitan trains, CUDA's own pools, and no cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
ALLOCATORS = pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
EXAMPLES = pytest.mark.parametrize(
    ("example", "captured", "count"),
    [("examples.capture_step", "; captured; ", 1), ("examples.capture_layers", ": captured, ", 4)],
    ids=["step", "layers"],
)


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


@EXAMPLES
def test_steps_and_layers_are_captured_in_expandable_segments(example: str, captured: str, count: int) -> None:
    text = run_under("expandable_segments:True", example)
    assert text.count(captured) == count and "; 0 bytes" not in text, text


@EXAMPLES
def test_steps_and_layers_run_eagerly_with_cudas_pools_and_say_so(example: str, captured: str, count: int) -> None:
    text = run_under("backend:cudaMallocAsync", example)
    assert text.count("torch's allocator is cudaMallocAsync") == count and "; 0 bytes" not in text, text


def test_demo_trains_with_equal_bits_where_nothing_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    text = run_under("", "te_offload", "demo", "--device", "cuda", "--steps", "2", "--out", str(tmp_path))
    assert "offloaded" in text


@pytest.mark.parametrize("setting", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_steps_are_within_a_limit_of_the_device(setting: str) -> None:
    text = run_under(setting, "tests.support.limited_steps")
    assert "within the limit: " in text, text
    if setting:  # there is nothing to fill in segments that grow and shrink, nor where there are none
        assert "filled [0]" in text, text
