"""Copies on a GPU's streams: what queues them, what they wait for, and whose memory may be used again when.

Each copy is slowed down where its order is tested, so that a missing wait is a wrong bit.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from te_offload.offload import cuda_queue
from te_offload.offload.transfer import CudaTransfer
from tests.gpu.paths import (
    FORMATS,
    HIDDEN,
    SPLITS,
    Stack,
    came_back_or_never_left,
    choose_path,
    mlp,
    slot_bytes,
    slow_copies,
    step,
)
from tests.support.mlp import assert_same_bits, make_inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch's calls"])
def test_copies_are_queued_by_compiled_code_or_without_a_compiler_by_torch(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """The bits and the bytes are the same."""
    assert cuda_queue.build().module is not None, cuda_queue.build().reason
    if not compiled:
        monkeypatch.setattr(cuda_queue, "build", lambda: cuda_queue.Built(None, "no compiler"))
    expected = step(Stack(3), SPLITS["even"], False)
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0, verify=True) as session:
        for _ in range(3):
            with session.step():
                found = step(model, SPLITS["even"], False)
            assert_same_bits(expected, found)
        assert session._engine is not None
        mark = session._engine.mover.transfer.mark()
    assert hasattr(mark, "event") is not compiled
    record = session.records[-1]
    assert came_back_or_never_left(record)
    assert all(row.out_ms is not None and row.out_ms > 0 for row in record.slots if row.bytes_out)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch's calls"])
def test_number_that_the_host_asks_for_does_not_wait_for_all_copies_out_that_are_queued(compiled: bool) -> None:
    """On one stream it would: a GPU copies out all that one has queued, however it is cut, before it looks at another's."""
    nbytes = 256 << 20
    source = torch.arange(nbytes // 4, dtype=torch.int32, device="cuda")
    host = torch.zeros_like(source, device="cpu").pin_memory()
    number = torch.ones(1, device="cuda")
    number.item()
    transfer = CudaTransfer(torch.device("cuda", 0), compiled=compiled)
    ready = transfer.mark()
    copies = [transfer.copy_out([(source.data_ptr(), host.data_ptr(), nbytes)], (ready,)) for _ in range(8)]
    number.item()
    was_over = copies[-1].ended.is_over()
    copies[-1].ended.wait()
    assert not was_over
    assert all(copy.ended.is_over() for copy in copies)
    assert torch.equal(host, source.cpu())


@FORMATS
def test_copy_back_waits_for_its_copy_out_however_slow_that_is(monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    choose_path(monkeypatch, "split", fp8)
    expected = step(Stack(3), SPLITS["ragged"], fp8)
    slow_copies(monkeypatch, 20_000_000, "copy_out")
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session, session.step():
        found = step(model, SPLITS["ragged"], fp8)
    assert_same_bits(expected, found)
    assert session.records[-1].peak_in_flight > 0


def test_device_memory_is_not_reused_while_a_copy_out_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(Stack(4), SPLITS["ragged"], False)
    slow_copies(monkeypatch, 5_000_000, "copy_out")
    model = Stack(4)

    def poison(*arguments: Any) -> None:
        for _repeat in range(40):
            torch.full((2**18,), float("nan"), device="cuda")

    for layer in model.layers:
        layer.register_forward_hook(poison)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session, session.step():
        found = step(model, SPLITS["ragged"], False)
    assert_same_bits(expected, found)
    assert session.records[-1].bytes_out > 0


@pytest.mark.usefixtures("copies_out_end")
def test_host_memory_is_not_overwritten_while_a_copy_back_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [step(Stack(3), SPLITS["ragged"], False, seed=seed) for seed in range(4)]
    slow_copies(monkeypatch, 20_000_000, "copy_back")
    model, found = Stack(3), []
    with OffloadSession(model.layers, min_bytes=0) as session:
        for seed in range(4):  # no comparison in between: the host would wait for the copies
            with session.step():
                found.append(step(model, SPLITS["ragged"], False, seed=seed))
    for one, other in zip(expected, found, strict=True):
        assert_same_bits(one, other)
    assert session.records[-1].bytes_back > 0


@pytest.mark.usefixtures("copies_out_end")
def test_memory_brought_back_for_nobody_is_not_reused_too_early() -> None:
    model = Stack(4)
    x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
    expected = step(Stack(4), SPLITS["ragged"], False)
    with OffloadSession(model.layers, min_bytes=0) as session, session.step():
        h = model.layers[0](x, sizes, scales, sizes).detach().requires_grad_()
        y = model.layers[1](h, sizes, scales, sizes)
        y.sum().backward()  # brings layer 0 back too, whose backward never comes
        del y, h
        gc.collect()
        model.zero_grad()
        found = step(model, SPLITS["ragged"], False)
    assert_same_bits(expected, found)
    assert session.records[-1].bytes_back > sum(slot_bytes(512, False).values())


def test_host_memory_is_page_locked_and_exact() -> None:
    model = mlp()
    with OffloadSession(model, min_bytes=0) as session:
        for _ in range(2):
            with session.step():
                step(model, SPLITS["even"], False)
        assert session._engine is not None
        lease = session._engine.pool.acquire(1000)
        assert lease is not None
        memory = torch.frombuffer((ctypes.c_uint8 * 1000).from_address(lease.pieces[0][0]), dtype=torch.uint8)
        assert memory.is_pinned()
        lease.release()
        record = session.records[-1]
        assert record.host_held == record.host_peak == sum(slot_bytes(512, False).values())
