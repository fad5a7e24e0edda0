"""Whether a CUDA graph would pay, which wins the time in which the GPU waits for launches; or autograd in this thread.

In: a function and inputs. Out: `Preflight`: times of an eager call, and what they predict. Keeps true: nothing is captured;
times are measured, the prediction is arithmetic that can be read here. Does not: know the copies of inputs that a graph
needs.

While the GPU is busy, a graph wins nothing. Predicted is the union of the intervals in which the GPU is busy, and a gap
between two kernels of one graph.

A part of the waiting may be autograd's own: it runs the GPU's part of a backward in a thread of its own, on another core,
while the calling one waits. `torch.autograd.set_multithreading_enabled(False)` has the calling one do it, in the same order
where the graph lies on one GPU. So that is measured too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_offload.errors import ArgumentError

GAP_US = 1.0  # from one kernel of a graph to the next that waits for it
WORTH = 1.05  # a gain below this is lost in copies of inputs, and in what a graph forbids


@dataclass(frozen=True)
class Preflight:
    """What an eager call showed.

    Attributes:
        ms: of a call, when calls follow one another. busy_ms: of which the GPU computes or copies. kernels: of a call.
        one_thread_ms: of a call with autograd in the calling thread.
    """

    ms: float
    busy_ms: float
    kernels: int
    one_thread_ms: float

    @property
    def launch_bound(self) -> float:
        """Share of the time, from 0 to 1, in which the GPU waits for launches."""
        return max(0.0, 1 - self.busy_ms / self.ms) if self.ms else 0.0

    @property
    def predicted_ms(self) -> float:
        """Of a call as a graph."""
        return min(self.ms, self.busy_ms + 1e-3 * GAP_US * max(self.kernels - 1, 0))

    @property
    def gain(self) -> float:
        """How many times faster a graph is, predicted."""
        return self.ms / self.predicted_ms if self.predicted_ms else 1.0

    @property
    def pays(self) -> bool:
        """Whether a graph is predicted to be worth it."""
        return self.gain >= WORTH

    def __str__(self) -> str:
        advice = "a graph pays" if self.pays else "a graph would not pay: the GPU hardly waits for launches"
        return (
            f"{self.ms:.3f} ms a call, the GPU busy for {self.busy_ms:.3f} ms in {self.kernels} kernels and copies: "
            f"{self.launch_bound:.0%} is waiting for launches. As a graph {self.predicted_ms:.3f} ms predicted, "
            f"{self.gain:.2f} times as fast; {advice}. Without a graph, under "
            f"torch.autograd.set_multithreading_enabled(False), {self.one_thread_ms:.3f} ms."
        )


def preflight(function: Callable[..., Any], inputs: Sequence[Any] = (), *, runs: int = 10) -> Preflight:
    """Measure a function that runs on the current GPU, eagerly.

    Args:
        function: it may hold a training step; it is called ``3 + 3 * runs`` times. inputs: for it.
        runs: to measure, at least 2.

    Raises:
        ArgumentError: fewer runs.
    """
    if runs < 2:
        raise ArgumentError(f"preflight: runs must be at least 2, but is {runs}.")
    for _ in range(3):
        function(*inputs)
    ms, one_thread_ms = milliseconds(function, inputs, runs)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(runs):
            function(*inputs)
        torch.cuda.synchronize()
    intervals = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return Preflight(ms, 1e-3 * busy(intervals) / runs, round(len(intervals) / runs), one_thread_ms)


def milliseconds(function: Callable[..., Any], inputs: Sequence[Any], runs: int) -> tuple[float, float]:
    """Of a call as things are, and with autograd in the calling thread; in four rows, the outer two as things are."""
    as_it_is = torch._C._is_multithreading_enabled()
    spent = {False: 0.0, True: 0.0}
    half = runs // 2
    for one_thread, calls in ((False, half), (True, half), (True, runs - half), (False, runs - half)):
        with torch.autograd.set_multithreading_enabled(as_it_is and not one_thread):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                function(*inputs)
            torch.cuda.synchronize()
            spent[one_thread] += time.perf_counter() - began
    return 1e3 * spent[False] / runs, 1e3 * spent[True] / runs


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
