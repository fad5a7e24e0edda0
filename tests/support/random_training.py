"""Random trainings of layers with grouped MLPs: recipes, micro-batches, checkpoints, hooks, frozen, new and computed
weights, delayed wgrads, evaluations and errors, by turns or the same for many steps. The same seed gives the same training,
with a session or without.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

from te_offload import OffloadSession
from tests.support.mlp import make_mlp

WIDTH, ROWS = 128, 16  # of a layer; tokens are so many times a small number
RECIPES: Mapping[str, Any] = {
    "bf16": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=2),
    "blocks": Float8BlockScaling(),
}
Results = dict[str, torch.Tensor]


class Layer(torch.nn.Module):
    """A norm, a grouped MLP, and maybe a dense expert beside it, which may be a region."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.experts = draw.choice([1, 3, 3, 5])
        linear: dict[str, Any] = {"bias": draw.random() < 0.2, "keep_quantized_weight": draw.random() < 0.7}
        self.scales_bias = linear["bias"] and draw.random() < 0.5
        self.into_main_grad = draw.random() < 0.2
        self.delays = draw.random() < 0.2
        keep = [name for name in ("fc1_input", "act_input", "fc2_input") if draw.random() < 0.2]
        self.mlp = make_mlp(
            experts=self.experts,
            hidden=WIDTH,
            ffn=WIDTH,
            activation=draw.choice(["srelu", "srelu", "tanh-srelu"]),
            keep=keep,
            dtype=torch.bfloat16,
            fc2={"scale_bias": self.scales_bias},
            accumulate_into_main_grad=self.into_main_grad,
            delay_wgrad_compute=self.delays,
            **linear,
        )
        if self.into_main_grad:
            for parameter in self.mlp.parameters():
                vars(parameter).update(main_grad=torch.zeros(parameter.shape), grad_added_to_main_grad=False)
        self.shared = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) if draw.random() < 0.4 else None
        self.is_region = draw.random() < 0.5
        self.session: OffloadSession | None = None

    def assign(self) -> None:
        """Have other parameters, of other numbers."""
        state = {name: tensor.detach() * 0.9 for name, tensor in self.mlp.named_parameters()}
        frozen = {name for name, parameter in self.mlp.named_parameters() if not parameter.requires_grad}
        self.mlp.load_state_dict(state, strict=False, assign=True)
        for name, parameter in self.mlp.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def backward_dw(self) -> None:
        """What the backwards so far left."""
        for op in (self.mlp[2], self.mlp[0]):
            while op.wgrad_store.context is not None and not op.wgrad_store.context.empty():
                op.backward_dw()

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (WIDTH,))
        y: torch.Tensor = self.mlp(h, sizes, scales, sizes, *[scales] * self.scales_bias)
        if self.shared is not None:
            session = self.session
            with session.region("shared") if session and self.is_region else contextlib.nullcontext():
                y = y + F.silu(self.shared(h))
        return x + y


