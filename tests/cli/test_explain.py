"""`te-offload explain`: every kind of window, with a reason for each no."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from te_offload.cli import app
from te_offload.fused import hopper, machine


def windows(*arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    result = CliRunner().invoke(app, ["explain", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return {(row["activation"], row["recipe"]): row for row in json.loads(result.output)["windows"]}


def test_every_no_says_why_for_both_paths() -> None:
    found = windows()
    assert len(found) == 5 * 6
    for row in found.values():
        assert row["ok"] or ("Blackwell: " in row["reason"] and "Hopper: " in row["reason"]), row


def test_window_that_is_taken_is_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    found = windows("--bias")
    assert found["ScaledSReLU", "none"] == {"activation": "ScaledSReLU", "recipe": "none", "ok": True, "reason": ""}
    assert found["ScaledSwiGLU", "none"]["ok"]


def test_widths_are_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    assert "FC1 is 36 x 64" in windows("--hidden", "36", "--ffn", "64")["ScaledSReLU", "none"]["reason"]


def test_halves_lie_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")
    monkeypatch.setattr(machine, "reason_against", lambda *_, **__: None)
    monkeypatch.setattr(machine, "broken_package", lambda **_: None)
    found = windows("--glu-interleave-size", "64")
    assert found["ScaledSReLU", "none"]["ok"] and found["ScaledSReLU", "FP8 by blocks"]["ok"]
    assert "glu_interleave_size=64, which does not divide 32" in found["ScaledSiTUGLU", "FP8 by blocks"]["reason"]
    assert windows()["ScaledSiTUGLU", "FP8 by blocks"]["ok"]


def test_names_in_reasons_are_not_cut_in_a_narrow_table() -> None:
    text = CliRunner().invoke(app, ["explain"], env={"COLUMNS": "80"}).output
    assert "\u2026" not in text and "_MLP" in text


def test_table_has_a_row_for_each() -> None:
    text = CliRunner().invoke(app, ["explain"], env={"COLUMNS": "200"}).output
    assert text.count("ScaledSReLU") >= 4 and "NVFP4" in text
