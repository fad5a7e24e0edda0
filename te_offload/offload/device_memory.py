"""How much memory of the device torch's allocator had given out at the most, window by window of a step.

In: the borders between windows, when the step passes them. Out: a `DevicePeak` for each window, and how much of the device
the allocator had taken; what it holds and nobody uses, given back or filled. Keeps true: each peak is of its window alone.
Does not: count what is not torch's; leave torch's own peak statistics as they are, which begin anew at each border.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_offload.errors import ArgumentError, UnsupportedError
from te_offload.offload.allocator import is_native
from te_offload.offload.record import DevicePeak, Phase


class Watermarks:
    """See the module.

    Args:
        read: gives the most bytes that were allocated since it was called last.
        taken: gives the most that the allocator had taken of the device in the time of which `read` told last.

    Attributes:
        reserved: the most that it had taken in the last step that ended.
    """

    def __init__(self, read: Callable[[], int], taken: Callable[[], int] = lambda: 0) -> None:
        self._read, self._taken = read, taken
        self.reserved = 0
        self._window: tuple[str, int, Phase] | None = None
        self._held = self._filled = 0
        self._peaks: list[DevicePeak] = []

    def begin(self) -> None:
        """A step begins."""
        self._read()
        self._peaks, self.reserved = [], 0
        self._window, self._held, self._filled = ("", 0, Phase.BEFORE), 0, 0

    def border(self, layer: str, forward: int, phase: Phase) -> None:
        """The window of a step ends, if one is open, and another one begins."""
        if self._window is not None:
            self._peaks.append(DevicePeak(*self._window, self._read() - self._filled, self._held))
            self.reserved = max(self.reserved, self._taken())
            self._window, self._filled = (layer, forward, phase), 0

    def holds(self, nbytes: int) -> None:
        """So many bytes of saved tensors are on the device as the window begins."""
        self._held = nbytes

    def fills(self, nbytes: int) -> None:
        """So many bytes of what is allocated in the window are nobody's."""
        self._filled = nbytes

    def end(self) -> tuple[DevicePeak, ...]:
        """The step ends: its windows in order; none, if `begin` did not come before."""
        self.border("", 0, Phase.BEFORE)
        found, self._peaks, self._window = tuple(self._peaks), [], None
        return found


def watermarks_of(device: torch.device) -> Watermarks:
    """Of torch's allocator of a GPU.

    Raises:
        ArgumentError: it is none. UnsupportedError: torch allocates without a cache, and counts nothing.
    """
    if device.type != "cuda":
        raise ArgumentError(f"device_limit is of a GPU's memory, but the layers are on {device}.")

    taken = 0

    def read() -> int:
        # Not `memory_stats`, which takes the host 0.1 ms to flatten and sort what is asked for in each phase.
        found = torch.cuda.memory_stats_as_nested_dict(device)
        nonlocal taken
        peak, taken = (
            found.get(name, {}).get("all", {}).get("peak", 0) for name in ("allocated_bytes", "reserved_bytes")
        )
        torch.cuda.reset_peak_memory_stats(device)
        if not peak:
            raise UnsupportedError(
                "device_limit: torch's allocator does not count here (PYTORCH_NO_CUDA_MEMORY_CACHING=1?), so that nobody "
                "knows what a step takes. Leave device_limit out, or that setting."
            )
        return int(peak)

    return Watermarks(read, lambda: taken)


def give_back_unused(device: torch.device) -> None:
    """Steps keep other slots from now on: torch's allocator gives the GPU what it holds and nobody uses. Else these slots
    would be cut from large free blocks, which then would be allocated once more, for a loss, say; and what a small slot
    lies in cannot be given back any more, so that the device had to hold both. It waits for the device, unless others
    capture.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.empty_cache()


def fill_unused(device: torch.device, most: int) -> list[torch.Tensor]:
    """Tensors in whatever torch's allocator holds for the current stream and nobody uses, so that it does not give that to
    the GPU where memory runs out, in a loss, say: else the next step's forwards, which need it again, would be cut from
    what the loss has left by then.

    Args:
        most: bytes that may be allocated.
    """
    if device.type != "cuda" or not is_native() or torch.cuda.is_current_stream_capturing():
        return []
    stream = torch.cuda.current_stream(device).cuda_stream
    unused = sorted(
        (
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == device.index and segment["stream"] == stream and not segment["is_expandable"]
            if tuple(segment["segment_pool_id"]) == (0, 0) and segment["segment_type"] == "large"
            if [block["state"] for block in segment["blocks"]] == ["inactive"]
        ),
        reverse=True,
    )
    filling = []
    for nbytes in unused:  # the largest first: a smaller one could be cut from it
        if nbytes <= most:
            filling.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
            most -= nbytes
    return filling
