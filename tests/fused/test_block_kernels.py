"""Quantizers of FP8 by blocks, without a GPU: by Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def output_of(module: str) -> str:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_kernels_make_the_numbers_of_torch_arithmetic() -> None:
    assert output_of("tests.support.interpret_blocks").strip().endswith("the same")
