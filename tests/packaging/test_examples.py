"""Every example has a main() that runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = [
    path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__" and not path.stem.startswith("capture")
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_shows_its_slots(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name.endswith("_fused"):
        monkeypatch.setenv("TE_OFFLOAD_FUSED_MLP", "reference")
    report = importlib.import_module(f"examples.{name}").main()
    assert "0.fc1_input" in report
    assert "kept: asked by the user" in report
    assert ("recomputed: the backward" in report) == name.endswith("_fused")


def test_fused_example_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OFFLOAD_FUSED_MLP", "reference")
    first, last = importlib.import_module("examples.train_moe_fused").main().split("\n")[0].split()[1::2]
    assert float(last) < 0.9 * float(first)


@pytest.mark.parametrize("name", ["capture_step", "capture_layers"])
def test_example_of_a_capture_says_what_it_needs_without_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "needs one" in importlib.import_module(f"examples.{name}").main()


@pytest.mark.gpu
def test_example_of_a_capture_trains_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TE_OFFLOAD_FUSED_MLP")
    text = importlib.import_module("examples.capture_step").main()
    assert "; captured; " in text and " 0 bytes" not in text
    first, last = text.split(";")[0].split()[1::2]
    assert float(last) < 0.97 * float(first)


@pytest.mark.gpu
def test_example_of_layers_as_graphs_trains_and_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TE_OFFLOAD_FUSED_MLP")
    text = importlib.import_module("examples.capture_layers").main()
    assert text.count(": captured, ") == 4 and "; 0 bytes" not in text and " eager: " not in text, text
    first, last = text.split(";")[0].split()[1::2]
    assert float(last) < 0.9 * float(first)


def test_there_are_examples() -> None:
    assert EXAMPLES
