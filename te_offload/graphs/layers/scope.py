"""A layer whose forward is replaced: warm-up, capture, replay, and when it runs as it was.

In: calls of the layer. Out: what the layer returns, with the layer's gradients. Keeps true: a call that a graph cannot take
runs eagerly and is counted with its reason, or is an error, as asked; a graph that was not captured whole is never
replayed. Does not: know memory.
"""

from __future__ import annotations

import collections
import functools
import gc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from te_offload.errors import CaptureError, InputMismatchError, RowOverflowError
from te_offload.graphs.backend import CudaBackend
from te_offload.graphs.collectives import check_process_groups
from te_offload.graphs.layers.buffers import strides_of
from te_offload.graphs.layers.ground import Ground
from te_offload.graphs.layers.hooks import Hooks
from te_offload.graphs.layers.pair import Flight, GraphPair
from te_offload.graphs.reasons import explained, waits_for_another_stream, without_frames
from te_offload.graphs.residents import Residents
from te_offload.graphs.signature import Kind, Signature
from te_offload.graphs.states import CaptureState, change
from te_offload.offload.allocator import check_captures
from te_offload.offload.attachment import is_attached
from te_offload.ops import row_check, te_adapter
from te_offload.slots import SlotObserver

MISMATCHES = ("raise", "recapture", "eager")
HOOKS = ("eager", "ignore")
_TRIES = 3  # of a capture that an autograd graph of an earlier step forbids: the next step's takes its place
_FORBIDDEN = "its capture would have waited for another stream, as for an older autograd graph's, and is tried again"


