"""Layers as graphs of their own on a GPU: bits, offloading in between, memory, and calls that no graph takes."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.errors import BackwardTwiceError, InputMismatchError, RowOverflowError
from te_offload.fused import hopper
from te_offload.graphs import CaptureState, capture_layers
from te_offload.graphs.layers.virtual import CudaVirtualMemory
from te_offload.offload.transfer import make_transfer
from tests.support.layer_stack import (
    FFN,
    HIDDEN,
    LAYERS,
    TOKENS,
    Model,
    batches,
    captured,
    grads,
    loss_of,
    train,
    weights,
)
from tests.support.mlp import assert_same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")
    monkeypatch.setenv(hopper.SWITCH, "1")


@pytest.mark.parametrize("offloads", [False, True], ids=["no offload", "offload"])
@pytest.mark.parametrize("virtual", [True, False], ids=["virtual", "resident"])
def test_training_with_graphs_of_layers_gives_the_bits_of_eager_training(offloads: bool, virtual: bool) -> None:
    eager, model = Model(), Model()
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0) if offloads else None
    with capture_layers(model.layers, session=session, warmup=2, virtual=virtual) as graphs:
        for number, batch in enumerate(batches(20)):
            expected, found = train(eager, batch), train(model, batch, session)
            assert torch.equal(expected, found), number
        captured(graphs)
        assert_same_bits(weights(eager), weights(model))
        assert [scope.replays for scope in graphs.scopes.values()] == [18] * LAYERS, graphs.report()
        if session is not None:
            record = session.records[-1]
            rows = {row.slot.value: row for row in record.slots}
            if virtual:
                slots = TOKENS * (HIDDEN + FFN) * 2  # a layer's; the last one's may be recalled
                assert record.bytes_out >= LAYERS * slots and record.bytes_back >= (LAYERS - 1) * slots
                assert rows["fc1_input"].fate is rows["act_input"].fate is Fate.OFFLOADED
            else:
                assert record.bytes_out == 0
                assert rows["fc1_input"].reason is rows["act_input"].reason is Reason.NO_VIRTUAL_MEMORY
    if session is not None:
        session.close()


def test_thousand_replays_with_random_routing_give_the_bits_of_eager_steps() -> None:
    eager, model = Model(2), Model(2)
    session = OffloadSession(model.layers, min_bytes=0)
    with capture_layers(model.layers, session=session) as graphs:
        every = list(batches(25))
        for number in range(1003):
            expected, found = train(eager, every[number % 25]), train(model, every[number % 25], session)
            if number % 100 == 2:
                assert torch.equal(expected, found), number
        captured(graphs)
        assert_same_bits(weights(eager), weights(model))
    session.close()


def test_memory_of_what_is_offloaded_goes_back_between_forward_and_backward() -> None:
    model = Model()
    slots = LAYERS * TOKENS * (HIDDEN + FFN) * 2
    mapped = []
    for min_bytes in (1 << 30, 0):
        session = OffloadSession(model.layers, min_bytes=min_bytes, max_in_flight=0)
        with capture_layers(model.layers, session=session) as graphs:
            for batch in batches(5):
                train(model, batch, session)
            for parameter in model.parameters():
                parameter.grad = None
            with session.step():
                loss = loss_of(model, batch)
                graphs.settle()
                mapped.append(graphs.used_bytes)
                loss.backward()
            del loss
            captured(graphs)
        session.close()
    assert mapped[0] - mapped[1] >= 0.7 * slots, (mapped, slots)  # the last layer's may still be leaving


def test_gradients_accumulate_over_microbatches() -> None:
    eager, model = Model(), Model()
    every = list(batches(8))
    with capture_layers(model.layers, warmup=2) as graphs:
        for batch in every[:3]:
            train(eager, batch), train(model, batch)
        for one in (eager, model):
            for parameter in one.parameters():
                parameter.grad = None
            for batch in every[3:6]:
                loss_of(one, batch).backward()
        captured(graphs)
        assert_same_bits(grads(eager), grads(model))


def test_gradients_accumulate_on_the_stream_of_the_warm_up_while_losses_are_kept() -> None:
    """A kept loss keeps the nodes that accumulate gradients, which read what the next layer's backward could write over."""
    eager, model = Model(), Model()
    with capture_layers(model.layers, warmup=2) as graphs:
        kept = None
        for number, batch in enumerate(batches(12)):
            loss_of(eager, batch).backward()
            loss = loss_of(model, batch)
            kept = loss  # and the one before until now
            loss.backward()
            assert_same_bits(grads(eager), grads(model))
            if number % 4 == 3:
                for one in (eager, model):
                    one.zero_grad(set_to_none=False)
        assert kept is not None
        captured(graphs)


