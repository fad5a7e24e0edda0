"""Captured functions on a GPU: bits, offloading inside the graph, failures and what they leave behind."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload import Fate, OffloadSession, Reason
from te_offload.errors import InputMismatchError, RowOverflowError, StaleOutputError, UnsupportedError, WarmUpError
from te_offload.fused import hopper
from te_offload.graphs import Capture, CaptureState, Pool, capture
from tests.support.mlp import assert_same_bits, make_mlp

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
EXPERTS, HIDDEN, FFN, TOKENS, LAYERS = 4, 256, 384, 2048, 3


@pytest.fixture(params=["grouped path", "fused"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes: Transformer Engine's grouped path, whose split sizes stay on the device, or the fused op."""
    found = str(request.param)
    if found == "fused":
        pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the kernels are Hopper's (compute capability 9.0)")
        monkeypatch.setenv(hopper.SWITCH, "1")
    else:
        from te_offload.ops import te_adapter

        if te_adapter.cublaslt_version() < 130300:
            pytest.skip("below cuBLAS 13.3 Transformer Engine reads the split sizes on the host")
    return found


class Model(torch.nn.Module):
    """Grouped MLPs with residuals."""

    def __init__(self, layers: int = LAYERS, ffn: int = FFN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=ffn, device="cuda", dtype=torch.bfloat16)
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, sizes, scales, sizes)
        return x


