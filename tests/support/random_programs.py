"""Random programs: layers that save tensors in every way that a session has to tell from others, and steps of forwards and
backwards in random order. Each tensor that a backward gets is compared with what was saved: bytes, size, strides, dtype,
and which of them share memory. Without a session all programs run, and free their tensors.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from te_offload import OffloadSession
from te_offload.errors import StepEndedError
from te_offload.offload.visit import LayerVisit
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState, Watch
from tests.support.discarded import Again

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
DTYPES = (*_FLOATS, torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64)
SHAPES = ((), (1,), (7,), (64,), (128,), (4, 16), (16, 4), (3, 5, 2), (0, 3), (1, 8), (8, 1), (2, 1, 4), (256, 4))
LARGE = (4096, 32)


class ForwardRaisedError(Exception):
    """A layer's forward raised on purpose."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Float8Tensor):
        parts = [tensor._data, tensor._scale_inv, tensor._transpose]
        return torch.cat([_bytes(part) for part in parts if part is not None])
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Addresses of the first byte and behind the last one."""
    if isinstance(tensor, Float8Tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if tensor.layout is torch.strided else None
    kind = torch.Tensor if isinstance(tensor, torch.nn.Parameter) else type(tensor)
    return tuple(tensor.shape), stride, tensor.dtype, kind, tensor.is_conj(), tensor.is_neg()


class Snapshot:
    """Tensors as they are when they are saved. ``own``: whether a session's hook, or none, is the innermost one."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.own = top is None or isinstance(getattr(top[0], "__self__", None), LayerVisit)
        self._described = [_described(tensor) for tensor in tensors]
        self._bytes = [_bytes(tensor) for tensor in tensors]
        self._spans = [_span(tensor) for tensor in tensors]

    def compare(self, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """Whether all bytes are the same, as a tensor that the device computes in its own time.

        Raises:
            AssertionError: something else differs.
        """
        assert [_described(tensor) for tensor in found] == self._described
        spans = [_span(tensor) for tensor in found]
        for place, mine in enumerate(self._spans):
            for other, theirs in enumerate(self._spans[:place]):
                if mine and theirs and mine[0] < theirs[1] and theirs[0] < mine[1]:
                    here, there = spans[place], spans[other]
                    assert here and there and here[0] - there[0] == mine[0] - theirs[0], "no aliases any more"
        same = [(_bytes(one) == before).all() for one, before in zip(found, self._bytes, strict=True)]
        return torch.stack([one.cpu() if one.device != same[0].device else one for one in same]).all()


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensors: list[torch.Tensor], program: Program) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.program, ctx.snapshot = program, Snapshot(tensors)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.program.got(ctx.snapshot, ctx.saved_tensors)
        return grad, None, None


