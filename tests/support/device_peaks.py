"""What torch's allocator had given out in the steps of a session within a limit of the device's memory.

In: layers, a step; what a loss is of. Out: the most bytes, what went, the session. Keeps true: a step's peak is that of all
its parts, though the session has torch's statistics begin anew between them. Does not: make a model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from te_offload import OffloadSession

STEPS = 20
LOGITS = 64 << 20  # bytes of a loss


def peak_of_steps(
    layers: Iterable[torch.nn.Module],
    step: Callable[[int], Any],
    *,
    told: Callable[[OffloadSession | None], None] | None = None,
    **arguments: Any,
) -> tuple[int, int, OffloadSession]:
    """Of any step from the third on, and bytes out of the last one.

    Args:
        step: is given its number. told: is given the session before, for its regions, and ``None`` after.
    """
    gc.collect()  # or models of tests before are let go of in between
    peaks: list[int] = []
    with OffloadSession(layers, min_bytes=0, **arguments) as session:
        if told is not None:
            told(session)
        for number in range(STEPS):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with session.step():
                step(number)
            torch.cuda.synchronize()
            peaks.append(peak_of_one(session, number))
        out = session.records[-1].bytes_out
        if told is not None:
            told(None)
    return max(peaks[2:]), out, session


def backward_of_a_wide_loss(y: torch.Tensor) -> None:
    """The backward of a loss that takes memory of its own until it is over."""
    wide = torch.empty(LOGITS, dtype=torch.uint8, device=y.device).zero_()
    (y.float().pow(2).mean() + wide[0]).backward()


def peak_of_one(session: OffloadSession, number: int) -> int:
    """Of the step with that number, which has ended, since the statistics began anew."""
    peak = torch.cuda.max_memory_allocated()
    record = session.records[-1]
    if record.device_peak is not None and record.index == number:
        assert record.device_peak.held <= record.device_peak.nbytes <= record.device_reserved
        peak = max(peak, record.device_peak.nbytes)
    return peak
