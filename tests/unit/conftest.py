"""Fixtures of the compiled code that queues copies."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from te_offload.offload import cuda_queue, cuda_runtime
from te_offload.offload.transfer import Copy
from tests.support.fake_runtime import BACK, BESIDE, COMPUTE, GPU, OUT, Runtime


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    found = Runtime()
    for module in (cuda_runtime, cuda_queue):
        monkeypatch.setattr(module, "runtime", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: COMPUTE if device == GPU else None)
    yield found
    gc.collect()


@pytest.fixture
def queue(runtime: Runtime) -> cuda_queue.Queue:
    found = cuda_queue.new_queue(GPU, (OUT, BACK, BESIDE), Copy)
    assert found is not None, cuda_queue.build().reason
    return found