def test_second_forward_before_the_backward_runs_eagerly_and_both_backwards_are_right() -> None:
    eager, model = Model(), Model()
    every = list(batches(8))
    with capture_layers(model.layers, warmup=2) as graphs:
        for batch in every[:3]:
            train(eager, batch), train(model, batch)
        for one in (eager, model):
            for parameter in one.parameters():
                parameter.grad = None
            losses = [loss_of(one, batch) for batch in every[3:5]]
            for loss in losses:
                loss.backward()
        assert_same_bits(grads(eager), grads(model))
        assert all(sum(scope.eager.values()) == 1 for scope in graphs.scopes.values()), graphs.report()


def test_output_that_is_kept_does_not_change() -> None:
    model = Model(1)
    every = list(batches(8))
    with capture_layers(model.layers, warmup=1) as graphs:
        train(model, every[0])
        kept = [model(*batch) for batch in every[1:4]]
        copies = [one.clone() for one in kept]
        for batch in every[4:]:
            model(*batch).sum().backward()
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
        captured(graphs)


def test_gradient_that_is_kept_does_not_change() -> None:
    eager, model = Model(1), Model(1)
    every = list(batches(6))
    with capture_layers(model.layers, warmup=1) as graphs:
        for batch in every[:3]:
            train(eager, batch), train(model, batch)
        kept = next(model.parameters()).grad
        assert kept is not None
        before = kept.clone()
        for batch in every[3:]:
            assert torch.equal(train(eager, batch), train(model, batch))
        assert torch.equal(kept, before)
        assert_same_bits(weights(eager), weights(model))
        assert sum(graphs.scopes["layer0"].eager.values()) == 3, graphs.report()


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_commits_can_wait_for_the_next_launch_and_the_report_says_what_that_won(delay: bool) -> None:
    eager, model = Model(), Model()
    session = OffloadSession(model.layers, min_bytes=0)
    with capture_layers(model.layers, session=session, warmup=2, delay_commits=delay) as graphs:
        for batch in batches(8):
            assert torch.equal(train(eager, batch), train(model, batch, session))
        captured(graphs)
        assert_same_bits(weights(eager), weights(model))
        assert session.records[-1].bytes_out >= LAYERS * TOKENS * (HIDDEN + FFN) * 2
        assert ("ms of the host that no launch waited for" in graphs.report().replace("\n", " ")) is delay
        assert session.delay is not None and (session.delay.commits == 6 * (LAYERS - 1)) is delay
    session.close()


def test_gradient_of_a_leaf_input_is_kept_as_in_eager_mode() -> None:
    eager, model = Model(2), Model(2)
    every = list(batches(5))
    found = []
    with capture_layers(model.layers, warmup=1) as graphs:
        for one in (eager, model):
            leaves = [(x.detach().requires_grad_(), sizes, scales) for x, sizes, scales in every]
            for batch in leaves:
                train(one, batch)
            found.append([x.grad for x, _, _ in leaves])
        captured(graphs)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)
    assert None not in found[0] + found[1]


def test_layers_replay_on_another_stream_than_before() -> None:
    eager, model = Model(), Model()
    side = torch.cuda.Stream()
    with capture_layers(model.layers, warmup=2) as graphs:
        for number, batch in enumerate(batches(10)):
            expected = train(eager, batch)
            if number % 2:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    found = train(model, batch)
                torch.cuda.current_stream().wait_stream(side)
            else:
                found = train(model, batch)
            assert torch.equal(expected, found), number
        captured(graphs)


