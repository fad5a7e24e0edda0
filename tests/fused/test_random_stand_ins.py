"""Random lives of a grouped MLP: whatever happens to its parameters between steps, gradients are those of a twin whose
parameters pass autograd themselves.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload.fused import hopper
from te_offload.fused.stand_ins import StandIns
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp

SPLITS = (3, 0, 4, 1)
LENGTH = 24


@pytest.fixture(autouse=True)
def in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")


@contextlib.contextmanager
def parameters_themselves(yes: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if yes:
            patch.setattr(StandIns, "of", lambda *_, **__: None)
        yield


@contextlib.contextmanager
def parameters_are_swapped() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class Life:
    """A module to which things happen. Each act returns what can be compared."""

    def __init__(self, seed: int, *, bias: bool) -> None:
        torch.manual_seed(seed)
        self.module: te.ops.Sequential = make_mlp(experts=len(SPLITS), bias=bias)
        self._steps = 0

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._steps += 1
        dtype = next(self.module.parameters()).dtype
        x, sizes, scales = make_inputs(SPLITS, dtype=dtype, seed=self._steps)
        output: torch.Tensor = self.module(x, sizes, scales, sizes)
        return output, x, scales

    def _found(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return gradients(self.module, *inputs)

    def step(self) -> dict[str, torch.Tensor]:
        """Gradients are added to what is there."""
        output, x, scales = self._forward()
        output.square().sum().backward()
        return self._found(x, scales) | {"output": output.detach()}

    def zero(self) -> dict[str, torch.Tensor]:
        self.module.zero_grad()
        return {}

    def two_forwards_first(self) -> dict[str, torch.Tensor]:
        one, other = self._forward(), self._forward()
        one[0].square().sum().backward()
        other[0].sum().backward()
        return self._found(*one[1:], *other[1:])

    def one_graph(self) -> dict[str, torch.Tensor]:
        one, other = self._forward(), self._forward()
        (one[0] * other[0]).sum().backward()
        return self._found(*one[1:], *other[1:])

    def abandoned(self) -> dict[str, torch.Tensor]:
        return {"output": self._forward()[0].detach()}

    def of_some(self) -> dict[str, torch.Tensor]:
        output, x, _ = self._forward()
        wanted = [x, *[weight for weight in self.module.parameters() if weight.requires_grad][::3]]
        found = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
        return {f"grad {number}": grad for number, grad in enumerate(found) if grad is not None}

    def evaluated(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"output": self._forward()[0]}

    def handed_over(self) -> dict[str, torch.Tensor]:
        if next(self.module.parameters()).dtype is torch.float64:
            return {}  # which autocast leaves alone
        with torch.autocast("cpu", torch.bfloat16):
            return self.step()

    def frozen(self) -> dict[str, torch.Tensor]:
        linear = self.module[0]
        linear.requires_grad_(not next(linear.parameters()).requires_grad)
        return {}

    def of_another_dtype(self) -> dict[str, torch.Tensor]:
        self.module.zero_grad()
        self.module.to(torch.float64 if next(self.module.parameters()).dtype is torch.float32 else torch.float32)
        return {}

    def swapped_in(self) -> dict[str, torch.Tensor]:
        state = {
            name: each + 0.125 for name, each in self.module.state_dict().items() if isinstance(each, torch.Tensor)
        }
        with parameters_are_swapped():
            self.module.load_state_dict(state, strict=False)
        return {}

    def converted_by_swaps(self) -> dict[str, torch.Tensor]:
        with parameters_are_swapped():
            return self.of_another_dtype()

    def rebound(self) -> dict[str, torch.Tensor]:
        for weight in self.module.parameters():
            weight.data = weight.data.clone()
        return {}

    def updated(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for weight in self.module.parameters():
                if weight.grad is not None:
                    weight -= 0.01 * weight.grad
        return {}

    def copied(self) -> dict[str, torch.Tensor]:
        self.module = copy.deepcopy(self.module)
        return {}

    def in_another_pipeline(self) -> dict[str, torch.Tensor]:
        self.module = te.ops.Sequential(*self.module)
        return {}


ACTS: list[Callable[[Life], dict[str, torch.Tensor]]] = [
    *[Life.step] * 6,
    *[Life.zero] * 2,
    Life.two_forwards_first,
    Life.one_graph,
    Life.abandoned,
    Life.of_some,
    Life.evaluated,
    Life.handed_over,
    Life.frozen,
    Life.of_another_dtype,
    Life.swapped_in,
    Life.converted_by_swaps,
    Life.rebound,
    Life.updated,
    Life.copied,
    Life.in_another_pipeline,
]


@pytest.mark.parametrize("seed", range(24))
def test_gradients_after_a_random_life_are_those_of_parameters_that_pass_themselves(seed: int) -> None:
    choose = random.Random(seed)
    acts = [Life.step, *[choose.choice(ACTS) for _ in range(LENGTH)], Life.step]
    lives = [Life(seed, bias=seed % 3 == 2) for _ in range(2)]
    for number, act in enumerate(acts):
        found = []
        for life, themselves in zip(lives, (False, True), strict=True):
            with parameters_themselves(themselves):
                found.append(act(life))
        names = ", ".join(each.__name__ for each in acts[: number + 1])
        assert found[0].keys() == found[1].keys(), names
        assert_same_bits(found[1], found[0])
