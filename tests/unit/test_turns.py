"""Copies out by turns on two streams, over a CUDA runtime that only writes down what it is asked."""

from __future__ import annotations

import random
from typing import Any

import pytest

from te_offload.errors import CopyError
from te_offload.offload import cuda_queue
from te_offload.offload import transfer as transfer_module
from te_offload.offload.transfer import Copy
from tests.support.fake_runtime import BACK, BESIDE, COMPUTE, GPU, OUT, Runtime

TURN = 32 << 20


def turns_of(calls: list[tuple[Any, ...]]) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Stream and pieces of each turn; between two of them the next stream must have come to wait for the one before."""
    found: list[tuple[int, list[tuple[int, int, int]]]] = []
    recorded: dict[int, int] = {}  # events, by the stream whose work they end
    relayed: set[tuple[int, int]] = set()  # which stream has waited for which since that one's last copy
    for name, *rest in calls:
        if name == "EventRecord":
            recorded[rest[0]] = rest[1]
        elif name == "StreamWaitEvent" and rest[1] in recorded:
            relayed.add((rest[0], recorded[rest[1]]))
        elif name.startswith("Memcpy"):
            stream = rest[-1]
            pieces = [(rest[1], rest[0], rest[2])] if name == "MemcpyAsync" else rest[0]
            if not found or found[-1][0] != stream:
                assert not found or (stream, found[-1][0]) in relayed
                found.append((stream, []))
            found[-1][1].extend(pieces)
            relayed = {pair for pair in relayed if pair[1] != stream}
    return found


def whole(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Pieces whose parts follow each other at once are one."""
    found: list[tuple[int, int, int]] = []
    for source, target, nbytes in pieces:
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (source, target):
            found[-1] = (*found[-1][:2], found[-1][2] + nbytes)
        else:
            found.append((source, target, nbytes))
    return found


