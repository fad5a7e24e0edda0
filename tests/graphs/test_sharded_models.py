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
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torchtitans_own_models_keep_their_bits_and_their_collectives_are_captured(device: str, tmp_path: Path) -> None:
    """Its Llama 3 with its SimpleFSDP and its tensor parallelism; releases whose models import with this torch (0.2.2)."""
    name = "torchtitan.experiments.simple_fsdp.llama3.model"
    pytest.importorskip(name, reason="torchtitan 0.2.2 is not installed here", exc_type=ImportError)
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    output = run(device, tmp_path / "meeting", "fsdp-titan", "tp-titan")
    assert ", eager" not in output and output.count("a CUDA graph") == 2 * 2, output
    assert output.count("collectives and waits in graphs") == 2


@pytest.mark.gpu
def test_sharded_models_keep_their_bits_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    what = "fsdp-llama", "fsdp-moe", "tp-llama", "tp-moe"
    check(run("cuda", tmp_path / "meeting", *what), what)