def test_ops_in_graphs_that_transformer_engine_makes_keep_their_bits_and_stay() -> None:
    import transformer_engine.pytorch as te

    # Its graphs keep the nodes that accumulate gradients, which were made on the stream of the capture.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    eager, model = Model(2), Model(2)
    every = list(batches(6))
    x, sizes, scales = every[0]
    graphed = te.make_graphed_callables(model.layers[1], (x.clone().requires_grad_(), sizes, scales))  # written to
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0)
    for batch in every:
        expected = train(eager, batch)
        for parameter in model.parameters():
            parameter.grad = None
        with session.step():
            x, sizes, scales = batch
            loss = graphed(model.layers[0](x, sizes, scales), sizes, scales).float().square().mean()
            loss.backward()
        assert torch.equal(expected, loss.detach())
        assert_same_bits(grads(eager), grads(model))
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), list(eager.parameters()))
    rows = {(row.layer, row.slot.value): row for row in session.records[-1].slots}
    assert rows["layer0", "act_input"].fate is Fate.OFFLOADED
    session.close()
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def test_second_backward_is_an_error() -> None:
    model = Model(1)
    with capture_layers(model.layers, warmup=1):
        for batch in batches(3):
            train(model, batch)
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        with pytest.raises(BackwardTwiceError, match="second backward"):
            loss.backward()


def test_evaluation_runs_eagerly_and_changes_nothing() -> None:
    eager, model = Model(), Model()
    with capture_layers(model.layers, warmup=2) as graphs:
        for batch in batches(6):
            with torch.no_grad():
                assert torch.equal(eager(*batch), model(*batch))
            assert torch.equal(train(eager, batch), train(model, batch))
        captured(graphs)
        assert all(scope.replays == 4 for scope in graphs.scopes.values()), graphs.report()


