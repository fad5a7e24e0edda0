"""Every Hopper kernel compiles, also where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sass import look_into

ROOT = Path(__file__).parents[2]
PARTS = ("bf16", "others", "fp8", "blocks")
# FC1's wgrad beside its dgrad, and FC2 after FC1
BEGIN_EARLY = ("BesideWgradGemm", "ReadyPlainGemm", "ReadyBiasGemm", "ReadyScaledBiasGemm")
Running = dict[str, tuple[subprocess.Popen[str], Path, list[str]]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A process for each part, all at once; the first two share kernels."""
    pytest.importorskip("quack")
    started: Running = {}
    folders = {part: tmp_path_factory.mktemp(part) for part in PARTS[1:]}
    folders["bf16"] = folders["others"]
    for part, folder in folders.items():
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.compile_sm90", part],
            cwd=ROOT,
            env=os.environ | {"QUACK_CACHE_DIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started[part] = process, folder, []
    yield started
    for process, _, printed in started.values():
        process.kill()
        if not printed:
            process.communicate()


def compiled(running: Running, part: str) -> tuple[str, int]:
    """What a part printed, and how many kernels it made."""
    process, folder, printed = running[part]
    if not printed:
        printed += process.communicate()
    out, err = printed
    assert process.returncode == 0, err[-2000:]
    return out, len(list(folder.rglob("*.o")))


def test_every_kernel_compiles_for_sm_90a(running: Running) -> None:
    usual, _ = compiled(running, "bf16")
    others, kernels = compiled(running, "others")
    assert usual.count("27 launches") == 2
    assert others.count("27 launches") == 2 and others.count("24 launches") == 2
    # for two dtypes: fc2 without, with and with a scaled bias, right after fc1 and not; fc1_dgrad; bias scales; wgrad of
    # weights and of biases, and to float32 written and added, and those of weights beside fc1_dgrad; offsets; begin; clear;
    # and with each of two activations fc1 with and without bias, fc2_dgrad.
    # Beside them in float32: clear and sums. For few tokens other tiles of fc2_dgrad, fc2 and fc1_dgrad; for many, and a
    # wide FC1, of fc2, fc1_dgrad and fc1.
    few, many = 1 + 3 + 1, 3 + 1 + 2
    assert kernels == 2 * (11 + 3 + 3 + 1 + 2 * 3) + 2 + few + many


def test_operands_are_loaded_five_tiles_ahead_where_that_fits(running: Running) -> None:
    printed = "".join(compiled(running, part)[0] for part in ("bf16", "others"))
    for kernel in ("DSReLUGemm", "DTanhSReLUGemm"):
        assert f"{kernel} 128x192x64: 5 stages" in printed
    for kernel in ("WgradGemm", "AddingWgradGemm", "BesideWgradGemm", "AddingBesideWgradGemm"):
        assert f"{kernel} 128x192x32: 10 stages" in printed  # half a tile of 64 each


def test_every_fp8_kernel_compiles_for_sm_90a(running: Running) -> None:
    printed, kernels = compiled(running, "fp8")
    # for both activations fc1 with and without bias, and fc2_dgrad; its sums; fc1 that quantizes; fc2 in three ways,
    # fc1_dgrad, three wgrads
    assert "12 launches" in printed and "4 launches" in printed
    assert kernels == 2 * 3 + 1 + 1 + 3 + 1 + 3


def test_every_kernel_of_fp8_by_blocks_compiles_for_sm_90a(running: Running) -> None:
    printed, kernels = compiled(running, "blocks")
    # a product in three ways, fc2_dgrad for both activations, its sums, three wgrads; quantizers of rows alone and with
    # columns both ways, of what both activations make, of the columns of one, and of weights one way and both
    assert "15 launches" in printed and "4 launches" in printed
    assert kernels == 3 + 2 + 1 + 3 + 3 + 2 + 1 + 2


@pytest.mark.parametrize("part", PARTS[1:])
def test_no_kernel_waits_after_each_instruction_for_the_tensor_cores(running: Running, part: str) -> None:
    """As ptxas has it where it cannot tell which registers they are still writing; it does not say so by itself."""
    pytest.importorskip("triton")
    for one in PARTS:  # two of them write into one folder
        compiled(running, one)
    found = [one for one in look_into(running[part][1].rglob("*.o")) if one.tensor_core]
    assert found and [one for one in found if one.groups * 4 > one.tensor_core] == []  # a tile of K is four


@pytest.mark.parametrize("part", PARTS[1:])
def test_no_warp_of_a_product_touches_memory_before_the_kernels_ahead_are_over(running: Running, part: str) -> None:
    """They may begin before that (programmatic dependent launch), and QuACK lets only warps that load operands wait."""
    pytest.importorskip("triton")
    for one in PARTS:
        compiled(running, one)
    found = [one for one in look_into(running[part][1].rglob("*.o")) if one.tensor_core]
    both = (True, True)  # those that load, and those that multiply
    early = [one for one in found if any(name in one.symbol for name in BEGIN_EARLY)]
    assert [one for one in found if one.parts_wait_first != both and one not in early] == []
    assert len(found) > len(early) and not any(one.waits_last for one in found if one not in early)


@pytest.mark.parametrize("part", ["bf16", "others"])
def test_product_that_begins_early_ends_after_the_one_ahead_and_that_one_lets_it(running: Running, part: str) -> None:
    pytest.importorskip("triton")
    for one in PARTS:
        compiled(running, one)
    found = [one for one in look_into(running[part][1].rglob("*.o")) if one.tensor_core]
    for name in BEGIN_EARLY:
        early = [one for one in found if name in one.symbol]
        assert early and [one for one in early if one.parts_wait_first != (False, False) or not one.waits_last] == []
    ahead = [one for one in found if one.lets_next_begin]
    assert ahead == [
        one for one in found if any(name in one.symbol for name in ("DgradGemm", "SReLUGemmBF16", "SReLUGemmFP16"))
    ]
    assert len(ahead) > 2


@pytest.mark.parametrize("part", ["bf16", "others"])
def test_fc2_asks_for_an_expert_before_each_load_of_a_tile_and_fc1_counts_after_its_stores(
    running: Running, part: str
) -> None:
    pytest.importorskip("triton")
    for one in PARTS:
        compiled(running, one)
    found = [one for one in look_into(running[part][1].rglob("*.o")) if one.tensor_core]
    asking = [one for one in found if one.asks_first]
    assert asking and asking == [one for one in found if any(name in one.symbol for name in BEGIN_EARLY[1:])]
    counting = [one for one in found if one.counts_last]
    assert counting and counting == [
        one for one in found if "SReLUGemmBF16" in one.symbol or "SReLUGemmFP16" in one.symbol
    ]
