"""Public names and the errors' tree are what the docs say."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import te_offload
from te_offload import errors


def test_public_names() -> None:
    assert sorted(te_offload.__all__) == [
        "DevicePeak",
        "Fate",
        "OffloadSession",
        "Outcome",
        "Phase",
        "Plan",
        "PlannedSlot",
        "Reason",
        "Residency",
        "SharedMemory",
        "SlotName",
        "SlotRecord",
        "StepRecord",
        "Window",
        "errors",
        "fused",
        "get_cpu_offload_context",
        "numbers_on_host",
        "ops",
    ]
    assert all(hasattr(te_offload, name) for name in te_offload.__all__)


def test_every_error_is_an_offload_error_and_stands_in_the_tree() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert len(kinds) == 21
    for kind in kinds:
        assert issubclass(kind, errors.OffloadError)
        assert kind.__name__ in (errors.__doc__ or "")


def test_errors_are_the_built_in_kinds_that_callers_expect() -> None:
    assert issubclass(errors.ArgumentError, ValueError)
    assert issubclass(errors.ArgumentTypeError, TypeError)
    assert issubclass(errors.StateError, RuntimeError)
    assert issubclass(errors.UnsupportedError, RuntimeError)
    assert issubclass(errors.NotInstalledError, ImportError)


@pytest.mark.parametrize("missing", ["transformer_engine", "transformer_engine.pytorch"])
def test_transformer_engine_that_is_not_there_is_a_named_error_that_says_what_to_install(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import te_offload"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    asked_for = re.search(r"'(transformer-engine\[pytorch\]==.*?)'", last)
    assert last.startswith("te_offload.errors.NotInstalledError: ") and asked_for is not None
    assert f'"{asked_for[1]}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
