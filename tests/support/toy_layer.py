"""Graphs of layers without a GPU: a layer that computes where it is told to, and captures that run it there again.

Addresses are real, and lose their memory when nobody owns them (`paged_memory.py`): what is read too late ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.overrides

from te_offload.graphs.backend import Pool
from te_offload.graphs.layers import layer_graphs, pair, scope
from te_offload.graphs.layers.bank import Bank, Zone
from te_offload.graphs.layers.ground import Ground
from te_offload.graphs.layers.pool import SegmentPool
from te_offload.graphs.layers.space import Extent, Space
from te_offload.offload.transfer import CpuTransfer
from te_offload.ops import ScaledSReLU, te_adapter
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState, SlotName, Watch
from tests.support.paged_memory import PagedMemory

_SEGMENT = 16 << 20
STRIDE = 2 << 20  # of allocations, so that each has zones of its own


def at(
    address: int,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    gone: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Floats at an address, which nobody owns, without a gap. ``gone``: called when no tensor is over them any more."""
    count = torch.Size(shape).numel()
    kind: Any = type("Buffer", (ctypes.c_char * (4 * count),), {})  # a class of Python's, so that it can be watched
    buffer = kind.from_address(address)
    if gone is not None:
        weakref.finalize(buffer, gone)
    flat = torch.frombuffer(buffer, dtype=torch.float32)
    return flat.view(tuple(shape)) if stride is None else flat.as_strided(tuple(shape), tuple(stride))


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class FakePool(SegmentPool):
    """Hands out memory of its first segment, always in the same order. The others stand for what only a capture takes."""

    made: dict[Any, FakePool]

    def __init__(self, space: Space, lengths: Sequence[int], stream: Any) -> None:
        self._space = space
        self.sealed = False
        self.segments = [space.add_segment(length) for length in lengths]
        self._zones: list[Zone] = [zone for segment in self.segments for zone in space.zones(segment, 1)]
        space.bank.occupy(self._zones)
        self.handle = id(self), 0
        self._alive: dict[int, Extent] = {}
        FakePool.made[self.handle] = self

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """Floats."""
        places = range(self.segments[0], self.segments[0] + _SEGMENT, STRIDE)
        address = next(place for place in places if place not in self._alive)  # what is dead serves again
        self._alive[address] = Extent(address, 4 * torch.Size(shape).numel())
        return at(address, shape, gone=functools.partial(self._alive.pop, address, None))

    def live(self) -> list[Extent]:
        return sorted(self._alive.values())


class Machine:
    """Stands in for CUDA: captures, and where captured functions find memory.

    Attributes:
        fails_at: "forward" or "backward": its capture, outside of rehearsals, raises. short: forwards' captures, outside of
            rehearsals, that lack a segment. log: what was done.
    """

    def __init__(self) -> None:
        self.fails_at = ""
        self.short = 0
        self.pool: FakePool | None = None
        self.capturing = False
        self.log: list[str] = []
        self.ran: Callable[[], None] = lambda: None  # does again what the captured function did

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape)) if self.pool is None else self.pool.take(shape)


class FakeBackend:
    """See `graphs.backend.CudaBackend`."""

    machine: Machine

    def __init__(self, device: torch.device, pool: Pool | None, stream: Any = None) -> None:
        self._pool = pool

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any], generators: Sequence[Any]) -> tuple[FakeRecording, Any]:
        machine, pool = self.machine, self._pool
        assert pool is not None
        rehearses = pool.handle in (None, "rehearsal")
        if rehearses:
            pool.handle = "rehearsal"
        machine.pool = None if rehearses else FakePool.made[pool.handle]
        machine.capturing = True
        try:
            with _Clones(machine):
                result = function()
        finally:
            machine.pool, machine.capturing = None, False
        return FakeRecording(machine, machine.ran), result


