"""Models whose parameters are DTensors, in the pass: sharded over two ranks as by SimpleFSDP, and by tensor parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(device: str, meeting: Path, *what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sharded_models", "2", device, str(meeting), *what],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def check(output: str, what: tuple[str, ...]) -> None:
    """Forward and backward are one graph each, collectives in it, and only what moves is copied."""
    for one in what:
        assert f"{one.replace('-', ' ')}: inputs of forward and backward that are copied: [1, 1]" in output, output
    assert output.count("collectives and waits in graphs") == len(what)
    assert ", eager" not in output and output.count("a CUDA graph") == 2 * len(what), output


def test_sharded_models_keep_their_bits_and_their_collectives_are_captured(tmp_path: Path) -> None:
    what = "fsdp-moe", "tp-llama"
    check(run("cpu", tmp_path / "meeting", *what), what)


@pytest.mark.gpu
def test_sharded_models_keep_their_bits_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    what = "fsdp-llama", "fsdp-moe", "tp-llama", "tp-moe"
    check(run("cuda", tmp_path / "meeting", *what), what)
