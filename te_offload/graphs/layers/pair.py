"""One layer as two graphs, its forward and its backward, whose saved tensors an offload session can take in between.

In: a function, static inputs, parameters. Out: replays, each with tensors over the graphs' memory. Keeps true: a replay
writes no byte that a living tensor covers; what the backward may read has memory until then; saved tensors are where
the graphs know them when the backward is replayed. Does not: decide when to capture, or when to fall back.

What the backward reads is what torch's allocator still holds once the forward is captured and its outputs are let go of:
slots that ops tell of, tensors that passed a hook, and the rest, which stays. All else of the forward's memory is given up
as soon as the forward is over, all of the backward's but the gradients as soon as that is. Both are captured into one pool:
the backward's gradients may lie where a saved tensor was, and where the forward works. So the forward is replayed only
while nobody holds any of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from te_offload.errors import BackwardTwiceError, CaptureError, StateError
from te_offload.graphs.backend import CudaBackend, Pool
from te_offload.graphs.layers.aliases import Aliases, aliased
from te_offload.graphs.layers.between import Between
from te_offload.graphs.layers.buffers import Buffers, strides_of
from te_offload.graphs.layers.ground import Ground
from te_offload.graphs.layers.items import Extents, Item, grouped, made, put
from te_offload.graphs.layers.pool import SegmentPool, segment_lengths
from te_offload.graphs.layers.recorder import Recorder
from te_offload.graphs.layers.run import Run, own
from te_offload.graphs.layers.space import Extent
from te_offload.graphs.layers.strays import Attributes, hides_tensors, sequence_number, stray
from te_offload.ops.row_check import RowCheck
from te_offload.slots import SlotHandle, Watch


@dataclass(eq=False)
class Flight:
    """A forward that was replayed, until its backward.

    Attributes:
        inputs: what it read. carried: memory that its backward reads. slots, packed: what a session or a hook has.
        plain: saved tensors that nobody took. kept: which differentiable inputs are leaves, whose gradients are kept.
    """

    inputs: Sequence[Any]
    kept: Sequence[int] = ()
    carried: list[torch.UntypedStorage] = field(default_factory=list)
    slots: list[tuple[tuple[Item, ...], SlotHandle]] = field(default_factory=list)
    packed: list[tuple[Item, Callable[[Any], Any], Any]] = field(default_factory=list)
    plain: list[torch.Tensor] = field(default_factory=list)
    over: bool = False


class GraphPair:
    """Forward and backward of a layer for one kind of inputs.

    Args:
        ground: memory, stream and marks. name: of the layer, for messages. module: the layer.
        function: its forward. structure, leaves: of the arguments. moving: which leaves are tensors that may lie anywhere.
        layouts: strides of the gradients that come in, by the number of the output, where they are known.
        begin: called before each run that is captured, the rehearsal too.

    Attributes:
        copied: backwards whose gradients came in with other strides, and were copied.
    """

    def __init__(
        self,
        ground: Ground,
        name: str,
        module: torch.nn.Module,
        function: Callable[..., Any],
        structure: Any,
        leaves: Sequence[Any],
        moving: Sequence[int],
        layouts: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._ground = ground
        self._module = module
        self._function = function
        self._structure = structure
        self._leaves = list(leaves)
        self._constants: list[Any] = []
        # An input that another pair's graph has just written is read where it lies; others have a place of their own.
        self.chained = {number: leaves[number].data_ptr() for number in moving if ground.wrote(leaves[number])}
        self._moving = [number for number in moving if number not in self.chained]
        own = [leaves[number] for number in self._moving]
        self._strides = [strides_of(one) for one in own]
        self._inputs = Buffers(ground, own)
        self._differentiable = [number for number in moving if leaves[number].requires_grad]
        self._segments: list[int] = []
        self._pool: SegmentPool | None = None
        self._between = Between()
        self._layouts, self._begin = layouts, begin
        self.copied = 0
        self._flights: weakref.WeakSet[Flight] = weakref.WeakSet()
        self._closed = False
        self._grads: Buffers | None = None
        self.rows = RowCheck(ground.device, most=256)

    # Capture ---------------------------------------------------------------------------------------------------------

    def record(self, times: int = 1) -> None:
        """Capture.

        Args:
            times: how often each segment that the rehearsal needed lies ready.

        Raises:
            torch.OutOfMemoryError: a segment was missing, or the GPU's memory is used up.
            CaptureError: an output lies where no replay would write it.
        """
        ground = self._ground
        rehearsal = Pool()
        run = self._run(rehearsal, grad_outputs=None)
        lengths = segment_lengths(rehearsal.handle) * times
        run.close()
        del run
        self._pool = pool = SegmentPool(ground.space, lengths, ground.stream)
        assert self._grads is not None
        inputs = self._inputs.storage()
        grads = self._grads.storage()
        try:
            run = self._run(Pool(pool.handle), grad_outputs=self._grads.tensors(grads))
            self._note(run, pool)
        finally:
            del inputs, grads
        self._forward, self._backward, self._borders = run.forward, run.backward, run.recorder.borders
        self._leaves = []
        self._structure_out = run.structure

    def _run(self, pool: Pool, grad_outputs: list[torch.Tensor] | None) -> Run:
        self._begin()
        with aliased(self._module) as aliases:
            return self._run_with(aliases, pool, grad_outputs)

    def _run_with(self, aliases: Aliases, pool: Pool, grad_outputs: list[torch.Tensor] | None) -> Run:
        """Capture both into one pool, so that the backward uses again what it has read; without ``grad_outputs`` as a
        rehearsal.
        """
        ground = self._ground
        storage = self._inputs.storage()
        leaves = list(self._leaves)
        for number, tensor in zip(self._moving, self._inputs.tensors(storage), strict=True):
            leaves[number] = tensor
        for number in self.chained:
            leaves[number] = leaves[number].detach()
        for number in self._differentiable:
            leaves[number].requires_grad_()
        recorder = Recorder(ground.transfer.border)
        elsewhere = {tensor.untyped_storage().data_ptr() for tensor in self._module.parameters()}
        elsewhere |= {tensor.untyped_storage().data_ptr() for tensor in self._module.buffers()}
        elsewhere |= {one.untyped_storage().data_ptr() for one in leaves if isinstance(one, torch.Tensor)}

        since, attributes = sequence_number(), Attributes(self._module)

        def run_forward() -> Any:
            args, kwargs = pytree.tree_unflatten(leaves, self._structure)
            with torch.enable_grad(), recorder.watching(self._module), self.rows.watching():
                result = self._function(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda one: own(one, elsewhere), result)

        try:
            recording, result = CudaBackend(ground.device, pool, ground.stream).record(run_forward, ())
        except BaseException:
            leaves.clear()  # the exception's frames keep functions, and those what they refer to
            recorder.clear()
            raise
        run = Run(recording, None, *pytree.tree_flatten(result), recorder, [])
        del result
        if grad_outputs is not None:
            self._note_outputs(run)
        outputs = [one for one in run.outputs if isinstance(one, torch.Tensor) and one.requires_grad]
        if grad_outputs is None:
            numbers = [n for n, one in enumerate(run.outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
            layouts = {place: self._layouts[number] for place, number in enumerate(numbers) if number in self._layouts}
            self._grads = Buffers(ground, outputs, layouts)
        wanted = [leaves[number] for number in self._differentiable]
        wanted += [*aliases.of(self.parameters), *self.parameters]
        why = attributes.left_behind() or stray(outputs, wanted, since)
        attributes.clear()
        if why is not None:
            run.give_up(leaves, wanted, outputs)
            raise CaptureError(f"{why}.")
        if not outputs or not wanted:
            return run
        assert self._grads is not None
        given = grad_outputs if grad_outputs is not None else self._grads.like()
        edges = [torch.autograd.graph.get_gradient_edge(one) for one in outputs]
        elsewhere |= recorder.storages()  # one of which may be returned as a gradient, and is the forward's
        # The backward must not use the outputs' memory, though it may not read them.
        keepers = [one.untyped_storage() for one in run.outputs if isinstance(one, torch.Tensor)]
        run.outputs = []
        del outputs
        if grad_outputs is not None:
            assert self._pool is not None
            self._between = Between.of(recorder, self._pool.live(), keepers, ground.resident)
        recorder.clear()  # which saved tensors keep, with its hook: the backward may free what it has read
        elsewhere |= {one.untyped_storage().data_ptr() for one in given}

        def run_backward() -> list[torch.Tensor | None]:
            found = aliases.one_each(torch.autograd.grad(edges, wanted, given, allow_unused=True), len(self.parameters))
            return [None if one is None else own(one.detach(), elsewhere) for one in found]

        try:
            run.backward, run.gradients = CudaBackend(ground.device, pool, ground.stream).record(run_backward, ())
        except BaseException:
            run.give_up(leaves, wanted, given, edges)
            raise
        return run

    def _note_outputs(self, run: Run) -> None:
        """Where its outputs lie."""
        assert self._pool is not None
        live = Extents(self._pool.live())
        self._outputs: list[Item | None] = []
        self._values: list[Any] = []
        for number, one in enumerate(run.outputs):
            item = live.item(one) if isinstance(one, torch.Tensor) else None
            if isinstance(one, torch.Tensor) and item is None:
                raise CaptureError(
                    f"{self.name}: output {number} is not in the memory of its graph, so that no replay would change it. "
                    "Return a dense tensor that the layer has made."
                )
            if item is None and hides_tensors(one):
                raise CaptureError(
                    f"{self.name}: output {number} is a {type(one).__name__} with tensors inside, which no pytree opens, "
                    "so that no replay would change them. Return tensors, or register it (torch.utils._pytree)."
                )
            self._outputs.append(item)
            self._values.append(None if item is not None else one)

    def _note(self, run: Run, pool: SegmentPool) -> None:
        """Where gradients lie, and which memory lives how long."""
        live = Extents(pool.live())
        self._gradients: list[Item | None] = []
        for one in run.gradients or [None] * (len(self._differentiable) + len(self.parameters)):
            item = live.item(one) if one is not None else None
            self._gradients.append(item)
            self._constants.append(one if item is None else None)  # such as Transformer Engine's, of a fused main_grad
        self._runs = grouped([item for item in self._gradients if item is not None])
        run.gradients, run.outputs = [], []
        outputs = [item.extent for item in self._outputs if item is not None]
        self._output_extents = sorted(set(outputs))
        self._gradient_extents = sorted({item.extent for item in self._gradients if item is not None})
        self._ground.synchronize()
        extents = [*outputs, *self._between.taken, *self._between.carried, *self._gradient_extents]
        space = self._ground.space
        edges = space.edges(outputs)
        self._owned = pool.seal([*extents, *edges])
        self._segments += pool.segments
        self._zones = {extent: space.zones(*extent) for extent in (*extents, *edges)}
        # Beside an output, in the granules in which it begins and ends, the backward may work.
        in_backward = [*self._between.taken, *self._between.carried, *self._gradient_extents, *edges]
        self._in_backward = list({zone.begin: zone for extent in in_backward for zone in self._zones[extent]}.values())
        self._ground.add_outputs([item.address for item in self._outputs if item is not None])

    def bytes(self) -> dict[str, int]:
        """What its graphs have addresses for, by what lies there; the memory behind them is shared and comes and goes."""
        space = self._ground.space

        def of(extents: Sequence[Extent]) -> int:
            return sum({zone.begin: zone.nbytes for extent in extents for zone in self._zones[extent]}.values())

        whole = sum(zone.nbytes for segment in self._segments for zone in space.zones_of(segment))
        owned = sum(zone.nbytes for zone in self._owned)
        assert self._grads is not None
        return {
            "inputs": self._inputs.nbytes,
            "outputs": of(self._output_extents),
            "slots and saved tensors": of(self._between.taken),
            "what else the backward reads": of(self._between.carried),
            "gradients that come in": self._grads.nbytes,
            "gradients": of(self._gradient_extents),
            "scratch": whole - owned,
        }

    # Replay ----------------------------------------------------------------------------------------------------------

    def busy(self, leaves: Sequence[Any]) -> str | None:
        """Why the forward cannot be replayed now: something of an earlier replay is in use, or an input is not where the
        graph reads it; ``None`` if it can.
        """
        space = self._ground.space
        for number, address in self.chained.items():
            if leaves[number].data_ptr() != address or not leaves[number].is_contiguous():
                return "an input was another layer's output, and is not"
        for number, strides in zip(self._moving, self._strides, strict=True):
            if leaves[number].stride() != strides and strides_of(leaves[number]) != strides:
                return "an input has other strides than the one of the capture"  # kernels, and so bits, depend on them
        if space.are_owned(self._owned):  # anywhere there the forward may write
            self._move_gradients()
        if space.are_owned(self._owned):
            return "an output, a saved tensor or a gradient of an earlier call is in use"
        if self._inputs.in_use():
            return "an input of an earlier call is in use"
        return None

    def has_lost_an_input(self) -> bool:
        """Whether it reads the output of a graph that is gone."""
        return any(not self._ground.writes(address) for address in self.chained.values())

    def awaits_backward(self) -> bool:
        """Whether a backward of a replayed forward may still come."""
        return bool(self._flights)

    def differentiable(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Of the arguments and the parameters, those for which `backward` has gradients."""
        return [*(leaves[number] for number in self._differentiable), *self.parameters]

    def differentiable_outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """Of what belongs to the outputs, what belongs to those with a gradient."""
        items = [item for item in self._outputs if item is not None]
        return [one for one, item in zip(outputs, items, strict=True) if item.requires_grad]

    def constant_outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """Of what belongs to the outputs, what belongs to those without a gradient."""
        items = [item for item in self._outputs if item is not None]
        return [one for one, item in zip(outputs, items, strict=True) if not item.requires_grad]

    def results(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The output tensors as the layer nests them, with its other results."""
        rest = iter(outputs)
        found = [value if item is None else next(rest) for item, value in zip(self._outputs, self._values, strict=True)]
        return pytree.tree_unflatten(found, self._structure_out)

    def forward(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], Flight]:
        """Replay it: its output tensors, and what its backward needs."""
        ground, space = self._ground, self._ground.space
        ground.begin_replay()
        ground.begin_round(self)
        space.bank.occupy(self._owned)
        try:
            storage = self._inputs.storage()
            self._inputs.fill(storage, [leaves[number] for number in self._moving])
            self._forward.replay()
            ground.launched()
            saved = {extent: self._storage(extent) for extent in (*self._between.taken, *self._between.carried)}
            outputs = {extent: saved.get(extent) or self._storage(extent) for extent in self._output_extents}
        finally:
            space.bank.drop(self._owned)
        results = [item.over(outputs) for item in self._outputs if item is not None]
        kept = [place for place, number in enumerate(self._differentiable) if leaves[number].is_leaf]
        flight = Flight([storage, [leaves[number] for number in self.chained]], kept)
        if self._backward is not None:
            self._flights.add(flight)
            flight.carried = [saved[extent] for extent in self._between.carried]
            self._hand_over(flight, saved)
        del saved, outputs
        ground.order()
        return results, flight

    def _hand_over(self, flight: Flight, saved: dict[Extent, torch.UntypedStorage]) -> None:
        """Tell of slots and saved tensors, as the layer's own forward would have."""
        for slot in self._between.slots:
            observer, watch = slot.op.follower()
            tensors = [item.over(saved) for item in slot.items]
            handle = None
            if observer is not None and watch is Watch.TAKES:
                ready = slot.ready() if slot.ready is not None else None
                saved_slot = slot.saved._replace(buffers=tuple(tensors), ready=ready)
                handle = observer.slot_saved(slot.op, saved_slot, take=True)  # type: ignore[arg-type]
            if handle is not None:
                flight.slots.append((slot.items, handle))
            else:
                flight.plain += tensors
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        for item in self._between.others:
            tensor = item.over(saved)
            if hooks is None:
                flight.plain.append(tensor)
            else:
                flight.packed.append((item, hooks[1], hooks[0](tensor)))

    def backward(self, flight: Flight, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Replay it: gradients of the differentiable inputs, then of the parameters.

        Raises:
            BackwardTwiceError: of this forward it was replayed before.
            StateError: the graphs are closed.
        """
        if self._closed:
            raise StateError(
                f"{self.name}: a backward of a forward whose graphs were closed since. Close them after the last backward."
            )
        if flight.over:
            raise BackwardTwiceError(
                f"{self.name}: a second backward over one forward; its graphs have given up what the first one read. Run "
                "the forward again instead of retain_graph=True."
            )
        flight.over = True
        self._flights.discard(flight)
        assert self._backward is not None
        ground, space = self._ground, self._ground.space
        ground.wait_for_gradients()
        ground.begin_replay()
        held: list[Any] = []
        for items, handle in flight.slots:
            held += self._in_place(items, handle.take())
        for item, unpack, packed in flight.packed:
            held += self._in_place((item,), [unpack(packed)])
        space.bank.occupy(self._in_backward)
        try:
            assert self._grads is not None
            mirrored = self._grads.mirror(grads)
            if mirrored is None:
                storage = self._grads.storage()
                self._grads.fill(storage, grads)
                self.copied += not self._grads.are_like(grads)
                held.append(storage)
            self._backward.replay()
            if mirrored is not None:
                mirrored.left = ground.transfer.mark()
            storages = {extent: self._storage(extent) for extent in self._gradient_extents}
        finally:
            space.bank.drop(self._in_backward)
        tensors = iter(made(self._runs, storages))
        results = [  # constants as tensors of their own, or autograd would copy them
            (None if constant is None else constant.detach()) if item is None else next(tensors)
            for item, constant in zip(self._gradients, self._constants, strict=True)
        ]
        for place in flight.kept:
            grad = results[place]
            results[place] = None if grad is None else grad.clone()
        flight.inputs, flight.carried, flight.slots, flight.packed, flight.plain = (), [], [], [], []
        del held, storages, tensors
        ground.order()
        return results

    def _storage(self, extent: Extent) -> torch.UntypedStorage:
        return self._ground.space.storage(*extent, self._zones[extent])

    def _in_place(self, items: Sequence[Item], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Tensors that came back, at the addresses that the graph reads."""
        held: list[Any] = []
        for item, tensor in zip(items, tensors, strict=True):
            if tensor.data_ptr() != item.address:
                storage = self._storage(item.extent)
                held.append(storage)
                put(item, storage, tensor)
            held.append(tensor)
        return held

    def _move_gradients(self) -> None:
        """Gradients of parameters that still lie where the last backward wrote them get memory of their own."""
        items = self._gradients[len(self._differentiable) :]
        for parameter, item in zip(self.parameters, items, strict=True):
            if item is not None and parameter.grad is not None and parameter.grad.data_ptr() == item.address:
                parameter.grad.data = parameter.grad.clone()  # who holds it finds it there still

    # The end ---------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """It could not be captured: give up what was taken for it."""
        self._ground.synchronize()
        segments: list[int] = []
        if self._pool is not None:
            if not self._pool.sealed:
                self._pool.seal([])
            segments = self._pool.segments
        self._ground.give_up([*segments, *self._inputs.segments, *(self._grads.segments if self._grads else ())])
        self._leaves, self._constants, self._pool = [], [], None

    def close(self) -> None:
        """Give up the graphs. Memory stays where a living tensor covers it. The device must be idle."""
        self._closed = True
        self._forward.close()
        if self._backward is not None:
            self._backward.close()
        self._move_gradients()
        self._ground.synchronize()
        assert self._grads is not None
        self._ground.give_up([*self._segments, *self._inputs.segments, *self._grads.segments])
        self._ground.remove_outputs([item.address for item in self._outputs if item is not None])
        self._leaves, self._constants, self._pool = [], [], None
