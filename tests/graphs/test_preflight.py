"""Whether a CUDA graph would pay: the arithmetic."""

from __future__ import annotations

import pytest

from te_offload.graphs.preflight import Preflight, busy


def test_busy_time_counts_what_overlaps_once() -> None:
    assert busy([]) == 0
    assert busy([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5


def test_call_that_waits_for_launches_gains() -> None:
    found = Preflight(ms=10.0, busy_ms=2.0, kernels=501)
    assert found.launch_bound == pytest.approx(0.8) and found.predicted_ms == pytest.approx(2.5)
    assert found.gain == pytest.approx(4) and found.pays
    assert "80% is waiting for launches" in str(found) and str(found).endswith("4.00 times as fast; a graph pays.")


def test_call_whose_gpu_is_busy_does_not_gain() -> None:
    found = Preflight(ms=10.0, busy_ms=9.9, kernels=50)
    assert not found.pays and "would not pay" in str(found)


def test_prediction_is_never_slower_than_what_was_measured() -> None:
    assert Preflight(ms=1.0, busy_ms=0.9, kernels=5000).gain == 1
    assert Preflight(ms=0.0, busy_ms=0.0, kernels=0).gain == 1