class LayerScope:
    """Stands in for a module's ``forward``.

    Args:
        name: of the layer, for messages. module: the layer. ground: memory and stream.
        warmup: eager runs before the capture. on_mismatch, on_hooks: see `capture_layers`.

    Attributes:
        reason: why it was not captured, if it could not be. replays: of the forward.
        eager: runs after the warm-up that no graph took, by reason. recaptures: why it was captured anew, each time.
        overflows: see `Capture.overflows`. ignored: modules inside of the layer whose hooks no replay calls, as asked.
    """

    def __init__(
        self, name: str, module: torch.nn.Module, ground: Ground, warmup: int, on_mismatch: str, on_hooks: str = "eager"
    ) -> None:
        self.name = name
        self.module = module
        self.reason: BaseException | None = None
        self.replays = 0
        self.eager: collections.Counter[str] = collections.Counter()
        self.recaptures: list[str] = []
        self.overflows: dict[str, int] = {}
        self.ignored: list[str] = []
        self._ground = ground
        self._warmup = warmup
        self._on_mismatch = on_mismatch
        self._on_hooks = on_hooks
        self._state = CaptureState.WARMING_UP
        self._runs = 0
        self._forbidden = 0  # captures in a row
        self._copied = 0  # of pairs that are gone
        self._pair: GraphPair | None = None
        self._signature: Signature | None = None
        self._flags: tuple[Any, ...] = ()
        self._layouts: dict[int, tuple[int, ...]] = {}  # of gradients of the warm-up's outputs
        self._modes: list[tuple[str, torch.nn.Module, bool]] = []
        self._hooks = Hooks(module)
        self._residents = Residents([module], grads=False)
        self._watched: dict[int, Any] = {}  # handles of hooks of parameters
        self._had = module.__dict__.get("forward")
        self._function = module.forward
        module.forward = self

    @property
    def state(self) -> CaptureState:
        """What the next call does."""
        return self._state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer.

        Raises:
            InputMismatchError: inputs of another kind, or parameters that moved.
            RowOverflowError: split sizes in an earlier replay asked for more rows than there are.
        """
        if self._ground.in_capture():
            return self._function(*args, **kwargs)  # a part of that capture
        if self._state is CaptureState.WARMING_UP and self._runs < self._warmup:
            return self._warm_up(args, kwargs)
        if self._state is CaptureState.EAGER:
            return self._function(*args, **kwargs)
        why = _why_eagerly(quantized=self._ground.quantized)
        if self._state is not CaptureState.CAPTURED:
            self._hooks.look()
        if why is None and self._on_hooks == "eager":
            uncalled = self._hooks.uncalled()
            if uncalled:
                why = f"modules inside of it have hooks, which no replay calls: {', '.join(uncalled)}"
        if why is not None:
            return self._eagerly(why, args, kwargs)
        self._hooks.wait_for_parameters()
        leaves = pytree.tree_leaves((args, kwargs))
        self.look_at_rows()
        if self._state is CaptureState.CAPTURED:
            difference = self._difference(args, kwargs, leaves)
            if difference is not None:
                if self._on_mismatch == "eager":
                    return self._eagerly(difference, args, kwargs)
                if self._on_mismatch == "recapture" and self._pair is not None and self._pair.awaits_backward():
                    return self._eagerly("a backward of other inputs is still to come", args, kwargs)
                self._start_over(difference)
                return self._warm_up(args, kwargs)
        else:
            self._record(args, kwargs, leaves)
        if self._pair is None:
            if self._state is CaptureState.WARMING_UP:
                return self._eagerly(_FORBIDDEN, args, kwargs)
            return self._function(*args, **kwargs)
        busy = self._pair.busy(leaves)
        if busy is not None:
            return self._eagerly(busy, args, kwargs)
        self.replays += 1
        self._residents.refresh()
        return self._replay(self._pair, leaves)

    def look_at_rows(self) -> None:
        """See `Capture.check_rows`; without waiting."""
        found = self._pair.rows.overflows() if self._pair is not None else {}
        if found:
            found = {f"{self.name}, {place}": excess for place, excess in found.items()}
            for place, excess in found.items():
                self.overflows[place] = max(excess, self.overflows.get(place, 0))
            if self._ground.raises_overflow:
                raise row_check.error(found)

    def bytes(self) -> dict[str, int]:
        """What its graphs have addresses for; see `GraphPair.bytes`."""
        return {} if self._pair is None else self._pair.bytes()

    @property
    def copied(self) -> int:
        """Replayed backwards whose gradients came in with other strides than in the warm-up, and were copied."""
        return self._copied + (0 if self._pair is None else self._pair.copied)

    def close(self) -> None:
        """The module's own forward again. The device must be idle. Idempotent."""
        if self._state is CaptureState.CLOSED:
            return
        self._state = change(self._state, CaptureState.CLOSED)
        if self._had is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self._had
        self._drop()

    # Steps -----------------------------------------------------------------------------------------------------------

    def _warm_up(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self._runs += 1
            self._watch_readers()
        backend = CudaBackend(self._ground.device, None, self._ground.stream)
        found = backend.warm_up(lambda: self._function(*args, **kwargs))
        for number, one in enumerate(pytree.tree_leaves(found)):
            if isinstance(one, torch.Tensor) and one.requires_grad and not one.is_leaf:
                one.register_hook(functools.partial(_note_layout, self._layouts, number))
        return found

    def _watch_readers(self) -> None:
        """Have backwards tell on which streams gradients are accumulated, for a replay has to wait for those: all until the
        capture and one after it, since under a pipeline's schedule the warm-up's own may come after it too.
        """
        if not self._watched:
            parameters = [one for one in self.module.parameters() if one.requires_grad]
            self._watched = {
                id(one): one.register_hook(functools.partial(self._note_reader, id(one))) for one in parameters
            }

    def _note_reader(self, number: int, _: torch.Tensor) -> None:
        self._ground.note_reader()
        if self._state is not CaptureState.WARMING_UP and number in self._watched:
            self._watched.pop(number).remove()

    def _watch_no_readers(self) -> None:
        for handle in self._watched.values():
            handle.remove()
        self._watched = {}

    def _eagerly(self, why: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.eager[why] += 1
        return self._function(*args, **kwargs)

    def _difference(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> str | None:
        assert self._signature is not None and self._pair is not None
        difference, _ = self._signature.difference(args, kwargs)
        if difference is not None:
            return difference
        flags = _flags(leaves)
        if flags != self._flags:
            return f"autocast, the recipe, and which inputs need gradients, were {self._flags} and are {flags}"
        for title, part, trains in self._modes:
            if part.training is not trains:
                return f"{title or self.name}.training was {trains} and is {part.training}"
        if self._on_mismatch == "recapture" and self._pair.has_lost_an_input():
            return "an input was the output of a graph that is gone"
        return self._residents.moved()

    def _record(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> None:
        self._state = change(self._state, CaptureState.CAPTURING)
        pair: GraphPair | None = None
        try:
            self._residents.look()
            why = self._residents.gathered() or te_adapter.reason_against_backward_graphs(self.module)
            why = why or session_inside(self.module)
            if why is not None:
                raise CaptureError(f"{why}.")
            check_process_groups()
            check_captures(self._ground.device)
            signature = Signature.of(args, kwargs, (), self._ground.device)
            moving = [number for number, leaf in enumerate(signature.leaves) if leaf.kind is Kind.MOVES]
            structure = pytree.tree_structure((tuple(args), dict(kwargs)))
            for times in (1, 2):
                pair = GraphPair(
                    self._ground,
                    self.name,
                    self.module,
                    self._function,
                    structure,
                    leaves,
                    moving,
                    self._layouts,
                    self._residents.begin_again,
                )
                try:
                    pair.record(times)
                    break
                except torch.OutOfMemoryError as error:  # it asked for other segments than its rehearsal, perhaps
                    if times == 2:
                        raise
                    _let_go(error)
                    gone, pair = pair, None
                    gone.abandon()
        except BaseException as error:
            self._residents.restore()
            _let_go(error)
            if pair is not None:
                pair.abandon()
            if not isinstance(error, Exception):
                self._state = change(self._state, CaptureState.WARMING_UP)
                raise
            if waits_for_another_stream(error):
                self._forbidden += 1
                if self._forbidden < _TRIES:
                    self._runs = 0
                    self._state = change(self._state, CaptureState.WARMING_UP)
                    return
                error = explained(error)
            self.reason = error
            self._state = change(self._state, CaptureState.EAGER)
            return
        self._forbidden = 0
        self._ground.trim()
        self._signature = signature.placed(leaves)
        self._flags = _flags(leaves)
        self._modes = [(title, part, part.training) for title, part in self.module.named_modules()]
        self.ignored = self._hooks.uncalled()
        self._residents.note()
        self._pair = pair
        self._state = change(self._state, CaptureState.CAPTURED)

    def _start_over(self, difference: str) -> None:
        if self._on_mismatch == "raise":
            raise InputMismatchError(
                f"{self.name}: its graphs were captured for other inputs: {difference}. Give it what they were captured "
                'for, or capture with on_mismatch="recapture" or "eager".'
            )
        self.recaptures.append(difference)
        self._state = change(self._state, CaptureState.WARMING_UP)
        self._runs = 0
        self._ground.synchronize()
        self._drop()

    def _drop(self) -> None:
        self._watch_no_readers()
        pair = self._pair
        if pair is not None:
            pair.close()
            self._copied += pair.copied
            try:
                self.look_at_rows()  # of the last replay
            except RowOverflowError as error:
                warnings.warn(str(error), stacklevel=2)
        self._pair = None

    def _replay(self, pair: GraphPair, leaves: Sequence[Any]) -> Any:
        tensors = pair.differentiable(leaves)
        found = _Replay.apply(pair, self._residents, leaves, *tensors)  # type: ignore[no-untyped-call]
        return pair.results(found)


def session_inside(module: torch.nn.Module) -> str | None:
    """Why a session would see no forward of a module that is replayed; ``None`` if it would, or there is none."""
    for title, part in module.named_modules():
        if title and is_attached(part):
            return (
                f"an OffloadSession is attached to {title} inside of it, whose forward no replay calls. Attach the session "
                "to what is captured or encloses that, or capture what the session is attached to"
            )
    return None


class _Replay(torch.autograd.Function):
    """The two graphs as one node of autograd's."""

    @staticmethod
    def forward(
        ctx: Any, pair: GraphPair, residents: Residents, leaves: Sequence[Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs, flight = pair.forward(leaves)
        ctx.pair, ctx.residents, ctx.flight = pair, residents, flight
        ctx.mark_non_differentiable(*pair.constant_outputs(outputs))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pair: GraphPair = ctx.pair
        flight: Flight = ctx.flight
        residents: Residents = ctx.residents
        why = residents.moved_in_memory()
        if why is not None:
            raise InputMismatchError(
                f"{pair.name}: between a forward and its backward {why}; the backward's graph reads it where it was. Leave "
                "parameters where they are until then, or run the layer eagerly."
            )
        found = pair.backward(flight, pair.differentiable_outputs(grads))
        residents.say_added()
        return (None, None, None, *found)


def _note_layout(layouts: dict[int, tuple[int, ...]], number: int, grad: torch.Tensor) -> None:
    if grad.layout is torch.strided and strides_of(grad) == strides_of(torch.empty_like(grad, device="meta")):
        layouts[number] = grad.stride()  # there is no gap, and nothing twice
    else:
        layouts.pop(number, None)


def _let_go(error: BaseException) -> None:
    """Of what the layer made until then: it lies in the graphs' memory."""
    without_frames(error)
    gc.collect()


def _why_eagerly(*, quantized: bool) -> str | None:
    """Why no graph may take a call now; ``None`` if one may."""
    if not torch.is_grad_enabled():
        return "no gradients are asked for"
    if torch._C._current_graph_task_id() != -1:
        return "inside a backward"
    if te_adapter.saved_tensor_hook_active() and not isinstance(te_adapter.saved_tensor_hook_owner(), SlotObserver):
        return "another saved-tensor hook is active"
    if te_adapter.quantization_enabled():
        if not quantized:
            return "quantization is on, and quantized=False was asked for"
        return te_adapter.reason_against_replays(te_adapter.active_recipe())
    return None


def _flags(leaves: Sequence[Any]) -> tuple[Any, ...]:
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    needs = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor))
    return autocast, te_adapter.recipe_key(te_adapter.active_recipe()), needs
