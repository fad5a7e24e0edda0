"""What the benchmarks run: grouped MLPs with residuals, and the ways to offload them.

In: a shape. Out: variants whose `step` leaves gradients. Keeps true: every variant has the same weights, inputs and
`main_grad` buffers. Does not: time.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import cpu_offload

import te_offload
from te_offload import OffloadSession, Plan, PlannedSlot, ops
from te_offload.fused import hopper

DEVICE = "cuda"
ASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda numbers: numbers.tolist(),
    "numbers_on_host": te_offload.numbers_on_host,
}


@dataclass(frozen=True)
class Shape:
    """A stack of grouped MLPs: layers, experts, hidden and ffn width, tokens; bf16 or FP8 current scaling; squared ReLU, or
    SwiGLU if gated; how each layer asks the GPU for its split sizes first, one of `ASKS`, as token dispatchers without a
    capacity do, if it does; whether our ops run fused.
    """

    layers: int
    experts: int
    hidden: int
    ffn: int
    tokens: int
    fp8: bool
    gated: bool = False
    asks: str | None = None
    fused: bool = False

    @property
    def title(self) -> str:
        """The shape in a line."""
        form = "FP8 current scaling" if self.fp8 else "bf16"
        size = f"hidden {self.hidden}, ffn {self.ffn}, {self.tokens} tokens"
        rest = (", SwiGLU" if self.gated else "") + (", our ops fused" if self.fused else "")
        if self.asks:
            rest += f", split sizes asked for before each layer ({self.asks})"
        return f"{self.layers} layers of {self.experts} experts, {size}, {form}{rest}"


Wrap = Callable[[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


class Again(torch.nn.Module):
    """A layer that a checkpoint computes again in the backward: of what it saves its input alone is there until then."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.mlp, x, *rest, use_reentrant=False, preserve_rng_state=False)
        return y


class Stack(torch.nn.Module):
    """Grouped MLPs with residuals, one behind the other; the first ``again`` of them are computed again by checkpoints."""

    def __init__(
        self,
        shape: Shape,
        *,
        keep_act: bool,
        plain: bool,
        keep_weights: bool = True,
        again: int = 0,
        fc1_again: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        room: Any = te.ops if plain else ops
        linear, wide = room.GroupedLinear, 2 * shape.ffn if shape.gated else shape.ffn
        activation = room.ScaledSwiGLU if shape.gated else room.ScaledSReLU
        keep = {} if plain else {"no_offload_activation": keep_act, "recompute_act_input": fc1_again}
        size: dict[str, Any] = {
            "bias": False,
            "device": DEVICE,
            "dtype": torch.bfloat16,
            "accumulate_into_main_grad": True,
        }
        if not keep_weights:
            size["keep_quantized_weight"] = False
        mlps = [
            te.ops.Sequential(
                linear(shape.experts, shape.hidden, wide, **size),
                activation(**keep),
                linear(shape.experts, shape.ffn, shape.hidden, **size),
            )
            for _ in range(shape.layers)
        ]
        self.layers = torch.nn.ModuleList([*map(Again, mlps[:again]), *mlps[again:]])
        self._ask = None if shape.asks is None else ASKS[shape.asks]
        self.wrap: Wrap = lambda layer, run, x: run(x)
        self.border: Callable[[], None] | None = None  # called after each layer's forward

    def share(self, first: Stack | None) -> None:
        """Use the weights and `main_grad` buffers of the first stack, so that many variants fit on one card."""
        for parameter, other in zip(self.parameters(), (first or self).parameters(), strict=True):
            if first is None:
                parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)  # type: ignore[attr-defined]
            else:
                parameter.data, parameter.main_grad = other.data, other.main_grad  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, splits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        x = x.clone()  # memory of the step, as what an embedding or attention computes
        for layer in self.layers:
            if self._ask is not None:
                self._ask(splits)
            x = x + self._bordered(
                self.wrap(layer, lambda x, layer=layer: layer(x, splits, scales, splits), x)  # type: ignore[misc]
            )
        return x

    def _bordered(self, y: torch.Tensor) -> torch.Tensor:
        if self.border is not None:
            self.border()
        return y


