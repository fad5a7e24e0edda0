"""How a capture begins and ends, on a backend that needs no GPU: out of turn, by leaving its block, with generators."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from te_offload.errors import ArgumentError, CaptureError, StateError
from te_offload.graphs import Capture, CaptureState
from te_offload.graphs.capture import in_session
from te_offload.offload.engine import GROWTH_STEPS
from tests.support.fake_graphs import FakeBackend


class _Backend(FakeBackend):
    """Keeps the generators that a capture registers too."""

    generators: Sequence[torch.Generator] = ()

    def record(self, function: Any, generators: Sequence[torch.Generator]) -> Any:
        self.generators = generators
        return super().record(function, generators)


def _make(**options: Any) -> tuple[Capture, _Backend]:
    backend = _Backend()
    return Capture(lambda x: x * 2, backend, ((torch.ones(2),), {}), warmup=1, **options), backend


def test_leaving_the_block_closes_after_the_device_has_ended() -> None:
    captured, backend = _make()
    with captured:
        for _ in range(3):
            captured(torch.ones(2))
    assert captured.state is CaptureState.CLOSED and backend.log[-2:] == ["settle", "close"]
    with pytest.raises(StateError, match="closed"):
        captured(torch.ones(2))


@pytest.mark.parametrize("again", ["warm_up", "record"])
def test_warm_up_and_capture_out_of_turn_are_errors(again: str) -> None:
    captured, _ = _make()
    captured.warm_up()
    captured.record()
    with pytest.raises(StateError, match="This capture is captured; that can be done while it is warming up"):
        getattr(captured, again)()


def test_generators_are_registered_with_the_graph() -> None:
    generator = torch.Generator()
    captured, backend = _make(generators=[generator])
    captured.warm_up()
    captured.record()
    assert tuple(backend.generators) == (generator,)


def test_session_wants_as_many_warm_up_runs_as_it_takes_host_memory_in() -> None:
    layer = torch.nn.Linear(2, 2)
    with OffloadSession([layer], min_bytes=0) as session:
        make = functools.partial(in_session, lambda x: layer(x).sum().backward(), session)
        with pytest.raises(
            ArgumentError, match=rf"warmup={GROWTH_STEPS - 1}, but a session takes host memory in its first"
        ):
            make(GROWTH_STEPS - 1)
        make(GROWTH_STEPS)(torch.ones(1, 2))
        assert session.records[-1].bytes_out == 8  # a step of the session


def test_capture_that_would_wait_for_another_stream_says_what_holds_one_and_what_to_do() -> None:
    text = "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"

    def forbidden(x: torch.Tensor) -> torch.Tensor:
        if backend.log[-1] == "begin":
            raise RuntimeError(text)
        return x * 2

    backend = FakeBackend()
    captured = Capture(forbidden, backend, ((torch.ones(2),), {}), warmup=1)
    for _ in range(2):
        assert captured(torch.ones(2)).tolist() == [2.0, 2.0]
    assert captured.state is CaptureState.EAGER and isinstance(captured.reason, CaptureError)
    assert "held by data parallelism (make its wrapper inside torch.cuda.stream" in str(captured.reason)
    assert str(captured.reason.__cause__) == text
