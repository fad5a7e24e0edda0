"""The compiled code that queues copies, over a CUDA runtime that only writes down what it is asked."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_offload.errors import CopyError
from te_offload.offload import cuda_queue
from te_offload.offload.transfer import Copy, CudaTransfer
from tests.support.fake_runtime import BACK, BESIDE, COMPUTE, GPU, OUT, Runtime


def test_copy_comes_after_its_marks_and_its_end_after_the_copy(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """The order of the calls is the order on the stream."""
    ready = queue.mark(False)
    assert runtime.since() == [("EventCreate", 101, 2, GPU), ("EventRecord", 101, COMPUTE)]
    copy = queue.copy(0, [(1000, 2000, 64)], (ready,), False)
    assert type(copy) is Copy and copy.began is None
    assert runtime.since() == [
        ("EventCreate", 102, 2, GPU),
        ("StreamWaitEvent", OUT, 101, 0),
        ("MemcpyAsync", 2000, 1000, 64, 4, OUT),
        ("EventRecord", 102, OUT),
    ]
    queue.block_compute(copy.ended)
    assert runtime.since() == [("StreamWaitEvent", COMPUTE, 102, 0)]


def test_timed_copy_begins_when_its_waits_are_over(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """What it waits for is not its time."""
    copy = queue.copy(1, [(1000, 2000, 64)], (queue.mark(True),), True)
    assert [call[:3] for call in runtime.since() if call[0] != "EventCreate"] == [
        ("EventRecord", 101, COMPUTE),
        ("StreamWaitEvent", BACK, 101),
        ("EventRecord", 102, BACK),
        ("MemcpyAsync", 2000, 1000),
        ("EventRecord", 103, BACK),
    ]
    assert copy.began.milliseconds_to(copy.ended) == 1.5
    with pytest.raises(TypeError, match="another Mark"):
        copy.began.milliseconds_to(None)


def test_timed_events_are_made_with_times_and_others_without(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    marks = [queue.mark(True), queue.mark(False)]
    assert [call[2] for call in runtime.since() if call[0] == "EventCreate"] == [0, 2]
    del marks
    assert None not in [queue.mark(True), queue.mark(False)]
    assert runtime.since() == [("EventRecord", 101, COMPUTE), ("EventRecord", 102, COMPUTE)]


def test_event_is_recorded_anew_only_when_nobody_holds_its_mark(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """A mark that is held tells of its own moment."""
    held = [queue.mark(False) for _ in range(200)]
    assert len({call[1] for call in runtime.since()}) == 200
    del held[7]
    assert [queue.mark(False) is not None, runtime.since()] == [True, [("EventRecord", 108, COMPUTE)]]
    held.clear()
    held += [queue.mark(False) for _ in range(200)]
    assert {call[0] for call in runtime.since()} == {"EventRecord"}  # as many as there were are enough


def test_mark_that_a_way_waited_for_first_the_last_time_is_not_waited_for_again(
    runtime: Runtime, queue: cuda_queue.Queue
) -> None:
    """The slots of a layer come back after one moment; what a way waits for, all that follows on it does."""
    free, left = queue.mark(False), queue.mark(False)
    queue.copy(1, [(1, 2, 64)], (free,), False)
    runtime.since()
    queue.copy(1, [(1, 2, 64)], (free, left), False)
    assert [call for call in runtime.since() if call[0] == "StreamWaitEvent"] == [("StreamWaitEvent", BACK, 102, 0)]
    queue.copy(0, [(1, 2, 64)], (free,), False)  # the other way has not
    assert [call for call in runtime.since() if call[0] == "StreamWaitEvent"] == [("StreamWaitEvent", OUT, 101, 0)]
    queue.forget()
    queue.copy(1, [(1, 2, 64)], (free,), False)
    assert [call for call in runtime.since() if call[0] == "StreamWaitEvent"] == [("StreamWaitEvent", BACK, 101, 0)]


@pytest.mark.parametrize("count", [1, 20])
def test_way_does_not_count_on_a_wait_that_was_refused(runtime: Runtime, queue: cuda_queue.Queue, count: int) -> None:
    """Else this copy or the next one would come before its producer."""
    free = queue.mark(False)
    runtime.fails["cudaStreamWaitEvent"] = 1
    with pytest.raises(CopyError, match=r"^CUDA refused \d+ copies of \d+ bytes together, or to order them: invalid"):
        queue.copy(1, [(1, 2, 64)] * count, (free,), False)
    assert not [call for call in runtime.since() if call[0].startswith("Memcpy")]
    runtime.fails.clear()
    queue.copy(1, [(1, 2, 64)], (free,), False)
    assert ("StreamWaitEvent", BACK, 101, 0) in runtime.since()


@pytest.mark.parametrize("name", ["cudaMemcpyAsync", "cudaMemcpyBatchAsync", "cudaEventRecord"])
def test_refused_copy_is_an_error_and_leaves_none_behind_for_the_next_kernel(
    runtime: Runtime, queue: cuda_queue.Queue, name: str
) -> None:
    """After each launch torch asks for the thread's last error, and raises it there."""
    ready = queue.mark(False)
    runtime.fails[name] = 1
    count = 20 if name == "cudaMemcpyBatchAsync" else 2
    with pytest.raises(CopyError, match=rf"{count} copies of {64 * count} bytes .* invalid argument \(error 1\)\.$"):
        queue.copy(0, [(1, 2, 64)] * count, (ready,), False)
    assert runtime.last == 0
    runtime.fails.clear()
    runtime.since()
    queue.copy(0, [(1, 2, 64)], (ready,), False)
    assert not [call for call in runtime.since() if call[0] == "EventCreate"]  # the event of the refused one serves