class _Clones(torch.overrides.TorchFunctionMode):
    """Clones have memory from a machine too."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and self._machine.pool is not None:
            return _Clone.apply(args[0], self._machine)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Clone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, machine: Machine) -> torch.Tensor:
        found, before = machine.take(x.shape), machine.ran
        source, target = _place(x), _place(found)

        def run() -> None:
            before()
            at(*target).copy_(at(*source))

        machine.ran = run
        return found.copy_(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class FakeRecording:
    def __init__(self, machine: Machine, run: Callable[[], None]) -> None:
        self._machine, self._run = machine, run

    def replay(self) -> None:
        self._machine.log.append("replay")
        self._run()

    def close(self) -> None:
        self._machine.log.append("close")
        self._run = lambda: None


class _Toy(torch.autograd.Function):
    """``relu(x * weight)``, by hand, with memory from a machine. Its mask waits on the context, where no hook sees it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, machine: Machine, kind: str, op: SlotOwner | None
    ) -> torch.Tensor:
        inner, mask, scratch, found = (machine.take(x.shape) for _ in range(4))

        def run(
            x: torch.Tensor, inner: torch.Tensor, mask: torch.Tensor, scratch: torch.Tensor, found: torch.Tensor
        ) -> None:
            torch.mul(x, weight.detach(), out=inner)
            torch.sign(inner, out=scratch)
            torch.clamp(scratch, min=0, out=mask)
            torch.mul(inner, mask, out=found)

        if machine.capturing and machine.pool is not None and machine.fails_at == "forward":
            raise RuntimeError("injected: forward")
        if machine.capturing and machine.pool is not None and machine.short:
            machine.short -= 1
            raise torch.OutOfMemoryError("injected: no such segment")
        run(x.detach(), inner, mask, scratch, found)
        places = [_place(tensor) for tensor in (x, inner, mask, scratch, found)]
        machine.ran = lambda: run(*[at(*place) for place in places])
        ctx.machine = machine
        ctx.kind = kind
        ctx.weight = weight
        ctx.mask = None if kind == "saves two" else mask
        ctx.slot = None
        if op is not None:
            observer, watch = op.follower()
            buffers = (inner, x) if kind == "slot with the input" else (inner,)
            if observer is not None and watch is Watch.TAKES:
                ctx.slot = op.hand_over(SavedSlot(SlotName.ACT_INPUT, SaveState.SAVED, buffers, ()), observer)
        ctx.save_for_backward(x, weight, *([] if ctx.slot else [inner]), *([mask] if kind == "saves two" else []))
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, *rest = ctx.saved_tensors
        inner = rest.pop(0) if ctx.slot is None else ctx.slot.take()[0]
        mask = rest[0] if rest else ctx.mask
        machine: Machine = ctx.machine
        if machine.capturing and machine.pool is not None and machine.fails_at == "backward":
            raise RuntimeError("injected: backward")
        into_main_grad = ctx.kind == "main_grad"
        adds = into_main_grad and te_adapter.accumulates_into_main_grad(ctx.weight)
        scratch, of_x = machine.take(x.shape), machine.take(x.shape)
        of_weight = ctx.weight.main_grad if into_main_grad else machine.take(weight.shape)

        def run(*tensors: torch.Tensor) -> None:
            grad, x, inner, mask, scratch, of_x, of_weight = tensors
            torch.mul(grad, (inner > 0) * mask * 2, out=scratch)  # what lies elsewhere is read after this is written
            torch.mul(grad * (inner > 0) * mask, weight.detach(), out=of_x)
            of_weight.copy_(torch.sum(scratch * x / 2, dim=0) + (of_weight if adds else 0))

        tensors = grad, x.detach(), inner, mask, scratch, of_x, of_weight
        if not (into_main_grad and machine.capturing):  # which computes nothing
            run(*tensors)
        places = [_place(tensor) for tensor in tensors]
        machine.ran = lambda: run(*[at(*place) for place in places])
        if into_main_grad:
            ctx.weight.grad_added_to_main_grad = True
            of_weight = torch.full_like(ctx.weight, torch.nan)  # a dummy, as Transformer Engine's: anything
        return inner if ctx.kind == "returns what it saved" else of_x, of_weight, None, None, None


class Toy(torch.nn.Module):
    """A layer with one weight; with an op that has a slot, if its kind says so."""

    def __init__(self, width: int, machine: Machine, kind: str = "") -> None:
        super().__init__()
        self.op = ScaledSReLU() if kind.startswith("slot") else None
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, width))
        self._machine = [machine]
        self._kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Toy.apply(x, self.weight, self._machine[0], self._kind, self.op)  # type: ignore[no-untyped-call]
        return found


class FakeGround(Ground):
    """On the CPU."""

    def __init__(self, device: torch.device, *, virtual: bool) -> None:
        self.device = device
        self.stream = None  # type: ignore[assignment]
        self.resident = None if virtual else "as asked"
        self.memory = PagedMemory()
        self.bank = Bank(self.memory, lambda: None)
        self.space = Space(device, self.bank)
        self.transfer = CpuTransfer()
        self._leader, self._rounds = None, 0
        self.raises_overflow = True
        self.quantized = True
        self._warns = False
        self._outputs = set()
        self._given_up = set()
        self.launched = lambda: None

    def in_capture(self) -> bool:
        return False

    def wait_for_gradients(self) -> None:
        """There are no streams."""

    def note_reader(self, stream: Any = None) -> None:
        """There are no streams."""

    def begin_replay(self) -> None:
        self.order()

    def synchronize(self) -> None:
        """Nothing runs."""


def install(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Have layers of the CPU captured."""
    machine = Machine()
    FakePool.made = {}
    backend = type("Backend", (FakeBackend,), {"machine": machine})
    for module in (pair, scope):
        monkeypatch.setattr(module, "CudaBackend", backend)
    monkeypatch.setattr(pair, "SegmentPool", FakePool)
    monkeypatch.setattr(pair, "segment_lengths", lambda handle: [_SEGMENT] * 3)
    monkeypatch.setattr(layer_graphs, "Ground", FakeGround)
    monkeypatch.setattr(layer_graphs, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return machine
