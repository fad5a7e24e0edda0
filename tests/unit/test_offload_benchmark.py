"""What the benchmark of offloading makes of its times and records, and when its layers ask for their split sizes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import offload, plans, stack
from benchmarks.floor import floor_ms
from benchmarks.stack import Shape, Stack
from te_offload.offload.engine import TIMED_EVERY
from te_offload.offload.timeline import Link
from tests.support import te_on_cpu


class _Layer(torch.nn.Module):
    """Notes its call."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        self._calls.append("layer")
        return x


@pytest.mark.parametrize("asks", [None, *stack.ASKS])
def test_a_layer_asks_for_its_split_sizes_before_it_runs_if_told_to(
    monkeypatch: pytest.MonkeyPatch, asks: str | None
) -> None:
    calls: list[str] = []
    shape = Shape(0, 4, 8, 8, 16, fp8=False, asks=asks)
    model = Stack(shape, keep_act=False, plain=False)
    model.layers = torch.nn.ModuleList(_Layer(calls) for _ in range(2))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: calls.append("asked"))
    model(torch.ones(2, 3), torch.tensor([2]), torch.ones(2))
    assert calls == (["asked", "layer"] * 2 if asks else ["layer"] * 2)
    assert ("split sizes asked for" in shape.title) is (asks is not None)
    assert asks is None or asks in shape.title


@pytest.mark.parametrize("fp8", [False, True])
def test_split_sizes_are_all_tokens_and_in_fp8_multiples_of_16(fp8: bool) -> None:
    splits = stack.split_sizes(Shape(8, 6, 4096, 14336, 16384, fp8=fp8))
    assert int(splits.sum()) == 16384
    assert bool((splits % 16 == 0).all()) is fp8


def test_cost_of_looking_weighs_timed_steps_as_they_occur_in_a_long_run() -> None:
    share = 1 / TIMED_EVERY
    cost = offload.cost_of_looking([10.0, 10.0, 10.0], [12.0, 11.0, 11.0], [True, False, False])
    assert cost == pytest.approx((share * 2 + (1 - share) * 1) / 10)
    assert offload.cost_of_looking([10.0], [12.0], [True]) is None  # no step without times


def test_steps_with_a_session_and_without_come_in_pairs_in_both_orders_after_one_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    order: list[str] = []
    seconds = {"without": 1, "with": 2}
    monkeypatch.setattr(time, "perf_counter", lambda: sum(map(seconds.__getitem__, order)))

    class Steps:
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> None:
            order.append(self.name)

        def was_timed(self) -> bool:
            return len(order) == 3

    without, with_session = Steps("without"), Steps("with")
    before, after, timed = offload.time_looking(without, with_session, 3)  # type: ignore[arg-type]
    pair, other = ["without", "without", "with"], ["without", "with", "without"]
    assert order == [*pair, *other, *pair]
    assert before == [1000] * 3 and after == [2000] * 3 and timed == [True, False, False]


def test_terms_take_the_worst_window_and_not_the_worst_of_each_term() -> None:
    moments = [
        SimpleNamespace(label=label, nbytes=nbytes)
        for label, nbytes in (("layer0 saved", 5), ("taken", 7), ("grad", 9), ("taken", 4))
    ]
    record: Any = SimpleNamespace(residency=moments)
    assert offload.resident(record) == [5, 5, 9, 4]
    assert offload.terms(record, [0, 3, 1, 8]) == 12
    with pytest.raises(ValueError, match="shorter"):
        offload.terms(record, [0, 3])
    assert offload.resident(record, fused=True) == [5, 5, 9]  # both slots of a fused layer are taken in one window


