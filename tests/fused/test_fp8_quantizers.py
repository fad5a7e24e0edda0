"""FP8 quantizers' kernels, by Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_kernels_make_the_scales_and_numbers_of_torch_arithmetic() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_fp8"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("the same")
