"""Kernels of FP8 by blocks, without a GPU: by Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = 227 << 10  # bytes that a block of threads can have on Hopper


def output_of(module: str) -> str:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_kernels_make_the_numbers_of_torch_arithmetic() -> None:
    assert output_of("tests.support.interpret_blocks").strip().endswith("the same")


def test_products_use_hoppers_fp8_tensor_cores_and_fit_its_shared_memory() -> None:
    lines = output_of("tests.support.compile_blocks").splitlines()
    assert [line.split()[0] for line in lines] == ["multiply_rows"] * 3 + ["multiply_columns"]
    for line in lines:
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in line, line
        assert int(line.split()[-1]) <= SHARED, line
