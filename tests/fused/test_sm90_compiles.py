"""Every Hopper kernel compiles, also without a GPU: in processes that `conftest` starts before this folder's tests."""

from __future__ import annotations

import re

import pytest

from tests.support.compiling import PARTS, Running
from tests.support.sass import look_into


@pytest.fixture(scope="module")
def running(kernels_compile_meanwhile: Running | None) -> Running:
    pytest.importorskip("quack")
    assert kernels_compile_meanwhile is not None
    return kernels_compile_meanwhile


def compiled(running: Running, part: str) -> tuple[str, int]:
    """What a part printed, and how many kernels it made."""
    return running.printed(part), len(running.objects(part))


def test_every_kernel_compiles_for_sm_90a(running: Running) -> None:
    usual, _ = compiled(running, "bf16")
    others, kernels = compiled(running, "others")
    assert usual.count("28 launches") == 3 and others.count("28 launches") == 4
    # for two dtypes: fc2 without, with and with a scaled bias; fc1_dgrad; wgrads of fc2 and, beside fc1_dgrad, of fc1, also
    # to float32 written and added; offsets; clear; sums of rows with and without factors, and their totals; and with each
    # of two activations fc1 with and without bias, its fc2_input alone too, fc2_dgrad; fc1's act_input alone, with and
    # without bias, by fc2's kernels in other tiles.
    # Beside them in float32: sums. For few tokens other tiles of fc2_dgrad, fc2, fc1's act_input, fc1_dgrad and all wgrads;
    # for many, and a wide FC1, of fc2, fc1, fc2_dgrad and the wgrads of fc1. For two dtypes fc1 in wide parts. An H200's
    # tiles of fc1 with and without bias and of both dgrads.
    few, many, wide_parts, h200 = 1 + 3 + 2 + 1 + 6, 3 + 4 + 1 + 3, 2, 4 + 2
    assert kernels == 2 * (10 + 2 + 3 + 2 * 5 + 2) + 1 + few + many + wide_parts + h200


def test_operands_are_loaded_five_tiles_ahead_or_more_where_that_fits(running: Running) -> None:
    printed = "".join(compiled(running, part)[0] for part in ("bf16", "others"))
    assert "DSReLUGemm 128x192x64: 5 stages" in printed and "DTanhSReLUGemm 128x128x64: 6 stages" in printed
    for kernel in ("WgradGemm", "AddingWgradGemm", "BesideWgradGemm", "AddingBesideWgradGemm"):
        assert f"{kernel} 128x192x32: 10 stages" in printed  # half a tile of 64 each


def test_every_kernel_of_gated_activations_compiles_for_sm_90a(running: Running) -> None:
    printed, kernels = compiled(running, "glu")
    assert printed.count("25 launches") == 6
    # offsets, clear, sums; fc1 with and without a bias, each of its results alone too, fc2, fc2_dgrad, fc1_dgrad, a wgrad
    # of fc2; of fc1, beside the dgrad or not, as weights are, and in float32 written and added; sums of rows and their
    # totals. In fp16 all of these but the sums. With halves in blocks of 32 fc1 six times, both dgrads and wgrads for many
    # tokens, and totals. Of the two other activations fc1 and its fc2_input twice and fc2_dgrad. An H200's tiles of fc1,
    # six times.
    assert kernels == (3 + 10 + 6 + 2) + (2 + 10 + 6 + 2) + (8 + 6 + 1) + 2 * 5 + 6


def test_every_fp8_kernel_compiles_for_sm_90a(running: Running) -> None:
    printed, kernels = compiled(running, "fp8")
    # for both activations fc1 with and without bias; fc1 that quantizes, with act_input and without; fc2 in three ways;
    # for many tokens other tiles of fc1; of three gated ones fc1 with and without bias
    fast = 2 * 2 + 2 + 3 + (2 + 2) + 3 * 2
    # fc2_dgrad, fc1_dgrad and three wgrads in use, and in other tiles, some of which are in use
    split = 2 * 3 + 3 * 4 + 4 + 3 * 3
    # sums; what each gate makes and the columns of that; for both orders of columns what is in pairs, with columns and
    # without, and with columns in blocks of 1, 2 and 4; quantizers of rows and of weights, both ways round or one
    rest = 1 + 3 * 2 + 2 * 2 + 3 + 2 * 2
    # an H200's tiles of fc1 with and without bias, or that quantizes in both ways, of both again with SwiGLU, and of fc2 in
    # three ways
    h200 = 4 + 2 + 3
    assert [printed.count(f" {count} launches") for count in (32, 14, 17, 18, 12)] == [1, 1, 2, 3, 1]
    assert kernels == fast + split + rest + h200


