"""The graph of a capture while there is one, and functions that are captured over inputs of which they let go.

In: a recording and what the recorded function returned. Out: replays, and the outputs. Keeps true: the device is idle when
the graph is given up. Does not: check inputs, or decide when to record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from te_offload.graphs.backend import Backend, Recording


class Boxed(Protocol):
    """A function of a list of inputs."""

    def owned(self, inputs: list[Any]) -> list[Any]:
        """The inputs that the capture runs with, which may own memory that those of other calls do not."""

    def run(self, inputs: list[Any]) -> Any:
        """Run it, letting go of each input after its last use."""


class RecordedGraph:
    """The graph of a capture and its outputs, apart from it so that they can be taken down when the capture is gone.

    Args:
        backend: by whom it is recorded.

    Attributes:
        structure: how the outputs nest. replays: since it was recorded.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._recording: Recording | None = None
        self._outputs: list[Any] = []
        self.structure: Any = None
        self.replays = 0

    def hold(self, recording: Recording, outputs: list[Any], structure: Any) -> None:
        """Keep a recording and what it returned."""
        self._recording, self._outputs, self.structure = recording, outputs, structure
        self.replays = 0

    def replace_outputs(self, change: Callable[[list[Any]], list[Any]]) -> None:
        """See `Capture.replace_outputs`."""
        self._outputs = change(self._outputs)

    def replay(self) -> list[Any]:
        """Run it: the outputs, which lie where they always do."""
        assert self._recording is not None
        self._recording.replay()
        self.replays += 1
        return self._outputs

    def close(self) -> None:
        """Wait for the device, and give its memory back. Idempotent."""
        recording, self._recording, self._outputs = self._recording, None, []
        if recording is not None:
            self._backend.settle()
            recording.close()