@pytest.mark.parametrize("on_mismatch", ["raise", "recapture", "eager"])
def test_other_inputs_raise_recapture_or_run_eagerly(on_mismatch: str) -> None:
    eager, model = Model(1), Model(1)
    every = list(batches(9))
    x, _, scales = every[3]
    half = x[: TOKENS // 2], torch.tensor([TOKENS // 2, 0, 0, 0], device="cuda"), scales[: TOKENS // 2]
    with capture_layers(model.layers, warmup=2, on_mismatch=on_mismatch) as graphs:
        for batch in every[:3]:
            train(eager, batch), train(model, batch)
        if on_mismatch == "raise":
            with pytest.raises(InputMismatchError, match="was \\(4096, 512\\)"):
                train(model, half)
            return
        for _ in range(4):
            assert torch.equal(train(eager, half), train(model, half))
        scope = graphs.scopes["layer0"]
        assert scope.replays == (1 if on_mismatch == "eager" else 3), graphs.report()
        assert_same_bits(weights(eager), weights(model))


def test_copy_comes_after_a_moment_inside_a_graph_and_not_after_its_end() -> None:
    """Each replay's own moment, though the event is one."""
    transfer = make_transfer(torch.device("cuda", torch.cuda.current_device()))
    transfer.timed = False
    x, host = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        border = transfer.border()
        torch.cuda._sleep(200_000_000)
    for number in range(1, 6):
        graph.replay()
        end = transfer.mark()
        copy = transfer.copy_out([(x.data_ptr(), host.data_ptr(), x.nbytes)], (border(),))
        copy.ended.wait()
        early = not end.is_over()
        assert early and bool((host == number).all())
        end.wait()


@pytest.mark.parametrize("on_overflow", ["raise", "report"])
def test_split_sizes_beyond_the_rows_are_told_and_what_fits_is_right(on_overflow: str) -> None:
    eager, model = Model(2), Model(2)
    every = list(batches(8))
    with capture_layers(model.layers, warmup=2, on_overflow=on_overflow) as graphs:
        for batch in every[:4]:
            assert torch.equal(train(eager, batch), train(model, batch))
        x, sizes, scales = every[4]
        more = sizes + torch.tensor([0, 0, 5, 2], device="cuda")
        assert torch.equal(train(eager, (x, more, scales)), train(model, (x, more, scales)))
        if on_overflow == "raise":
            with pytest.raises(RowOverflowError, match=f"layer0.*on {TOKENS} rows: at the most 7 more"):
                graphs.check_rows()
            with pytest.raises(RowOverflowError, match=r"layer1.*most 7 more"):
                graphs.check_rows()
        for batch in every[5:]:
            assert torch.equal(train(eager, batch), train(model, batch))
        graphs.check_rows()
        assert list(graphs.overflows.values()) == [7, 7] and "7 rows more were asked for" in graphs.report()
        assert_same_bits(weights(eager), weights(model))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_layer_that_waits_for_the_host_runs_eagerly_and_leaves_nothing_behind(where: str) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                x.sum().item()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if where == "backward":
                grad.sum().item()
            return grad

    class Waits(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Reads.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return found

    layer = Waits(1024, 1024, device="cuda")
    x = torch.ones(2048, 1024, device="cuda")
    layer(x).sum().backward()
    with capture_layers(layer, warmup=1) as graphs:
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        expected = layer.weight.grad / 2
        layer.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        layer(x).sum().backward()
        assert graphs.scopes["layer0"].state is CaptureState.EAGER and "could not be captured" in graphs.report()
        torch.cuda.synchronize()
        assert torch.equal(layer.weight.grad, expected) and gc.isenabled()
        gc.collect()
        torch.cuda.empty_cache()
        graphs.settle()
        assert torch.cuda.memory_reserved() <= before + (2 << 20) and graphs.used_bytes == 0


def test_random_numbers_differ_from_replay_to_replay() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(512, 512, device="cuda"), torch.nn.Dropout(0.5))
    x = torch.ones(1024, 512, device="cuda")
    with capture_layers(layer, warmup=1) as graphs:
        found = []
        for _ in range(5):
            y = layer(x)
            found.append(y.detach().clone())
            y.sum().backward()
        captured(graphs)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


def test_close_gives_the_forward_and_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memories: dict[int, int] = {}  # what this process has of the driver: others may use the GPU too
    create, release = CudaVirtualMemory.create, CudaVirtualMemory.release

    def created(driver: CudaVirtualMemory, nbytes: int) -> int | None:
        memory = create(driver, nbytes)
        if memory is not None:
            memories[memory] = nbytes
        return memory

    def released(driver: CudaVirtualMemory, memory: int) -> None:
        release(driver, memory)
        del memories[memory]

    monkeypatch.setattr(CudaVirtualMemory, "create", created)
    monkeypatch.setattr(CudaVirtualMemory, "release", released)
    model = Model()
    batch = next(batches(1))
    train(model, batch)
    for parameter in model.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs = capture_layers(model.layers, warmup=1)
    for _ in range(4):
        train(model, batch)
    captured(graphs)
    assert graphs.held_bytes > 0 and sum(memories.values()) > 0
    graphs.close()
    graphs.close()
    expected = grads(model)
    train(model, batch)
    assert set(expected) == set(grads(model)) and "forward" not in model.layers[0].__dict__
    for parameter in model.parameters():
        parameter.grad = None
    expected.clear()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (64 << 20)  # cuBLAS may have asked for memory to work in
    assert graphs.held_bytes == 0 and not memories


def test_checkpointed_layers_run_eagerly() -> None:
    from torch.utils.checkpoint import checkpoint

    eager, model = Model(), Model()
    every = list(batches(5))
    with capture_layers(model.layers, warmup=2) as graphs:
        for batch in every[:3]:
            train(eager, batch), train(model, batch)
        x, sizes, scales = every[3]
        results = []
        for one in (eager, model):
            for parameter in one.parameters():
                parameter.grad = None
            y = x
            for layer in one.layers:
                y = checkpoint(layer, y, sizes, scales, use_reentrant=False)
            y.float().square().mean().backward()
            results.append(grads(one))
        assert_same_bits(*results)
        assert all("another saved-tensor hook is active" in scope.eager for scope in graphs.scopes.values())
