"""What CUDA refuses, and who hears of it."""

from __future__ import annotations

import mmap

import pytest
import torch

from te_offload.errors import CopyError
from te_offload.offload import host_pool
from te_offload.offload.cuda_copies import Copier

pytestmark = pytest.mark.gpu


def _launch() -> None:
    """A kernel, after whose launch torch raises the thread's last error."""
    assert torch.ones(1, device="cuda").add_(1).item() == 2


@pytest.mark.parametrize("count", [1, 9], ids=["one", "many at once"])
def test_refused_copy_is_no_error_of_the_next_kernel(count: int) -> None:
    source, target = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    too_long = (source.data_ptr(), target.data_ptr(), 1 << 50)
    with pytest.raises(CopyError, match=r"\(error \d+\)"):
        Copier(source.device.index).start([too_long] * count, torch.cuda.current_stream().cuda_stream)
    _launch()


def test_refused_page_lock_is_no_error_of_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mmap.mmap(-1, 4096)
    monkeypatch.setattr(host_pool.mmap, "mmap", lambda *_: memory)  # type: ignore[attr-defined]
    slab = host_pool._Slab(4096, pinned=True, node=None)
    with pytest.raises(OSError, match=r"CUDA did not page-lock 4\.0 KiB"):
        host_pool._Slab(4096, pinned=True, node=None)  # page-locked already
    _launch()
    slab.close()
