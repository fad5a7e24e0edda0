"""CUDA graphs: capture, guards, replay, teardown.

In: functions. Out: `Capture`. Keeps true: nothing in the package imports this room. Does not: offload inside a graph yet.
"""

from te_offload.graphs.backend import Pool
from te_offload.graphs.capture import Capture, capture
from te_offload.graphs.states import CaptureState

__all__ = ["Capture", "CaptureState", "Pool", "capture"]
