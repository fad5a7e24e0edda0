"""What depends on torch's allocator of GPU memory, and errors of CUDA's runtime that were handled."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_offload.errors import CaptureError, CopyError
from te_offload.graphs import Pool
from te_offload.offload import allocator, cuda_copies, cuda_runtime, host_pool
from te_offload.offload.load import Load
from tests.unit.test_extents import storages_side_by_side

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    allocator.joins_storages.cache_clear()
    yield
    allocator.joins_storages.cache_clear()


@pytest.mark.parametrize(
    ("backend", "uncached", "joined"),
    [
        ("native", None, True),
        ("native", "1", False),
        ("cudaMallocAsync", None, False),
        ("pluggable", None, False),
    ],
)
def test_neighbours_share_a_run_only_where_the_allocator_has_both_in_one_segment(
    monkeypatch: pytest.MonkeyPatch, backend: str, uncached: str | None, joined: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    if uncached:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", uncached)
    handles: Any = [SimpleNamespace(tensors=[tensor]) for tensor in storages_side_by_side(2, 512)]
    load = Load(SimpleNamespace(), handles)  # type: ignore[arg-type]
    assert len(load.measure(GPU).runs) == (1 if joined else 2)
    assert not allocator.joins_storages("cpu")


def test_nothing_is_captured_with_another_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator.check_captures(GPU)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    allocator.check_captures(torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"torch's allocator is cudaMallocAsync: .* Leave backend:\.\.\. out"):
        allocator.check_captures(GPU)
    monkeypatch.undo()
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    allocator.check_captures(torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"PYTORCH_NO_CUDA_MEMORY_CACHING is set: .* Unset it\."):
        allocator.check_captures(GPU)


class Runtime:
    """CUDA's, which keeps the last error until it is asked for; it refuses all."""

    def __init__(self) -> None:
        self.last = 0

        def fail(*_: Any) -> int:
            self.last = 1
            return 1

        self.cudaMemcpyAsync = self.cudaMemcpyBatchAsync = fail
        self.cudaHostRegister = self.cudaHostUnregister = fail

    def cudaGetErrorString(self, error: int) -> bytes:
        return b"invalid argument" if error == 1 else b"?"

    def cudaGetLastError(self) -> int:
        found, self.last = self.last, 0
        return found


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    for module in (cuda_runtime, cuda_copies):
        monkeypatch.setattr(module, "runtime", lambda: found)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    return found


@pytest.mark.parametrize("count", [1, 2, 9], ids=["one", "a few", "many at once"])
def test_refused_copy_leaves_no_error_behind_for_the_next_kernel(runtime: Runtime, count: int) -> None:
    """After each launch torch asks for the thread's last error, and raises it there."""
    copier = cuda_copies.Copier(0)
    with pytest.raises(CopyError, match=r"copies of \d+ bytes together: invalid argument \(error 1\)\.$"):
        copier.start([(0, 0, 1)] * count, 0)
    assert runtime.last == 0


def test_host_memory_that_cuda_does_not_lock_leaves_no_error_behind(runtime: Runtime) -> None:
    with pytest.raises(OSError, match=r"CUDA did not page-lock 4\.0 KiB: invalid argument \(error 1\)$"):
        host_pool._Slab(4096, pinned=True, node=None)
    assert runtime.last == 0
    host_pool._unregister(torch.zeros(1))
    assert runtime.last == 0


def test_pool_that_would_keep_memory_is_not_asked_for_where_nothing_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "MemPool", None)
    assert Pool.kept(GPU).handle is None
