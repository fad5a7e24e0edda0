"""Whether a CUDA graph would pay: the arithmetic."""

from __future__ import annotations

import time

import pytest
import torch

from te_offload.errors import ArgumentError
from te_offload.graphs.preflight import Preflight, busy, milliseconds, preflight


def test_busy_time_counts_what_overlaps_once() -> None:
    assert busy([]) == 0
    assert busy([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5


def test_call_that_waits_for_launches_gains() -> None:
    found = Preflight(ms=10.0, busy_ms=2.0, kernels=501, one_thread_ms=9.0)
    assert found.launch_bound == pytest.approx(0.8) and found.predicted_ms == pytest.approx(2.5)
    assert found.gain == pytest.approx(4) and found.pays
    assert "80% is waiting for launches" in str(found) and "4.00 times as fast; a graph pays." in str(found)
    assert str(found).endswith("set_multithreading_enabled(False), 9.000 ms.")


def test_call_whose_gpu_is_busy_does_not_gain() -> None:
    found = Preflight(ms=10.0, busy_ms=9.9, kernels=50, one_thread_ms=10.0)
    assert not found.pays and "would not pay" in str(found)


def test_prediction_is_never_slower_than_what_was_measured() -> None:
    assert Preflight(ms=1.0, busy_ms=0.9, kernels=5000, one_thread_ms=1.0).gain == 1
    assert Preflight(ms=0.0, busy_ms=0.0, kernels=0, one_thread_ms=0.0).gain == 1


@pytest.mark.parametrize("threads", [True, False])
def test_half_of_the_calls_have_autograd_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    now, seen = [0.0], list[bool]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(seconds: float) -> None:
        seen.append(torch._C._is_multithreading_enabled())
        now[0] += seconds if seen[-1] else seconds / 2

    with torch.autograd.set_multithreading_enabled(threads):
        found = milliseconds(call, [0.004], 5)
        assert torch._C._is_multithreading_enabled() is threads
    assert seen == ([True] * 2 + [False] * 5 + [True] * 3 if threads else [False] * 10)
    assert found == pytest.approx((4, 2) if threads else (2, 2))


def test_one_run_is_too_few() -> None:
    with pytest.raises(ArgumentError, match="runs must be at least 2, but is 1"):
        preflight(lambda: None, runs=1)
