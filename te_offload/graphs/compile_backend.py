"""The CUDA graph pass as a backend of torch.compile.

In: what Dynamo traced. Out: forward and backward with CUDA graphs in them. Keeps true: numbers are those of the backend
"aot_eager"; what torch.compile knows to be static is not copied: parameters, buffers, and what a captured forward saved for
its backward. Does not: fuse kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from te_offload.graphs.backend import Backend
from te_offload.graphs.fx_pass import GraphedModule, cudagraph_pass
from te_offload.graphs.handover import Handover


class CudagraphBackend:
    """For ``torch.compile(model, backend=CudagraphBackend())``.

    Outputs may be held; see ``saved_outputs`` of `cudagraph_pass`.

    Args:
        min_ops, warmup: as in `cudagraph_pass`. make_backend: who captures.
        partition_fn: cuts forward and backward apart, and so decides what is saved and what is computed twice; by default
            that of the backend "aot_eager". ``functorch.compile.default_partition`` saves all.

    Attributes:
        forwards, backwards: the graphs so far; ``None`` in place of a backward that is still to be traced.
    """

    def __init__(
        self,
        *,
        min_ops: int = 2,
        warmup: int = 3,
        partition_fn: Callable[..., Any] = min_cut_rematerialization_partition,
        make_backend: Callable[[torch.device], Backend] | None = None,
    ) -> None:
        self._partition = partition_fn
        self.forwards: list[GraphedModule] = []
        self.backwards: list[GraphedModule | None] = []
        self._options: dict[str, Any] = {"min_ops": min_ops, "warmup": warmup, "make_backend": make_backend}

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile one graph of Dynamo's."""
        forward: list[GraphedModule] = []
        primals: list[Any] = []
        handovers: list[Handover] = []

        def compile_forward(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            metadata = torch._guards.TracingContext.get().fw_metadata
            assert metadata is not None
            static = [number for number in metadata.static_input_indices if number < len(inputs)]
            nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
            primals[:] = [node.meta.get("val") if n in static else None for n, node in enumerate(nodes)]
            returned = metadata.num_forward
            outputs = len(_outputs(graph))
            device = next((one.device for one in inputs if isinstance(one, torch.Tensor)), torch.device("cpu"))
            handovers[:] = [Handover(device)] if returned < outputs else []
            graphed = cudagraph_pass(
                graph,
                inputs,
                static_inputs=static,
                saved_outputs=range(returned, outputs),
                lends=handovers[0] if handovers else None,
                **self._options,
            )
            forward[:] = [graphed]
            self.forwards.append(graphed)
            self.backwards.append(None)
            return _boxed(graphed)

        def compile_backward(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            saved = [number for number, name in enumerate(names) if not name.startswith("tangents")]
            in_place = _in_place(forward[0], names)
            lay_out_gradients(graph, primals)
            graphed = cudagraph_pass(
                graph,
                inputs,
                static_inputs=[number for number in saved if names[number] in in_place],
                saved_outputs=(),
                takes=handovers[0] if forward[0].lends else None,
                **self._options,
            )
            self.backwards[self.forwards.index(forward[0])] = graphed
            return _boxed(graphed)

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=compile_forward, bw_compiler=compile_backward, partition_fn=self._partition
        )(module, list(example_inputs))
        return compiled

    def report(self) -> str:
        """What became of each graph."""
        lines = []
        for number, (forward, backward) in enumerate(zip(self.forwards, self.backwards, strict=True)):
            lines.append(f"graph {number}, forward\n{forward.report()}")
            if backward is not None:
                lines.append(f"graph {number}, backward\n{backward.report()}")
        return "".join(lines)

    def close(self) -> None:
        """Give up all graphs, before the process group is destroyed. Idempotent."""
        for graphed in (*self.backwards, *self.forwards):
            if graphed is not None:
                graphed.close()


def lay_out_gradients(backward: GraphModule, primals: Sequence[Any]) -> None:
    """Have the graph return gradients as contiguous as their parameters are.

    Autograd would copy the others for ``param.grad``, outside the graph, whose own memory for them then is of no use. What
    else has a gradient is left alone: what comes before it may compute otherwise from another layout.

    Args:
        backward: its first outputs are the gradients of ``primals``, or ``None``.
        primals: example values of parameters; ``None`` for other inputs.
    """
    output = next(node for node in backward.graph.nodes if node.op == "output")
    gradients = list(output.args[0])
    for number, (node, primal) in enumerate(zip(gradients, primals, strict=False)):
        found = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(found, torch.Tensor) or not isinstance(primal, torch.Tensor) or found.shape != primal.shape:
            continue
        if primal.is_contiguous() and not found.is_contiguous():
            with backward.graph.inserting_before(output):
                copy = backward.graph.call_function(
                    torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
            copy.meta = {"val": torch.empty_like(found, memory_format=torch.contiguous_format)}
            gradients[number] = copy
    output.args = (tuple(gradients),)
    backward.recompile()


def _boxed(graphed: GraphedModule) -> Callable[..., Any]:
    """Called with one list, which it empties: so AOTAutograd lets go of what is in it."""

    def call(inputs: list[Any]) -> Any:
        return graphed.call_boxed(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _outputs(graph: GraphModule) -> list[Any]:
    node = next(node for node in graph.graph.nodes if node.op == "output")
    return list(torch.utils._pytree.tree_leaves(node.args[0]))


def _in_place(forward: GraphedModule, names: Sequence[str]) -> set[str]:
    """Inputs of the backward that are where the forward's graphs left them, or where they always are."""
    found = set(forward.static_names)
    for name, leased in zip(forward.output_names, forward.leased, strict=True):
        if leased:
            found.add(name)
    return found.intersection(names)
