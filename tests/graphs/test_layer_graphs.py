"""Layers as graphs of their own, without a GPU: what is replayed and what not, whose memory stays, failures, the end."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession
from te_offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackwardTwiceError,
    CaptureError,
    InputMismatchError,
)
from te_offload.graphs import CaptureState, LayerGraphs, capture_layers
from te_offload.graphs.layers import bank
from te_offload.graphs.layers.pool import segment_lengths
from te_offload.offload import allocator
from tests.support import toy_layer
from tests.support.toy_layer import FakeGround, FakePool, Machine, Toy, install

WIDTH, ROWS = 256, 512


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def layers(machine: Machine, count: int = 3, kind: str = "") -> Any:  # a ModuleList of Toys
    return torch.nn.ModuleList(Toy(WIDTH, machine, kind) for _ in range(count))


def batches(count: int, rows: int = ROWS) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(rows, WIDTH, generator=random) for _ in range(count)]


def run(stack: Any, x: torch.Tensor, *, zero: bool = True) -> torch.Tensor:
    if zero:
        stack.zero_grad()
    for layer in stack:
        x = x + layer(x)
    x.square().sum().backward()
    return x.detach().clone()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


def ground_of(graphs: LayerGraphs) -> FakeGround:
    ground = graphs._ground
    assert isinstance(ground, FakeGround)
    return ground


@pytest.mark.parametrize("stride", [2 << 20, 1 << 20, 1 << 19], ids=["a granule", "half", "quarter"])
def test_replays_give_what_the_layers_give(machine: Machine, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    """Allocations that share granules live as long as they did before."""
    monkeypatch.setattr(toy_layer, "STRIDE", stride)
    eager, stack = layers(machine), layers(machine)
    with capture_layers(stack, warmup=2) as graphs:
        for x in batches(8):
            assert torch.equal(run(eager, x), run(stack, x))
            assert same(eager, stack)
        assert graphs.captured and [one.replays for one in graphs.scopes.values()] == [6] * 3
        assert machine.log.count("replay") == 2 * 3 * 6
        assert "addresses for inputs" in graphs.report() and "scratch" in graphs.report()


@pytest.mark.parametrize("saved", [1, 2])
def test_session_takes_saved_tensors_between_the_graphs_and_they_are_back_where_the_graphs_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    """One tensor comes back to its address; small ones share an allocation on their way, and are copied in."""
    eager, stack = (layers(machine, kind="saves two" if saved == 2 else "") for _ in range(2))
    with OffloadSession(stack, min_bytes=0) as session, capture_layers(stack, session=session, warmup=2) as graphs:
        space, homecomings = graphs._ground.space, []
        bytes_at = space.bytes_at
        monkeypatch.setattr(space, "bytes_at", lambda *place: homecomings.append(place) or bytes_at(*place))  # type: ignore[func-returns-value]
        for x in batches(6):
            expected = run(eager, x)
            with session.step():
                assert torch.equal(expected, run(stack, x))
            assert same(eager, stack)
        record = session.records[-1]
        assert graphs.captured
        assert record.bytes_out == record.bytes_back == 3 * saved * ROWS * WIDTH * 4  # the input crosses the border
        assert {row.fate for row in record.slots} == {Fate.OFFLOADED}
        assert len(homecomings) == (4 * 3 if saved == 1 else 0)


@pytest.mark.parametrize("delay", [False, True])
def test_commits_can_come_after_the_next_launch(machine: Machine, delay: bool) -> None:
    eager, stack = layers(machine), layers(machine)
    with (
        OffloadSession(stack, min_bytes=0) as session,
        capture_layers(stack, session=session, warmup=2, delay_commits=delay) as graphs,
    ):
        for x in batches(6):
            expected = run(eager, x)
            with session.step():
                assert torch.equal(expected, run(stack, x))
            assert same(eager, stack)
        record, found = session.records[-1], session.delay
        assert record.bytes_out == record.bytes_back == 3 * ROWS * WIDTH * 4 and found is not None
        # of a replayed step's three commits two come after a launch, the last one when the backward begins
        assert (found.commits, found.forced) == ((4 * 2, 4 + 2 * 3) if delay else (0, 0))
        assert ("8 commits came after a launch" in graphs.report()) is delay


def test_everything_but_scratch_is_unused_after_the_backward(machine: Machine) -> None:
    stack = layers(machine)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(3):
            run(stack, x)
        stack.zero_grad()
        gc.collect()
        graphs.settle()
        scratch = sum(piece.length for piece in ground_of(graphs).bank._scratch)
        assert 0 < graphs.used_bytes == scratch
        assert scratch < 3 * (16 << 20)  # one layer's, not all layers'


def test_memory_that_a_capture_alone_took_goes_back_at_its_end(machine: Machine) -> None:
    stack = layers(machine, 2)
    with capture_layers(stack, warmup=1) as graphs:
        run(stack, batches(1)[0])
        for layer in stack:  # captured now
            layer(batches(1)[0]).sum().backward()
            bank = ground_of(graphs).bank
            free = [piece.length for pieces in bank._free.values() for piece in pieces.values()]
            assert max(free, default=0) <= 2 << 20  # what the replay has let go of since


def test_memory_that_the_last_rounds_did_not_need_goes_back_while_training_goes_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank, "SLACK", 0)  # these layers need less than may lie idle
    stack, held = layers(machine), []
    with capture_layers(stack, warmup=1) as graphs:
        for number, x in enumerate(batches(22)):
            outputs, y = [], x
            for layer in stack:
                found = layer(y)
                y = y + found
                if number == 4:  # this once outputs are held until the backward
                    outputs.append(found)
            del found
            y.square().sum().backward()
            del outputs, y
            stack.zero_grad()
            held.append(graphs.held_bytes)
    assert max(held[:12]) > held[-1] == held[-2], held


def test_microbatches_accumulate_and_a_gradient_moves_out_of_the_way(machine: Machine) -> None:
    eager, stack = layers(machine), layers(machine)
    with capture_layers(stack, warmup=1) as graphs:
        for number, x in enumerate(batches(7)):
            run(eager, x, zero=number == 2), run(stack, x, zero=number == 2)
        assert same(eager, stack) and graphs.captured


def test_forward_before_the_last_ones_backward_runs_eagerly(machine: Machine) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    x, *more = batches(4)
    with capture_layers(stack, warmup=1) as graphs:
        run(stack, x), run(stack, x)
        for one in (eager, stack):
            one.zero_grad()
            outputs = [one[0](batch) for batch in more]
            for output in outputs:
                output.sum().backward()
        assert same(eager, stack)
        assert dict(graphs.scopes["layer0"].eager) == {
            "an output, a saved tensor or a gradient of an earlier call is in use": 2,
        }


def test_output_that_is_held_keeps_its_numbers(machine: Machine) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=1):
        run(stack, batches(1)[0])
        held = [stack[0](x).detach() for x in batches(4)]
        expected = [torch.relu(x * stack[0].weight) for x in batches(4)]
        assert all(torch.equal(one, other) for one, other in zip(held, expected, strict=True))


def test_output_that_is_held_over_its_own_backward_keeps_its_numbers(machine: Machine) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(4):
            stack.zero_grad()
            output = stack[0](x)
            before = output.detach().clone()
            output.sum().backward()
            assert torch.equal(output, before)
            del output
        assert graphs.captured and not graphs.scopes["layer0"].eager


def test_output_that_nobody_reads_any_more_has_no_memory_until_the_backward(machine: Machine) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(3):
            run(stack, x)
        stack.zero_grad()
        loss = stack[0](x).sum()
        graphs.settle()
        scratch = sum(piece.length for piece in ground_of(graphs).bank._scratch)
        assert graphs.used_bytes == 3 * (2 << 20) + scratch  # its input, `inner` and the mask
        loss.backward()


def test_second_backward_over_one_forward_is_an_error(machine: Machine) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=1):
        run(stack, batches(1)[0])
        output = stack[0](batches(1)[0]).sum()
        output.backward(retain_graph=True)
        with pytest.raises(BackwardTwiceError, match="layer0: a second backward"):
            output.backward()


def test_input_that_was_another_layers_output_is_read_where_it_lies(machine: Machine) -> None:
    eager, stack = layers(machine, 2), layers(machine, 2)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(4):
            for one in (eager, stack):
                one.zero_grad()
                one[1](one[0](x)).sum().backward()
            assert same(eager, stack)
        assert graphs.captured
        assert [len(scope._pair.chained) for scope in graphs.scopes.values() if scope._pair is not None] == [0, 1]
        # The gradient that layer 1 computes is read by layer 0 where it lies, too.
        ground, pair = graphs._ground, graphs.scopes["layer0"]._pair
        assert pair is not None and pair._grads is not None
        (zone,) = ground.space.zones_of(pair._grads.segments[0])
        assert zone.pieces and zone.left is not None and not zone.owners
        written = graphs.scopes["layer1"]._pair
        assert written is not None and written._gradients[0] is not None
        assert zone.pieces == ground.space.zones(written._gradients[0].address, 1)[0].pieces
        stack[1](batches(1)[0].requires_grad_()).sum().backward()  # not layer 0's output
        assert dict(graphs.scopes["layer1"].eager) == {"an input was another layer's output, and is not": 1}


def test_hooks_of_layers_and_gradients_run_at_each_replay_in_the_order_of_eager_steps(machine: Machine) -> None:
    """Failure 14."""
    logs: list[list[str]] = [[], []]
    stacks = [layers(machine, 2), layers(machine, 2)]
    for log, stack in zip(logs, stacks, strict=True):
        for number, layer in enumerate(stack):

            def note(what: str, log: list[str] = log, number: int = number) -> Any:
                return lambda *_: log.append(f"{what} {number}")

            layer.register_forward_pre_hook(note("before the forward of"))
            layer.register_forward_hook(note("after the forward of"))
            layer.register_full_backward_hook(note("after the backward of"))
            layer.weight.register_post_accumulate_grad_hook(note("gradient of"))
    with capture_layers(stacks[1], warmup=1) as graphs:
        for x in batches(4):
            for stack in stacks:
                run(stack, x.clone().requires_grad_())
        assert graphs.captured
    assert logs[0] == logs[1] and len(logs[0]) == 4 * 2 * 4


@pytest.mark.parametrize("how", ["no grad", "checkpoint", "hook"])
def test_calls_that_no_graph_takes_are_counted_with_their_reason(machine: Machine, how: str) -> None:
    stack = layers(machine, 1)
    x = batches(1)[0]
    with capture_layers(stack, warmup=1) as graphs:
        run(stack, x), run(stack, x)
        stack.zero_grad()
        if how == "no grad":
            with torch.no_grad():
                stack[0](x)
            expected = {"no gradients are asked for": 1}
        elif how == "hook":
            with torch.autograd.graph.save_on_cpu():
                stack[0](x).sum().backward()
            expected = {"another saved-tensor hook is active": 1}
        else:
            y = x.clone().requires_grad_()
            torch.utils.checkpoint.checkpoint(stack[0], y, use_reentrant=True).sum().backward()
            expected = {"no gradients are asked for": 1, "inside a backward": 1}
        assert dict(graphs.scopes["layer0"].eager) == expected


@pytest.mark.parametrize("on_mismatch", ["raise", "recapture", "eager"])
def test_other_shapes_are_an_error_a_capture_or_an_eager_call(machine: Machine, on_mismatch: str) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1, on_mismatch=on_mismatch) as graphs:
        for x in batches(2):
            run(stack, x)
        for x in batches(3, rows=100):
            if on_mismatch == "raise":
                with pytest.raises(InputMismatchError, match=r"layer0: .* was \(512, 256\) .* and is \(100, 256\)"):
                    run(stack, x)
                return
            assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        scope = graphs.scopes["layer0"]
        assert scope.replays == (1 if on_mismatch == "eager" else 3)
        assert len(scope.recaptures) == (on_mismatch == "recapture")


def test_parameter_that_moved_is_noticed(machine: Machine) -> None:
    stack = layers(machine, 1)
    with capture_layers(stack, warmup=1):
        for x in batches(2):
            run(stack, x)
        stack[0].weight.data = stack[0].weight.data.clone()
        with pytest.raises(InputMismatchError, match="weight was at"):
            run(stack, x)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failed_capture_leaves_nothing_behind_and_the_layer_right(machine: Machine, where: str) -> None:
    eager, stack = layers(machine, 1), layers(machine, 1)
    machine.fails_at = where
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(4):
            assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        scope = graphs.scopes["layer0"]
        assert scope.state is CaptureState.EAGER and f"RuntimeError: injected: {where}" in graphs.report()
        graphs.settle()
        assert graphs.used_bytes == 0 and not ground_of(graphs).memory.mapped


def test_layer_is_not_captured_where_its_collectives_would_hang(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure 20."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(3):
            assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        assert "NCCL_GRAPH_REGISTER=0" in graphs.report() and "replay" not in machine.log


def test_layer_is_not_captured_with_another_allocator(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    check = allocator.check_captures  # of a GPU, which this machine has not
    monkeypatch.setattr("te_offload.graphs.layers.scope.check_captures", lambda _: check(torch.device("cuda")))
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync")
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(3):
            assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        assert "torch's allocator is cudaMallocAsync" in graphs.report() and "replay" not in machine.log


@pytest.mark.parametrize("short", [1, 2])
def test_layer_that_asks_for_other_segments_than_its_rehearsal_is_captured_once_more_with_more_of_them(
    machine: Machine, short: int
) -> None:
    machine.short = short
    eager, stack = layers(machine, 1), layers(machine, 1)
    with capture_layers(stack, warmup=1) as graphs:
        for x in batches(4):
            assert torch.equal(run(eager, x), run(stack, x)) and same(eager, stack)
        first, second = FakePool.made.values()
        assert len(second.segments) == 2 * len(first.segments)
        assert ground_of(graphs).space._segments.keys().isdisjoint(first.segments)
        if short == 1:
            assert graphs.scopes["layer0"].state is CaptureState.CAPTURED and "replay" in machine.log
        else:
            assert graphs.scopes["layer0"].state is CaptureState.EAGER and "no such segment" in graphs.report()
            graphs.settle()
            assert graphs.used_bytes == 0 and not ground_of(graphs).memory.mapped


def test_segments_of_a_rehearsal_are_those_that_a_graph_will_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small allocations come from segments of 2 MiB, but in expandable segments from one of any length."""

    def lengths(*segments: tuple[str, int]) -> list[int]:
        segments_now = [{"segment_type": kind, "total_size": mib << 20} for kind, mib in segments]
        monkeypatch.setattr("torch.cuda.memory_snapshot", lambda handle: segments_now if handle == (0, 7) else None)
        return [length >> 20 for length in segment_lengths((0, 7))]

    assert lengths(("small", 2), ("large", 20), ("small", 2)) == [2, 20, 2]
    assert lengths(("small", 6), ("large", 40)) == [2, 2, 2, 2, 2, 2, 40]


