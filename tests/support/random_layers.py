"""Random layers for CUDA graphs, and steps with them in random order. Twins of one seed do the same; one of them, which
runs eagerly, judges the other. What a backward gets decides the gradients, so that no wrong byte is without a trace.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from te_offload import OffloadSession
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState, SlotName, Watch

WIDTH = 64
STYLES = ["one"] * 4 + ["pair", "nested", "view", "input", "halves", "values", "constant", "twice", "buffer", "count"]
TAKES = ["x"] * 3 + ["scale", "other", "order", "list"]
ALONE = ("one", "values", "count", "constant", "halves")  # whose first output no other one is made of


def _made(x: torch.Tensor, weight: torch.Tensor, kinds: list[int]) -> list[torch.Tensor]:
    """Tensors to save: of their own, views, parts, the input, a parameter, none."""
    found: list[torch.Tensor] = []
    ways: list[Callable[[], Any]] = [
        lambda: [x.exp()],
        lambda: [(x * 3).t()],
        lambda: [x.bfloat16()],
        lambda: list((x + 1).chunk(4)),
        lambda: [x > 0],
        lambda: [x],
        lambda: [x[:, 3:7]],
        lambda: [x.sum()],
        lambda: [x[:0]],
        lambda: [weight],
        lambda: [x.new_ones(3).expand(5, 3)],
        lambda: [x.repeat(8, 1) * 2],
        lambda: found[-1:],
    ]
    for kind in kinds:
        found += ways[kind]()
    return found


class _Mix(torch.autograd.Function):
    """Saves some tensors, a part of them as the slot of an op, and holds one or the whole of one beside the hooks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Op | None, kinds: list[int], weight: torch.Tensor) -> torch.Tensor:
        tensors = _made(x, weight, kinds)
        ctx.handle, ctx.held, slot = None, None, []
        if op is not None and tensors:
            count = 1 + len(tensors) // 2
            slot, tensors = [tensor.detach() for tensor in tensors[:count]], tensors[count:]
            observer, watch = op.follower()
            saved = SavedSlot(SlotName.ACT_INPUT, SaveState.SAVED, tuple(slot), tuple(tensors[:1]))
            if observer is not None and watch is Watch.TAKES:
                ctx.handle = op.hand_over(saved, observer)
            elif watch is not Watch.NOT:
                op.declare_slot(saved, observer)
        if tensors and kinds[0] % 3 == 0:
            ctx.held = tensors.pop()
            if len(kinds) % 2:
                ctx.held = ctx.held * 1
            elif ctx.held.numel() > WIDTH:
                tensors.append(ctx.held.reshape(-1)[: WIDTH - 4])
        ctx.save_for_backward(*(slot if ctx.handle is None else []), *tensors)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found = [*(ctx.handle.take() if ctx.handle is not None else ()), *ctx.saved_tensors]
        found += [] if ctx.held is None else [ctx.held]
        factor = grad.new_ones(())
        for place, tensor in enumerate(found, 1):
            if tensor.numel():
                numbers = torch.tanh(tensor.float() * 0.1)
                factor = factor + 0.01 * place * numbers.mean()
                if numbers.shape == grad.shape:
                    grad = grad + 0.01 * numbers * grad
        return grad * factor * 1.5, None, None, None


