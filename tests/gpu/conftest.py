"""Fixtures of tests on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from te_offload.offload.transfer import CudaTransfer


@pytest.fixture
def copies_out_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for each copy out, so that every slot comes back from the host, however busy the GPU is: else a
    backward reads where they are those that have not left.
    """
    copy_out = CudaTransfer.copy_out

    def copy_and_wait(self: CudaTransfer, pieces: Any, after: Any) -> Any:
        copy = copy_out(self, pieces, after)
        copy.ended.wait()
        return copy

    monkeypatch.setattr(CudaTransfer, "copy_out", copy_and_wait)