def test_long_copy_out_goes_by_turns_on_two_streams_in_order(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """A number that the host asks for goes between two turns, and not behind all of it."""
    copy = queue.copy(0, [(1, 2, 3 * TURN + 5)], (queue.mark(False),), True)
    calls = runtime.since()
    found = turns_of(calls)
    assert [stream for stream, _ in found] == [OUT, BESIDE, OUT]
    assert [[nbytes for *_, nbytes in pieces] for _, pieces in found] == [[TURN], [TURN], [TURN + 5]]
    assert whole([piece for _, pieces in found for piece in pieces]) == [(1, 2, 3 * TURN + 5)]
    records = [call for call in calls if call[0] == "EventRecord"]
    assert records[1][2] == OUT and records[-1][2] == OUT  # it begins and ends there
    assert copy.began is not copy.ended


def test_copies_out_take_turns_also_one_after_the_other(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """Slots of less than a turn queue up behind each other too. What a copy waits for, its own stream waits for."""
    marks = [queue.mark(False) for _ in range(6)]
    for mark in marks:
        queue.copy(0, [(1, 2, TURN // 2)], (mark,), False)
    calls = runtime.since()
    assert [(stream, len(pieces)) for stream, pieces in turns_of(calls)] == [(OUT, 2), (BESIDE, 2), (OUT, 2)]
    ready = [call[1] for call in calls if call[0] == "EventRecord" and call[2] == COMPUTE]
    waited = {call[2]: call[1] for call in calls if call[0] == "StreamWaitEvent"}
    assert [waited[event] for event in ready] == [OUT, OUT, BESIDE, BESIDE, OUT, OUT]


@pytest.mark.parametrize("batches", [True, False])
def test_every_byte_out_is_copied_once_in_order_whatever_the_pieces(runtime: Runtime, batches: bool) -> None:
    """Few and many, short and long, in one copy and in several."""
    functions = cuda_queue.addresses(runtime, batches=batches)
    streams = (OUT, BACK, BESIDE)
    queue = cuda_queue.build().module.Queue(functions, GPU, streams, lambda _: COMPUTE, cuda_queue.refuse, Copy)
    draw = random.Random(batches)
    for _ in range(200):
        lengths = [
            draw.choice([1, 512, 1 << 20, TURN // 3, TURN, TURN + 1, 2 * TURN]) for _ in range(draw.randint(1, 40))
        ]
        pieces = [(2 * i * 10**9, 3 * i * 10**9, nbytes) for i, nbytes in enumerate(lengths, 1)]
        queue.copy(0, pieces, (queue.mark(False),), False)
        found = turns_of(runtime.since())
        assert whole([piece for _, part in found for piece in part]) == pieces
        for _, part in found:  # what was there of the turn before, and what is no more than a turn and a quarter
            assert sum(nbytes for *_, nbytes in part) <= 2.25 * TURN
        assert len(found) >= sum(lengths) // (2.25 * TURN)


def test_copies_back_take_no_turns_nor_do_those_on_one_stream(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """Short copies to the GPU do not wait for long ones; and who gives a stream has all on it."""
    queue.copy(1, [(1, 2, 5 * TURN)] * 2, (queue.mark(False),), False)
    alone = cuda_queue.new_queue(GPU, (OUT, OUT, 0), Copy)
    assert alone is not None
    alone.copy(0, [(1, 2, 5 * TURN)] * 2, (queue.mark(False),), False)
    copies = [call for call in runtime.since() if call[0] == "MemcpyAsync"]
    assert copies == [("MemcpyAsync", 2, 1, 5 * TURN, 4, stream) for stream in (BACK, BACK, OUT, OUT)]


@pytest.mark.parametrize("name", ["cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent"])
def test_turn_that_is_refused_is_an_error_and_not_taken(runtime: Runtime, queue: cuda_queue.Queue, name: str) -> None:
    """Else what is next would not come after what was before."""
    ready = queue.mark(False)
    held = [queue.mark(False) for _ in range(4)]
    queue.copy(0, [(1, 2, TURN)], (ready,), False)
    del held  # events for the next copy: none is made but the turn's
    runtime.since()
    runtime.fails[name] = 1
    with pytest.raises(CopyError, match="invalid argument"):
        queue.copy(0, [(1, 2, 64)], (ready,), False)
    assert not [call for call in runtime.since() if call[0].startswith("Memcpy")]
    runtime.fails.clear()
    queue.copy(0, [(1, 2, 64)], (ready,), False)
    calls = runtime.since()
    assert [call[-1] for call in calls if call[0] == "MemcpyAsync"] == [BESIDE]
    waited = [call[1] for call in calls if call[0] == "StreamWaitEvent"]
    assert waited == [BESIDE]  # for the copy before, and not for `ready` again


class _TorchStream:
    """A stream of torch's, over the same runtime."""

    def __init__(self, runtime: Runtime, handle: int) -> None:
        self._runtime = runtime
        self.cuda_stream = handle

    def wait_stream(self, other: _TorchStream) -> None:
        event = -other.cuda_stream
        self._runtime.calls += [
            ("EventRecord", event, other.cuda_stream),
            ("StreamWaitEvent", self.cuda_stream, event, 0),
        ]


def test_without_compiled_code_copies_out_take_the_same_turns(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    assert transfer_module._TURN == TURN
    made = [_TorchStream(runtime, handle) for handle in (OUT, BESIDE)]
    way = transfer_module._Way(*made)  # type: ignore[arg-type]
    draw = random.Random(0)
    for _ in range(100):
        lengths = [draw.choice([1, TURN // 3, TURN, TURN + 1, 3 * TURN]) for _ in range(draw.randint(1, 9))]
        pieces = [(2 * i * 10**9, 3 * i * 10**9, nbytes) for i, nbytes in enumerate(lengths, 1)]
        queue.copy(0, pieces, (queue.mark(False),), False)
        compiled = turns_of(runtime.since())
        way.take_turns()
        for part in way.parts(pieces):
            runtime.calls += [("MemcpyAsync", target, source, nbytes, 4, way.handle) for source, target, nbytes in part]
        found = turns_of(runtime.since())
        assert whole([piece for _, part in found for piece in part]) == pieces
        assert found == compiled