class Op(SlotOwner, torch.nn.Module):
    """An op with a slot."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self._init_slot_owner(keeps)

    def forward(self, x: torch.Tensor, kinds: list[int], weight: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Mix.apply(x, self, kinds, weight)  # type: ignore[no-untyped-call]
        return found


class Layer(torch.nn.Module):
    """A layer made of random numbers; ``reentrant``: how often its checkpoints are."""

    def __init__(self, draw: random.Random, device: torch.device) -> None:
        super().__init__()
        self.seed, self.count = draw.randrange(1 << 30), draw.randint(1, 7)
        self.style, self.takes = draw.choice(STYLES), draw.choice(TAKES)
        self.writes, self.reentrant = draw.random() < 0.06, 0.3
        self.session: OffloadSession | None = None
        self.ops = torch.nn.ModuleList(Op(draw.random() < 0.15) for _ in range(3))
        numbers = torch.Generator().manual_seed(self.seed)
        self.weight = torch.nn.Parameter((torch.randn(WIDTH, WIDTH, generator=numbers) / 8).to(device))
        bias = (torch.randn(WIDTH, generator=numbers) / 8).to(device)
        self.bias = torch.nn.Parameter(bias, requires_grad=draw.random() < 0.8)
        self.unused = torch.nn.Parameter(torch.zeros(3, device=device))
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.randn(WIDTH, generator=numbers).to(device))

    def forward(self, x: torch.Tensor, **others: Any) -> Any:
        given = x
        if "scale" in others:
            x = x * others["scale"]
        if "other" in others:
            x = x + others["other"] * 0.5
        if "order" in others:
            x = x[others["order"]]
        if "list" in others:
            x = x + others["list"][0] * others["list"][1]
        x = self._block(x, self._draw(), 0, self.count)
        if self.writes:
            with torch.no_grad():
                self.buffer.add_(0.01)
        results: dict[str, Callable[[], Any]] = {
            "one": lambda: x,
            "pair": lambda: (x, x.square()),
            "nested": lambda: {"x": x, "more": [x.mean(), None]},
            "view": lambda: (x, x.reshape(-1)[:5]),
            "input": lambda: (x, given),
            "halves": lambda: x.chunk(2),
            "values": lambda: (x, 3, "no", None),
            "constant": lambda: (x, x.detach() * 2),
            "twice": lambda: (x, x),
            "buffer": lambda: (x, self.buffer),
            "count": lambda: (x, (x > 0).sum()),
        }
        return results[self.style]()

    def _draw(self) -> random.Random:
        return random.Random(self.seed)

    def _block(self, x: torch.Tensor, draw: random.Random, depth: int, count: int) -> torch.Tensor:
        for _ in range(count):
            x = self._statement(x, draw, depth, draw.randrange(20))
        return x

    def _statement(self, x: torch.Tensor, draw: random.Random, depth: int, way: int) -> torch.Tensor:
        plain: list[Callable[[], torch.Tensor]] = [
            lambda: F.linear(x, self.weight, self.bias),
            lambda: torch.tanh(x),
            lambda: F.silu(x) + x,
            lambda: F.layer_norm(x, (WIDTH,)),
            lambda: x * self.buffer,
            lambda: torch.cat(x.chunk(2, 1)[::-1], 1),
            lambda: F.relu(x * 1.01, inplace=True),
            lambda: (x.t().contiguous() * 1.1).t(),
            lambda: x + torch.softmax(x, 1),
            lambda: x.bfloat16().float() * self.bias,
            lambda: torch.where(x > 0, x, x * 2),
        ]
        if way < len(plain):
            return plain[way]()
        if way < 16:
            kinds = [draw.randrange(13) for _ in range(draw.randint(1, 6))]
            op = draw.choice(list(self.ops)) if way < 14 else None
            found: torch.Tensor = _Mix.apply(x, op, kinds, self.weight)  # type: ignore[no-untyped-call]
            return found
        inner, keeps = draw.randrange(1 << 30), draw.random() < 0.2
        if way == 16 and depth < 2:
            reentrant = draw.random() < self.reentrant
            y: torch.Tensor = checkpoint(
                lambda x: self._block(x, random.Random(inner), depth + 1, 2), x, use_reentrant=reentrant
            )
            return y
        if way == 17 and depth < 2:
            session = self.session
            with session.region("inner", no_offload_activation=keeps) if session else contextlib.nullcontext():
                return self._block(x, random.Random(inner), depth + 1, 2)
        return x


class PlainLayer(Layer):
    """A layer of plain ops alone, which torch.compile traces as a whole."""

    def __init__(self, draw: random.Random, device: torch.device) -> None:
        super().__init__(draw, device)
        ways = random.Random(self.seed)
        self.ways = tuple(ways.randrange(15) for _ in range(self.count))
        self.writes = ways.random() < 0.1

    def _draw(self) -> Any:
        """Nothing: torch.compile would draw other numbers."""

    def _block(self, x: torch.Tensor, draw: Any, depth: int, count: int) -> torch.Tensor:
        for way in self.ways:
            if way == 0:
                x = F.linear(x, self.weight, self.bias)
            elif way == 1:
                x = torch.tanh(x)
            elif way == 2:
                x = F.silu(x) + x
            elif way == 3:
                x = F.layer_norm(x, (WIDTH,))
            elif way == 4:
                x = x * self.buffer
            elif way == 5:
                x = torch.cat(x.chunk(2, 1)[::-1], 1)
            elif way == 6:
                x = F.relu(x * 1.01, inplace=True)
            elif way == 7:
                x = (x.t().contiguous() * 1.1).t()
            elif way == 8:
                x = x + torch.softmax(x, 1)
            elif way == 9:
                x = x.bfloat16().float() * self.bias
            elif way == 10:
                x = torch.where(x > 0, x, x * 2)
            elif way == 11:
                x = x.sort(1).values
            elif way == 12:
                x = x + x.cumsum(0) * 0.1
            elif way == 13:
                x = x.reshape(-1, 2, WIDTH // 2).flip(1).reshape(-1, WIDTH)
            else:
                x = x + F.linear(x.exp().clamp(max=3), self.weight).mean(0)
        return x


class Twin:
    """Some layers, and steps of theirs.

    Args:
        seed: of all that is random. device: where. kind: of the layers.

    Attributes:
        calm: most steps are alike. observed: numbers that steps have seen, with names. held: tensors that outlive steps.
    """

    def __init__(self, seed: int, device: torch.device, kind: type[Layer] = Layer) -> None:
        draw = random.Random(seed)
        self.seed, self.device = seed, device
        self.layers = torch.nn.ModuleList(kind(draw, device) for _ in range(draw.randint(1, 4)))
        self.calm, self.chains = draw.random() < 0.65, draw.random() < 0.5
        self.rows = 16 if draw.random() < 0.9 else 4096
        self.rows_vary, self.asks_grads = draw.random() < 0.15, draw.random() < 0.4
        self.observed: list[tuple[str, torch.Tensor]] = []
        self.held: list[torch.Tensor] = []
        for layer in self.parts():
            layer.reentrant = 0 if self.asks_grads else layer.reentrant

    def parts(self) -> list[Layer]:
        """The layers."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def step(self, number: int) -> None:
        """Forwards, their backwards in random order, some never; then an optimizer, perhaps."""
        draw = random.Random(f"{self.seed} {number}")
        pending: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for _ in range(1 if self.calm and draw.random() < 0.7 else draw.randint(1, 3)):
            with torch.set_grad_enabled(draw.random() < 0.9):
                loss, leaves = self._forward(draw, number)
            if loss.requires_grad:
                pending.append((loss, leaves))
            del loss
            while pending and draw.random() < 0.4:
                self._backward(draw, *pending.pop(draw.randrange(len(pending))))
        while pending:
            loss, leaves = pending.pop(draw.randrange(len(pending)))
            if draw.random() < 0.93:
                self._backward(draw, loss, leaves)
            del loss
        self._end(draw)

    def inputs(self, draw: random.Random) -> dict[str, Any]:
        """Of one forward."""
        numbers = torch.Generator().manual_seed(draw.randrange(1 << 30))
        rows = self.rows * 2 if self.rows_vary and draw.random() < 0.3 else self.rows
        made = {
            "x": torch.randn(rows, WIDTH, generator=numbers),
            "scale": torch.rand(WIDTH, generator=numbers),
            "other": torch.randn(rows, WIDTH, generator=numbers),
            "order": torch.randperm(rows, generator=numbers),
        }
        found: dict[str, Any] = {name: tensor.to(self.device) for name, tensor in made.items()}
        found["list"] = [found["other"], found["scale"]]
        return found

    def _forward(self, draw: random.Random, number: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        given = self.inputs(draw)
        leaves = [given[name] for name, has in (("x", self.seed % 4 == 1), ("scale", self.seed % 3 == 0)) if has]
        for leaf in leaves:
            leaf.requires_grad_()
        order = self.parts()
        if not self.calm and draw.random() < 0.3:
            order = draw.sample(order, draw.randint(1, len(order)))
        x, more = given["x"], []
        for layer in order:
            y, also = self._call(draw, layer, x, given, checkpoints=number >= 2 and draw.random() < 0.04)
            more += also
            x = self._between(draw, y, x)
            del y, also
        loss = x.square().mean()
        for one in more:
            loss = loss + one.square()
        self.note("loss", loss)
        if draw.random() < 0.15:
            self.held.append(x if draw.random() < 0.6 else x.detach())
        return loss, leaves

    def _call(
        self, draw: random.Random, layer: Layer, x: torch.Tensor, given: dict[str, Any], *, checkpoints: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output that goes on, and others for the loss."""
        # A graph sums the gradients of an input before what else has one adds to them. So do nodes of views.
        others = {layer.takes: pytree.tree_map(lambda one: one.view_as(one), given[layer.takes])}
        if layer.takes == "other" and draw.random() < 0.5:
            others["other"] = x.view_as(x)
        x, others = x.view_as(x), others if layer.takes != "x" else {}
        if checkpoints and not layer.writes:  # how often a write is done again depends on where the second run stops
            others = pytree.tree_map(torch.Tensor.detach, others)
            reentrant = draw.random() < 0.5 and layer.style != "buffer" and not self.asks_grads
            found = checkpoint(lambda x: layer(x, **others), x, use_reentrant=reentrant)
        else:
            found = layer(x, **others)
        tensors = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
        for place, one in enumerate(tensors):
            self.note(f"output {place} of a layer that returns {layer.style}", one)
        if layer.style != "buffer" and draw.random() < 0.2:
            one = draw.choice(tensors)
            self.held.append(one if draw.random() < 0.5 else one.detach())
        y = torch.cat(found) if layer.style == "halves" else tensors[0]
        if draw.random() < 0.1 and y.requires_grad and layer.style in ALONE:
            y.register_hook(self._hook(keeps=draw.random() < 0.5))
        others_too = layer.style in ("pair", "nested", "view", "input") and draw.random() < 0.7
        return y, [one.mean() for one in tensors[1:] if others_too and one.requires_grad]

    def _hook(self, *, keeps: bool) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            self.note("gradient of an output", grad)
            if keeps:
                self.held.append(grad)

        return hook

    def _between(self, draw: random.Random, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ways: list[Callable[[], torch.Tensor]] = [
            lambda: y,
            lambda: x + y,
            lambda: y * 1,
            lambda: y.t().contiguous().t(),
            lambda: y.detach().requires_grad_(torch.is_grad_enabled()),
            lambda: torch.tanh(y),
            lambda: y + y.mean(),
        ]
        way = 0 if draw.random() < 0.35 else draw.randrange(len(ways))
        return ways[(0 if self.chains else 1) if self.calm else way]()

    def _backward(self, draw: random.Random, loss: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        if self.asks_grads and leaves and draw.random() < 0.3:
            grads = [grad for grad in torch.autograd.grad(loss, leaves, allow_unused=True) if grad is not None]
        else:
            loss.backward()
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        for grad in grads:
            self.note("gradient of an input", grad)
            if draw.random() < 0.2:
                self.held.append(grad)

    def _end(self, draw: random.Random) -> None:
        for name, parameter in self.layers.named_parameters():
            if parameter.grad is not None:
                self.note(f"gradient of {name}", parameter.grad)
                if draw.random() < 0.05:
                    self.held.append(parameter.grad)
        if draw.random() < 0.4:
            with torch.no_grad():
                for parameter in self.layers.parameters():
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad.nan_to_num().clamp(-1, 1), alpha=-0.01)
        if draw.random() < 0.7:
            self.layers.zero_grad(set_to_none=draw.random() < 0.7)
        if draw.random() < 0.02:
            weight = draw.choice(self.parts()).weight
            weight.data = weight.data.clone()
        while self.held and draw.random() < 0.6:
            self.held.pop(draw.randrange(len(self.held)))

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Remember its numbers."""
        self.observed.append((name, tensor.detach().clone()))

    def difference(self, other: Twin) -> str | None:
        """What the last steps of two twins saw and hold: the first that differs by a bit."""
        pairs = [*zip(self.observed, other.observed, strict=True)]
        self.observed, other.observed = [], []
        held = [*zip(self.held, other.held, strict=True)]
        pairs += [(("what is held", one.detach()), ("", two.detach())) for one, two in held]
        for (name, one), (_, two) in pairs:
            if not torch.equal(_bits(one), _bits(two)):
                return f"{name}: {one.flatten()[:4].tolist()} and {two.flatten()[:4].tolist()}"
        return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_session(draw: random.Random, layers: torch.nn.ModuleList, *, verify: bool = True) -> OffloadSession | None:
    """A session for some layers, or none. ``verify``: it may, which a graph cannot."""
    if draw.random() < 0.25:
        return None
    settings: dict[str, Any] = {"min_bytes": draw.choice([0, 0, 64, 5000]), "verify": draw.random() < 0.1 and verify}
    if draw.random() < 0.4:
        settings["max_in_flight"] = draw.choice([0, 4096, 100_000])
    session = OffloadSession(layers, **settings)
    for layer in layers:
        assert isinstance(layer, Layer)
        layer.session = session
    return session