class _HandOver(torch.autograd.Function):
    """What an op of te_offload does with its slot, whoever follows it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, op: Op, slot: list[torch.Tensor], exempt: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.program, ctx.snapshot, ctx.count, ctx.handle = op.program, Snapshot(slot), len(slot), None
        observer, watch = op.follower()
        saved = SavedSlot(None, SaveState.SAVED, tuple(slot), tuple(exempt))
        if observer is not None and watch is Watch.TAKES:
            ctx.handle = op.hand_over(saved, observer)
        elif watch is not Watch.NOT:
            op.declare_slot(saved, observer)
        if ctx.handle is None:
            ctx.save_for_backward(*slot, *exempt)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found = ctx.saved_tensors[: ctx.count] if ctx.handle is None else ctx.handle.take()
        ctx.program.slots_read += 1
        ctx.program.got(ctx.snapshot, found)
        return grad, None, None, None


class Op(SlotOwner, torch.nn.Module):
    """An op that saves what it is given."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._init_slot_owner(program.random.random() < 0.15)
        self.program = program

    def forward(self, x: torch.Tensor, slot: list[torch.Tensor], exempt: list[torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = _HandOver.apply(x, self, slot, exempt)  # type: ignore[no-untyped-call]
        return y


class Layer(torch.nn.Module):
    """A layer whose forward is made of random numbers: the same ones for the same ``seed``."""

    def __init__(self, program: Program, number: int) -> None:
        super().__init__()
        self.program = program
        self.number = number
        self.seed = 0
        self.inside_checkpoint = False
        self.weight = torch.nn.Parameter(torch.randn(program.random.choice([4, 128]), device=program.device))
        self.register_buffer("buffer", torch.randn(32, device=program.device))
        self.ops = torch.nn.ModuleList(Op(program) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = random.Random(f"{self.program.seed} {self.number} {self.seed}")
        return self._block(x, draw, 0, [], draw.randint(1, 6))

    def _block(
        self, x: torch.Tensor, draw: random.Random, depth: int, seen: list[torch.Tensor], count: int
    ) -> torch.Tensor:
        for _ in range(count):
            x = self._statement(x, draw, depth, seen, draw.random())
        return x

    def _statement(
        self, x: torch.Tensor, draw: random.Random, depth: int, seen: list[torch.Tensor], chance: float
    ) -> torch.Tensor:
        program = self.program
        if chance < 0.36:
            saved = self._tensors(draw, seen) + ([x] if draw.random() < 0.2 else [])
            return _Save.apply(x, saved, program)  # type: ignore[no-untyped-call, no-any-return]
        if chance < 0.40:
            ways: list[Callable[[], torch.Tensor]] = [
                lambda: x.exp().clamp(max=2),
                lambda: torch.nn.functional.layer_norm(x, (4,)),
                lambda: x * self.weight[:4],
                lambda: x + self.weight.view(-1, 4)[0],
            ]
            return draw.choice(ways)()
        if chance < 0.62:
            slot = [x] if draw.random() < 0.2 else self._slot(draw, seen)
            exempt = [self._fresh(draw) for _ in range(draw.randint(0, 1))]
            return draw.choice(list(self.ops))(x, slot, exempt) if slot else x
        if chance < 0.78 and depth < 3:
            with program.region(draw.choice("abc"), keep=draw.random() < 0.2):
                return self._block(x, draw, depth + 1, seen, draw.randint(1, 3))
        if chance < 0.82 and depth < 3:
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
                return self._block(x, draw, depth + 1, seen, draw.randint(1, 2))
        if chance < 0.88 and depth < 2:
            inner, reentrant = draw.randrange(1 << 30), draw.random() < 0.5

            def again(x: torch.Tensor) -> torch.Tensor:
                before, self.inside_checkpoint = self.inside_checkpoint, True
                try:
                    return self._block(x, random.Random(inner), depth + 2, [], random.Random(inner).randint(1, 3))
                finally:
                    self.inside_checkpoint = before

            y: torch.Tensor = checkpoint(again, x, use_reentrant=reentrant)
            return y
        if chance < 0.91:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                inside = _Save.apply(leaf, self._tensors(draw, seen), program)  # type: ignore[no-untyped-call]
                return x + torch.autograd.grad(inside.square().sum(), leaf)[0]
        if chance < 0.93:
            seen.clear()
        elif chance < 0.94 and program.may_raise:
            raise ForwardRaisedError
        elif chance < 0.96 and program.may_write and seen:
            self._write(draw.choice(seen))
        elif 0.96 <= chance < 0.985:
            return self._discard(x, draw)
        return torch.tanh(x)

    def _discard(self, x: torch.Tensor, draw: random.Random) -> torch.Tensor:
        """Save what has no memory until the backward, beside something else."""
        if self.inside_checkpoint or not (x.requires_grad and torch.is_grad_enabled()):
            return torch.tanh(x)  # what a checkpoint computes again has hooks that see no gradient
        wide = Again(lambda x: torch.sin(x.repeat(50)))
        others = [self._fresh(draw) for _ in range(draw.randint(0, 2))]
        y = wide(x)
        z: torch.Tensor = _Save.apply(y, [y[7:], *others, y.view(-1, 4)], self.program)  # type: ignore[no-untyped-call]
        wide.discard(z)
        self.program.discarded += 1
        return z[:4]

    def _write(self, tensor: torch.Tensor) -> None:
        """Write to a tensor that was saved, where one may."""
        if tensor.dtype is torch.float32 and not tensor.requires_grad and tensor.numel() and 0 not in tensor.stride():
            with contextlib.suppress(RuntimeError):  # parts of it overlap
                tensor.add_(1)
                self.program.wrote = True

    def _fresh(self, draw: random.Random) -> torch.Tensor:
        """A tensor of its own."""
        dtype = draw.choice(DTYPES)
        shape = draw.choice((*SHAPES, *[LARGE] * self.program.large))
        numbers = torch.Generator().manual_seed(draw.randrange(1 << 30))
        made = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=numbers)
        return self.program.note(made.to(self.program.device, dtype))

    def _tensors(self, draw: random.Random, seen: list[torch.Tensor]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for _ in range(draw.choice([1, 1, 1, 2, 3, 5, 20])):
            chance = draw.random()
            if chance < 0.10 and seen:
                found.append(draw.choice(seen))
            elif chance < 0.30:
                found.append(self._view(draw.choice(seen) if seen and draw.random() < 0.5 else self._fresh(draw), draw))
            elif chance < 0.40:
                parts = list(self._fresh(draw).reshape(-1).tensor_split(4))
                draw.shuffle(parts)
                found += parts[: draw.randint(1, 4)]
            elif chance < 0.55:
                found.append(self._odd(draw))
            else:
                found.append(self._fresh(draw))
        seen += [tensor for tensor in found if type(tensor) is torch.Tensor and tensor.layout is torch.strided]
        return found

    def _odd(self, draw: random.Random) -> torch.Tensor:
        """A tensor that stays, is shared with another layer, or is no plain one."""
        program, made = self.program, self._fresh(draw)
        marked = made.clone()
        marked._TE_do_not_offload = True  # type: ignore[attr-defined]
        real = made.real if made.is_complex() else made
        data = real.reshape(-1).to(torch.uint8)[: made.numel() // 4 * 4].view(-1, 4).clone()
        wrapped = Float8Tensor(
            shape=data.shape,
            dtype=torch.bfloat16,
            data=data,
            fp8_scale_inv=torch.tensor([0.25], device=program.device),
            fp8_dtype=DType.kFloat8E4M3,
            data_transpose=data.t().contiguous() if draw.random() < 0.5 else None,
            device=program.device,
        )
        odd = [
            program.shared[draw.randrange(3)],
            self.weight,
            self.weight.detach() if program.knows_parameters else self.weight,
            self.weight.view(-1, 2),
            self.buffer,
        ]
        odd += [marked, wrapped, real.to(torch.float32).to_sparse(), made.to(torch.complex64).conj().imag]
        return draw.choice(odd)  # type: ignore[return-value]

    @staticmethod
    def _view(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
        ways: list[Callable[[], torch.Tensor]] = [
            lambda: tensor.t(),
            lambda: tensor[::2],
            lambda: tensor.reshape(-1)[draw.randint(0, 9) :],
            lambda: tensor.unsqueeze(0).expand(3, *tensor.shape),
            lambda: tensor[..., 1:],
            lambda: tensor.detach(),
            lambda: tensor.view(torch.int16),
            lambda: tensor.as_strided((tensor.numel() // 4, 2), (2, 1)),
        ]
        try:
            return draw.choice(ways)()
        except (RuntimeError, IndexError):  # it has no such view
            return tensor

    def _slot(self, draw: random.Random, seen: list[torch.Tensor]) -> list[torch.Tensor]:
        """What an op may save as its slot: tensors of one buffer, as split sizes cut it, or a few."""
        chance = draw.random()
        if chance < 0.2 and seen:
            found = [draw.choice(seen)]
        elif chance < 0.7:
            buffer = self._fresh(draw).reshape(-1)
            rows = buffer.view(-1, 4) if buffer.numel() % 4 == 0 else buffer
            cuts = sorted(draw.choices(range(len(rows) + 1), k=draw.randint(1, 6)))
            found = list(rows.tensor_split(cuts))
            if draw.random() < 0.2:
                draw.shuffle(found)
        else:
            found = [self._fresh(draw) for _ in range(draw.randint(1, 4))]
        return [tensor for tensor in found if not tensor.is_complex() and not tensor.is_neg()]


class Program:
    """Layers, and steps of theirs.

    Args:
        seed: of all that is random. device: of the tensors.

    Attributes:
        session: which the layers are in. call: runs a layer.
        knows_parameters: whether who offloads knows the layers, and so their parameters' memory.
        late: whether backwards may come in a later step than their forwards, or between two; then nothing is written to.
        compared: sets of tensors that backwards got. slots_read: of them those of ops.
        discarded: tensors whose memory was given up until the backward.
        came_late: backwards that came in a later step, but for those whose bytes were gone.
        wrote: whether a saved tensor was written to in this step.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self.random = random.Random(seed)
        self.may_raise, self.may_write = self.random.random() < 0.2, self.random.random() < 0.2
        self.large = int(self.random.random() < 0.3)
        self.shared = [torch.randn(count, device=device) for count in (3, 64, 300)]
        self.layers = [Layer(self, number) for number in range(self.random.randint(1, 4))]
        self.session: OffloadSession | None = None
        self.call: Callable[[Layer, torch.Tensor], torch.Tensor] = Layer.__call__
        self.knows_parameters = True
        self.late = False
        self.compared = self.slots_read = self.came_late = self.discarded = 0
        self.wrote = False
        self._steps = 0
        self._pending: list[tuple[torch.Tensor, int]] = []
        self._same: list[torch.Tensor] = []
        self._held: list[tuple[Snapshot, Sequence[torch.Tensor]]] = []
        self._made: list[StorageWeakRef] = []

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember, without holding it, a tensor that is to be freed."""
        self._made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def region(self, name: str, *, keep: bool) -> contextlib.AbstractContextManager[None]:
        """The session's."""
        if self.session is None:
            return contextlib.nullcontext()
        return self.session.region(name, no_offload_activation=keep)

    def got(self, snapshot: Snapshot, found: Sequence[torch.Tensor]) -> None:
        """A backward got some tensors."""
        if not snapshot.own and self.wrote:
            return  # what others hold autograd does not look at
        self.compared += 1
        self._same.append(snapshot.compare(found))
        if self.device.type == "cpu":
            assert self._same.pop()
        elif self.random.random() < 0.1:
            torch.cuda._sleep(self.random.choice([1_000, 100_000, 3_000_000]))
        if self.random.random() < 0.3:
            self._held.append((snapshot, found))

    def step(self, number: int) -> None:
        """Forwards of layers, one behind the other, and their backwards, in random order; some never come."""
        self.wrote = False
        self._steps += 1
        pending = self._pending
        for forward in range(self.random.randint(1, 4)):
            y = torch.ones(4, requires_grad=True, device=self.device)
            some = self.random.sample(self.layers, self.random.randint(1, len(self.layers)))
            with torch.set_grad_enabled(self.random.random() < 0.9):
                for layer in self.layers if self.random.random() < 0.6 else some:
                    layer.seed = 100 * number + forward * self.random.choice([0, 1])
                    y = self.call(layer, y)
            if y.requires_grad:
                pending.append((y, self._steps))
            del y
            while pending and self.random.random() < 0.4:
                self._backward()
        while pending and not (self.late and self.random.random() < 0.2):
            if self.random.random() < 0.1:
                pending.pop(self.random.randrange(len(pending)))
            else:
                self._backward()

    def between_steps(self) -> None:
        """A backward may come here too."""
        self._steps += 1
        if self.late and self._pending and self.random.random() < 0.2:
            self._backward()

    def _backward(self) -> None:
        output, step = self._pending.pop(self.random.randrange(len(self._pending)))
        loss, read = output.sum(), self.slots_read
        twice = self.random.random() < 0.15
        try:
            loss.backward(retain_graph=twice)
        except StepEndedError:
            if step == self._steps:
                raise
            return
        self.came_late += step != self._steps
        if twice and read == self.slots_read:  # ops of te.ops cannot
            loss.backward()

    def check_after_step(self) -> None:
        """What backwards got was what was saved, and what was held of it still is."""
        if not self.late:
            self._pending.clear()
        if not self.wrote:
            self._same += [snapshot.compare(found) for snapshot, found in self._held]
        same, self._same, self._held = self._same, [], []
        assert all(same)

    def unfreed(self) -> int:
        """Tensors that were made and still have memory, though nobody can need them."""
        self._pending.clear()
        gc.collect()
        return sum(not made.expired() for made in self._made)


def random_settings(draw: random.Random) -> dict[str, Any]:
    """Arguments of a session."""
    found: dict[str, Any] = {"min_bytes": draw.choice([0, 0, 0, 64, 1000])}
    choices: list[tuple[float, str, Callable[[], Any]]] = [
        (0.4, "max_in_flight", lambda: draw.choice([0, 256, 4096])),
        (0.2, "host_limit", lambda: draw.choice([4096, 65536])),
        (0.15, "verify", lambda: True),
        (0.1, "enabled", lambda: False),
        (0.2, "max_tokens", lambda: 8),
    ]
    found |= {name: make() for chance, name, make in choices if draw.random() < chance}
    if "host_limit" not in found and draw.random() < 0.2:
        found["fraction"] = math.ceil(10 * draw.random()) / 10
    elif "host_limit" not in found and draw.random() < 0.15:
        found["budget_per_layer"] = draw.choice([0, 64, 1000, 4096, 100_000])
    return found
