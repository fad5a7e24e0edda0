"""CUDA graphs: capture, guards, replay, teardown.

In: functions, and a session whose steps they are. Out: `Capture`. Keeps true: nothing in the package imports this room.
Does not: capture layers apart, or graphs of torch.compile.
"""

from te_offload.graphs.backend import Pool
from te_offload.graphs.capture import Capture, capture
from te_offload.graphs.states import CaptureState

__all__ = ["Capture", "CaptureState", "Pool", "capture"]
