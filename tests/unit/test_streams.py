"""Streams are made one at a time and never destroyed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import pytest
import torch

from te_offload.offload import streams


class _Stream:
    """In place of torch's, which needs a GPU, and takes no weak references that mean anything."""

    __slots__ = ("__dict__",)

    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream, self.device = handle, device


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Handles that CUDA was asked for."""
    handles: list[int] = []
    numbers = itertools.count(1)

    def create(device: int) -> int:
        handles.append(1000 * device + next(numbers))
        return handles[-1]

    monkeypatch.setattr(streams, "_create", create)
    monkeypatch.setattr(torch.cuda, "ExternalStream", _Stream)
    streams._spare.cache_clear()
    yield handles
    streams._spare.cache_clear()


def test_each_stream_that_lives_has_a_handle_of_its_own(made: list[int]) -> None:
    """Two ways of a transfer must not wait for each other."""
    living = [streams.new_stream(0) for _ in range(3)]
    assert [stream.cuda_stream for stream in living] == made == [1, 2, 3]


def test_a_stream_that_is_gone_is_given_out_again(made: list[int]) -> None:
    """The allocator may know memory by it, so that it cannot be destroyed; and many sessions need no more than one."""
    kept = streams.new_stream(0)
    for _ in range(5):
        gone = streams.new_stream(0)
        del gone
        gc.collect()
    assert made == [1, 2]
    assert kept.cuda_stream == 1


def test_a_stream_of_one_gpu_is_not_given_out_for_another(made: list[int]) -> None:
    """A handle belongs to a context."""
    stream = streams.new_stream(0)
    del stream
    gc.collect()
    assert streams.new_stream(1).cuda_stream == 1002
    assert made == [1, 1002]
