"""Parts of an FX graph that are captured, and the way through a graph that is one such part as a whole.

In: submodules that the pass has cut. Out: calls, of a graph or of the nodes. Keeps true: where inputs come in a list, each
is let go of after its last use, in warm-up runs too. Does not: decide what is captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from te_offload.graphs.backend import Backend
from te_offload.graphs.capture import Capture
from te_offload.graphs.handover import Handover


@dataclass(frozen=True)
class Part:
    """Some nodes that run one behind the other.

    Attributes:
        name: of the submodule. captured: whether it becomes a CUDA graph. ops: how many calls it has.
        reasons: why not: one for each node that cannot be captured, or that it has too few calls.
    """

    name: str
    captured: bool
    ops: int
    reasons: tuple[str, ...] = ()


def run_boxed(module: GraphModule, inputs: list[Any]) -> Any:
    """Run the nodes; the list of inputs is emptied."""
    return torch.fx.Interpreter(module).boxed_run(inputs)


class BoxedPart:
    """A part over what its forward lent; see `recorded.Boxed`."""

    def __init__(self, part: GraphModule, takes: Handover) -> None:
        self._part = part
        self._takes = takes

    def owned(self, inputs: list[Any]) -> list[Any]:
        """See `Boxed.owned`."""
        return self._takes.owned(inputs)

    def run(self, inputs: list[Any]) -> Any:
        """See `Boxed.run`."""
        return run_boxed(self._part, inputs)


class Replayed(torch.nn.Module):
    """A part that is captured.

    Attributes:
        capture: its graph; ``None`` before the first call.
    """

    def __init__(
        self, part: GraphModule, make_backend: Callable[[], Backend], stay: Sequence[int], warmup: int
    ) -> None:
        super().__init__()
        self.capture: Capture | None = None
        self._part = part
        self._make_backend = make_backend
        self._boxed: BoxedPart | None = None
        self._stay = stay
        self._warmup = warmup

    def take_from(self, takes: Handover) -> None:
        """Capture over inputs that own their memory, letting go of each after its last use."""
        self._boxed = BoxedPart(self._part, takes)

    def forward(self, *inputs: Any) -> Any:
        """Run it."""
        return self._captured(inputs)(*inputs)

    def call_boxed(self, inputs: list[Any]) -> Any:
        """Run it; the list of inputs may be emptied. Needs `take_from`."""
        return self._captured(inputs).call_boxed(inputs)

    def _captured(self, inputs: Sequence[Any]) -> Capture:
        if self.capture is None:
            self.capture = Capture(
                self._part,
                self._make_backend(),
                (inputs, {}),
                modules=[self._part],
                stay=[inputs[number] for number in self._stay if not isinstance(inputs[number], torch.nn.Parameter)],
                warmup=self._warmup,
                on_mismatch="recapture",
                raw_outputs=True,
                boxed=self._boxed,
            )
        return self.capture

    def start_over(self) -> None:
        """Warm up and capture anew."""
        self.close()
        self.capture = None

    def close(self) -> None:
        """Give up its graph."""
        if self.capture is not None:
            self.capture.close()


@dataclass(frozen=True)
class Route:
    """How inputs and outputs of a graph are those of its one part.

    Attributes:
        inputs: numbers of the graph's inputs that the part has. passed: those that are outputs of the graph as they are.
        outputs: a leaf each: number of an output of the part's, or of an input as ``~number``, or something else.
        structure: how the outputs nest.
    """

    inputs: tuple[int, ...]
    passed: tuple[int, ...]
    outputs: tuple[Any, ...]
    structure: Any

    @classmethod
    def through(cls, split: GraphModule) -> Route:
        """Of a graph with one call of a submodule."""
        nodes = list(split.graph.nodes)
        number = {node: place for place, node in enumerate(n for n in nodes if n.op == "placeholder")}
        (call,) = [node for node in nodes if node.op == "call_module"]
        leaves, structure = pytree.tree_flatten(next(node for node in nodes if node.op == "output").args[0])
        outputs: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Node):
                outputs.append(_Constant(leaf))
            elif leaf in number:
                outputs.append(~number[leaf])
            else:
                outputs.append(leaf.args[1] if leaf.target is operator.getitem else 0)
        passed = tuple(~one for one in outputs if isinstance(one, int) and one < 0)
        return cls(tuple(number[one] for one in call.args), passed, tuple(outputs), structure)

    def saved_inputs(self, saved: Collection[int], static: Collection[int]) -> dict[int, int]:
        """Outputs in ``saved`` that are inputs which do not stay in place, and the number that each has in the part."""
        found = {}
        for number in saved:
            one = self.outputs[number]
            if isinstance(one, int) and one < 0 and ~one not in static and ~one in self.inputs:
                found[number] = self.inputs.index(~one)
        return found

    def run(self, part: Replayed, inputs: list[Any]) -> tuple[list[Any], Any]:
        """Run the part: the outputs, and how they nest; the list of inputs is emptied."""
        passed = {number: inputs[number] for number in self.passed}
        given = [inputs[number] for number in self.inputs]
        inputs.clear()
        result = part.call_boxed(given)
        own = result if isinstance(result, (tuple, list)) else (result,)
        found = []
        for one in self.outputs:
            if isinstance(one, _Constant):
                found.append(one.value)
            else:
                found.append(own[one] if one >= 0 else passed[~one])
        return found, self.structure


@dataclass(frozen=True)
class _Constant:
    """An output that is no node."""

    value: Any