def train_step(model: Model) -> Callable[..., torch.Tensor]:
    """Forward, backward, and SGD without an optimizer's state."""
    parameters: list[torch.Tensor] = list(model.parameters())

    def step(x: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss: torch.Tensor = model(x, sizes, scales).float().square().mean()
        loss.backward()
        with torch.no_grad():
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            torch._foreach_add_(parameters, grads, alpha=-0.5)
        return loss.detach()

    return step


def batches(count: int, tokens: int = TOKENS) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Random inputs, and random routing of the same number of tokens."""
    random = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(tokens, HIDDEN, generator=random).cuda().bfloat16()
        cuts = torch.randint(0, tokens + 1, (EXPERTS - 1,), generator=random).sort().values.tolist()
        sizes = torch.tensor([b - a for a, b in itertools.pairwise([0, *cuts, tokens])])
        yield x, sizes.cuda(), torch.rand(tokens, generator=random).cuda()


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def captured_step(model: Model, session: OffloadSession | None = None, **options: Any) -> Capture:
    example = next(batches(1))
    return capture(train_step(model), example, session=session, modules=[model], **options)


@pytest.mark.parametrize("offloads", [False, True], ids=["no offload", "offload"])
def test_captured_training_gives_the_bits_of_eager_training(path: str, offloads: bool) -> None:
    eager, model = Model(), Model()
    step = train_step(eager)
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0) if offloads else None
    with captured_step(model, session) as replay:
        for number, batch in enumerate(batches(40)):
            expected, found = step(*batch), replay(*batch)
            assert torch.equal(expected, found + 0), number
        assert replay.state is CaptureState.CAPTURED, replay.reason
        assert_same_bits(weights(eager), weights(model))
        if session is not None:
            record = session.records[-1]
            assert record.bytes_out >= record.bytes_back > 0
            assert Fate.OFFLOADED in {row.fate for row in record.slots}


def test_split_sizes_beyond_the_rows_are_told_and_what_fits_is_right(path: str) -> None:
    eager, model = Model(), Model()
    step = train_step(eager)
    with captured_step(model) as replay:
        for number, (x, sizes, scales) in enumerate(batches(6)):
            expected = step(x, sizes, scales)
            more = sizes.clone()
            if number == 4:
                more[-1] += 7  # which there are no rows for: cut, they are the sizes as they were
            assert torch.equal(expected, replay(x, more, scales) + 0), number
            if number == 4:
                with pytest.raises(RowOverflowError, match=f"on {TOKENS} rows: at the most 7 more"):
                    replay.check_rows()
        assert replay.state is CaptureState.CAPTURED, replay.reason
        assert set(replay.overflows.values()) == {7}
        assert_same_bits(weights(eager), weights(model))


def test_graph_with_offloading_holds_less_memory(path: str) -> None:
    """By what goes, less what is in flight; slots of 16 MiB and more, since the allocator takes 20 MiB for smaller ones."""
    held = []
    layers, tokens, ffn = 6, 1 << 15, 512
    for offloads in (False, True):
        model = Model(layers, ffn)
        session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0) if offloads else None
        example = next(batches(1, tokens))
        replay = capture(train_step(model), example, session=session, modules=[model])
        for _ in range(3):
            replay(*example)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        replay.record()
        held.append(torch.cuda.memory_reserved() - before)
        assert replay.state is CaptureState.CAPTURED, replay.reason
        replay.close()
    assert session is not None
    gone = session.records[-1].bytes_out
    assert gone >= layers * tokens * (HIDDEN + ffn) * 2 and held[0] - held[1] > 0.6 * gone, (held, gone)


def test_eager_steps_after_a_capture_and_replays_after_them_give_the_same_bits(path: str) -> None:
    eager, model = Model(), Model()
    step = train_step(eager)
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0)
    replay = captured_step(model, session, on_mismatch="recapture")
    for number, batch in enumerate(batches(12)):
        expected = step(*batch)
        found = (replay.eagerly if number in (6, 7) else replay)(*batch)
        assert torch.equal(expected, found + 0), number
    assert_same_bits(weights(eager), weights(model))
    assert replay.state is CaptureState.CAPTURED, replay.reason
    replay.close()
    session.close()


def test_host_memory_of_a_closed_session_stays_as_long_as_its_graph(path: str) -> None:
    eager, model = Model(), Model()
    step = train_step(eager)
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0)
    replay = captured_step(model, session)
    for number, batch in enumerate(batches(8)):
        if number == 5:
            session.close()
        step(*batch)
        replay(*batch)
    assert_same_bits(weights(eager), weights(model))
    replay.close()


def test_random_numbers_differ_from_replay_to_replay() -> None:
    own = torch.Generator(device="cuda").manual_seed(3)

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.dropout(x), torch.rand(x.shape, device="cuda", generator=own)

    x = torch.ones(1000, device="cuda")
    with capture(draw, [x], generators=[own], clone_outputs=True) as replay:
        found = [replay(x) for _ in range(6)]
    for number in (0, 1):
        assert not any(torch.equal(a[number], b[number]) for a, b in itertools.combinations(found, 2))


def test_input_that_another_stream_still_writes_is_waited_for() -> None:
    """Failure 11."""
    x, side = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
    with capture(lambda x: x * 2, [x], clone_outputs=True) as replay:
        for _ in range(4):
            replay(x)
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.fill_(3)
        replay.wait_for(side)
        assert replay(x).unique().tolist() == [6.0]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_function_that_waits_for_the_host_runs_eagerly_and_leaves_nothing_behind(where: str) -> None:
    """Failures 24 and those of a broken capture: streams, garbage collection, memory, gradients."""

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

    layer = torch.nn.Linear(512, 512, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad(set_to_none=False)
        loss: torch.Tensor = Reads.apply(layer(x)).square().sum()  # type: ignore[no-untyped-call]
        loss.backward()
        return loss.detach()

    x = torch.ones(256, 512, device="cuda")
    replay = capture(step, [x], modules=[layer])
    for _ in range(3):
        replay(x)
    torch.cuda.synchronize()
    stream, grad = torch.cuda.current_stream(), layer.weight.grad
    assert grad is not None
    expected = grad.clone()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    replay.record()
    assert replay.state is CaptureState.EAGER and replay.reason is not None
    assert torch.cuda.current_stream() == stream and gc.isenabled() and not torch.cuda.is_current_stream_capturing()
    assert layer.weight.grad is grad
    replay(x)
    torch.cuda.synchronize()
    assert torch.equal(grad, expected)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)
    other = capture(lambda x: x + 1, [x])  # and the next one can be captured
    assert [other(x).sum().item() for _ in range(5)] == [2.0 * x.numel()] * 5
    assert other.state is CaptureState.CAPTURED
    other.close()


def test_capture_within_a_capture_is_a_part_of_it() -> None:
    x = torch.ones(100, device="cuda")
    inner = capture(lambda x: x * 3, [x])
    for _ in range(5):
        inner(x)
    outer = capture(lambda x: inner(x) + 1, [x], clone_outputs=True)
    assert [outer(x * n).unique().tolist() for n in range(5)] == [[3.0 * n + 1] for n in range(5)]
    assert outer.state is CaptureState.CAPTURED, outer.reason
    outer.close()
    inner.close()


def test_captures_that_share_a_pool_work_in_the_same_memory() -> None:
    nbytes = 256 << 20

    def sums(x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(nbytes // x.nbytes)
        return (wide * 2).sum() + (wide * 3).sum()

    held, segments = [], []
    for shared in (True, False):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        pool, x = Pool(), torch.ones(1 << 10, device="cuda", dtype=torch.int32)
        captures = [capture(sums, [x], warmup=1, pool=pool if shared else None) for _ in range(3)]
        for _ in range(2):
            assert [float(one(x) + 0) for one in captures] == [5 * nbytes / 4] * 3
        assert [one.reason for one in captures] == [None] * 3
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved() - before)
        segments.append(
            sorted(
                (segment["total_size"] >> 20, segment["segment_pool_id"], segment["stream"], segment["allocated_size"])
                for segment in torch.cuda.memory_snapshot()
                if segment["total_size"] > nbytes // 2
            )
        )
        for one in captures:
            one.close()
    assert held[0] < 0.5 * held[1], (held, segments)


def test_close_gives_the_memory_back() -> None:
    x = torch.ones(1 << 22, device="cuda")
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    replay = capture(lambda x: (x * 2).sin() + x, [x])
    for _ in range(5):
        output = replay(x)
    del output
    assert torch.cuda.memory_reserved() > before
    replay.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)


def test_stale_output_and_moved_gradient_are_named_errors() -> None:
    """Failures 8 and 14c."""
    model = torch.nn.Linear(8, 8, device="cuda")
    x = torch.ones(4, 8, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        return loss.detach()

    with capture(step, [x], modules=[model]) as replay:
        outputs = [replay(x) for _ in range(6)]
        with pytest.raises(StaleOutputError):
            outputs[-2].item()
        outputs[-1].item()
        model.zero_grad(set_to_none=True)
        with pytest.raises(InputMismatchError, match=r"grad was at"):
            replay(x)


def test_process_with_an_open_capture_ends() -> None:
    """Failure 19."""
    text = (
        "import torch; from te_offload.graphs import capture\n"
        "x = torch.ones(10, device='cuda'); replay = capture(lambda x: x * 2, [x])\n"
        "for _ in range(5): y = replay(x)\n"
        "print(y.sum().item())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, env=os.environ
    )
    assert ran.returncode == 0 and ran.stdout.strip() == "20.0", ran.stderr[-2000:]


@pytest.mark.parametrize(
    ("options", "steps", "error"),
    [({}, 2, WarmUpError), ({"verify": True}, 3, UnsupportedError)],
    ids=["early", "verify"],
)
def test_step_that_cannot_be_captured_is_a_named_error(
    options: dict[str, Any], steps: int, error: type[Exception]
) -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.ones(8, 64, device="cuda", requires_grad=True)
    with OffloadSession(layer, min_bytes=0, **options) as session:
        for _ in range(steps):
            with session.step():
                layer(x).sum().backward()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(error), torch.cuda.graph(graph):  # noqa: PT012
            torch.zeros(1, device="cuda")
            with session.step():
                pass
        with session.step():
            layer(x).sum().backward()


def test_layer_captured_within_a_step_is_left_alone_and_says_so() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.ones(8, 64, device="cuda")  # no leaf that needs a gradient: those stay
    layer(x).sum().backward()
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(x).sum().backward()
        assert session._engine is not None
        moved = session._engine.mover.counts.bytes_out
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y, layer(x))
    assert session.records[-1].bytes_out == moved > 0
    assert session.records[-1].slots[-1].reason is Reason.IN_CAPTURE


@pytest.mark.slow
def test_thousand_replays_with_random_routing_give_the_bits_of_eager_training(path: str) -> None:
    eager, model = Model(), Model()
    step = train_step(eager)
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight="1MiB")
    with captured_step(model, session) as replay:
        for batch in batches(1003):
            step(*batch)
            replay(*batch)
        assert replay.state is CaptureState.CAPTURED, replay.reason
        assert_same_bits(weights(eager), weights(model))
    assert isinstance(model.layers[0], te.ops.Sequential)
