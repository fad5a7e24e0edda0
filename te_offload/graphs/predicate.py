"""Which nodes of an FX graph a CUDA graph can hold, and why not the others.

In: a graph of ATen ops whose nodes carry example values (``meta["val"]``), as AOTAutograd and `make_fx` leave it. Out: a
reason for each node that cannot be captured. Keeps true: what is not known to be safe has a reason. Does not: run, or
change, the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

_WAIT = "wait_tensor"
_BETWEEN_DEVICES = ("aten._to_copy", "aten.copy_", "aten.copy", "prims.device_put")


def runs(node: Node) -> bool:
    """Whether a node is a call, and does not only hand something on."""
    return node.op.startswith("call_") and node.target is not operator.getitem


def reasons(graph: Graph, device: torch.device, stays: Collection[Node] = ()) -> dict[Node, str]:
    """Why nodes cannot be captured.

    Args:
        graph: of calls. device: of the capture. stays: placeholders whose tensors stay in place.
    """
    found = {
        node: reason for node in graph.nodes if runs(node) and (reason := _reason(node, device, stays)) is not None
    }
    _keep_collectives_whole(list(graph.nodes), found)
    _keep_writes_whole(list(graph.nodes), found)
    return found


def _reason(node: Node, device: torch.device, stays: Collection[Node]) -> str | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return f"{target} is no ATen op"
    for tag, text in (
        (torch.Tag.cudagraph_unsafe, "it is tagged cudagraph_unsafe"),
        (torch.Tag.data_dependent_output, "host sync: its result is a number on the host"),
        (torch.Tag.dynamic_output_shape, "host sync: the size of its result depends on data"),
    ):
        if tag in target.tags:
            return text
    if "val" not in node.meta:
        return "its result is not known: the node has no example value"
    outputs, inputs = list(_tensors([node])), list(_tensors(node.all_input_nodes))
    for tensor in (*outputs, *inputs):
        if not all(isinstance(size, int) for size in tensor.shape):
            return f"dynamic shape: {tuple(tensor.shape)}"
    return _device_reason(str(target), outputs, inputs, device) or _write_reason(node, target, stays)


def _device_reason(name: str, outputs: list[Any], inputs: list[Any], device: torch.device) -> str | None:
    kinds = {tensor.device for tensor in (*outputs, *inputs)}
    if len(kinds) > 1 and name.startswith(_BETWEEN_DEVICES):
        return f"unpinned copy between {' and '.join(sorted(map(str, kinds)))}"
    if any(tensor.device.type == "cpu" for tensor in outputs) and device.type != "cpu":
        return "CPU op"
    if any(tensor.device.type == "cpu" for tensor in inputs) and device.type != "cpu":
        return "it reads a number on the CPU, which a replay would not see change"
    elsewhere = {tensor.device for tensor in outputs if tensor.device != device}
    return f"it runs on {elsewhere.pop()}, the graph on {device}" if elsewhere else None


def _write_reason(node: Node, target: torch._ops.OpOverload, stays: Collection[Node]) -> str | None:
    """A captured write to an input that moves would go to the graph's buffer."""
    for source in _written(node, target):
        if source.op == "placeholder" and source not in stays:
            return f"it writes to the input {source.name}, which is copied for the graph"
    return None


def _written(node: Node, target: torch._ops.OpOverload) -> Iterator[Node]:
    """Whose memory a call writes to."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            source = _source(written)
            if source is not None:
                yield source


def _keep_writes_whole(nodes: list[Node], found: dict[Node, str]) -> None:
    """A captured write to what another part computed would go to a buffer that nobody else reads."""
    place = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        if node in found or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for source in _written(node, node.target):
            if runs(source) and any(other in found for other in nodes[place[source] : place[node]]):
                found[node] = f"it writes to {source.name}, which another part computes"


def _source(node: Any) -> Node | None:
    """Whose memory a node's is, through views."""
    while isinstance(node, Node) and node.op == "call_function":
        target = node.target
        views = isinstance(target, torch._ops.OpOverload) and any(
            result.alias_info is not None for result in target._schema.returns
        )
        if not views or not node.args:
            return node
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _keep_collectives_whole(nodes: list[Node], found: dict[Node, str]) -> None:
    """What is begun in a capture must be waited for in it: a collective, and all up to its wait, or neither."""
    place = {node: number for number, node in enumerate(nodes)}
    changed = True
    while changed:
        changed = False
        for wait in nodes:
            if _WAIT not in str(wait.target) or not wait.args or not isinstance(wait.args[0], Node):
                continue
            begun = wait.args[0]
            if begun.target is operator.getitem and isinstance(begun.args[0], Node):
                begun = begun.args[0]
            between = nodes[place[begun] : place[wait] + 1]
            blocking = next((node for node in between if node in found or node.op == "placeholder"), None)
            if blocking is None:
                continue
            for node in (begun, wait):
                if runs(node) and node not in found:
                    found[node] = (
                        f"work from outside the capture: {blocking.name} lies between a collective and its wait"
                    )
                    changed = True


def _tensors(nodes: Collection[Node] | list[Node]) -> Iterator[Any]:
    for node in nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, torch.SymInt):
                yield _Sized((value,))


class _Sized:
    """A number that is not known, for the check of shapes."""

    def __init__(self, shape: tuple[Any, ...]) -> None:
        self.shape = shape
        self.device = torch.device("cpu")
