"""How much of the host's time a session costs: for a slot of one tensor, for each further tensor, for a layer.

    ./run benchmarks.host_time [--device cpu] [--one-thread] [--json FILE]

A layer here is an autograd function that saves tensors in some slots and does next to nothing else; its forward and
backward are timed with and without a session around it, over many layers. Between the two, untimed, the copies out end, as
they mostly have where there is work between, and the session is told: else what has not left by then stays on the device
and nothing comes back, and calls that queue a copy behind a backlog of others take longer. A slot is what an op of
te_offload hands over (``op``: the parts of one buffer, as split sizes cut it), or what a region saves through autograd's
hooks (``region``: a buffer each). The time of a slot is the difference between layers of four slots and of one, divided by
three; that of a layer is the rest. In each round all layers take their turns, with a session and without, and a difference
is of one round; medians over the rounds, in microseconds of the host for forward and backward together.

Two more rows are of layers as models have them, and of all that a session adds to one. ``a whole layer``: what a
transformer layer saves in six regions, some of whose tensors are other regions' too, and in two ops' slots, with the
parameters of 64 experts in it. ``a fused grouped MLP``: a Sequential of 64 experts that runs fused, with Transformer Engine
around it; what its forward and backward take the host without a session stands beside it.

On a GPU two rows stand beside ours. One is Transformer Engine's context, with host memory that it keeps (else it asks for
some for each tensor), around the same layers, in one round with a session's: it takes tensors through the hooks that a
region's pass too, and none below 256 Ki elements, so these have as many; no two of them lie side by side (the tensors of
the region above do, as far as the allocator lets them, and go as few copies). The other is what the same host needs for the
calls alone that no engine written in Python on torch can do without, for one tensor out and back: three events recorded
and three waited for, one allocation, two copies.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import transformer_engine.pytorch as te

from te_offload import OffloadSession, ops
from te_offload.fused import fusions_in, hopper
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState, Watch

LAYERS = 32
TENSORS = 64
SMALLEST = 256 * 1024  # elements that a tensor needs for Transformer Engine's context to take it


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        return grad, *([None] * len(saved))


class _HandOver(torch.autograd.Function):
    """What an op of te_offload does with its slot, without Transformer Engine around it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: SlotOp, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        ctx.handle = None
        observer, watch = op.follower()
        if observer is not None and watch is Watch.TAKES:
            ctx.handle = op.hand_over(SavedSlot(None, SaveState.SAVED, tensors, ()), observer)
        else:
            ctx.save_for_backward(*tensors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        handle, ctx.handle = ctx.handle, None  # an op's goes with the call, and what it held with it
        saved = ctx.saved_tensors if handle is None else handle.take()
        assert len(saved)
        return grad, None, None


class SlotOp(SlotOwner, torch.nn.Module):
    """An op with one slot."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.tensors = tensors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _HandOver.apply(x, self, self.tensors)  # type: ignore[no-untyped-call]
        return y


class Layer(torch.nn.Module):
    """Some slots, of ops or of regions."""

    def __init__(self, slots: list[tuple[torch.Tensor, ...]], *, regions: bool) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1, device=slots[0][0].device))
        self.slots = slots
        self.ops = None if regions else torch.nn.ModuleList([SlotOp(tensors) for tensors in slots])
        self.session: OffloadSession | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ops is not None:
            for op in self.ops:
                x = op(x)
            return x
        for number, tensors in enumerate(self.slots):
            with contextlib.nullcontext() if self.session is None else self.session.region(str(number)):
                x = _Save.apply(x, *tensors)  # type: ignore[no-untyped-call]
        return x


class WholeLayer(torch.nn.Module):
    """What a transformer layer with experts saves, and no more: 17 tensors in six regions and two ops' slots."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()

        def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        heads, tokens, width = 8, 512, 1024
        query, key, value = empty(1, tokens, 3 * width).view(1, tokens, heads, -1).transpose(1, 2).chunk(3, -1)
        core = empty(1, heads, tokens, width // heads)
        normed = empty(tokens, width)
        self.saves = {
            "norm": (empty(tokens, width), empty(tokens, dtype=torch.float32), empty(tokens, dtype=torch.float32)),
            "qkv": (empty(tokens, width),),
            "core": (query, key, value, core, empty(1, heads, tokens, dtype=torch.float32)),
            "projection": (core.view(tokens, width),),
            "second norm": (normed, empty(tokens, dtype=torch.float32), empty(tokens, dtype=torch.float32)),
            "router": (normed, empty(tokens, 64, dtype=torch.float32)),
        }
        self.ops = torch.nn.ModuleList([SlotOp((empty(2 * tokens, columns),)) for columns in (width, width // 2)])
        self.experts = torch.nn.ParameterList([empty(8) for _ in range(2 * 64)])
        self.session: OffloadSession | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, tensors in self.saves.items():
            with contextlib.nullcontext() if self.session is None else self.session.region(name):
                x = _Save.apply(x, *tensors)  # type: ignore[no-untyped-call]
        for op in self.ops:
            x = op(x)
        return x


class FusedMLP(torch.nn.Module):
    """A small grouped MLP of 64 experts, which runs fused: two slots."""

    TOKENS, WIDTH = 512, 64

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
        linears = [ops.GroupedLinear(TENSORS, self.WIDTH, self.WIDTH, **options) for _ in range(2)]
        self.mlp = te.ops.Sequential(linears[0], ops.ScaledSReLU(), linears[1])
        self.sizes = torch.full((TENSORS,), self.TOKENS // TENSORS, device=device)
        self.scales = torch.ones(self.TOKENS, device=device)
        self.session: OffloadSession | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(x, self.sizes, self.scales, self.sizes)
        return y


def run(
    layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, session: OffloadSession | None
) -> float:
    """Microseconds of the host for one forward and backward of a layer."""
    start = time.perf_counter()
    y = x
    for layer in layers:
        y = layer(y)
    middle = time.perf_counter()
    _sync(x.device)
    if session is not None:
        assert session._engine is not None
        session._engine.mover.settle()  # as the next layer's forward would
    again = time.perf_counter()
    y.backward(torch.ones_like(y))
    return 1e6 * (time.perf_counter() - again + middle - start) / len(layers)


def slots_of(
    device: torch.device,
    slots: int,
    count: int,
    nbytes: int,
    *,
    regions: bool,
    spacers: list[torch.Tensor] | None = None,
) -> list[Any]:
    """Tensors of the slots of a layer: parts of one buffer, of two sizes by turns, or a buffer each.

    Args:
        spacers: filled with what lies between any two buffers, as large as they are, to be held as long; ``None``: they lie
            where the allocator puts them, mostly one behind the other.
    """

    def empty(nbytes: int) -> torch.Tensor:
        if spacers is not None:
            spacers.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    if regions:
        return [tuple(empty(nbytes) for _ in range(count)) for _ in range(slots)]
    less = nbytes // 2 if count > 1 else 0  # no two neighbours are of one size, as no two experts get as many tokens
    sizes = [nbytes - less if number % 2 else nbytes + less for number in range(count)]
    return [empty(nbytes * count).split(sizes) for _ in range(slots)]


class Case(Protocol):
    """Some layers, with an engine that offloads what they save and without."""

    def added(self) -> float:
        """Microseconds that the engine adds to a layer, in one round."""

    def close(self) -> None:
        """Check that bytes moved, if they were to, and end."""


class SessionCase:
    """Some layers and their session.

    Args:
        layers: which. device: theirs. min_bytes: of the session: 0, or more than they save.
        spacers: held as long. x: the first one's input.
    """

    def __init__(
        self,
        layers: Sequence[Layer | WholeLayer | FusedMLP],
        device: torch.device,
        min_bytes: int,
        spacers: list[torch.Tensor] | None = None,
        x: torch.Tensor | None = None,
    ) -> None:
        self._spacers = spacers
        self._layers = layers
        self._x = torch.zeros(1, device=device, requires_grad=True) if x is None else x
        self._goes = min_bytes == 0
        self.without = 0.0  # in the last round
        self.session = OffloadSession(self._layers, min_bytes=min_bytes, max_in_flight="16GiB")

    @classmethod
    def of_slots(
        cls,
        device: torch.device,
        slots: int,
        count: int,
        nbytes: int,
        min_bytes: int,
        *,
        regions: bool,
        apart: bool = False,
    ) -> SessionCase:
        """Layers with so many slots of ``count`` tensors."""
        spacers: list[torch.Tensor] | None = [] if apart else None
        layers = [
            Layer(slots_of(device, slots, count, nbytes, regions=regions, spacers=spacers), regions=regions)
            for _ in range(LAYERS)
        ]
        return cls(layers, device, min_bytes, spacers)

    def added(self) -> float:
        """See `Case.added`."""
        self._let(None)
        without = self.without = run(self._layers, self._x, None)
        self._let(self.session)
        with self.session.step():
            with_session = run(self._layers, self._x, self.session)
        self._let(None)
        return with_session - without

    def _let(self, session: OffloadSession | None) -> None:
        for layer in self._layers:
            layer.session = session
            layer.zero_grad()  # else a second backward adds, which takes the host longer
        _sync(self._x.device)

    def close(self) -> None:
        """See `Case.close`."""
        record = self.session.records[-1]
        assert record.bytes_out == record.bytes_back
        assert (record.bytes_back > 0) == self._goes
        self.session.close()


class ContextCase:
    """The same in Transformer Engine's context, which takes all layers but one more."""

    def __init__(self, slots: int, count: int, nbytes: int) -> None:
        self._device = torch.device("cuda")
        self._spacers: list[torch.Tensor] = []
        self._layers = [
            Layer(slots_of(self._device, slots, count, nbytes, regions=True, spacers=self._spacers), regions=True)
            for _ in range(LAYERS + 1)
        ]
        self._x = torch.zeros(1, device=self._device, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it advises against all layers but one, for the sake of overlap
            self._context, self._sync = te.get_cpu_offload_context(
                enabled=True, num_layers=LAYERS, model_layers=LAYERS + 1, retain_pinned_cpu_buffers=True
            )
        self._mebibytes = LAYERS * slots * count * nbytes / 2**20

    def added(self) -> float:
        """See `Case.added`."""
        _sync(self._device)
        without = run(self._layers, self._x, None)
        _sync(self._device)
        inside = [self._inside(layer) for layer in self._layers]
        return (run(inside, self._x, None) - without) * len(inside) / LAYERS

    def _inside(self, layer: Layer) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            with self._context:
                y = layer(x)
            result: torch.Tensor = self._sync(y)
            return result

        return forward

    def close(self) -> None:
        """See `Case.close`."""
        assert self._context.offload_synchronizer.get_offloaded_total_size_mb() == self._mebibytes


def measure(device: torch.device, nbytes: int, rounds: int, min_bytes: int, *, regions: bool) -> dict[str, float]:
    """Microseconds that a session adds: by slot, by layer, and by further tensor of a slot."""
    sizes = {count: 2048 if regions else nbytes // count for count in (1, TENSORS)}
    shapes = ((1, 1), (4, 1), (1, TENSORS))
    cases = [
        SessionCase.of_slots(device, slots, count, sizes[count], min_bytes, regions=regions) for slots, count in shapes
    ]
    return medians([[*cases, cases[0]]], rounds)[0]


def beside_transformer_engine(nbytes: int, rounds: int) -> list[dict[str, float]]:
    """The same for regions of a session, and for Transformer Engine's context around the same layers. A slot has
    ``nbytes`` bytes, and each further tensor as many as the context needs to take it.
    """
    shapes = ((1, 1, max(nbytes, SMALLEST)), (4, 1, max(nbytes, SMALLEST)), (1, TENSORS, SMALLEST), (1, 1, SMALLEST))
    ours = [SessionCase.of_slots(torch.device("cuda"), *shape, 0, regions=True, apart=True) for shape in shapes]
    return medians([ours, [ContextCase(*shape) for shape in shapes]], rounds)


def medians(ways: Sequence[Sequence[Case]], rounds: int) -> list[dict[str, float]]:
    """Microseconds that engines add: by slot, by layer, and by further tensor of a slot.

    Args:
        ways: for each engine the cases of one slot of one tensor, of four of one, of one of `TENSORS`, and of one of one as
            large as each of those. rounds: turns of each case.
    """
    cases = list(dict.fromkeys(case for way in ways for case in way))
    gc.collect()
    gc.disable()
    found = [{case: case.added() for case in cases} for _ in range(rounds)][4:]
    gc.enable()
    for case in cases:
        case.close()
    return [_by_part(*([times[case] for times in found] for case in way)) for way in ways]


def _by_part(one: list[float], four: list[float], many: list[float], few: list[float]) -> dict[str, float]:
    each = statistics.median((more - less) / 3 for less, more in zip(one, four, strict=True))
    return {
        "us_per_slot": each,
        "us_per_layer": statistics.median(one) - each,
        "us_per_further_tensor": statistics.median(
            (more - less) / (TENSORS - 1) for less, more in zip(few, many, strict=True)
        ),
    }


def whole_layer(device: torch.device, rounds: int) -> float:
    """Microseconds that a session adds to a `WholeLayer`."""
    case = SessionCase([WholeLayer(device) for _ in range(LAYERS)], device, 0)
    gc.collect()
    gc.disable()
    times = [case.added() for _ in range(rounds)][4:]
    gc.enable()
    case.close()
    return statistics.median(times)


def fused_mlp(device: torch.device, rounds: int) -> tuple[float, float]:
    """Microseconds that a session adds to a `FusedMLP`, and those of one without."""
    x = torch.randn(FusedMLP.TOKENS, FusedMLP.WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    layers = [FusedMLP(device) for _ in range(LAYERS)]
    case = SessionCase(layers, device, 0, x=x)
    case.added()  # kernels are compiled
    gc.collect()
    gc.disable()
    times = []
    for _ in range(rounds):
        times.append((case.added(), case.without))
    gc.enable()
    case.close()
    assert all(fusion.fused and not fusion.handed_over for layer in layers for fusion in fusions_in(layer))
    added, without = zip(*times[4:], strict=True)
    return statistics.median(added), statistics.median(without)


def bare_calls(device: torch.device, nbytes: int, rounds: int) -> float:
    """Microseconds of the host for one tensor out and back by torch's own calls, and nothing around them."""
    tensors = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(LAYERS)]
    pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(LAYERS)]
    events = [[torch.cuda.Event() for _ in range(3)] for _ in range(LAYERS)]
    compute, out, back = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    times = []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        _sync(device)
        start = time.perf_counter()
        with torch.cuda.stream(out):
            for tensor, host, (ready, left, _) in zip(tensors, pinned, events, strict=True):
                ready.record(compute)
                out.wait_event(ready)
                host.copy_(tensor, non_blocking=True)
                left.record(out)
        targets = [torch.empty_like(tensor) for tensor in tensors]
        with torch.cuda.stream(back):
            for target, host, (_, left, there) in zip(targets, pinned, events, strict=True):
                back.wait_event(left)
                target.copy_(host, non_blocking=True)
                there.record(back)
                compute.wait_event(there)
        times.append(1e6 * (time.perf_counter() - start) / LAYERS)
        _sync(device)
        del targets
    gc.enable()
    return statistics.median(times[4:])


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nbytes", type=int, default=131072, help="of each slot of an op")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--one-thread", action="store_true", help="autograd works in the calling thread")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    torch.autograd.set_multithreading_enabled(not arguments.one_thread)
    device = torch.device(arguments.device)
    if device.type != "cuda":
        os.environ.setdefault(hopper.SWITCH, "reference")
    place = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    rows = []
    for regions in (False, True):
        for fate, min_bytes in (("offloaded", 0), ("kept, too small", 1 << 40)):
            row: dict[str, Any] = {"slot": "region" if regions else "op", "fate": fate}
            row |= measure(device, arguments.nbytes, arguments.rounds, min_bytes, regions=regions)
            rows.append(row)
    if device.type == "cuda":
        names = ("region, {} KiB, tensors apart", "Transformer Engine's context, {} KiB")
        beside = beside_transformer_engine(arguments.nbytes, arguments.rounds)
        for name, row in zip(names, beside, strict=True):
            kibibytes = max(arguments.nbytes, SMALLEST) >> 10
            rows.append({"slot": name.format(kibibytes), "fate": "offloaded", **row})
    whole = whole_layer(device, arguments.rounds)
    fused, unattended = fused_mlp(device, arguments.rounds)
    bare = bare_calls(device, arguments.nbytes, arguments.rounds) if device.type == "cuda" else None
    print(f"Host time that a session adds, {place}, torch {torch.__version__}; us, forward and backward together\n")
    print("| slots | fate | a slot of one tensor | each further tensor | a layer, beside its slots |")
    print("|---|---|---|---|---|")
    for row in rows:
        cells = [f"{row[name]:.1f}" for name in ("us_per_slot", "us_per_further_tensor", "us_per_layer")]
        print(f"| {row['slot']} | {row['fate']} | {' | '.join(cells)} |")
    print(f"| a whole layer: 6 regions, 2 ops, 17 tensors, 128 parameters | offloaded | | | {whole:.1f} |")
    print(f"| a fused grouped MLP: 2 ops' slots ({unattended:.0f} without a session) | offloaded | | | {fused:.1f} |")
    if bare is not None:
        print(f"| torch's calls alone | a copy out and back | {bare:.1f} | | |")
    if arguments.json:
        result = {"schema": "3.4", "place": place, "rows": rows, "whole_layer_us": whole, "bare_us": bare}
        result |= {"one_thread": arguments.one_thread, "fused_mlp_us": fused, "fused_mlp_without_us": unattended}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