@dataclass(frozen=True)
class Way:
    """One way to run the step.

    Attributes:
        name: in the table.
        engine: ``None``, ``"te_offload"``, ``"te"`` (Transformer Engine's context), ``"te-v1"`` (the one that it has under
            ``NVTE_CPU_OFFLOAD_V1=1``; the variable is set while this way runs), ``"drop-in"`` (ours of its signature),
            ``"megatron"`` (Megatron-core's fine-grained manager, a group a layer; it keeps the last one by itself).
        going: layers whose slots go, from the first one.
        again: checkpoints compute those layers again; with an engine their inputs go, which is all that is saved of them.
        keep_act: whether `act_input` stays. fc1_again: `recompute_act_input` of our activations. keep_weights:
            `keep_quantized_weight` of our linears. plain: plain `te.ops`.
        retain: retain_pinned_cpu_buffers.
        fraction: share of the bytes for a plan to choose.
        max_in_flight, min_bytes: of the session.
    """

    name: str
    engine: str | None = None
    going: int = 0
    again: bool = False
    fc1_again: bool = False
    keep_act: bool = False
    keep_weights: bool = True
    plain: bool = False
    retain: bool = False
    fraction: float | None = None
    max_in_flight: str | None = None
    min_bytes: str = "1MiB"


@contextlib.contextmanager
def _v1(on: bool) -> Iterator[None]:
    """As if ``NVTE_CPU_OFFLOAD_V1=1`` had been set, so that all ways run in one process."""
    before = cpu_offload.NVTE_CPU_OFFLOAD_V1
    cpu_offload.NVTE_CPU_OFFLOAD_V1 = before or on
    try:
        yield
    finally:
        cpu_offload.NVTE_CPU_OFFLOAD_V1 = before


