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
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_sm90"],
        cwd=ROOT,
        env=os.environ | {"QUACK_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count("16 launches") == 6
    # for two dtypes: fc2 without, with and with a scaled bias; fc1_dgrad; bias scales; wgrad of weights and of biases, and
    # to float32 written and added; offsets; clear; and with each of two activations fc1 with and without bias, fc2_dgrad.
    # Beside them in float32: clear and sums. For few tokens other tiles, but for wgrads; for many, of wgrads.
    few, many = 3 + 1 + 2 + 1, 4
    assert len(list(tmp_path.rglob("*.o"))) == 2 * (11 + 2 * 3) + 2 + few + many
