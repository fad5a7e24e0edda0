"""Random layers as CUDA graphs, and random steps as one: the bits of eager steps, and no memory left behind."""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import pytest
import torch

from te_offload.graphs import capture, capture_layers
from tests.support.random_compiled import run_compiled
from tests.support.random_layers import Twin, random_session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # of Dynamo's
]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _scratch(graphs: Any) -> int:
    bank = graphs._ground.bank
    return int(bank.used) if graphs.resident else sum(piece.length for piece in bank._scratch)


def _raise_unless_written(error: RuntimeError) -> None:
    if "modified by an inplace operation" not in str(error):  # to a saved tensor
        raise error


def run_layers(seed: int) -> int:
    """Steps of a program whose layers are graphs; how often one was replayed."""
    draw = random.Random(f"settings {seed}")
    eager, twin = Twin(seed, _device()), Twin(seed, _device())
    session = random_session(draw, twin.layers)
    graphs = capture_layers(
        twin.layers,
        session=session,
        warmup=draw.randint(1, 3),
        on_mismatch=draw.choice(["recapture", "recapture", "eager"]),
        delay_commits=session is not None and draw.random() < 0.4,
        virtual=draw.random() < 0.85,
    )
    with graphs, session or contextlib.nullcontext():
        for number in range(draw.choice([5, 6, 8, 12])):
            try:
                eager.step(number)
            except RuntimeError as error:
                _raise_unless_written(error)
                break
            with session.step() if session is not None else contextlib.nullcontext():
                twin.step(number)
            difference = eager.difference(twin)
            if difference is not None and any(scope.copied for scope in graphs.scopes.values()):
                break  # as the report says: gradients came in with other strides
            assert difference is None, f"step {number}: {difference}"
        twin.held.clear()
        twin.layers.zero_grad()
        gc.collect()
        graphs.settle()
        assert graphs.used_bytes == _scratch(graphs)
        replays = sum(scope.replays for scope in graphs.scopes.values())
    gc.collect()
    graphs.settle()
    graphs._ground.bank.trim()
    assert graphs.resident or graphs.held_bytes == 0
    return replays


def run_step(seed: int) -> bool:
    """Replays of a step of a program as one graph; whether it could be captured."""
    draw = random.Random(f"settings {seed}")
    eager, twin = Twin(seed, _device()), Twin(seed, _device())
    session = random_session(draw, twin.layers, verify=False)

    def step_of(one: Twin) -> Any:
        def step(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
            one.layers.zero_grad(set_to_none=False)
            found, loss = [], torch.zeros((), device=one.device)
            choices = random.Random(seed)
            for _ in range(choices.randint(1, 3)):
                x = given["x"]
                for layer in one.parts():
                    y, more = one._call(choices, layer, x, given, checkpoints=choices.random() < 0.1)
                    x = one._between(choices, y, x)
                    loss = loss + sum([each.square() for each in more])
                loss = loss + x.square().mean()
                found.append(x.detach() * 1)
                if choices.random() < 0.5 and loss.requires_grad:
                    loss.backward()
                    loss = loss.detach()
            if loss.requires_grad:
                loss.backward()
            one.held.clear()
            one.observed.clear()
            return loss.detach() * 1, *found

        return step

    numbers = random.Random(seed)
    judge, inputs = step_of(eager), [eager.inputs(numbers) for _ in range(7)]
    graph = capture(
        step_of(twin),
        (inputs[0],),
        session=session,
        modules=[twin.layers],
        on_mismatch="recapture",
        clone_outputs=draw.random() < 0.5,
    )
    with graph:
        for number, given in enumerate(inputs):
            try:
                expected = judge(given)
            except RuntimeError as error:
                _raise_unless_written(error)
                break
            found = graph(given)
            for place, (one, other) in enumerate(zip(expected, found, strict=True)):
                assert torch.equal(one.nan_to_num(), (other * 1).nan_to_num()), f"step {number}: output {place}"
            pairs = zip(eager.layers.named_parameters(), twin.layers.parameters(), strict=True)
            for (name, mine), theirs in pairs:
                assert (mine.grad is None) == (theirs.grad is None), name
                if mine.grad is not None and theirs.grad is not None:
                    assert torch.equal(mine.grad.nan_to_num(), theirs.grad.nan_to_num()), f"step {number}: {name}"
        captured = graph.reason is None
    if session is not None:
        session.close()
    return captured


@pytest.mark.parametrize("part", range(4))
def test_random_layers_as_graphs_have_the_bits_of_eager_steps(part: int) -> None:
    replays = 0
    for seed in range(20_000 + 15 * part, 20_015 + 15 * part):
        try:
            replays += run_layers(seed)
        except BaseException as error:
            raise AssertionError(f"random layers {seed}") from error
    assert replays > 50


def test_random_layers_through_torch_compile_have_the_bits_of_aot_eager() -> None:
    replays = 0
    for seed in range(40_000, 40_012):
        try:
            replays += run_compiled(seed, _device())
        except BaseException as error:
            raise AssertionError(f"random compiled layers {seed}") from error
    assert replays > 50


@pytest.mark.parametrize("part", range(2))
def test_random_steps_as_one_graph_have_the_bits_of_eager_steps(part: int) -> None:
    captured = 0
    for seed in range(30_000 + 20 * part, 30_020 + 20 * part):
        try:
            captured += run_step(seed)
        except BaseException as error:
            raise AssertionError(f"random step {seed}") from error
    assert captured >= 10