LOOKS = """
import sys, torch
from te_offload.graphs.layers.pool import snapshot

real = torch._C._cuda_memorySnapshot

def call(handle):
    try:
        return real(handle)
    except RuntimeError:  # there is no GPU, which it finds after it has read the handle
        return {"segments": []}

torch._C._cuda_memorySnapshot = call
torch.cuda.memory_snapshot = lambda handle: call(handle)["segments"]
handle = int("1000000"), int("1000001")  # which nobody else holds, as those that torch makes
before = [sys.getrefcount(handle[0]), sys.getrefcount(handle[1])]
for _ in range(20):
    snapshot(handle)
    others = [int(f"20000{n:02}") for n in range(50)]  # at the places of what was freed
print(handle == (1000000, 1000001) and before == [sys.getrefcount(handle[0]), sys.getrefcount(handle[1])])
"""


def test_numbers_of_a_pools_handle_survive_any_number_of_looks_into_it() -> None:
    """The own call of torch 2.11 takes a reference of each with it, which may be the last one."""
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_close_gives_forward_and_memory_back_but_not_under_a_living_tensor(machine: Machine) -> None:
    stack = layers(machine, 2)
    graphs = capture_layers(stack, warmup=1)
    for x in batches(3):
        run(stack, x)
    grads = [layer.weight.grad.clone() for layer in stack]
    output = stack[0](x)
    expected = output.detach().clone()
    memory = ground_of(graphs).memory
    graphs.close()
    graphs.close()
    assert all("forward" not in layer.__dict__ for layer in stack)
    assert all(torch.equal(layer.weight.grad, grad) for layer, grad in zip(stack, grads, strict=True))
    assert torch.equal(output, expected) and memory.mapped  # it is held
    del output
    gc.collect()
    graphs.settle()
    ground_of(graphs).close()
    assert not memory.mapped and memory.created == 0 == graphs.held_bytes
    run(stack, x)


