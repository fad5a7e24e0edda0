"""Captures on a backend that needs no GPU: a recording runs its function again, into the same outputs."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_offload.errors import (
    ArgumentError,
    CaptureError,
    InputMismatchError,
    RowOverflowError,
    StaleOutputError,
    StateError,
    WarmUpError,
)
from te_offload.graphs import Capture, CaptureState, Pool, backend, capture
from te_offload.graphs.backend import CudaBackend
from te_offload.graphs.states import TRANSITIONS, change
from te_offload.offload import allocator
from te_offload.ops import row_check
from tests.support.fake_graphs import FakeBackend


def make(function: Callable[..., Any], *args: Any, fails_at: str = "", **options: Any) -> tuple[Capture, FakeBackend]:
    backend, kwargs = FakeBackend(fails_at), options.pop("kwargs", {})
    return Capture(function, backend, (args, kwargs), warmup=options.pop("warmup", 1), **options), backend


def double(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


def ready(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Capture, FakeBackend]:
    """Captured, and not yet replayed."""
    captured, backend = make(function, *args, **options)
    captured.warm_up()
    captured.record()
    assert captured.state is CaptureState.CAPTURED
    return captured, backend


@pytest.mark.parametrize(("begin", "end"), itertools.product(CaptureState, repeat=2))
def test_every_edge_between_states_is_legal_or_an_error(begin: CaptureState, end: CaptureState) -> None:
    if end in TRANSITIONS[begin]:
        assert change(begin, end) is end
    else:
        with pytest.raises(StateError, match=end.value):
            change(begin, end)


def test_first_calls_warm_up_then_one_captures_and_each_does_its_work_once() -> None:
    captured, backend = make(double, torch.zeros(2), warmup=2)
    found = [captured(torch.full((2,), float(i))).tolist() for i in range(5)]
    assert found == [[2.0 * i] * 2 for i in range(5)]
    assert backend.log == ["warm up", "warm up", "begin", "end", "replay", "replay", "replay"]


def test_capture_before_its_warm_up_runs_names_how_many_are_missing() -> None:
    captured, _ = make(double, torch.zeros(2), warmup=3)
    captured(torch.zeros(2))
    with pytest.raises(WarmUpError, match="2 of 3 warm-up runs are missing"):
        captured.record()


def test_callers_first_batch_is_never_written() -> None:
    """Failure 14b."""
    first = torch.ones(2)
    captured, backend = make(lambda x: x.mul_(3), first, warmup=1)
    backend.written = captured._buffers
    for value in (1.0, 2.0, 3.0):
        given = torch.full((2,), value)
        assert captured(given).tolist() == [3 * value] * 2
        assert given.tolist() == [value] * 2
    assert first.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("inputs", "difference"),
    [
        ((torch.zeros(3), 2.0), r"args\[0\] was \(2,\) torch.float32 on cpu and is \(3,\)"),
        ((torch.zeros(2, dtype=torch.float64), 2.0), r"is \(2,\) torch.float64"),
        ((torch.zeros(2, device="meta"), 2.0), "on meta"),
        ((torch.zeros(2), 3.0), r"args\[1\] was 2.0 and is 3.0"),
        ((torch.zeros(2), 2), r"args\[1\] was 2.0 and is 2"),
        ((None, 2.0), "was a tensor and is NoneType"),
        ((torch.zeros(2),), "the inputs nest otherwise"),
    ],
)
def test_other_inputs_are_an_error_that_says_how_they_differ(inputs: tuple[Any, ...], difference: str) -> None:
    """Failure 10: values too, and at each call."""
    captured, _ = ready(double, torch.zeros(2), 2.0)
    captured(torch.zeros(2), 2.0)
    with pytest.raises(InputMismatchError, match=difference):
        captured(*inputs)
    assert captured(torch.ones(2), 2.0).tolist() == [2.0, 2.0]


def test_other_inputs_are_captured_anew_if_asked() -> None:
    captured, backend = ready(double, torch.zeros(2), 2.0, on_mismatch="recapture")
    captured(torch.zeros(2), 2.0)
    for _ in range(3):
        assert captured(torch.ones(3), 5.0).tolist() == [5.0] * 3
    assert len(captured.recaptures) == 1 and "args[0] was (2,)" in captured.recaptures[0]
    assert backend.log[-6:] == ["close", "warm up", "begin", "end", "replay", "replay"]


def test_parameter_among_the_inputs_is_read_where_it_lies_and_may_not_move() -> None:
    """Failure 9: the incoming one is compared, not the stored one with itself."""
    weight = torch.nn.Parameter(torch.ones(2))
    captured, _ = ready(lambda x, w: x * w, torch.zeros(2), weight)
    with torch.no_grad():
        weight.fill_(4)
    assert captured(torch.ones(2), weight).tolist() == [4.0, 4.0]
    with pytest.raises(InputMismatchError, match=r"args\[1\] stays in place, but was at 0x"):
        captured(torch.ones(2), torch.nn.Parameter(torch.ones(2)))


def test_tensor_that_is_said_to_stay_is_not_copied() -> None:
    table = torch.ones(2)
    captured, _ = ready(lambda x, table: x + table, torch.zeros(2), kwargs={"table": table}, stay=[table])
    table.fill_(7)
    assert captured(torch.zeros(2), table=table).tolist() == [7.0, 7.0]
    with pytest.raises(InputMismatchError, match=r"kwargs\['table'\] stays in place"):
        captured(torch.zeros(2), table=table.clone())


def test_what_stays_may_move_until_the_capture_and_not_after_it() -> None:
    tables = [torch.full((2,), float(i)) for i in range(4)]
    captured, _ = make(lambda x, table: x + table, torch.zeros(2), tables[0], stay=[tables[0]], warmup=2)
    assert [captured(torch.zeros(2), table).tolist()[0] for table in tables[1:]] == [1.0, 2.0, 3.0]
    assert captured.state is CaptureState.CAPTURED
    assert captured(torch.zeros(2), tables[3]).tolist() == [3.0, 3.0]
    with pytest.raises(InputMismatchError, match="stays in place"):
        captured(torch.zeros(2), tables[2])


def test_tensor_that_stays_but_is_no_input_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="1 tensors of stay are not among the inputs"):
        make(double, torch.zeros(2), stay=[torch.zeros(2)])


def step_of(layer: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss: torch.Tensor = layer(x).square().sum()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize(
    ("move", "difference"),
    [
        (lambda layer: layer.zero_grad(set_to_none=True), r"grad was at 0x\w+ and is at 0x0 \(0: there is none\)"),
        (lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()), "weight was at 0x"),
        (lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(1, 2))), "weight is another tensor now"),
    ],
    ids=["grad set to None", "data rebound", "parameter replaced"],
)
def test_parameters_and_gradients_that_moved_are_noticed(move: Callable[[Any], None], difference: str) -> None:
    """Failures 9 and 14c."""
    layer = torch.nn.Linear(2, 1)
    captured, _ = ready(step_of(layer), torch.ones(3, 2), modules=[layer])
    captured(torch.ones(3, 2))
    move(layer)
    with pytest.raises(InputMismatchError, match=difference):
        captured(torch.ones(3, 2))


def test_what_moved_is_named_by_its_place_in_the_module() -> None:
    layer = torch.nn.Linear(2, 1)
    captured, _ = ready(step_of(layer), torch.ones(3, 2), modules=[torch.nn.Sequential(layer)])
    layer.weight.data = layer.weight.data.clone()
    with pytest.raises(InputMismatchError, match=r"0\.weight was at 0x"):
        captured(torch.ones(3, 2))


def test_value_equal_to_the_one_of_the_capture_is_the_same() -> None:
    captured, backend = make(lambda x, kind: x * len(kind), torch.zeros(2), "ab")
    for kind in ("ab", "".join(["a", "b"]), "".join(["a", "b"])):
        assert captured(torch.ones(2), kind).tolist() == [2.0, 2.0]
    assert backend.log.count("replay") == 2
    with pytest.raises(InputMismatchError, match="was 'ab' and is 'ba'"):
        captured(torch.ones(2), "ba")


def test_gradient_of_an_input_starts_from_nothing_in_each_run() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.square().sum().backward()
        assert x.grad is not None
        return x.grad

    captured, _ = make(step, torch.ones(2, requires_grad=True), warmup=3)
    for _ in range(3):
        assert captured(torch.ones(2, requires_grad=True)).tolist() == [2.0, 2.0]


def test_output_is_stale_after_the_next_call_and_its_copy_is_not() -> None:
    """Failure 8."""
    captured, _ = ready(double, torch.zeros(2))
    output = captured(torch.ones(2))
    kept = output + 1
    assert type(kept) is torch.Tensor and output.shape == (2,)
    captured(torch.zeros(2))
    assert kept.tolist() == [3.0, 3.0]
    for read in (lambda: output + 1, output.tolist, lambda: torch.stack([kept, output]), output.data_ptr):
        with pytest.raises(StaleOutputError, match="read after a later replay"):
            read()


def test_output_is_stale_after_close() -> None:
    captured, _ = ready(double, torch.zeros(2))
    output = captured(torch.ones(2))
    captured.close()
    with pytest.raises(StaleOutputError, match="the capture was closed"):
        output.sum()


def test_cloned_outputs_may_be_kept() -> None:
    """Failure 8."""
    captured, _ = ready(lambda x: {"y": x * 2, "n": 3}, torch.zeros(2), clone_outputs=True)
    outputs = [captured(torch.full((2,), float(i))) for i in range(3)]
    assert [output["y"].tolist() for output in outputs] == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]
    assert outputs[0]["n"] == 3


@pytest.mark.parametrize("phase", ["begin", "end", "replay"])
def test_failure_leaves_it_running_eagerly_with_the_reason_kept(phase: str) -> None:
    layer = torch.nn.Linear(2, 1)
    captured, backend = make(step_of(layer), torch.ones(3, 2), modules=[layer], fails_at=phase)
    captured(torch.ones(3, 2))
    grads = [parameter.grad for parameter in layer.parameters()]
    expected = [layer.weight.grad.clone() if layer.weight.grad is not None else None]
    captured(torch.ones(3, 2))
    assert captured.state is CaptureState.EAGER and str(captured.reason) == f"injected: {phase}"
    assert all(parameter.grad is grad for parameter, grad in zip(layer.parameters(), grads, strict=True))
    assert torch.equal(layer.weight.grad, expected[0])  # type: ignore[arg-type]
    assert backend.log[-2:] == [*(["close"] if phase == "replay" else [phase]), "warm up"]
    assert captured(torch.ones(5, 2)).shape == ()  # any shape, eagerly
    captured.close()


def test_gradients_are_put_back_if_the_function_fails_while_captured() -> None:
    """Failure: TT sets the graph before it is captured, and replays an empty one later."""
    layer = torch.nn.Linear(2, 1)
    calls = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        layer.weight.grad = torch.full((1, 2), float(calls))
        if calls == 2:
            raise ValueError("the second time")
        return x

    captured, _ = make(step, torch.ones(1), modules=[layer])
    captured(torch.ones(1))
    before = layer.weight.grad
    captured.warm_up()
    captured.record()
    assert captured.state is CaptureState.EAGER and isinstance(captured.reason, ValueError)
    assert layer.weight.grad is before
    assert captured(torch.ones(1)).tolist() == [1.0] and calls == 3


def test_failure_in_a_warm_up_run_is_the_callers_and_does_not_count() -> None:
    captured, backend = make(double, torch.zeros(2), fails_at="warm up")
    with pytest.raises(RuntimeError, match="injected: warm up"):
        captured(torch.ones(2))
    backend.fails_at = ""
    captured(torch.ones(2))
    assert captured.state is CaptureState.WARMING_UP and backend.log == ["warm up", "warm up"]


def test_interrupt_while_captured_is_raised_and_nothing_is_captured() -> None:
    stops = [False, True, False]

    def step(x: torch.Tensor) -> torch.Tensor:
        if stops.pop(0):
            raise KeyboardInterrupt
        return x

    captured, _ = make(step, torch.zeros(1))
    captured(torch.zeros(1))
    with pytest.raises(KeyboardInterrupt):
        captured(torch.zeros(1))
    assert captured.state is CaptureState.WARMING_UP and captured.reason is None


def test_run_without_the_graph_takes_any_inputs_and_leaves_the_graph() -> None:
    captured, backend = ready(double, torch.zeros(2))
    assert captured.eagerly(torch.ones(5), factor=7.0).tolist() == [7.0] * 5
    assert captured(torch.ones(2)).tolist() == [2.0, 2.0] and backend.log[-2:] == ["warm up", "replay"]
    captured.close()
    with pytest.raises(StateError, match="closed"):
        captured.eagerly(torch.ones(5))


def test_inside_another_capture_it_is_a_part_of_that_one() -> None:
    captured, backend = ready(double, torch.zeros(2))
    backend.captures = True
    log = list(backend.log)
    assert captured(torch.ones(5), factor=3.0).tolist() == [3.0] * 5
    assert backend.log == log
    backend.captures = False
    assert captured(torch.ones(2)).tolist() == [2.0, 2.0]


def test_later_replay_that_fails_is_raised() -> None:
    captured, backend = ready(double, torch.zeros(2))
    captured(torch.zeros(2))
    backend.fails_at = "replay"
    with pytest.raises(RuntimeError, match="injected: replay"):
        captured(torch.zeros(2))


def test_output_on_another_device_cannot_be_captured() -> None:
    captured, backend = make(lambda x: torch.zeros(1, device="meta"), torch.zeros(2))
    captured.warm_up()
    captured.record()
    assert isinstance(captured.reason, CaptureError) and "Output 0 of the captured function is on meta" in str(
        captured.reason
    )
    assert backend.log[-1] == "close"


def test_input_on_another_device_is_an_error_that_names_it() -> None:
    with pytest.raises(ArgumentError, match=r"kwargs\['x'\] is on meta, but the graph on cpu"):
        make(double, kwargs={"x": torch.zeros(2, device="meta")})


def test_producers_of_inputs_are_waited_for_once() -> None:
    """Failure 11."""
    captured, backend = ready(double, torch.zeros(2))
    captured.wait_for("a stream")
    captured(torch.zeros(2))
    captured(torch.zeros(2))
    assert backend.log.count(("wait", "a stream")) == 1
    assert backend.log.index(("wait", "a stream")) < backend.log.index("replay")


def test_close_waits_for_the_device_takes_the_graph_down_once_and_ends_all_calls() -> None:
    """Failure 19."""
    captured, backend = ready(double, torch.zeros(2))
    with captured:
        captured(torch.zeros(2))
    captured.close()
    assert backend.log[-2:] == ["settle", "close"] and backend.log.count("close") == 1
    with pytest.raises(StateError, match="closed"):
        captured(torch.zeros(2))


def test_graph_of_a_forgotten_capture_is_taken_down() -> None:
    captured, backend = ready(double, torch.zeros(2))
    del captured
    gc.collect()
    assert backend.log[-2:] == ["settle", "close"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 0}, "warmup must be 1 or more"),
        ({"warmup": True}, "warmup must be 1 or more"),
        ({"on_mismatch": "ignore"}, "on_mismatch must be"),
    ],
)
def test_options_that_cannot_be_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(double, torch.zeros(2), **options)


def test_without_a_gpu_there_is_nothing_to_capture() -> None:
    with pytest.raises(CaptureError, match="the inputs and modules are on cpu"):
        capture(double, [torch.zeros(2)])


@pytest.mark.parametrize("on_overflow", ["raise", "report"])
def test_rows_that_a_replay_lacked_are_told_by_the_next_call(on_overflow: str) -> None:
    op = SimpleNamespace(num_groups=1, in_features=4, out_features=4)

    def step(sizes: torch.Tensor) -> torch.Tensor:
        return row_check.fitting(op, sizes, 10) + 0

    found = Capture(step, FakeBackend(), ([torch.tensor([1])], {}), warmup=1, on_overflow=on_overflow)
    for asked in (20, 8, 13):  # the first is a warm-up, which no graph is
        assert found(torch.tensor([asked])).item() == min(asked, 20 if asked == 20 else 10)
    if on_overflow == "raise":
        with pytest.raises(RowOverflowError, match=r"SimpleNamespace.*on 10 rows: at the most 3 more"):
            found(torch.tensor([9]))
    assert found(torch.tensor([9])).item() == 9
    assert list(found.overflows.values()) == [3]
    found(torch.tensor([12]))
    if on_overflow == "raise":
        with pytest.raises(RowOverflowError, match="3 more"):
            found.check_rows()
        found(torch.tensor([14]))
        with pytest.warns(UserWarning, match="4 more"):
            found.close()
    else:
        found.check_rows()
        found.close()
    assert max(found.overflows.values()) == (4 if on_overflow == "raise" else 3)


def test_unknown_answer_to_overflows_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="on_overflow"):
        Capture(torch.clone, FakeBackend(), ([torch.ones(1)], {}), on_overflow="ignore")


def test_inputs_of_a_warm_up_that_are_another_graphs_are_not_kept() -> None:
    """The backward's graph would hold the first step's saved tensors for good."""
    first = torch.ones(3)
    found = Capture(double, FakeBackend(), ([first], {}), stay=[first], warmup=1, raw_outputs=True)
    found(first)
    gone = weakref.ref(first)
    del first
    assert gone() is None
    stays = torch.ones(3)
    assert [found(stays).sum().item() for _ in range(2)] == [6.0, 6.0]
    assert found.state is CaptureState.CAPTURED


def test_captures_of_a_thread_share_a_stream_and_other_threads_have_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another one torch's allocator would not give them what the others have done with, and cuBLAS takes a workspace."""
    made: list[int] = []

    def make(index: int) -> SimpleNamespace:
        made.append(index)
        return SimpleNamespace()

    monkeypatch.setattr(backend, "new_stream", make)
    index = 97  # of a GPU that no other test has
    device, pool = torch.device("cuda", index), Pool()
    one, other, alone = CudaBackend(device, pool), CudaBackend(device, pool), CudaBackend(device, None)
    with ThreadPoolExecutor(1) as threads:
        elsewhere = threads.submit(CudaBackend, device, None).result()
    assert one._stream is other._stream is alone._stream is not elsewhere._stream
    assert made == [index, index]


def test_nothing_is_captured_with_another_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    check = allocator.check_captures  # of a GPU, which this machine has not
    module = sys.modules["te_offload.graphs.capture"]
    monkeypatch.setattr(module, "check_captures", lambda _: check(torch.device("cuda")))
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync")
    captured, backend = make(double, torch.zeros(2))
    assert [captured(torch.full((2,), float(i))).tolist() for i in range(3)] == [[2.0 * i] * 2 for i in range(3)]
    assert captured.state is CaptureState.EAGER and "torch's allocator is cudaMallocAsync" in str(captured.reason)
    assert "begin" not in backend.log
