"""A line while a kernel is compiled, and none while one is found on disk."""

from __future__ import annotations

import pytest

from te_offload.fused.kernels.progress import said_if_slow


def test_what_takes_long_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with said_if_slow("compiling FC1", seconds=0) as timer:
        timer.join()
    assert [record.message for record in caplog.records] == ["compiling FC1"]


def test_what_is_quick_or_fails_is_not(caplog: pytest.LogCaptureFixture) -> None:
    timers = []

    def fail() -> None:
        with said_if_slow("compiling FC1", seconds=3600) as timer:
            timers.append(timer)
            raise ZeroDivisionError

    with said_if_slow("compiling FC1", seconds=3600) as timer:
        timers.append(timer)
    with pytest.raises(ZeroDivisionError):
        fail()
    for timer in timers:
        timer.join()
    assert not caplog.records