@pytest.mark.parametrize("what", ["mark", "block_compute", "is_over", "wait", "milliseconds_to", "create"])
def test_refused_event_is_an_error(runtime: Runtime, queue: cuda_queue.Queue, what: str) -> None:
    """An illegal access of some kernel shows first where the runtime is asked next."""
    mark = queue.mark(False)
    names = ("Record", "Query", "Synchronize", "ElapsedTime", "CreateWithFlags")
    runtime.fails = dict.fromkeys([f"cudaEvent{name}" for name in names] + ["cudaStreamWaitEvent"], 700)
    calls: dict[str, Any] = {
        "mark": lambda: queue.mark(False),
        "create": lambda: queue.mark(False),
        "block_compute": lambda: queue.block_compute(mark),
        "is_over": mark.is_over,
        "wait": mark.wait,
        "milliseconds_to": lambda: mark.milliseconds_to(mark),
    }
    if what == "mark":
        del runtime.fails["cudaEventCreateWithFlags"]
    with pytest.raises(CopyError, match=r"^CUDA refused to record, to wait for or to ask an event: an illegal memory"):
        calls[what]()


def test_mark_that_has_not_passed_is_no_error_and_leaves_none_behind(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """The runtime keeps "not ready" as the thread's last error."""
    mark = queue.mark(False)
    assert mark.is_over()
    runtime.fails["cudaEventQuery"] = 600
    assert not mark.is_over()
    assert runtime.last == 0


@pytest.mark.parametrize("count", [1, 4, 5, 16, 17, 300])
def test_every_piece_is_copied_once(runtime: Runtime, queue: cuda_queue.Queue, count: int) -> None:
    """A few by themselves, which takes the host less time, and more in one call."""
    pieces = [(1000 + i, 2000 + i, 64 + i) for i in range(count)]
    queue.copy(0, pieces, (queue.mark(False),), False)
    calls = [call for call in runtime.since() if call[0].startswith("Memcpy")]
    if count <= 4:
        assert calls == [("MemcpyAsync", target, source, n, 4, OUT) for source, target, n in pieces]
    else:
        assert calls == [("MemcpyBatchAsync", pieces, 1, 0, 1, OUT)]


def test_runtime_without_batches_gets_single_copies(runtime: Runtime) -> None:
    """Before CUDA 13 the function has other arguments."""
    functions = cuda_queue.addresses(runtime, batches=False)
    queue = cuda_queue.build().module.Queue(
        functions, GPU, (OUT, BACK, BESIDE), lambda _: COMPUTE, cuda_queue.refuse, Copy
    )
    queue.copy(0, [(1, 2, 64)] * 9, (queue.mark(False),), False)
    assert [call[0] for call in runtime.since()].count("MemcpyAsync") == 9


def test_more_marks_than_one_has_room_for_are_all_waited_for(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """A lease in many pieces may have many copies before it."""
    marks = tuple([queue.mark(False) for _ in range(900)])
    runtime.since()
    queue.copy(0, [(1, 2, 64)], marks, False)
    waited = [call[2] for call in runtime.since() if call[0] == "StreamWaitEvent"]
    assert waited == list(range(101, 1001))


def test_mark_of_a_torch_event_can_be_waited_for(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """A replayed graph records events of torch's."""
    foreign = SimpleNamespace(event=SimpleNamespace(cuda_event=77))
    queue.copy(0, [(1, 2, 64)], (foreign,), False)
    queue.block_compute(foreign)
    waits = [call for call in runtime.since() if call[0] == "StreamWaitEvent"]
    assert waits == [("StreamWaitEvent", OUT, 77, 0), ("StreamWaitEvent", COMPUTE, 77, 0)]
    with pytest.raises(ValueError, match="never recorded"):
        queue.block_compute(SimpleNamespace(event=SimpleNamespace(cuda_event=0)))
    with pytest.raises(AttributeError, match="event"):
        queue.block_compute(None)


def test_other_gpu_is_current_again_afterwards(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """An event belongs to the GPU that was current when it was made."""
    runtime.device = 0
    queue.copy(0, [(1, 2, 64)], (queue.mark(False),), False)
    assert [call[3] for call in runtime.since() if call[0] == "EventCreate"] == [GPU, GPU]
    assert runtime.device == 0
    runtime.fails["cudaMemcpyAsync"] = 1
    with pytest.raises(CopyError):
        queue.copy(0, [(1, 2, 64)], (queue.mark(False),), False)
    assert runtime.device == 0


@pytest.mark.parametrize("what", ["mark", "block_compute"])
def test_default_stream_is_that_of_the_queues_gpu(
    runtime: Runtime, queue: cuda_queue.Queue, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its handle is 0 on every GPU, and means the current one's: a model may be on another."""
    mark = queue.mark(False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0 if device == GPU else None)
    asked: list[tuple[Any, ...]] = []
    for name in ("_cudaEventRecord", "_cudaStreamWaitEvent"):
        monkeypatch.setattr(runtime, name, lambda *args: asked.append((*args, runtime.device)), raising=False)
    made = cuda_queue.new_queue(GPU, (OUT, BACK, BESIDE), Copy)
    assert made is not None
    runtime.device = 0
    if what == "mark":
        assert made.mark(False) is not None
        assert asked == [("cudaEventRecord", 102, None, GPU)]
    else:
        made.block_compute(mark)
        assert asked == [("cudaStreamWaitEvent", None, 101, 0, GPU)]
    assert runtime.device == 0
    runtime.fails["cudaSetDevice"] = 1
    with pytest.raises(CopyError, match="invalid argument"):
        made.mark(False) if what == "mark" else made.block_compute(mark)
    assert len(asked) == 1


def test_other_threads_run_while_the_runtime_is_called(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call blocks where a stream is full, until there is room; a callback in Python may have to make it."""
    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    entered = threading.Event()
    runtime._cudaStreamWaitEvent = lambda *_: entered.set()  # type: ignore[attr-defined]
    runtime.cudaMemcpyAsync = libc.sem_wait  # type: ignore[attr-defined] # of what the first argument points to
    made: Any = cuda_queue.new_queue(GPU, (OUT, BACK, BESIDE), Copy)
    ready = made.mark(False)

    def other() -> None:
        assert entered.wait(30)
        libc.sem_post(semaphore)

    thread = threading.Thread(target=other, daemon=True)
    before = signal.signal(signal.SIGALRM, lambda *_: None)  # ends the wait with an error instead of hanging
    try:
        signal.alarm(20)
        thread.start()
        made.copy(0, [(1, ctypes.addressof(semaphore), 64)], (ready,), False)
        thread.join()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_mark_outlives_its_queue_and_the_last_one_destroys_the_events(
    runtime: Runtime, queue: cuda_queue.Queue, request: pytest.FixtureRequest
) -> None:
    """A record of a closed session still reads times."""
    made = cuda_queue.new_queue(GPU, (OUT, BACK, BESIDE), Copy)
    assert made is not None
    held, gone = made.mark(False), made.mark(False)
    runtime.since()
    del made, gone
    assert runtime.since() == []
    assert held.is_over()
    del held
    destroyed = [call[1] for call in runtime.since() if call[0] == "EventDestroy"]
    assert sorted(destroyed) == [101, 102]


def test_queue_and_its_marks_hold_each_other_in_no_circle(runtime: Runtime) -> None:
    """Nothing here is known to the garbage collector: a circle would stay for good."""

    def used() -> int:
        queue: Any = cuda_queue.new_queue(GPU, (OUT, BACK, BESIDE), Copy)
        queue.copy(1, [(1, 2, 64)], (queue.mark(False),), False)
        return sys.getrefcount(cuda_queue.refuse)

    counts = [sys.getrefcount(cuda_queue.refuse), used(), sys.getrefcount(cuda_queue.refuse)]
    assert counts[1:] == [counts[0] + 1, counts[0]]


def test_counts_of_references_stay(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """Of all that a copy is given or makes, also where it fails."""
    ready, pieces = queue.mark(True), [(10**6, 10**6 + 1, 10**6 + 2)]
    after = (ready,)

    def once() -> None:
        queue.copy(0, pieces, after, True)
        runtime.fails["cudaMemcpyAsync"] = 1
        with pytest.raises(CopyError):
            queue.copy(0, pieces, after, True)
        runtime.fails.clear()
        for bad in ((0, [None], after, False), (2, pieces, after, False), (0, 5, after, False), (0, pieces, (), False)):
            with pytest.raises((TypeError, ValueError)):
                queue.copy(*bad)

    def counts() -> list[int]:
        return [sys.getrefcount(one) for one in (ready, pieces, after, pieces[0], Copy, type(ready), None)]

    once()
    before = counts()
    for _ in range(500):
        once()
    grown = [new - old for new, old in zip(counts(), before, strict=True)]
    assert max(grown) < 50, grown


def test_memory_asked_for_by_long_calls_is_given_back(runtime: Runtime, queue: cuda_queue.Queue) -> None:
    """Also where they fail."""
    marks = tuple([queue.mark(False) for _ in range(900)])
    pieces = [(1, 2, 64)] * 900

    def once() -> None:
        queue.copy(0, pieces, marks, False)
        runtime.fails["cudaMemcpyBatchAsync"] = 1
        with pytest.raises(CopyError):
            queue.copy(0, pieces, marks, False)
        runtime.fails.clear()
        runtime.since()

    once()
    tracemalloc.start()
    try:
        once()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            once()
        assert tracemalloc.get_traced_memory()[0] - before < 20 * 900 * 8  # one array of a call that was kept
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("piece", [(1, 2), [1, 2, 3], (1, 2, -1), (1, "2", 3), (1, 2, 3.0)])
def test_piece_that_is_none_is_an_error_before_anything_is_queued(
    runtime: Runtime, queue: cuda_queue.Queue, piece: Any
) -> None:
    ready = queue.mark(False)
    runtime.since()
    with pytest.raises((TypeError, OverflowError)):
        queue.copy(0, [(1, 2, 3), piece], (ready,), False)
    assert runtime.since() == []


def test_transfer_copies_in_compiled_code_unless_a_graph_is_captured(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was waited for before a capture is not known after it."""
    streams = iter([SimpleNamespace(cuda_stream=handle) for handle in (OUT, BESIDE, BACK)])
    monkeypatch.setattr("te_offload.offload.transfer.new_stream", lambda _: next(streams))
    monkeypatch.setattr("te_offload.offload.transfer.Copier", lambda _: SimpleNamespace())
    transfer = CudaTransfer(torch.device("cuda", GPU))
    transfer.timed = False
    free = transfer.mark()
    transfer.copy_back([(1, 2, 64)], (free,))
    runtime.since()
    transfer.capture(on=True)
    assert transfer._queue is None
    transfer.capture(on=False)
    transfer.copy_back([(1, 2, 64)], (free,))
    assert [call for call in runtime.since() if call[0] == "StreamWaitEvent"] == [("StreamWaitEvent", BACK, 101, 0)]
    transfer.timed = True
    copy = transfer.copy_out([(1, 2, 64)], (free,))
    assert transfer.milliseconds(copy.began, copy.ended) == 1.5  # type: ignore[arg-type]
    transfer.block_compute(copy.ended)
    assert runtime.since()[-1] == ("StreamWaitEvent", COMPUTE, 104, 0)


def test_without_a_compiler_it_says_why_and_the_transfer_uses_torch(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Triton asks $CC for the compiler; of 3.9 only once."""
    from triton.runtime import build as of_triton

    forget = getattr(getattr(of_triton, "_find_compiler", None), "cache_clear", lambda: None)
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cuda_queue.build.cache_clear()
    forget()
    try:
        built = cuda_queue.build()
        assert built.module is None
        assert "no-such-compiler" in built.reason
        assert cuda_queue.new_queue(GPU, (OUT, BACK, BESIDE), Copy) is None
    finally:
        cuda_queue.build.cache_clear()
        forget()


def test_compiles_without_a_warning(tmp_path: Any) -> None:
    """Of either of the usual compilers' careful settings."""
    import sysconfig

    source = cuda_queue.__file__.replace(".py", ".c")
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", source]
    command += ["-I", sysconfig.get_paths()["include"], "-o", str(tmp_path / "queue.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