def test_every_kernel_of_fp8_by_blocks_compiles_for_sm_90a(running: Running) -> None:
    printed, kernels = compiled(running, "blocks")
    # a product alone, and fc2_dgrad for all five activations, in use and in other tiles; with both kinds of biases and
    # three wgrads, which have others for many tokens; for both orders of columns fc1 with and without bias, and in
    # other tiles
    products = 4 + 5 * 4 + 2 * (2 + 3) + 2 * (2 + 2)
    # sums; quantizers of rows alone and with columns both ways, of what both activations make, of the columns of one, of
    # weights one way and both, of what each gate makes and the columns of that, of pairs with columns and without,
    # and with columns in blocks of 1, 2 and 4
    rest = 1 + 3 + 2 + 1 + 2 + 3 * 2 + 2 * 2 + 3
    h200 = 3  # its tiles of three wgrads
    assert [printed.count(f" {count} launches") for count in (24, 10, 15, 18, 9)] == [1, 1, 2, 3, 1]
    assert kernels == products + rest + h200


@pytest.mark.parametrize("part", PARTS[1:])
def test_no_kernel_waits_after_each_instruction_for_the_tensor_cores(running: Running, part: str) -> None:
    """As ptxas has it where it cannot tell which registers they are still writing; it does not say so by itself."""
    pytest.importorskip("triton")
    for one in PARTS:  # two of them write into one folder
        compiled(running, one)
    found = [one for one in look_into(running.objects(part)) if one.tensor_core]
    assert found and [one for one in found if one.groups * 2 > one.tensor_core] == []  # a tile of K is two or more


@pytest.mark.parametrize("part", PARTS[1:])
def test_no_warp_of_a_product_touches_memory_before_the_kernels_ahead_are_over(running: Running, part: str) -> None:
    """They may begin before that (programmatic dependent launch), and QuACK lets only warps that load operands wait."""
    pytest.importorskip("triton")
    for one in PARTS:
        compiled(running, one)
    found = [one for one in look_into(running.objects(part)) if one.tensor_core]
    both = (True, True)  # those that load, and those that multiply
    assert [one for one in found if one.parts_wait_first != both and "BesideWgradGemm" not in one.symbol] == []
    assert len(found) > 3 and not any(one.waits_last for one in found if one.parts_wait_first == both)


def test_clusters_take_tiles_of_all_products_one_by_one(running: Running) -> None:
    """Else clusters drift apart, and what one has read has left the L2 cache before another wants it."""
    pytest.importorskip("triton")
    for one in PARTS:
        compiled(running, one)
    found = [one for part in PARTS[1:] for one in look_into(running.objects(part)) if one.tensor_core]
    assert len(found) > 55 and [one.symbol for one in found if not one.counts] == []


def test_warp_groups_of_every_product_by_blocks_store_apart_where_the_tile_says_so(running: Running) -> None:
    """Else both store while the tensor cores rest."""
    pytest.importorskip("triton")
    compiled(running, "blocks")
    found = [one for one in look_into(running.objects("blocks")) if one.tensor_core]
    apart = {re.search(r"device(\w+?)_object", one.symbol)[1] for one in found if one.stores_apart}  # type: ignore[index]
    names = "BlockGemm", "BlockBiasGemm", "BlockScaledBiasGemm", "PairedBlockGemm", "PairedBlockBiasGemm"
    grads = "SReLU", "TanhSReLU", "SwiGLU", "ClampedQGeGLU", "SiTUGLU"
    assert apart == {*names, "BlockWgradGemm", "AddingBlockWgradGemm", *(f"BlockD{one}Gemm" for one in grads)}
    assert {one.stores_apart for one in found} == {False, True}


@pytest.mark.parametrize("part", ["fp8", "blocks"])
def test_warp_groups_of_wide_tiles_let_each_other_begin_before_their_own_products_are_over(
    running: Running, part: str
) -> None:
    """Else the tensor cores rest between two tiles of K, and long sums take up to 26% longer."""
    pytest.importorskip("triton")
    compiled(running, part)
    wide = [one for one in look_into(running.objects(part)) if one.wide_in_fp8]
    in_float32 = [one for one in wide if re.search(r"device(Split|(Paired)?Block)", one.symbol)]
    assert len(in_float32) == {"fp8": 2 + 3 * 2 + 2 + 3, "blocks": 5 * 2 + 2 + 2 + 2}[part]
    assert [one.symbol for one in in_float32 if one.after_groups != {"BAR.ARV"}] == []


def test_wgrad_that_begins_beside_a_dgrad_ends_after_it_and_the_dgrad_lets_it(running: Running) -> None:
    pytest.importorskip("triton")
    for one in PARTS:
        compiled(running, one)
    found = [one for one in look_into(running.objects("others")) if one.tensor_core]
    beside = [one for one in found if "BesideWgradGemm" in one.symbol]
    assert beside and [one for one in beside if one.parts_wait_first != (False, False) or not one.waits_last] == []
    ahead = [one for one in found if one.lets_next_begin]
    assert ahead and ahead == [one for one in found if "DgradGemm" in one.symbol]
