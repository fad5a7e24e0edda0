"""Every example has a main() that runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = [path.stem for path in (Path(__file__).parents[2] / "examples").glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_shows_its_slots(name: str) -> None:
    report = importlib.import_module(f"examples.{name}").main()
    assert "layer0/0.fc1_input" in report
    assert "kept: asked by the user" in report


def test_there_are_examples() -> None:
    assert EXAMPLES
