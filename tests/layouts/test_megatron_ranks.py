"""Megatron-core's expert and pipeline parallelism, and its distributed checkpoints, with our experts and a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_model import groups, make_model, name_in_ours
from tests.support.megatron_optimizer import same_on_all, whole_of
from tests.support.megatron_ranks import (
    KINDS,
    SHARDED,
    Trained,
    gradients_of_the_whole,
    load,
    losses_of_the_whole,
    model_of_zeros,
    save,
)
from tests.support.megatron_steps import config_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed here")
pytest.importorskip("psutil", reason="psutil is not installed here, which Megatron-core's checkpoints need")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("ranks")
    with groups(folder / "meeting", "cpu"):
        yield Trained("cpu", folder)


def assert_same_weights(theirs: Any, ours: Any) -> None:
    weights = dict(ours.named_parameters())
    assert all(torch.equal(each, weights[name_in_ours(name)]) for name, each in theirs.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_what_one_does(trained: Trained, kind: str) -> None:
    assert losses_of_the_whole(kind, [rank["losses"] for rank in trained.of_two[kind]]) == pytest.approx(
        trained.losses, rel=1e-5
    )
    whole = gradients_of_the_whole(kind, trained.of_two[kind])
    assert whole.keys() == trained.gradients.keys()
    for name, gradient in trained.gradients.items():
        torch.testing.assert_close(whole[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_in_each_rank_changes_no_bit(trained: Trained, kind: str) -> None:
    for rank in trained.of_two[kind]:
        assert rank["repeats"], "a step without offloading has other bits in its second run"
        assert rank["same"] == [True] * 3 and all(out == back > 0 for out, back in rank["moved"])


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_the_distributed_optimizer_are_those_of_one_rank(trained: Trained, kind: str) -> None:
    ranks = trained.optimized_on_two(kind)
    trained.assert_losses_of_one(kind, ranks, rel=1e-4)
    assert same_on_all(ranks)
    weights = whole_of(ranks)
    assert weights.keys() == trained.optimized.weights.keys()
    for name, weight in trained.optimized.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_of_gradients_counts_each_experts_once(trained: Trained, kind: str) -> None:
    trained.assert_norms_of_one(trained.optimized_on_two(kind), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_beside_the_distributed_optimizer_changes_no_bit(trained: Trained, kind: str) -> None:
    trained.assert_same_in_a_session(kind)


def test_steps_that_megatrons_fsdp_shards_are_those_of_one_rank(trained: Trained) -> None:
    ranks = trained.optimized_on_two("data parallel", "sharded")
    trained.assert_losses_of_one("data parallel", ranks, rel=1e-4)
    trained.assert_norms_of_one(ranks, rel=1e-4)


@pytest.mark.parametrize("kind", SHARDED)
def test_a_session_beside_megatrons_fsdp_changes_no_bit(trained: Trained, kind: str) -> None:
    trained.assert_same_in_a_session(kind, "sharded")


@pytest.mark.parametrize("of_theirs", [{}, {"moe_grouped_gemm": False}], ids=["our experts", "Megatron-core's"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_reads_the_checkpoint_of_two(trained: Trained, kind: str, of_theirs: dict[str, Any]) -> None:
    model = model_of_zeros("cpu", ours=not of_theirs, **of_theirs)
    load([model], trained.folder / kind)
    assert_same_weights(model, trained.model)


def test_our_experts_read_a_checkpoint_of_megatron_cores(trained: Trained, tmp_path: Path) -> None:
    theirs = make_model("cpu", config_of("cpu", moe_grouped_gemm=False), ours=False)
    save([theirs], tmp_path / "theirs")
    ours = model_of_zeros("cpu")
    load([ours], tmp_path / "theirs")
    assert_same_weights(theirs, ours)
