"""Writes of a constant number through a mask, as ``x[mask] = 0.0`` is traced, in a form that a CUDA graph can hold.

In: an FX graph of ATen ops. Out: the same, or a copy in which ``index_put`` of a constant is ``masked_fill``, which torch
runs for it anyhow. Keeps true: every bit; the module that was given. Does not: touch writes whose number, or whose mask,
is anything else.

A vocabulary that is split over ranks has two such writes around its embedding. The number is a tensor on the CPU, which
a capture must not read where it could change; here it cannot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

_WRITE = torch.ops.aten.index_put.default
_FRESH = torch.ops.aten.lift_fresh_copy.default


def fold_masked_writes(module: GraphModule) -> GraphModule:
    """The module, or a copy of it if there is something to fold.

    Args:
        module: its nodes carry example values.
    """
    if not any(_folds(module, node) for node in module.graph.nodes):
        return module
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _like(graph, module.graph)
    found = GraphModule(module, graph)
    for node in list(graph.nodes):
        if _folds(found, node):
            _fold(found, node)
    graph.lint()
    found.recompile()
    return found


def _like(graph: Graph, other: Graph) -> None:
    """Names and meta data of the output, which a copy of a graph leaves out."""
    for node, original in zip(graph.nodes, other.nodes, strict=True):
        node.meta = dict(original.meta)


def _folds(module: GraphModule, node: Node) -> bool:
    if node.target is not _WRITE or (len(node.args) > 3 and node.args[3]) or node.kwargs:
        return False
    into, indices, number = node.args[:3]
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(into, Node):
        return False
    mask, value = _example(indices[0]), _constant(module, number)
    example = _example(into)
    if mask is None or value is None or example is None or "val" not in node.meta:
        return False
    return mask.dtype is torch.bool and mask.shape == example.shape[: mask.dim()] and value.dtype is example.dtype


def _example(node: Any) -> torch.Tensor | None:
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _constant(module: GraphModule, node: Any) -> torch.Tensor | None:
    """A number on the CPU as it stood in the code: it is copied each time, so nobody can have changed it."""
    if not isinstance(node, Node) or node.target is not _FRESH:
        return None
    source = node.args[0]
    if not isinstance(source, Node) or source.op != "get_attr" or not isinstance(source.target, str):
        return None
    found = getattr(module, source.target, None)
    return found if type(found) is torch.Tensor and not found.dim() and found.device.type == "cpu" else None


def _fold(module: GraphModule, node: Node) -> None:
    into, (mask,), number = node.args[:3]  # type: ignore[misc]
    value, example, shown = _constant(module, number), _example(into), _example(mask)
    assert isinstance(into, Node) and isinstance(mask, Node) and isinstance(number, Node)
    assert value is not None and example is not None and shown is not None
    with module.graph.inserting_before(node):
        for _ in range(example.dim() - shown.dim()):
            mask = module.graph.call_function(torch.ops.aten.unsqueeze.default, (mask, -1))
            shown = shown.unsqueeze(-1)
            mask.meta["val"] = shown
        with unset_fake_temporarily():  # torch.compile traces under it
            plain = value.item()
        filled = module.graph.call_function(torch.ops.aten.masked_fill.Scalar, (into, mask, plain))
    filled.meta = dict(node.meta)
    node.replace_all_uses_with(filled)
    module.graph.erase_node(node)
    for one in (number, *number.all_input_nodes):
        if not one.users:
            module.graph.erase_node(one)
