"""`get_cpu_offload_context` with Transformer Engine's signature, on the engine of te_offload.

In: the arguments of Transformer Engine's function of that name (v2). Out: its context, its synchronization function, and
with ``manual_synchronization`` its controller. Keeps true: a loop written for Transformer Engine runs with one import
changed, and its gradients keep their bits. Does not: take on what Transformer Engine has to refuse.

Different from Transformer Engine's: all layers may be offloaded, also the last one; any number of forwards may come before
their backwards, `model_layers` need not count them; shapes may change; host memory is always kept and reused, so
`retain_pinned_cpu_buffers` has nothing to do; a layer that raises ends its round, and the next one begins with the layer
that runs next; `double_buffering` and `offload_weights` are ignored, as there.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

from te_offload.errors import ArgumentError, ConflictError, StateError
from te_offload.offload.decide import Rules
from te_offload.offload.engine import Engine, HostSettings
from te_offload.offload.record import StepRecord
from te_offload.offload.states import SlotState
from te_offload.offload.visit import LayerVisit
from te_offload.ops import te_adapter
from te_offload.slots import Reason

MIN_BYTES = 512 << 10  # Transformer Engine leaves tensors of fewer than 256 * 1024 elements; in bf16 that is this


class OffloadContext(contextlib.ContextDecorator):
    """The context around each layer. A step of the record is from the first layer of one round to that of the next round
    that begins when nothing of the steps before is left to read.

    Args:
        num_layers: of each round of ``model_layers`` forwards the first so many are offloaded.
        model_layers: forwards of a round. manual: whether the caller starts all copies. stream: for the copies, if manual.
    """

    def __init__(self, num_layers: int, model_layers: int, *, manual: bool, stream: torch.cuda.Stream | None) -> None:
        self._num_layers = model_layers if manual else num_layers
        self._model_layers = model_layers
        self._manual = manual
        self._stream = stream
        self._engine: Engine | None = None
        self._entered = 0
        self._visit: LayerVisit | None = None
        self._synced = True
        self._again = 0  # forwards that run now and are none of a round
        self.round: dict[int, LayerVisit] = {}

    def __enter__(self) -> OffloadContext:
        """A layer's forward begins. One in a backward is a checkpoint's: no round counts it, and what it saves is used at
        once.

        Raises:
            StateError: the synchronization function was not called since the layer before.
            ConflictError: another offloading context is active.
        """
        if torch._C._current_graph_task_id() != -1:
            self._again += 1
            return self
        if not self._synced or self._visit is not None:
            raise StateError(
                "The offloading context was entered again before the synchronization function was called. Call it on "
                "each layer's output, after leaving the context."
            )
        other = te_adapter.offload_context_active()
        if other is not None:
            raise ConflictError(f"{other} is active, and two engines cannot take the same saved tensors. Use one.")
        number = self._entered % self._model_layers
        if number == 0:
            self._begin_round()
        self._entered += 1
        engine = self._engine
        assert engine is not None
        forward = sum(visit.layer == f"layer{number}" for visit in engine.visits)
        self._visit = engine.open_visit(f"layer{number}", None, forward, Reason.NONE)
        self._visit.keep = Reason.NONE if number < self._num_layers else Reason.PLAN
        self.round[number] = self._visit
        self._visit.open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """The layer's forward is over, or raised."""
        if self._again:
            self._again -= 1
            return
        visit, self._visit = self._visit, None
        assert visit is not None
        if kind is not None:
            visit.abort()
            self._entered += -self._entered % self._model_layers  # the layer that runs next is a round's first one
            return
        self._synced = not torch.is_grad_enabled()
        visit.close()
        if not self._manual:
            visit.load()

    def synchronize(self, tensor: torch.Tensor) -> torch.Tensor:
        """The synchronization function: marks the end of a layer.

        Raises:
            ArgumentError: the layer's output needs no gradient, so it has no backward to offload for.
            StateError: called inside the context, or before it was entered at all.
        """
        if not tensor.requires_grad:
            raise ArgumentError(
                f"The synchronization function got a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} that "
                "requires no gradient. Leave the context out where there is no backward."
            )
        if self._visit is not None or not self._entered:
            where = "inside the offloading context" if self._visit is not None else "before the context was entered"
            raise StateError(f"The synchronization function was called {where}. Call it behind the context.")
        self._synced = True
        return tensor

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The records of the last steps that are over; this step's is not."""
        return self._engine.records() if self._engine is not None else ()

    def close(self) -> None:
        """End the step, and give back all memory. Not needed in loops written for Transformer Engine."""
        if self._engine is not None:
            self._engine.end_step()
            self._engine.close()
            self._engine = None
        self._entered = 0

    def _begin_round(self) -> None:
        if self._engine is None:
            cuda = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
            rules = Rules(enabled=True, min_bytes=MIN_BYTES)
            bound = 1 << 62 if self._manual else None  # whoever starts the copies bounds them
            self._engine = Engine(device, rules, HostSettings(), bound, growth_steps=None, stream=self._stream)
            self._engine.returns.looks_ahead = not self._manual
            self._engine.begin_step()
        elif all(cargo.state is SlotState.RELEASED for visit in self._engine.visits for cargo in visit.cargos):
            self._engine.end_step()
            self._engine.begin_step()
        self.round = {}


