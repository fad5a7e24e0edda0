"""Every Hopper kernel compiles, also where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_for_sm_90a(tmp_path: Path) -> None:
    pytest.importorskip("quack")
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.compile_sm90", part],
            cwd=ROOT,
            env=os.environ | {"QUACK_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in ("bf16", "others")
    ]
    printed = ""
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err[-2000:]
        printed += out
    assert printed.count("16 launches") == 6
    # for two dtypes: fc2 without, with and with a scaled bias; fc1_dgrad; bias scales; wgrad of weights and of biases, and
    # to float32 written and added; offsets; clear; and with each of two activations fc1 with and without bias, fc2_dgrad.
    # Beside them in float32: clear and sums. For few tokens other tiles, but for wgrads; for many, of wgrads.
    few, many = 3 + 1 + 2 + 1, 4
    assert len(list(tmp_path.rglob("*.o"))) == 2 * (11 + 2 * 3) + 2 + few + many


def compiled(part: str, folder: Path) -> tuple[str, int]:
    """What was printed, and how many kernels there are."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_sm90", part],
        cwd=ROOT,
        env=os.environ | {"QUACK_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, len(list(folder.rglob("*.o")))


def test_every_fp8_kernel_compiles_for_sm_90a(tmp_path: Path) -> None:
    pytest.importorskip("quack")
    printed, kernels = compiled("fp8", tmp_path)
    # for both activations fc1 with and without bias, and fc2_dgrad; its sums; fc1 that quantizes; fc2 in three ways,
    # fc1_dgrad, three wgrads
    assert "12 launches" in printed and "4 launches" in printed
    assert kernels == 2 * 3 + 1 + 1 + 3 + 1 + 3


def test_every_kernel_of_fp8_by_blocks_compiles_for_sm_90a(tmp_path: Path) -> None:
    pytest.importorskip("quack")
    printed, kernels = compiled("blocks", tmp_path)
    # a product in three ways, fc2_dgrad for both activations, its sums, three wgrads
    assert "8 launches" in printed and "3 launches" in printed
    assert kernels == 3 + 2 + 1 + 3
