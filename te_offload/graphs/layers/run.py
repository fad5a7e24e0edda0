"""What one capture of a layer's forward and backward made, until it is known where all of it lies.

In: recordings, outputs, gradients. Out: the same, and their end. Keeps true: what is given up is held by nobody's frames.
Does not: capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_offload.graphs.backend import CudaRecording
from te_offload.graphs.layers.recorder import Recorder


@dataclass
class Run:
    """Recordings, what the forward returned as leaves and their structure, who noted what was saved, and gradients."""

    forward: CudaRecording
    backward: CudaRecording | None
    outputs: list[Any]
    structure: Any
    recorder: Recorder
    gradients: list[torch.Tensor | None]

    def close(self) -> None:
        """It was a rehearsal."""
        self.gradients, self.outputs = [], []
        self.forward.close()
        if self.backward is not None:
            self.backward.close()

    def give_up(self, *held: list[Any]) -> None:
        """Its backward cannot be captured. ``held``: is emptied, since an exception's frames keep functions, and those what
        they refer to.
        """
        for one in (*held, self.outputs):
            one.clear()
        self.recorder.clear()
        self.forward.close()


def own(tensor: torch.Tensor, elsewhere: set[int]) -> torch.Tensor:
    """A tensor that does not lie in memory that is no graph's."""
    return tensor.clone() if tensor.untyped_storage().data_ptr() in elsewhere else tensor
