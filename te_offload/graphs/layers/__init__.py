"""Layers as graphs of their own: forward and backward apart, offloading in between, memory only while it is used.

In: layers, and a session. Out: `LayerGraphs`. Keeps true: a layer that has no graphs runs as it always did. Does not:
capture what lies between layers.
"""

from te_offload.graphs.layers.layer_graphs import LayerGraphs, capture_layers

__all__ = ["LayerGraphs", "capture_layers"]