class Variant:
    """A way, ready to run. Our ops do in its first step what the one made last was to do: run fused, or as Transformer
    Engine's.
    """

    def __init__(self, way: Way, shape: Shape, inputs: tuple[torch.Tensor, ...], first: Stack | None) -> None:
        os.environ[hopper.SWITCH] = ("1" if DEVICE == "cuda" else "reference") if shape.fused else "0"
        self.way = way
        self.shape = shape
        self.inputs = inputs
        self.again = way.going if way.again else 0  # so many first layers are computed again
        self.model = Stack(
            shape,
            keep_act=way.keep_act,
            plain=way.plain,
            keep_weights=way.keep_weights,
            again=self.again,
            fc1_again=way.fc1_again,
        )
        self.model.share(first)
        self.session: OffloadSession | None = None
        self.megatron: Any = None
        self.steps = 0
        if way.engine == "te_offload":
            plan = None
            if way.going < shape.layers and way.fraction is None:
                slots = ("0.fc1_input", "1.act_input", "2.fc2_input")[: 2 if shape.fused else 3]
                plan = Plan(
                    tuple(
                        PlannedSlot(f"layer{layer}/{slot}", 0, 0, layer < way.going)
                        for layer in range(shape.layers)
                        for slot in (("other",) if way.again and layer < way.going else slots)
                    )
                )
            self.session = OffloadSession(
                self.model.layers,
                plan=plan,
                fraction=way.fraction,
                max_in_flight=way.max_in_flight,
                min_bytes=way.min_bytes,
            )
        elif way.engine == "megatron":
            self._use_megatron(way)
        elif way.engine is not None:
            self._use_context(way)

    def _use_context(self, way: Way) -> None:
        get = te_offload.get_cpu_offload_context if way.engine == "drop-in" else te.get_cpu_offload_context
        with _v1(way.engine == "te-v1"):
            context, sync = get(
                enabled=True,
                num_layers=way.going,
                model_layers=self.shape.layers,
                offload_activations=True,
                offload_weights=False,
                retain_pinned_cpu_buffers=way.retain,
            )

        def wrap(layer: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            with context:
                y = run(x)
            result: torch.Tensor = sync(y)
            return result

        self.model.wrap = wrap

    def _use_megatron(self, way: Way) -> None:
        """As Megatron-core 0.16's layers use it; weights are marked to stay. There is one manager, so one way may use it.

        Raises:
            ImportError: Megatron-core is not installed.
        """
        module = importlib.import_module("megatron.core.pipeline_parallel.fine_grained_activation_offload")
        megatron = self.megatron = module.FineGrainedActivationOffloadingInterface
        if not torch.distributed.is_initialized():  # its table of bytes gathers from all ranks
            torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29531", rank=0, world_size=1)
        name = "core_attn"  # groups of experts do without its pinned pool, and are slower
        for parameter in self.model.parameters():
            megatron.mark_not_offloadable(parameter)

        def wrap(layer: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            with megatron(True, x, name) as entered:
                y = run(entered)
            result: torch.Tensor = megatron.group_commit(y, name=name, forced_released_tensors=[])
            return result

        self.model.wrap = wrap

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        recipe = (
            te.autocast(enabled=True, recipe=Float8CurrentScaling()) if self.shape.fp8 else contextlib.nullcontext()
        )
        if self.megatron is not None:
            self.megatron.init_chunk_handler(1, 0, 1 << 20)
        step = self.session.step() if self.session else _v1(self.way.engine == "te-v1")
        with step, recipe:
            yield
        if self.megatron is not None:
            self.megatron.reset()

    def step(self) -> None:
        self.inputs[0].grad = None
        x, splits, scales, dy = self.inputs
        with self.around():
            self.model(x, splits, scales).backward(dy)
        self.steps += 1

    def was_timed(self) -> bool:
        """Whether the session took times in the last step, which the device has passed."""
        assert self.session is not None
        record = self.session.timed_record
        return record is not None and record.index == self.steps - 1

    def peak_bytes(self) -> list[int]:
        """Torch's peaks over one step, less what was there before it: in each layer's forward, from the last forward to the
        first op's backward, and in each op's backward (a fused layer's is one).
        """
        peaks: list[int] = []
        self.inputs[0].grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()

        def border() -> None:
            peaks.append(torch.cuda.max_memory_allocated() - before)
            torch.cuda.reset_peak_memory_stats()

        def bordered(backward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                border()
                return backward(*args, **kwargs)

            return run

        torch.cuda.reset_peak_memory_stats()
        self.model.border = border
        fused = self.shape.fused and not self.way.plain
        layers: list[Any] = [layer.mlp if isinstance(layer, Again) else layer for layer in self.model.layers]
        ops: list[Any] = [hopper.HopperGroupedMLP] if fused else [op for layer in layers for op in layer]
        with contextlib.ExitStack() as patches:
            for op in ops:
                patches.enter_context(mock.patch.object(op, "fuser_backward", bordered(op.fuser_backward)))
            self.step()
        self.model.border = None
        border()
        torch.cuda.synchronize()
        return peaks

    def gradients(self) -> list[torch.Tensor]:
        """Every gradient of one step, from zeroed buffers."""
        grads = [parameter.main_grad for parameter in self.model.parameters()]  # type: ignore[attr-defined]
        for grad in grads:
            grad.zero_()
        self.step()
        assert self.inputs[0].grad is not None
        return [*grads, self.inputs[0].grad]


def split_sizes(shape: Shape) -> torch.Tensor:
    """Tokens of each expert, int64, on the CPU. In FP8 multiples of 16: the GEMMs of cuBLAS that Transformer Engine calls
    there for few experts take no others.
    """
    grain = 16 if shape.fp8 else 1
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(shape.experts, generator=generator) + 0.5
    splits = (shares / shares.sum() * shape.tokens).long() // grain * grain
    splits[-1] += shape.tokens - splits.sum()
    return splits


def make_inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Input, split sizes, router scales, gradient of the output; the same for every variant."""
    splits = split_sizes(shape)
    rows = (shape.tokens, shape.hidden)
    torch.manual_seed(0)
    return (
        torch.randn(rows, device=DEVICE, dtype=torch.bfloat16).requires_grad_(),
        splits.to(DEVICE),
        torch.rand(shape.tokens, device=DEVICE, dtype=torch.bfloat16),
        torch.randn(rows, device=DEVICE, dtype=torch.bfloat16),
    )
