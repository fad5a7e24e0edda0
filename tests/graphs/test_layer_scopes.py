"""What a layer's scope does around its graphs, without a GPU: whose forward it was, captures anew, interrupts, flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformer_engine.common import recipe as te_recipe

from te_offload.graphs import CaptureState, LayerGraphs, capture_layers
from te_offload.graphs.layers.pair import GraphPair
from te_offload.ops import te_adapter
from tests.support.toy_layer import FakeGround, Machine, Toy, install

WIDTH, ROWS = 256, 512


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def ground_of(graphs: LayerGraphs) -> FakeGround:
    ground = graphs._ground
    assert isinstance(ground, FakeGround)
    return ground


def run(layer: Any, rows: int = ROWS, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the gradient of the weight."""
    layer.zero_grad()
    found = layer(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)))
    (found[0] if isinstance(found, tuple) else found).square().sum().backward()
    weight: Any = next(layer.parameters())
    return (found[0] if isinstance(found, tuple) else found).detach().clone(), weight.grad.clone()


def test_close_leaves_the_forward_that_someone_else_had_put_there(machine: Machine) -> None:
    plain, wrapped = Toy(WIDTH, machine), Toy(WIDTH, machine)
    own = wrapped.forward
    wrapped.forward = lambda x: own(x) * 2  # type: ignore[method-assign]
    mine = wrapped.__dict__["forward"]
    graphs = capture_layers(torch.nn.ModuleList([plain, wrapped]), warmup=1)
    assert wrapped.__dict__["forward"] is not mine
    graphs.close()
    assert wrapped.__dict__["forward"] is mine and "forward" not in plain.__dict__
    assert {scope.state for scope in graphs.scopes.values()} == {CaptureState.CLOSED}


def test_capture_anew_gives_the_memory_of_the_old_one_back(machine: Machine) -> None:
    layer = Toy(WIDTH, machine)
    with capture_layers(layer, warmup=1, on_mismatch="recapture") as graphs:
        (scope,) = graphs.scopes.values()
        segments = []
        for number in range(9):
            run(layer, rows=ROWS if number // 3 % 2 == 0 else ROWS // 2)
            if scope.state is CaptureState.CAPTURED:
                segments.append(len(ground_of(graphs).space._segments))
        assert len(scope.recaptures) == 2 and len(set(segments)) == 1


def test_output_without_a_gradient_has_none_when_it_is_replayed(machine: Machine) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.toy = Toy(WIDTH, machine)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = self.toy(x)
            return found, found.detach()

    eager, layer = Two(), Two()
    with capture_layers(layer, warmup=1) as graphs:
        for seed in range(4):
            assert all(torch.equal(a, b) for a, b in zip(run(eager, seed=seed), run(layer, seed=seed), strict=True))
        (scope,) = graphs.scopes.values()
        assert scope.replays == 3
        one, other = layer(torch.ones(ROWS, WIDTH))
        assert scope.replays == 4 and one.requires_grad and not other.requires_grad


def test_interrupted_capture_leaves_no_memory_and_is_made_at_the_next_call(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, layer = Toy(WIDTH, machine), Toy(WIDTH, machine)
    with capture_layers(layer, warmup=1) as graphs:
        (scope,) = graphs.scopes.values()
        run(layer)
        record = GraphPair.record

        def interrupted(self: GraphPair, times: int = 1) -> None:
            record(self, times)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(GraphPair, "record", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(layer)
        assert scope.state is CaptureState.WARMING_UP and not ground_of(graphs).space._segments
        for seed in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(eager, seed=seed), run(layer, seed=seed), strict=True))
        assert scope.replays == 3


@pytest.mark.parametrize("times", [1, 2, 3])
def test_capture_that_an_older_autograd_graph_forbids_is_tried_again_after_another_warm_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """By the next step its loss is gone, as a rule; after three tries the layer stays eager, and the report says why."""
    record = GraphPair.record
    tries: list[None] = []

    def forbidden(self: GraphPair, how_often: int = 1) -> None:
        record(self, how_often)
        tries.append(None)
        if len(tries) <= times:
            raise RuntimeError(
                "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
            )

    monkeypatch.setattr(GraphPair, "record", forbidden)
    eager, layer = Toy(WIDTH, machine), Toy(WIDTH, machine)
    with capture_layers(layer, warmup=2) as graphs:
        (scope,) = graphs.scopes.values()
        for seed in range(12):
            assert all(torch.equal(a, b) for a, b in zip(run(eager, seed=seed), run(layer, seed=seed), strict=True))
        # each try comes after two runs to warm up, and a call whose capture is to be tried again runs eagerly
        assert len(tries) == min(times + 1, 3) and sum(scope.eager.values()) == min(times, 2)
        assert scope.replays == (0 if times == 3 else 12 - 3 * times - 2)
        assert ("tried again" in graphs.report()) and ("loss, say, is kept" in graphs.report()) == (times == 3)
        assert scope.state is (CaptureState.EAGER if times == 3 else CaptureState.CAPTURED)


def test_capture_that_was_made_is_tried_as_often_again_when_it_is_made_anew(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, forbidden = GraphPair.record, iter([True, True, False, True, True, False])

    def sometimes(self: GraphPair, how_often: int = 1) -> None:
        record(self, how_often)
        if next(forbidden):
            raise RuntimeError(
                "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
            )

    monkeypatch.setattr(GraphPair, "record", sometimes)
    layer = Toy(WIDTH, machine)
    with capture_layers(layer, warmup=1, on_mismatch="recapture") as graphs:
        (scope,) = graphs.scopes.values()
        for rows in (ROWS, ROWS + 1):
            for _ in range(6):
                layer(torch.ones(rows, WIDTH)).sum().backward()
            assert scope.state is CaptureState.CAPTURED and scope.reason is None
        assert len(scope.recaptures) == 1 and sum(scope.eager.values()) == 4 and next(forbidden, None) is None


def test_layer_runs_eagerly_where_there_is_no_memory_to_capture_it_once_more(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.short = 1
    eager, layer = Toy(WIDTH, machine), Toy(WIDTH, machine)
    with capture_layers(layer, warmup=1) as graphs:
        (scope,) = graphs.scopes.values()
        made: list[bool] = []

        def make(*args: Any) -> GraphPair:
            if made:
                raise torch.OutOfMemoryError("injected: no memory for its inputs")
            made.append(True)
            return GraphPair(*args)

        monkeypatch.setattr("te_offload.graphs.layers.scope.GraphPair", make)
        for seed in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(eager, seed=seed), run(layer, seed=seed), strict=True))
        assert scope.state is CaptureState.EAGER and "no memory for its inputs" in str(scope.reason)
        graphs.settle()
        assert not ground_of(graphs).space._segments and graphs.used_bytes == 0


def test_another_dtype_of_autocast_is_another_call(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Toy(WIDTH, machine)
    with capture_layers(layer, warmup=1, on_mismatch="eager") as graphs:
        (scope,) = graphs.scopes.values()
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, None):
            monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind, dtype=dtype: dtype is not None)
            monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind, dtype=dtype: dtype)
            run(layer)
        assert scope.replays == 1
        assert [text.split("need gradients, were ")[1][:16] for text in scope.eager] == ["(torch.bfloat16,"] * 2


