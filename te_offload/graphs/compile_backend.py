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
from torch.fx import GraphModule

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
        handovers: list[Handover] = []

        def compile_forward(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            metadata = torch._guards.TracingContext.get().fw_metadata
            assert metadata is not None
            static = [number for number in metadata.static_input_indices if number < len(inputs)]
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

        lay_out_gradients(module)
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


def lay_out_gradients(module: GraphModule) -> None:
    """Have parameters get gradients that are as contiguous as they are.

    Autograd would copy the others for ``param.grad``, outside the graph, whose own memory for them then is of no use. What
    else has a gradient is left alone: what comes before it may compute otherwise from another layout. A hook in what
    Dynamo traced does it, so that a DTensor's wrapper learns of the layout too.

    Args:
        module: what Dynamo traced, changed in place.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        if _is_contiguous_parameter(node.meta.get("example_value")):
            with module.graph.inserting_after(inputs[-1]):
                module.graph.call_function(_lay_out_gradient, (node,))
    module.recompile()


def _is_contiguous_parameter(found: Any) -> bool:
    return isinstance(found, torch.nn.Parameter) and found.requires_grad and found.is_contiguous()


def _lay_out_gradient(parameter: torch.Tensor) -> None:
    if parameter.requires_grad:
        parameter.register_hook(torch.Tensor.contiguous)


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