class ManualController:
    """Starts the copies of layers, as the controller of Transformer Engine's context does.

    Args:
        context: whose layers.
    """

    def __init__(self, context: OffloadContext) -> None:
        self._context = context

    def start_offload_layer(self, layer_id: int) -> None:
        """Start the copies out of a layer of this round.

        Raises:
            ArgumentError: the layer has not run in this round.
        """
        self._layer(layer_id).load()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Let go of the layer's device memory; the compute stream waits for its copies out.

        Raises:
            ArgumentError: the layer has not run in this round.
        """
        self._layer(layer_id).let_go()

    def start_reload_layer(self, layer_id: int) -> None:
        """Start the copies back of a layer.

        Raises:
            ArgumentError: the layer has not run in this round.
        """
        self._layer(layer_id).start_back()

    def _layer(self, layer_id: int) -> LayerVisit:
        visit = self._context.round.get(layer_id)
        if visit is None:
            raise ArgumentError(f"Layer {layer_id} has not run in this round; {sorted(self._context.round)} have.")
        return visit


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.cuda.Stream | None = None,
) -> Any:
    """As `transformer_engine.pytorch.get_cpu_offload_context`; see this module for what is different.

    Args:
        enabled: ``False`` gives contexts that do nothing.
        num_layers: of each round of ``model_layers`` forwards the first so many are offloaded. Without meaning if manual.
        model_layers: forwards of a round.
        offload_activations, offload_weights: not both ``False``; weights are never offloaded.
        double_buffering, retain_pinned_cpu_buffers: without effect.
        manual_synchronization: also return a controller, and copy nothing unless it says so.
        offload_stream: for the copies; with ``manual_synchronization`` only.

    Returns:
        the context, the synchronization function, and the controller if ``manual_synchronization`` (``None`` if disabled).

    Raises:
        ArgumentError (a ValueError): arguments that exclude each other.
    """
    idle = (
        (contextlib.nullcontext(), _unchanged, None)
        if manual_synchronization
        else (contextlib.nullcontext(), _unchanged)
    )
    if not enabled:
        return idle
    if not offload_weights and not offload_activations:
        raise ArgumentError("Offloading is enabled, but neither offload_activations nor offload_weights is set.")
    if offload_weights:
        warnings.warn(
            "offload_weights=True has no effect: weights are never offloaded.", DeprecationWarning, stacklevel=2
        )
        if not offload_activations:
            return idle
    if offload_stream is not None and not manual_synchronization:
        raise ArgumentError("offload_stream needs manual_synchronization=True.")
    layers = model_layers if num_layers is None else num_layers
    if model_layers < 1 or not 0 <= layers <= model_layers:
        raise ArgumentError(f"num_layers={num_layers} of model_layers={model_layers} cannot be.")
    te_adapter.require_supported_release()
    context = OffloadContext(layers, model_layers, manual=manual_synchronization, stream=offload_stream)
    if manual_synchronization:
        return context, context.synchronize, ManualController(context)
    return context, context.synchronize


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