RECIPES: dict[str, Any] = {
    "current": te_recipe.Float8CurrentScaling(),
    "blocks": te_recipe.Float8BlockScaling(),
    "mxfp8": te_recipe.MXFP8BlockScaling(),
    "nvfp4, no random": te_recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4": te_recipe.NVFP4BlockScaling(),
    "delayed": te_recipe.DelayedScaling(),
    "one's own": te_recipe.CustomRecipe(qfactory=lambda role: None),
}
HAS_STATE = {"nvfp4": "at random", "delayed": "its scales change", "one's own": "may have state"}


def under(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> None:
    """From now on calls stand inside ``te.autocast`` with a recipe; ``None``: outside."""
    monkeypatch.setattr(te_adapter, "quantization_enabled", lambda: recipe is not None)
    monkeypatch.setattr(te_adapter, "active_recipe", lambda: recipe)


def test_calls_that_quantize_run_eagerly_if_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Toy(WIDTH, machine)
    under(monkeypatch, RECIPES["current"])
    with capture_layers(layer, warmup=1, quantized=False) as graphs:
        (scope,) = graphs.scopes.values()
        for _ in range(3):
            run(layer)
        assert scope.replays == 0
        assert dict(scope.eager) == {"quantization is on, and quantized=False was asked for": 2}


@pytest.mark.parametrize("name", RECIPES)
def test_calls_that_quantize_without_state_are_replayed_and_others_say_why_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    layer = Toy(WIDTH, machine)
    under(monkeypatch, RECIPES[name])
    with capture_layers(layer, warmup=1) as graphs:
        (scope,) = graphs.scopes.values()
        for _ in range(3):
            run(layer)
        assert scope.replays == (0 if name in HAS_STATE else 2)
        reasons = list(scope.eager)
        assert len(reasons) == (1 if name in HAS_STATE else 0)
        assert all(HAS_STATE[name] in reason for reason in reasons)


def test_another_recipe_or_none_is_another_call(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Toy(WIDTH, machine)
    changed = te_recipe.Float8CurrentScaling()
    with capture_layers(layer, warmup=1, on_mismatch="eager") as graphs:
        (scope,) = graphs.scopes.values()
        for recipe in (changed, changed, te_recipe.Float8CurrentScaling(), RECIPES["blocks"], None):
            under(monkeypatch, recipe)
            run(layer)
        assert scope.replays == 2  # the third one's recipe says the same
        changed.fp8_quant_fwd_inp = te_recipe.QParams(power_2_scale=True)
        under(monkeypatch, changed)
        run(layer)
        assert scope.replays == 2 and sum(scope.eager.values()) == 3
        assert all("the recipe, and which inputs" in reason for reason in scope.eager)
