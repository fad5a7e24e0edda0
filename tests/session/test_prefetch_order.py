"""What comes back before the backward asks for it: the next forward in the order of the step before."""

from __future__ import annotations

import contextlib

import pytest
import torch

from te_offload import OffloadSession
from te_offload.offload.returns import Returns
from te_offload.offload.states import ON_HOST
from te_offload.offload.transfer import Mark
from te_offload.offload.visit import LayerVisit
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.mlp import make_inputs


def _train(session: OffloadSession, model: Stack, order: tuple[int, ...], *, fails: bool = False) -> None:
    """All forwards, then their backwards in some order."""
    x, sizes, scales = make_inputs(SPLITS, seed=0)
    with contextlib.suppress(ZeroDivisionError), session.step():
        losses = [model(x, sizes, scales, sizes).sum() for _ in order]
        for number, index in enumerate(order):
            losses[index].backward()
            assert not (fails and number == 0) or 1 / 0
    assert session.records[-1].bytes_back > 0


def _looked_at(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The forwards that are looked at to bring them back early, from now on."""
    real, looked = Returns._bring, list[tuple[str, int]]()

    def bring(self: Returns, visit: LayerVisit, free: Mark) -> bool:
        looked.append(visit.key)
        assert len(looked) < 100, "it looks at the same forwards again and again"
        return real(self, visit, free)

    monkeypatch.setattr(Returns, "_bring", bring)
    return looked


@pytest.mark.parametrize("between", ["nothing", "an evaluation", "a step that raised"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_what_the_step_before_read_next_is_on_its_way_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], between: str
) -> None:
    on_its_way: list[bool] = []
    real = Returns.read

    def read(self: Returns, visit: LayerVisit) -> None:
        assert visit.cargos
        on_its_way.append(all(cargo.state is not ON_HOST for cargo in visit.cargos))
        real(self, visit)

    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session:
        _train(session, model, order)
        if between == "an evaluation":
            x, sizes, scales = make_inputs(SPLITS, seed=0)
            with session.step(), torch.no_grad():
                model(x, sizes, scales, sizes)
        elif between == "a step that raised":
            _train(session, model, order, fails=True)
        monkeypatch.setattr(Returns, "read", read)
        _train(session, model, order)
    assert len(on_its_way) == 3 * len(order)
    assert all(on_its_way[1:]) and not on_its_way[0]


def test_more_forwards_than_before_read_in_another_order_are_looked_ahead_to_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = _looked_at(monkeypatch)
    model = Stack(1)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight="1MiB") as session:
        _train(session, model, (0, 1))
        looked.clear()
        _train(session, model, (2, 0, 1))  # the last read before, 1, lies behind 0 in the order of forwards
    assert sorted(set(looked)) == [("layer0", 0), ("layer0", 1)]


@pytest.mark.parametrize("when", ["in the next step", "between the steps"])
def test_backward_that_comes_when_its_step_is_over_has_no_place_in_the_order(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    looked = _looked_at(monkeypatch)
    model = Stack(1)
    with OffloadSession(model.layers, min_bytes=300) as session:
        x, _, scales = make_inputs([1, 0, 0], seed=0)
        sizes = torch.tensor([1, 0, 0])
        with session.step():
            late = model(x, sizes, scales, sizes).sum()  # few tokens: all of it stays
        x, sizes, scales = make_inputs(SPLITS, seed=0)
        with session.step():
            losses = [model(x, sizes, scales, sizes).sum() for _ in range(2)]
            for loss in (losses[1], losses[0], *([late] if when == "in the next step" else [])):
                loss.backward()
        if when == "between the steps":
            late.backward()
        record = session.records[-1]
        last = next(window for window in record.windows if window.read == 1)  # which ends with the step
        assert last.needed_ms is not None and last.backward_ms is not None and record.step_ms is not None
        assert last.needed_ms + last.backward_ms <= record.step_ms + 1e-6
        assert [window.read for window in record.windows] == [1, 0]
        looked.clear()
        _train(session, model, (1, 0))
        assert set(looked) == {("layer0", 0)}