def test_graphs_are_closed_when_nobody_has_them(machine: Machine) -> None:
    stack = layers(machine, 1)
    graphs: Any = capture_layers(stack, warmup=1)
    for x in batches(2):
        run(stack, x)
    del graphs
    gc.collect()
    assert "forward" not in stack[0].__dict__ and machine.log.count("close") == 4  # two rehearsals, two graphs


def test_what_cannot_be_captured_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = layers(machine, 2)
    with pytest.raises(ArgumentError, match="layers is empty"):
        capture_layers([])
    with pytest.raises(ArgumentTypeError, match="layer1 must be a module, but is int"):
        capture_layers([stack[0], 3])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="layer1 is layer0, or inside it"):
        capture_layers([torch.nn.Sequential(stack[0]), stack[0]])
    with pytest.raises(ArgumentError, match="warmup must be 1 or more"):
        capture_layers(stack, warmup=0)
    with pytest.raises(ArgumentError, match="on_mismatch must be one of raise, recapture, eager"):
        capture_layers(stack, on_mismatch="ignore")
    with capture_layers({"first": stack[0]}), pytest.raises(ArgumentError, match="layer0 has graphs already"):
        capture_layers(stack)
    monkeypatch.undo()
    with pytest.raises(CaptureError, match="the layers are on cpu"):
        capture_layers(stack)
