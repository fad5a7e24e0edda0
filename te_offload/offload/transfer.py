"""Copies between the device and the host, and what orders them.

In: uint8 tensors of equal length on either side. Out: `Done`, to be waited for. Keeps true: a copy out starts after all
work queued on the compute stream, a copy back after the copy out that it reads; nothing that a copy reads or writes is
handed to the allocator before the compute stream has been made to wait for the copy. Does not: own memory, or decide.

A GPU has one stream each way. On the CPU the same calls copy at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Done(Protocol):
    """The end of a copy."""

    def block_compute(self) -> None:
        """Make later work of the compute stream wait for it. Does not block the host on a GPU."""

    def is_over(self) -> bool:
        """Whether it has ended already. Never blocks."""

    def wait(self) -> None:
        """Block the host until it has ended."""


class Transfer(Protocol):
    """Copies out to the host and back."""

    def copy_out(self, source: torch.Tensor, host: torch.Tensor, after: Sequence[Done] = ()) -> Done:
        """Start ``host[:] = source`` after ``after`` and after the work queued so far on the compute stream."""

    def copy_back(self, host: torch.Tensor, target: torch.Tensor, after: Done) -> Done:
        """Start ``target[:] = host`` after ``after`` and after the work queued so far on the compute stream."""


class _Immediate:
    def block_compute(self) -> None:
        """Nothing to wait for."""

    def is_over(self) -> bool:
        """Always: the copy was over when it was asked for."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class CpuTransfer:
    """Between two pools of CPU memory: each copy is over when the call returns."""

    def copy_out(self, source: torch.Tensor, host: torch.Tensor, after: Sequence[Done] = ()) -> Done:
        """See `Transfer.copy_out`."""
        host.copy_(source)
        return _Immediate()

    def copy_back(self, host: torch.Tensor, target: torch.Tensor, after: Done) -> Done:
        """See `Transfer.copy_back`."""
        target.copy_(host)
        return _Immediate()


class _CudaDone:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def block_compute(self) -> None:
        """See `Done.block_compute`."""
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def is_over(self) -> bool:
        """See `Done.is_over`."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See `Done.wait`."""
        self.event.synchronize()


class CudaTransfer:
    """Between a GPU and pinned host memory, on one stream each way.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def copy_out(self, source: torch.Tensor, host: torch.Tensor, after: Sequence[Done] = ()) -> Done:
        """See `Transfer.copy_out`."""
        for done in after:
            if isinstance(done, _CudaDone):
                self._out.wait_event(done.event)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        return self._copy(self._out, source, host)

    def copy_back(self, host: torch.Tensor, target: torch.Tensor, after: Done) -> Done:
        """See `Transfer.copy_back`."""
        if isinstance(after, _CudaDone):
            self._back.wait_event(after.event)
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        return self._copy(self._back, host, target)

    def _copy(self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor) -> Done:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _CudaDone(event, self._device)


def make_transfer(device: torch.device) -> Transfer:
    """The transfer for a device: `CudaTransfer` or `CpuTransfer`."""
    return CudaTransfer(device) if device.type == "cuda" else CpuTransfer()
