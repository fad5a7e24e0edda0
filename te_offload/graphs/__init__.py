"""CUDA graphs: capture, guards, replay, teardown; and the pass that captures what it can of an FX graph.

In: functions, and a session whose steps they are; FX graphs. Out: `Capture`, `GraphedModule`. Keeps true: nothing in the
package imports this room. Does not: decide what is offloaded.
"""

from te_offload.graphs.backend import Pool
from te_offload.graphs.capture import Capture, capture
from te_offload.graphs.compile_backend import CudagraphBackend
from te_offload.graphs.fx_pass import GraphedModule, cudagraph_pass
from te_offload.graphs.layers import LayerGraphs, capture_layers
from te_offload.graphs.parts import Part
from te_offload.graphs.preflight import Preflight, preflight
from te_offload.graphs.states import CaptureState

__all__ = [
    "Capture",
    "CaptureState",
    "CudagraphBackend",
    "GraphedModule",
    "LayerGraphs",
    "Part",
    "Pool",
    "Preflight",
    "capture",
    "capture_layers",
    "cudagraph_pass",
    "preflight",
]