def _on_cpu(monkeypatch: pytest.MonkeyPatch, *, grouped: bool) -> None:
    """Where no memory is counted and no copy takes time."""
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    monkeypatch.setattr(stack, "DEVICE", "cpu")
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(offload, "COST_PAIRS", 2)  # of which none is timed
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped path", "split path"])
def test_the_whole_benchmark_runs_every_way_of_ours_and_fills_its_table(
    monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    """With the ways, steps and records of a GPU."""
    ways = offload.ways
    _on_cpu(monkeypatch, grouped=grouped)
    monkeypatch.setattr(offload, "time_link", lambda: Link(1e6, 1e6, 1e6, 1e6))
    monkeypatch.setattr(
        offload, "ways", lambda layers, **_: [way for way in ways(layers) if way.engine in (None, "te_offload")]
    )
    result = offload.measure(Shape(3, 2, 64, 128, 8192, fp8=False), 2, None)
    assert [row["name"] for row in result["rows"]] == [way.name for way in offload.ways(3)]
    assert all(row["same_bits"] for row in result["rows"])
    assert [row["name"] for row in result["rows"] if "cost" in row] == [offload.ways(3)[2].name]
    out = {row["name"]: row["bytes_out"] >> 20 for row in result["rows"] if "floors_ms" in row}
    assert out.pop("te_offload, a plan for a tenth of the bytes") > 0
    # Of 1, 2 and 2 MiB a layer, as the grouped path saves them; of layers that are computed again the first.
    assert list(out.values()) == [0, 15, 10, 10, 5, 5, 3, 2, 2]
    printed = offload.table(result)
    assert all(way.name in printed for way in offload.ways(3))


def test_fused_layers_have_bits_and_windows_of_their_own_in_the_benchmark_and_others_engines_run_plain_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = offload.ways
    theirs = [way for way in ways(3, fused=True) if way.engine in ("te", "te-v1", "megatron")]
    assert {way.name for way in theirs if not way.plain} == {
        f"{offload.TE}, {number} of 3, retained buffers" for number in (1, 2)
    }
    again = [way.name for way in ways(3, fused=True, fp8=True) if not way.keep_weights]
    assert len(again) == 4 and all("made again" in name for name in again)
    assert again[:3] == [way.name for way in ways(3, fp8=True) if not way.keep_weights]
    assert [way.name for way in ways(3, fused=True, fp8=True) if way.fc1_again and not way.keep_weights] == again[3:]
    assert not any("made again" in way.name for way in [*ways(3, fused=True), *ways(3)])
    _on_cpu(monkeypatch, grouped=True)
    monkeypatch.setattr(offload, "time_link", lambda: Link(1e6, 1e6, 1e6, 1e6))
    monkeypatch.setattr(
        offload,
        "ways",
        lambda layers, **how: [way for way in ways(layers, **how) if way.engine in (None, "te_offload")],
    )
    result = offload.measure(Shape(3, 2, 64, 128, 8192, fp8=False, fused=True), 2, None)
    assert all(row["same_bits"] for row in result["rows"])
    plain = {way.name for way in offload.ways(3, fused=True) if way.plain}
    assert len(plain) == 2
    for row in result["rows"]:  # forwards, the loss, backwards of ops or layers
        assert len(row["peaks"]) == 3 + 1 + (3 * 3 if row["name"] in plain else 3)
    out = {row["name"]: row["bytes_out"] >> 20 for row in result["rows"] if "floors_ms" in row}
    assert out.pop("te_offload, a plan for a tenth of the bytes") > 0
    assert list(out.values()) == [0, 9, 6, 6, 3, 3, 1, 2, 2, 2, 2]  # of 1 and 2 MiB a layer: FC2's input is rebuilt
    assert "our ops fused" in offload.table(result)


def test_benchmark_of_plans_has_a_row_for_each_fraction_and_its_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch, grouped=True)
    result = plans.measure(Shape(3, 2, 64, 128, 8192, fp8=False), (0.3, 1.0), 2)
    first, some, most = result["rows"]
    assert all(row["same_bits"] and len(row["ms"]) == 2 for row in result["rows"])
    assert "predicted_ms" not in first
    assert (some["bytes_going"] >> 20, most["bytes_going"] >> 20) == (5, 15)  # of 1, 2 and 2 MiB a layer
    assert len(some["slots_going"]) == 3 and len(most["slots_going"]) == 9
    for row in (some, most):
        assert row["predicted_ms"] > 0 and 0 < row["resident"] <= 15 << 20
        assert f"| {row['fraction']:g} | {row['bytes_going'] >> 20}" in plans.table(result)


def test_floor_of_layers_that_are_computed_again_has_their_forwards_twice() -> None:
    windows = [SimpleNamespace(layer=f"layer{number}", forward=0) for number in range(3)]
    record: Any = SimpleNamespace(windows=windows, slots=())
    link = Link(1e6, 1e6, 1e6, 1e6)
    assert floor_ms(record, (2.0, 3.0), link) == pytest.approx(3 * (2 + 3))
    assert floor_ms(record, (2.0, 3.0), link, again=2) == pytest.approx(3 * (2 + 3) + 2 * 2)
