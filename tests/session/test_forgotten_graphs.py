"""A graph through which no backward goes is freed with its tensors, as without a session; and weights that were written to
between a forward and its backward are an error, as without one.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.multiprocessing.reductions import StorageWeakRef

from te_offload import OffloadSession, Reason
from te_offload.errors import SavedTensorModifiedError


class Layer(torch.nn.Module):
    """Saves its own output, in a region if there is a session; and says what it saved."""

    session: OffloadSession | None = None

    def __init__(self, *, mark: bool = False, raises: bool = False, view: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.mark, self.raises, self.view = mark, raises, view
        self.saved: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor, *, region: bool) -> torch.Tensor:
        if region:
            assert self.session is not None
            with self.session.region("tanh", no_offload_activation=True):
                return self._tanh(x)
        return self._tanh(x)

    def _tanh(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Tanh.apply(x * self.weight, self.mark)  # type: ignore[no-untyped-call]
        self.saved.append(StorageWeakRef(y.untyped_storage()))
        if self.raises:
            raise ZeroDivisionError
        return y


class _Tanh(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: bool) -> torch.Tensor:
        y = x.tanh()
        if mark:
            te.cpu_offload.mark_not_offload(y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y), None


@pytest.mark.parametrize("ends", ["forgotten", "backward that keeps the graph", "the forward raises"])
@pytest.mark.parametrize(
    ("region", "mark", "min_bytes", "reason"),
    [
        (False, False, "1MiB", Reason.TOO_SMALL),
        (True, False, 0, Reason.ASKED),
        (False, True, 0, Reason.MARKED),
        (False, False, 0, Reason.NONE),
    ],
)
def test_graph_that_no_backward_frees_goes_with_its_last_user(
    region: bool, mark: bool, min_bytes: Any, reason: Reason, ends: str
) -> None:
    layer = Layer(mark=mark, raises=ends == "the forward raises")
    with OffloadSession(layer, min_bytes=min_bytes) as session:
        layer.session = session
        for _ in range(2):
            with session.step():
                try:
                    y = layer(torch.ones(64), region=region)
                    if ends != "forgotten":
                        y.sum().backward(retain_graph=True)
                    del y
                except ZeroDivisionError:
                    pass
                gc.collect()
                if reason is not Reason.NONE or layer.raises:
                    assert layer.saved[-1].expired()
        gc.collect()
        assert all(saved.expired() for saved in layer.saved) and len(layer.saved) == 2
        rows = session.records[-1].slots
        assert layer.raises or reason in {row.reason for row in rows}
        assert (session.records[-1].bytes_out > 0) == (min_bytes == 0 and not region and not layer.raises)


def test_what_stays_is_the_numbers_of_the_graph_and_gradients_of_gradients_pass_through_it() -> None:
    def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad((x * weight).tanh().square().sum(), x, create_graph=True)
        return first.square().sum()

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(x, self.weight)

    x = torch.linspace(0, 1, 64, requires_grad=True)
    layer = Twice()
    expected = torch.autograd.grad(twice(x, layer.weight), [x, layer.weight])
    for min_bytes in (0, "1MiB"):
        with OffloadSession(layer, min_bytes=min_bytes) as session, session.step():
            found = torch.autograd.grad(layer(x), [x, layer.weight])
        assert all(map(torch.equal, found, expected))
        assert (session.records[-1].bytes_out > 0) == (min_bytes == 0)


class _SavesMarked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((8,), 2.0)
        te.cpu_offload.mark_not_offload(scale)
        self.seen.append(scale)
        return x * scale


@pytest.mark.parametrize("written", ["the weight", "a view of the weight", "a marked tensor"])
def test_what_stays_as_it_is_and_was_written_to_is_an_error_as_without_a_session(written: str) -> None:
    if written == "a marked tensor":
        layer: torch.nn.Module = _SavesMarked()
    else:
        layer = torch.nn.Linear(8, 8, bias=False)
    weight = next(layer.parameters())
    x = torch.ones(2, 8, requires_grad=True)

    def loss() -> torch.Tensor:
        y: torch.Tensor = x @ weight.view(8, 8) if written == "a view of the weight" else layer(x)
        return y.sum()

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self) -> torch.Tensor:
            return loss()

    def written_to() -> torch.Tensor:
        found: torch.Tensor = whole()
        with torch.no_grad():
            (layer.seen[-1] if isinstance(layer, _SavesMarked) else weight).add_(1)
        return found

    whole = Whole()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written_to().backward()
    with OffloadSession(whole, min_bytes=0) as session:
        with (
            session.step(),
            pytest.raises(SavedTensorModifiedError, match=r"layer0: a weight, or another saved tensor"),
        ):
            written_to().backward()
        with session.step():
            whole().backward()  # and the next step is sound
        assert session.host_bytes == 0
