"""Random grouped MLPs, as a model may hold them, and one step of each beside the same step in FP64.

In: a random number generator and a device. Out: a `Window`, which is a frozen value; from it a module, its inputs, and the
results of a step by name. Keeps true: all that is drawn is in the window, and its text says it, so a failure can be built
by hand. Does not: choose what a path cannot take (tests of refusals do).

Widths are multiples of 8 of any size, tokens any number, experts one to hundreds, some without tokens; an op's parameters
may be frozen, its weights may have a main_grad; the gradient that comes in may have any strides, x may begin anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformer_engine.pytorch as te

from tests.support.mlp import is_glu, make_mlp
from tests.support.reference import activate, grouped_linear

SQUARED = ("srelu", "tanh-srelu")
GATED = ("swiglu", "swiglu-interleaved", "swiglu-pairs", "clamped-qgeglu", "situ-glu")
MOST_EXPERTS = (1, 2, 3, 5, 8, 17, 32, 64, 129, 300)
MEAN_TOKENS = (1, 7, 40, 150, 199, 200, 300, 383, 384, 500, 767, 768, 1300, 2047, 2048, 3000)  # where tiles change


@dataclass(frozen=True)
class Window:
    """What was drawn.

    Attributes:
        hidden, ffn: H and F. splits: tokens of each expert. beyond: rows of none, after those.
        biases: of FC1; of FC2; the latter times the router scales. frozen: how the names of frozen parameters begin.
        needs_dx: whether a gradient of x is asked for. main_grad: weight gradients are added to one in float32.
        x_place, dy_place: how they lie, of `PLACES`. seed: of the numbers; one in three keeps no quantized weights.
    """

    dtype: torch.dtype
    activation: str
    hidden: int
    ffn: int
    splits: tuple[int, ...]
    beyond: int
    biases: tuple[bool, bool, bool]
    scales_dtype: torch.dtype
    sizes_dtype: torch.dtype
    frozen: tuple[str, ...]
    needs_dx: bool
    main_grad: bool
    x_place: str
    dy_place: str
    seed: int

    @property
    def tokens(self) -> int:
        """Rows of experts."""
        return sum(self.splits)


def _odd(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel() + 1, device=tensor.device, dtype=tensor.dtype)
    return flat[1:].copy_(tensor.flatten()).view(tensor.shape)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]


PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "at an odd address": _odd,
    "turned": _turned,
    "part of wider rows": _part,
}


def draw_window(
    draw: random.Random, dtypes: Sequence[torch.dtype], most_work: float, most_tokens: int, *, may_leave_rows: bool
) -> Window:
    """A window of any kind.

    Args:
        draw: chooses. dtypes: to choose from. most_work: of the product of its tokens, H and F, of which one is taken for
            200 at least (tensors of its tokens need memory, too).
        most_tokens: of all experts, but for a few. may_leave_rows: there may be rows of no expert.
    """
    activation = draw.choice(SQUARED + GATED)
    experts, mean = draw.choice(MOST_EXPERTS), draw.choice(MEAN_TOKENS)
    tokens = min(experts * mean, most_tokens) + draw.randrange(-8, 9) * (draw.random() < 0.5)
    splits = _splits(draw, experts, max(tokens, 0))
    step = 32 if activation == "swiglu-interleaved" else 8
    hidden, ffn = _width(draw, 8), _width(draw, step)
    while max(tokens, 1) * max(hidden * ffn, 200 * hidden, 200 * ffn) > most_work and max(hidden, ffn) > 64:
        if hidden > ffn:
            hidden = max(8, hidden // 16 * 8)
        else:
            ffn = max(step, ffn // (2 * step) * step)
    bias2 = draw.random() < 0.4
    biases = draw.random() < 0.4, bias2, bias2 and draw.random() < 0.5
    frozen: tuple[str, ...] = ()
    if draw.random() < 0.3:  # all of an op, or none: Transformer Engine asks for that
        frozen = tuple(place for place in ("0.", "2.") if draw.random() < 0.7)
    return Window(
        dtype=draw.choice(dtypes),
        activation=activation,
        hidden=hidden,
        ffn=ffn,
        splits=splits,
        beyond=draw.randrange(1, 300) if may_leave_rows and draw.random() < 0.25 else 0,
        biases=biases,
        scales_dtype=draw.choice((torch.float32, dtypes[0])),
        sizes_dtype=draw.choice((torch.int32, torch.int64)),
        frozen=frozen,
        needs_dx=bool(frozen) or draw.random() < 0.8,
        main_grad=not frozen and draw.random() < 0.25,
        x_place=draw.choice(list(PLACES)),
        dy_place=draw.choice(list(PLACES)),
        seed=draw.randrange(1 << 30),
    )


def quantizable(window: Window) -> Window:
    """One like it, with widths that FP8 takes, by blocks too: multiples of 16, or of 64 of a gated activation's halves."""
    step = 64 if is_glu(window.activation) else 16
    return replace(window, hidden=max(16, window.hidden // 16 * 16), ffn=max(step, window.ffn // step * step))


def _width(draw: random.Random, step: int) -> int:
    return step * draw.choice((1, 2, 3, draw.randrange(1, 33), draw.randrange(1, 129), draw.randrange(1, 400)))


def _splits(draw: random.Random, experts: int, tokens: int) -> tuple[int, ...]:
    kind = draw.choice(("even", "random", "random", "one has half", "some have none", "one has all"))
    weights = [1.0] * experts
    if kind == "random":
        weights = [draw.expovariate(1) for _ in range(experts)]
    elif kind == "one has half":
        weights[draw.randrange(experts)] = experts - 1.0 or 1.0
    elif kind == "some have none":
        weights = [float(draw.random() < 0.6) for _ in range(experts)]
    elif kind == "one has all":
        weights = [0.0] * experts
        weights[draw.randrange(experts)] = 1.0
    whole = sum(weights)
    splits = [int(tokens * weight / whole) if whole else 0 for weight in weights]
    splits[draw.randrange(experts)] += tokens - sum(splits)
    return tuple(splits)


@dataclass(frozen=True)
class Inputs:
    """Tensors of one step. Rows of no expert are NaN, in ``dy`` too."""

    x: torch.Tensor
    sizes: torch.Tensor
    scales: torch.Tensor
    dy: torch.Tensor


def make_inputs(window: Window, device: str) -> Inputs:
    """The same for the same window and device."""
    made = torch.Generator(device).manual_seed(window.seed)

    def rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.randn(window.tokens + window.beyond, columns, generator=made, device=device).to(dtype)
        numbers[window.tokens :] = float("nan")
        return numbers

    x, dy = rows(window.hidden, window.dtype), rows(window.hidden, window.dtype)
    scales = rows(1, window.scales_dtype)[:, 0].abs().contiguous()
    sizes = torch.tensor(window.splits, device=device, dtype=window.sizes_dtype)
    return Inputs(PLACES[window.x_place](x), sizes, scales, PLACES[window.dy_place](dy))


def make_module(window: Window, device: str) -> te.ops.Sequential:
    """The window's ops; weights of which a row's sum has about the size of one of its terms."""
    module = make_mlp(
        experts=len(window.splits),
        hidden=window.hidden,
        ffn=window.ffn,
        activation=window.activation,
        device=device,
        dtype=window.dtype,
        fc1={"bias": window.biases[0]},
        fc2={"bias": window.biases[1], "scale_bias": window.biases[2]},
        accumulate_into_main_grad=window.main_grad,
        keep_quantized_weight=window.seed % 3 > 0,
    )
    made = torch.Generator(device).manual_seed(window.seed + 1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            numbers = torch.randn(parameter.shape, generator=made, device=device)
            parameter.copy_(numbers * (parameter.shape[-1] ** -0.5 if "weight" in name else 0.5))
            parameter.requires_grad_(not name.startswith(window.frozen))
            if window.main_grad and "weight" in name:
                parameter.main_grad = torch.full(parameter.shape, 0.5, device=device)
                parameter.overwrite_main_grad = parameter.grad_added_to_main_grad = False
    return module


def step(window: Window, module: te.ops.Sequential, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Output and all gradients of one step. What is in a main_grad is a gradient of its parameter."""
    x, scales = inputs.x.detach().requires_grad_(window.needs_dx), inputs.scales.detach().requires_grad_()
    sized: list[Any] = [inputs.sizes, *([scales] if window.biases[2] else [])]
    module.zero_grad()
    for parameter in module.parameters():
        if window.main_grad and hasattr(parameter, "main_grad"):
            parameter.main_grad.fill_(0.5)
    output = module(x, inputs.sizes, scales, *sized)
    if output.requires_grad:
        output.backward(inputs.dy)
    found = {"output": output.detach(), "x": x.grad, "scales": scales.grad}
    for name, parameter in module.named_parameters():
        added = window.main_grad and hasattr(parameter, "main_grad")
        found[name] = parameter.main_grad.clone() if added else parameter.grad
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True)
class Expected:
    """A step in FP64.

    Attributes:
        results: as of `step`.
        terms: the largest sum of magnitudes in a router scale's gradient; its error is a part of that, however small the
            gradient is.
    """

    results: dict[str, torch.Tensor]
    terms: float


def step_in_fp64(window: Window, module: te.ops.Sequential, inputs: Inputs) -> Expected:
    """The same step through torch's own autograd, from the same bits; rows of no expert are zero."""
    rows, experts = window.tokens, range(len(window.splits))
    parameters = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    x, scales = (tensor.detach()[:rows].double() for tensor in (inputs.x, inputs.scales))
    x.requires_grad_(window.needs_dx)
    scales.requires_grad_()

    def of(place: int, what: str) -> list[torch.Tensor]:
        return [parameters[f"{place}.{what}{expert}"] for expert in experts]

    act_input = grouped_linear(x, window.splits, of(0, "weight"), of(0, "bias") if window.biases[0] else None)
    bias2, bias_scales = of(2, "bias") if window.biases[1] else None, scales if window.biases[2] else None
    fc2_input = activate(window.activation, act_input, scales)
    fc2_input.retain_grad()
    output = grouped_linear(fc2_input, window.splits, of(2, "weight"), bias2, bias_scales)
    output.backward(inputs.dy[:rows].double())
    assert fc2_input.grad is not None
    parts = [fc2_input.grad * activate(window.activation, act_input, torch.ones_like(scales))]
    if bias2 is not None and bias_scales is not None:
        parts.append(inputs.dy[:rows].double() * torch.repeat_interleave(torch.stack(bias2), inputs.sizes.long(), 0))
    terms = sum([part.detach().abs().sum(1).amax().item() for part in parts if rows])
    found = {"output": output.detach(), "x": x.grad, "scales": scales.grad}
    for name in found:
        tensor = found[name]
        if tensor is not None:
            found[name] = torch.cat([tensor, tensor.new_zeros(window.beyond, *tensor.shape[1:])])
    for name, parameter in parameters.items():
        added = 0.5 if window.main_grad and "weight" in name else 0.0
        found[name] = None if parameter.grad is None else parameter.grad + added
    return Expected({name: tensor for name, tensor in found.items() if tensor is not None}, terms)


def widened(window: Window) -> int:
    """Columns of FC1's result."""
    return window.ffn * (2 if is_glu(window.activation) else 1)
