"""The CUDA graph pass over FX graphs: what can be captured is, around what cannot.

In: a `GraphModule` of ATen ops and example inputs. Out: `GraphedModule`, called like it. Keeps true: nodes run in their
order; a part that is captured reads an earlier captured part's outputs where they lie, without a copy; what is not
captured runs as before, and the report says why. Does not: differentiate; give it forward and backward apart.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from te_offload.errors import ArgumentError
from te_offload.graphs.backend import Backend, CudaBackend, Pool
from te_offload.graphs.capture import Capture
from te_offload.graphs.collectives import check_collectives, is_collective
from te_offload.graphs.handover import Handover
from te_offload.graphs.holding import Holding
from te_offload.graphs.masked_writes import fold_masked_writes
from te_offload.graphs.parts import Part, Replayed, Route, run_boxed
from te_offload.graphs.predicate import reasons, runs
from te_offload.graphs.states import CaptureState
from te_offload.graphs.weak import Lease, WeakOutput


def cudagraph_pass(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    static_inputs: Sequence[int] = (),
    min_ops: int = 2,
    warmup: int = 3,
    clone_outputs: bool = False,
    saved_outputs: Sequence[int] | None = None,
    pool: Pool | None = None,
    lends: Handover | None = None,
    takes: Handover | None = None,
    make_backend: Callable[[torch.device], Backend] | None = None,
) -> GraphedModule:
    """Have the parts of a graph that CUDA graphs can hold replayed as such.

    Args:
        module: its nodes carry example values. example_inputs: as it will be called.
        static_inputs: numbers of inputs that stay in place, beside parameters: for a backward, what a captured forward
            saved. What is no tensor does not count.
        min_ops: parts with fewer calls are not worth a graph. warmup: runs of a part before it is captured.
        clone_outputs: return copies; else outputs may be read until the next call.
        saved_outputs: numbers of outputs that wait for another graph, as a forward's saved tensors do for its backward. If
            given, outputs may be held as long as one likes: a call that comes while one is held runs eagerly; of an output
            that is none of these, copies are returned from then on.
        pool: memory to share with captures that are replayed in the order in which they were captured.
        lends, takes: of a forward, and of its backward: have the backward's graph work in the memory of what the forward's
            saved, if each is one graph as a whole.
        make_backend: who captures.

    Raises:
        ArgumentError: no tensor among the inputs; a number of a static input that there is not.
        CaptureError: a collective of NCCL would hang with torch's allocator as it is configured.
    """
    device = next(
        (one.device for one in pytree.tree_leaves(list(example_inputs)) if isinstance(one, torch.Tensor)), None
    )
    if device is None:
        raise ArgumentError("cudagraph_pass needs a tensor among the example inputs, to know the device.")
    wrong = [number for number in static_inputs if not 0 <= number < len(example_inputs)]
    if wrong:
        raise ArgumentError(f"static_inputs names {wrong}, but there are {len(example_inputs)} inputs, from 0.")
    module = fold_masked_writes(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    # Of torch 2.15 a mesh of devices may be an input too, and static.
    static = {placeholders[number] for number in static_inputs if isinstance(example_inputs[number], torch.Tensor)}
    static |= {
        node for node, one in zip(placeholders, example_inputs, strict=True) if isinstance(one, torch.nn.Parameter)
    }
    if any(is_collective(node) for node in module.graph.nodes):
        check_collectives(device)
    parts, place = _cut(module, device, static, min_ops)
    split = split_module(module, module, lambda node: place[node], keep_original_order=True)
    whole = len(parts) == 1 and parts[0].captured and saved_outputs is not None
    lends, takes = (lends, takes) if whole else (None, None)
    handover = lends or takes
    one_pool = pool if pool is not None else Pool()

    def make() -> Backend:
        if make_backend is not None:
            return make_backend(device)
        return CudaBackend(device, handover.pool if handover is not None else one_pool)

    names = [node.name for node in placeholders if node in static]
    output = next(node for node in module.graph.nodes if node.op == "output")
    returned = [one.name if isinstance(one, Node) else "" for one in pytree.tree_leaves(output.args[0])]
    graphed = GraphedModule(split, parts, set(names), make, warmup, clones=clone_outputs)
    graphed._output_names = tuple(returned)
    if saved_outputs is not None:
        graphed.holding = Holding(
            functools.partial(run_boxed, module), [node in static for node in placeholders], saved_outputs
        )
    graphed.hand_over(lends, takes)
    return graphed


def _cut(
    module: GraphModule, device: torch.device, static: set[Node], min_ops: int
) -> tuple[list[Part], dict[Node, int]]:
    """Runs of nodes that can all be captured, or all not."""
    why = reasons(module.graph, device, static)
    runs_of: list[tuple[bool, list[Node]]] = []
    for node in module.graph.nodes:
        if not runs(node):
            continue
        captured = node not in why
        if not runs_of or runs_of[-1][0] is not captured:
            runs_of.append((captured, []))
        runs_of[-1][1].append(node)
    joined: list[tuple[bool, list[Node], list[str]]] = []
    for captured, nodes in runs_of:
        texts = [f"{node.name}: {why[node]}" for node in nodes if node in why]
        if captured and len(nodes) < min_ops:
            captured, texts = False, [f"{nodes[0].name}: {len(nodes)} calls, fewer than {min_ops}"]
        if joined and joined[-1][0] is captured:
            joined[-1][1].extend(nodes)
            joined[-1][2].extend(texts)
        else:
            joined.append((captured, nodes, texts))
    parts = [Part(f"submod_{n}", cap, len(nodes), tuple(texts)) for n, (cap, nodes, texts) in enumerate(joined)]
    place = {node: number for number, (_, nodes, _) in enumerate(joined) for node in nodes}
    for node in module.graph.nodes:
        if node.target is operator.getitem:
            place[node] = place.get(node.args[0], 0)
    return parts, place


class GraphedModule:
    """A graph of which parts are CUDA graphs; see `cudagraph_pass`.

    Attributes:
        parts: in order. holding: follows outputs that are held; ``None``: they may be read until the next call.
    """

    def __init__(
        self,
        split: GraphModule,
        parts: list[Part],
        static: set[str],
        make_backend: Callable[[], Backend],
        warmup: int,
        *,
        clones: bool,
    ) -> None:
        self.parts = tuple(parts)
        self._split = split
        self._lease = Lease()
        self._clones = clones
        self._replayed: list[Replayed] = []
        self._route: Route | None = None
        in_place = set(static)  # names of nodes of the split graph whose tensors stay
        captured = {part.name for part in parts if part.captured}
        for node in split.graph.nodes:
            if node.target is operator.getitem and node.args[0].name in in_place:
                in_place.add(node.name)
            if node.op == "call_module" and node.target in captured:
                stay = [
                    number for number, one in enumerate(node.args) if isinstance(one, Node) and one.name in in_place
                ]
                replayed = Replayed(getattr(split, node.target), make_backend, stay, warmup)
                self._replayed.append(replayed)
                setattr(split, node.target, replayed)
                in_place.add(node.name)
        output = next(node for node in split.graph.nodes if node.op == "output")
        self._static_names = frozenset(static)
        names = [node.name for node in split.graph.nodes if node.op == "placeholder"]
        self._static = frozenset(number for number, name in enumerate(names) if name in static)
        self._buffered: dict[int, int] = {}  # outputs that are inputs, saved: where the graph has its own copy
        self._output_names: tuple[str, ...] = ()
        self.holding: Holding | None = None
        self._lends: Handover | None = None
        self._takes: Handover | None = None
        self._lent = 0  # captures whose saved outputs were lent
        self._leased = [
            isinstance(one, Node) and one.name in in_place - static for one in pytree.tree_leaves(output.args[0])
        ]

    @property
    def captures(self) -> tuple[Capture | None, ...]:
        """Of the parts that are captured; ``None`` before the first call."""
        return tuple(replayed.capture for replayed in self._replayed)

    @property
    def lends(self) -> bool:
        """Whether the backward's graph may work in the memory of what is saved."""
        return self._lends is not None

    @property
    def static_names(self) -> frozenset[str]:
        """Names of the inputs that stay in place."""
        return self._static_names

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the nodes that are returned; empty for what is no node."""
        return self._output_names

    @property
    def leased(self) -> tuple[bool, ...]:
        """Which outputs lie in the memory of a graph."""
        return tuple(self._leased)

    def hand_over(self, lends: Handover | None, takes: Handover | None) -> None:
        """Lend what is saved to the backward's graph; or take it from the forward's."""
        self._lends, self._takes = lends, takes
        if lends is not None:
            assert self.holding is not None
            self._buffered = Route.through(self._split).saved_inputs(self.holding.saved, self._static)
            for number in self._buffered:
                self._leased[number] = True
        if takes is not None:
            assert self.holding is not None
            holding = self.holding
            takes.backward_holds = lambda: bool(holding.find_held())
            takes.restart_backward = self._start_over
            for replayed in self._replayed:
                replayed.take_from(takes)
            self._route = Route.through(self._split)

    def __call__(self, *inputs: Any) -> Any:
        """Run all parts.

        Raises:
            BackwardTwiceError: of this forward a backward was replayed before.
        """
        return self.call_boxed(list(inputs))

    def call_boxed(self, inputs: list[Any]) -> Any:
        """A call whose inputs are let go of as soon as possible: the list is emptied. Raises as a call does."""
        holding = self.holding
        if holding is not None:
            if self._takes is not None:
                self._takes.check(inputs)
            why = self._cannot(inputs) or holding.why_eagerly(inputs)
            renews = False
            if why is None and self._lends is not None:
                if self._lends.gradient_held():
                    why = "a gradient of an earlier call is held"
                renews = self._lends.renews
            if holding.is_stuck or renews:
                self._give_way()
            if why is not None:
                return holding.run_eagerly(why, inputs)
        self._lease.ended = "a later replay"
        self._lease = lease = Lease()
        places = holding.places_of(inputs) if holding is not None else []
        if self._route is not None:
            leaves, structure = self._route.run(self._replayed[0], inputs)
        else:
            leaves, structure = pytree.tree_flatten(self._split(*inputs))
        if holding is not None:
            captured = [one is not None and one.state is CaptureState.CAPTURED for one in self.captures]
            if all(captured):
                leaves = self._handed_over(leaves, inputs)
            if any(captured):
                leaves = holding.hand_out(leaves, self._leased, places, copies=not all(captured))
            return pytree.tree_unflatten(leaves, structure)
        found = []
        for leased, one in zip(self._leased, leaves, strict=True):
            if leased and isinstance(one, torch.Tensor):
                one = one.detach().clone() if self._clones else WeakOutput.of(one, lease)
            found.append(one)
        return pytree.tree_unflatten(found, structure)

    def _give_way(self) -> None:
        """What is held is left to its holder: other graphs are captured. A backward's are when its forward's are."""
        if self._takes is not None:
            self._takes.renews = True
            return
        self._start_over()
        if self._lends is not None:
            self._lends.restart_backward()
            self._lends.renew()

    def _start_over(self) -> None:
        for replayed in self._replayed:
            replayed.start_over()
        self._lent = 0
        if self.holding is not None:
            self.holding.start_over()

    def _handed_over(self, leaves: list[Any], inputs: Sequence[Any]) -> list[Any]:
        """After a replay of the whole: what it returns, which the other graph may use again."""
        if self._takes is not None and self._takes.taken:
            self._takes.backward_replayed()
        if self._lends is None:
            return leaves
        (capture,) = self.captures
        assert capture is not None
        for number, place in self._buffered.items():
            leaves[number] = capture.input_at(place)
        if capture.captures != self._lent:
            if self._lent:
                self._lends.restart_backward()
            self._lent = capture.captures
            leaves = self._lend(capture, leaves, inputs)
        self._lends.forward_replayed()
        return leaves

    def _lend(self, capture: Capture, leaves: list[Any], inputs: Sequence[Any]) -> list[Any]:
        assert self._lends is not None and self.holding is not None
        lends = self._lends
        known = {id(leaves[number]) for number in self.holding.saved if self._leased[number]}
        others = capture.input_addresses()
        others |= {
            one.untyped_storage().data_ptr() for one in inputs if type(one) in (torch.Tensor, torch.nn.Parameter)
        }
        others |= {
            one.untyped_storage().data_ptr()
            for number, one in enumerate(leaves)
            if isinstance(one, torch.Tensor) and number not in self.holding.saved
        }
        changed: dict[int, Any] = {}

        def change(outputs: list[Any]) -> list[Any]:
            saved = [number for number, one in enumerate(outputs) if id(one) in known]
            found = lends.lend(outputs, saved, others)
            changed.update({id(one): other for one, other in zip(outputs, found, strict=True)})
            return found

        capture.replace_outputs(change)
        return [changed.get(id(leaf), leaf) for leaf in leaves]

    def _cannot(self, inputs: Sequence[Any]) -> str | None:
        """Why its parts cannot be replayed, though they should."""
        captures = [one for one in self.captures if one is not None]
        if any(one.state is CaptureState.EAGER for one in captures):
            return "a part could not be captured"
        if self._takes is not None and any(one.is_warm for one in captures):
            if not self._takes.has_lent:
                return "its forward is not a graph yet"
            if self._takes.waits_for_others(inputs):
                return "its forward was not replayed"
        return None

    def report(self) -> str:
        """A line for each part, and one for each reason."""
        lines = []
        for part in self.parts:
            lines.append(f"{part.name}: {part.ops} calls, {'a CUDA graph' if part.captured else 'eager'}")
            lines += [f"  {reason}" for reason in part.reasons]
        for replayed in self._replayed:
            capture = replayed.capture
            if capture is not None and capture.reason is not None:
                lines.append(f"  could not be captured: {type(capture.reason).__name__}: {capture.reason}")
        if self.holding is not None:
            lines += [f"  {count} calls ran eagerly: {why}" for why, count in self.holding.eager.items()]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Give up all graphs. Idempotent."""
        self._lease.ended = "the graphs were closed"
        for replayed in self._replayed:
            replayed.close()