def _by_checkpoint(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(run, *inputs, use_reentrant=False)
    return y


def _by_reentrant_checkpoint(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(run, *inputs, use_reentrant=True) if inputs[0].requires_grad else run(*inputs)
    return y


def _by_selective_checkpoint(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    def saves(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op is torch.ops.aten.silu.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, saves)
    y: torch.Tensor = checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts)
    return y


def _under_hooks(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        return run(*inputs)


def _with_computed_parameters(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    layer = inspect.signature(run).parameters["layer"].default
    if layer.into_main_grad or layer.delays:  # computed ones have no such attributes
        return run(*inputs)
    with torch.nn.utils.stateless._reparametrize_module(
        layer.mlp, {name: parameter * 0.9 for name, parameter in layer.mlp.named_parameters()}
    ):
        return run(*inputs)


def _with_an_inner_backward(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return run(*inputs)
    x = inputs[0].detach().requires_grad_()
    (grad,) = torch.autograd.grad(run(x, *inputs[1:]).float().sum(), x)
    return inputs[0] + 0.01 * grad


_WAYS: list[Callable[..., torch.Tensor]] = [
    *[lambda run, *inputs: run(*inputs)] * 4,
    *(_by_checkpoint, _by_reentrant_checkpoint, _by_selective_checkpoint, _under_hooks, _with_an_inner_backward),
    _with_computed_parameters,
]


class Batch(NamedTuple):
    """One micro-batch: its tokens, split sizes and way of each layer, what needs gradients, whether it has a backward."""

    seed: int
    tokens: int
    splits: list[list[int]]
    ways: list[Callable[..., torch.Tensor]]
    needs: tuple[bool, bool]
    has_backward: bool


class Step(NamedTuple):
    """One step: micro-batches, and the order of their backwards; ``None``: each right after its forward. ``finishes``:
    what waits is computed right after each backward, at the step's end or after it.
    """

    recipe: Any
    batches: list[Batch]
    order: list[int] | None
    evaluates: bool
    raises: bool
    finishes: str


class Training:
    """A model and its steps; ``raised``: of each whether it did. Results of a step are by name."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        torch.manual_seed(seed)
        self._each = [Layer(self._draw) for _ in range(self._draw.randint(1, 3))]
        self.layers = torch.nn.ModuleList(self._each)
        self._recipes = self._draw.choice([["bf16"], ["current"], ["delayed"], ["blocks"], list(RECIPES)])
        self._calm = self._draw.choice([0.0, 0.5, 0.9])
        self._steps = self._draw.choice([3, 6, 12])
        self._early = self._draw.random() < 0.7
        self._last: Step | None = None
        self.raised: list[bool] = []

    @property
    def activations(self) -> list[Any]:
        """Of each layer."""
        return [layer.mlp[1] for layer in self._each]

    def run(self, session: OffloadSession | None = None) -> list[Results]:
        """All steps."""
        for layer in self._each:
            layer.session = session
        found = []
        for _ in range(self._steps):
            step = self._next()
            with set_checkpoint_early_stop(self._early):
                found.append(self._run_step(step, session))
            self.raised.append(step.raises)
            if self._draw.random() < 0.7:
                self.layers.zero_grad()
            with torch.no_grad():
                for parameter in self.layers.parameters():
                    parameter.mul_(1.001)
        return found

    def _next(self) -> Step:
        draw = self._draw
        if self._last is not None and draw.random() < self._calm:
            return self._last._replace(raises=draw.random() < 0.02)
        if draw.random() < 0.3:
            op = draw.choice(self._each).mlp[draw.choice([0, 2])]
            op.requires_grad_(draw.random() < 0.5)
        layer = draw.choice(self._each)
        if draw.random() < 0.2 and not layer.into_main_grad:
            layer.assign()
        batches = [self._batch() for _ in range(draw.randint(1, 3))]
        order = draw.sample(range(len(batches)), len(batches)) if draw.random() < 0.5 else None
        recipe = RECIPES[draw.choice(self._recipes)]
        self._last = Step(
            recipe, batches, order, draw.random() < 0.2, draw.random() < 0.08, draw.choice(["soon", "late", "after"])
        )
        return self._last

    def _batch(self) -> Batch:
        draw = self._draw
        parts, splits = draw.randint(1, 6), []
        for layer in self._each:
            cuts = sorted(draw.randint(0, parts) for _ in range(layer.experts - 1))
            ends = zip([0, *cuts], [*cuts, parts], strict=True)
            splits.append([ROWS * (end - begin) for begin, end in ends])
        ways = [draw.choice(_WAYS) for _ in self._each]
        needs = draw.random() < 0.9, draw.random() < 0.9
        return Batch(draw.randrange(1 << 30), ROWS * parts, splits, ways, needs, draw.random() < 0.85)

    def _forward(self, batch: Batch, recipe: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        numbers = torch.Generator().manual_seed(batch.seed)
        x = torch.randn(batch.tokens, WIDTH, generator=numbers).bfloat16().requires_grad_(batch.needs[0])
        y, inputs = x, [x]
        for layer, split, way in zip(self._each, batch.splits, batch.ways, strict=True):
            scales = torch.rand(batch.tokens, generator=numbers).requires_grad_(batch.needs[1])
            inputs.append(scales)

            def run(
                y: torch.Tensor, scales: torch.Tensor, layer: Any = layer, split: list[int] = split
            ) -> torch.Tensor:
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    z: torch.Tensor = layer(y, torch.tensor(split), scales)
                return z

            y = way(run, y, scales)
        return y, inputs

    def _run_step(self, step: Step, session: OffloadSession | None) -> Results:
        forwards: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        found: Results = {}

        def backward(number: int) -> None:
            batch, (y, _) = step.batches[number], forwards[number]
            if batch.has_backward and y.requires_grad:
                (y.float().square().sum() * 10 ** (batch.seed % 3)).backward()
            if step.finishes == "soon":
                finish()

        def finish() -> None:
            for layer in self._each:
                layer.backward_dw()

        with contextlib.suppress(ZeroDivisionError), session.step() if session else contextlib.nullcontext():
            if step.evaluates:
                with torch.no_grad():
                    found["evaluation"] = self._forward(step.batches[0], step.recipe)[0]
            for number, batch in enumerate(step.batches):
                forwards.append(self._forward(batch, step.recipe))
                if step.order is None:
                    backward(number)
            for number in step.order or ():
                backward(number)
            if step.raises:
                raise ZeroDivisionError
            if step.finishes == "late":
                finish()
        finish()
        for number, (y, inputs) in enumerate(forwards):
            found[f"{number} output"] = y.detach()
            found |= {f"{number} input {place}": x.grad for place, x in enumerate(inputs) if x.grad is not None}
        for name, parameter in self.layers.named_parameters():
            main = vars(parameter).get("main_grad")
            grad = parameter.grad if main is None else main
            if grad is not None:
                found[name] = grad.clone()
        return found


def random_session(draw: random.Random, layers: torch.nn.ModuleList) -> OffloadSession:
    """A session with random arguments, for layers whose slots are at most some hundred KiB."""
    ways: dict[str, Any] = {"min_bytes": draw.choice([0, 0, 4096, "1MiB"]), "verify": draw.random() < 0.3}
    if draw.random() < 0.4:
        ways["max_in_flight"] = 1 << draw.choice([14, 16, 20])
    if draw.random() < 0.4:
        ways["fraction"] = draw.choice([0.2, 0.5, 0.8])
    elif draw.random() < 0.2:
        ways["policy"] = "planned"
    if draw.random() < 0.2:
        ways["host_limit"] = 1 << draw.randint(17, 22)
    if draw.random() < 0.2:
        ways["max_tokens"] = 8 * ROWS
    return OffloadSession(layers, **ways)
