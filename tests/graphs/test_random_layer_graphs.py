"""Random training with layers as graphs, beside the same layers without: outputs, gradients, and what is held of them."""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from te_offload.graphs import LayerGraphs, capture_layers
from tests.support.toy_layer import Machine, Toy, install

WIDTH, ROWS, OTHER_ROWS = 256, 512, 100
KINDS = ("", "", "saves two", "slot", "slot with the input", "returns what it saved")
Held = tuple[torch.Tensor, torch.Tensor]  # a tensor of the graphs', and what its numbers are to be


class Training:
    """Some layers twice, eager ones and ones with graphs, and steps of both.

    Args:
        seed: of all that is random. machine: which captures.

    Attributes:
        session: which offloads the latter, if any does. graphs: theirs. held: what a user keeps.
    """

    def __init__(self, seed: int, machine: Machine) -> None:
        draw = self.draw = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        kinds = [draw.choice(KINDS) for _ in range(draw.randint(1, 4))]
        self.eager, self.stack = (torch.nn.ModuleList(Toy(WIDTH, machine, kind) for kind in kinds) for _ in range(2))
        self.adds = [draw.random() < 0.5 for _ in kinds]
        self.session: OffloadSession | None = None
        self.graphs: LayerGraphs | None = None
        self.held: list[Held] = []
        self._rows = [ROWS] * 4 + [OTHER_ROWS] * (draw.random() < 0.4)

    def enter(self, stack: contextlib.ExitStack) -> None:
        """Capture the layers, in a session or not."""
        draw = self.draw
        if draw.random() < 0.6:
            options: dict[str, Any] = {"min_bytes": draw.choice([0, 0, 400_000]), "verify": draw.random() < 0.2}
            if draw.random() < 0.4:
                options["max_in_flight"] = draw.choice([0, 1 << 20])
            self.session = stack.enter_context(OffloadSession(self.stack, **options))
        ways: dict[str, Any] = {"warmup": draw.randint(1, 3), "virtual": draw.random() < 0.85}
        ways["on_mismatch"] = draw.choice(["eager", "recapture"])
        ways["delay_commits"] = self.session is not None and draw.random() < 0.4
        self.graphs = stack.enter_context(capture_layers(self.stack, session=self.session, **ways))

    def step(self) -> None:
        """Microbatches, whose backwards come in any order or not at all, and an optimizer's step."""
        draw, weights = self.draw, self._weights()
        anew = draw.random() < 0.7
        if not anew:  # gradients that are held are written to
            grads = [id(weight.grad) for _, weight in weights]
            self.held = [pair for pair in self.held if id(pair[0]) not in grads]
        for both in weights:
            for weight in both:
                if anew:
                    weight.grad = None
                elif weight.grad is not None:
                    weight.grad.zero_()
        if draw.random() < 0.1:
            with torch.no_grad():
                x = torch.randn(ROWS, WIDTH, generator=self.numbers)
                assert torch.equal(self._run(self.eager, x), self._run(self.stack, x))
        if draw.random() < 0.07:
            for weight in draw.choice(weights):
                weight.requires_grad_(not weight.requires_grad)
        with self.session.step() if self.session is not None else contextlib.nullcontext():
            self._microbatches()
        for one, other in weights:
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None and other.grad is not None:
                assert torch.equal(one.grad, other.grad)
                if draw.random() < 0.1:
                    self.held.append((other.grad, one.grad.clone()))
        self.check_held()
        with torch.no_grad():
            for weight in [weight for both in weights for weight in both]:
                if weight.grad is not None:
                    weight.sub_(weight.grad.sign(), alpha=1e-2)
        self.held = [pair for pair in self.held if draw.random() < 0.4]
        if draw.random() < 0.15:
            assert self.graphs is not None
            self.graphs.settle()
            gc.collect()

    def check_held(self) -> None:
        """What is held has the numbers that it had."""
        assert all(torch.equal(found, expected) for found, expected in self.held)

    def _weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.eager.parameters(), self.stack.parameters(), strict=True))

    def _run(self, layers: Any, x: torch.Tensor) -> torch.Tensor:
        for adds, layer in zip(self.adds, layers, strict=True):
            y = layer(x)
            x = x + y if adds else y
        return x

    def _microbatches(self) -> None:
        draw, pending = self.draw, list[tuple[torch.Tensor, ...]]()
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            x = torch.randn(draw.choice(self._rows), WIDTH, generator=self.numbers)
            needs = draw.random() < 0.6
            inputs = [x.clone().requires_grad_(needs) for _ in range(2)]
            outputs = [self._run(layers, x) for layers, x in zip((self.eager, self.stack), inputs, strict=True)]
            assert torch.equal(*outputs)
            if draw.random() < 0.2:
                self.held.append((draw.choice([outputs[1], outputs[1].detach()]), outputs[0].detach().clone()))
            if outputs[0].requires_grad:
                pending.append((*inputs, *outputs))
            outputs.clear()
            while pending and draw.random() < 0.6:
                self._backward(*pending.pop(draw.randrange(len(pending))))
        while pending:
            some = pending.pop(draw.randrange(len(pending)))
            if draw.random() < 0.9:
                self._backward(*some)

    def _backward(self, x: torch.Tensor, other_x: torch.Tensor, y: torch.Tensor, other_y: torch.Tensor) -> None:
        for output in (y, other_y):
            output.square().sum().backward()
        if x.grad is not None:
            assert other_x.grad is not None and torch.equal(x.grad, other_x.grad)
            if self.draw.random() < 0.3:
                self.held.append((other_x.grad, x.grad.clone()))


def _train(seed: int) -> tuple[int, int]:
    """Replays, and bytes that left."""
    with pytest.MonkeyPatch.context() as patch:
        training = Training(seed, install(patch))
        with contextlib.ExitStack() as stack:
            training.enter(stack)
            for _ in range(training.draw.randint(4, 12)):
                training.step()
            assert training.graphs is not None
            replays = sum(scope.replays for scope in training.graphs.scopes.values())
            moved = sum(record.bytes_out for record in training.session.records) if training.session else 0
        training.check_held()
    return replays, moved


def test_random_training_has_the_bits_of_eager_layers_and_what_is_held_keeps_its_numbers() -> None:
    replays, moved = 0, 0
    for seed in range(16):
        try:
            found = _train(seed)
        except BaseException as error:
            raise AssertionError(f"random training {seed}") from error
        replays, moved = replays + found[0], moved + found[1]
    assert replays > 100 and moved > 10 << 20
