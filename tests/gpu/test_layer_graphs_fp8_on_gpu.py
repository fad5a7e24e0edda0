"""Layers as graphs of their own in FP8, on a Hopper GPU: bits, offloading in between, and weights that are made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe

from te_offload import Fate, OffloadSession
from te_offload.fused import fusions_in
from te_offload.graphs import capture_layers
from tests.gpu.test_fp8_on_gpu import on_hopper as on_hopper
from tests.support.layer_stack import LAYERS, Model, batches, captured, train, weights
from tests.support.mlp import assert_same_bits

pytestmark = pytest.mark.gpu
RECIPES: dict[str, Any] = {"current": te_recipe.Float8CurrentScaling(), "by blocks": te_recipe.Float8BlockScaling()}
EVERY = pytest.mark.parametrize("recipe", RECIPES)


def model_of(*, keep: bool) -> Model:
    model = Model()
    for layer in model.layers:
        for place in (0, 2):
            layer.experts[place].keep_quantized_weight = keep  # type: ignore[index,union-attr]
    return model


@EVERY
@pytest.mark.parametrize("keep", [True, False], ids=["weights kept", "weights made again"])
@pytest.mark.parametrize("offloads", [False, True], ids=["no offload", "offload"])
def test_training_in_fp8_with_graphs_of_layers_gives_the_bits_of_eager_training(
    recipe: str, keep: bool, offloads: bool
) -> None:
    eager, model = model_of(keep=True), model_of(keep=keep)
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0) if offloads else None
    with capture_layers(model.layers, session=session, warmup=2) as graphs:
        for number, batch in enumerate(batches(20)):
            with te.autocast(enabled=True, recipe=RECIPES[recipe]):
                expected, found = train(eager, batch), train(model, batch, session)
            assert torch.equal(expected, found), number
        captured(graphs)
        assert_same_bits(weights(eager), weights(model))
        assert [scope.replays for scope in graphs.scopes.values()] == [18] * LAYERS, graphs.report()
        assert all(fusion.fused for layer in model.layers for fusion in fusions_in(layer))
        if session is not None:
            rows = {row.slot.value: row for row in session.records[-1].slots}
            assert rows["act_input"].fate is Fate.OFFLOADED and session.records[-1].bytes_back > 0
    if session is not None:
        session.close()


def test_a_step_without_quantization_and_one_under_delayed_scaling_run_eagerly_between_replays() -> None:
    eager, model = model_of(keep=True), model_of(keep=True)
    every = [RECIPES["current"]] * 5 + [None, te_recipe.DelayedScaling()] + [RECIPES["current"]] * 2
    with capture_layers(model.layers, warmup=2, on_mismatch="eager") as graphs:
        for recipe, batch in zip(every, batches(len(every)), strict=True):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                assert torch.equal(train(eager, batch), train(model, batch))
        assert_same_bits(weights(eager), weights(model))
        for scope in graphs.scopes.values():
            assert scope.replays == 5 and sum(scope.eager.values()) == 2, graphs.report()
