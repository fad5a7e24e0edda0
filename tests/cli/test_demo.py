"""`te-offload demo`: what it shows, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from te_offload.cli import app
from te_offload.demo import training
from te_offload.offload.saved import Saved


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--steps", "2", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_demo_shows_the_table_and_writes_both_reports(tmp_path: Path) -> None:
    status, text = invoke("--out", str(tmp_path))
    assert status == 0
    for words in ("Loss", "layer3/moe.mlp.2.fc2_input", "offloaded", "without offload, again", "kept: too small"):
        assert words in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(check["holds"] for check in report["checks"].values()) and len(report["checks"]) == 3
    assert report["bytes_out"] == report["bytes_back"] > 0
    with_offload, without = report["last_step_with"], report["last_step_without"]
    assert with_offload["peak_resident"] < 0.6 * without["peak_resident"]
    assert without["bytes_out"] == 0
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_no_offload_reaches_the_ops(tmp_path: Path) -> None:
    status, _ = invoke("--out", str(tmp_path), "--no-offload", "fc1_input, act_input")
    assert status == 0
    rows = json.loads((tmp_path / "report.json").read_text())["last_step_with"]["slots"]
    fates = {row["slot"]: (row["fate"], row["reason"]) for row in rows if row["op"]}
    assert fates == {
        "fc1_input": ("kept", "asked by the user"),
        "act_input": ("kept", "asked by the user"),
        "fc2_input": ("offloaded", ""),
    }


def test_wrong_gradient_bit_makes_the_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Saved.take

    def flip(self: Saved) -> list[torch.Tensor]:
        moved = self.cargo is not None
        tensors = take(self)
        if moved and tensors[0].is_floating_point() and self.entry.op.endswith("mlp.1"):
            tensors[0].view(torch.uint8)[0, 0] ^= 1
        return tensors

    monkeypatch.setattr(Saved, "take", flip)
    status, text = invoke("--out", str(tmp_path))
    assert status == 1
    assert "NO" in text and "differs in the gradient of" in text


def test_demo_that_moves_nothing_is_status_1(tmp_path: Path) -> None:
    status, text = invoke("--out", str(tmp_path), "--min-bytes", "1GiB")
    assert status == 1
    assert "bytes were moved out and back" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--no-offload", "fc3_input"), "'fc3_input' is no slot"),
        (("--min-bytes", "much"), "--min-bytes must be a size"),
    ],
    ids=["slot", "size"],
)
def test_wrong_option_is_a_named_error(arguments: tuple[str, str], message: str) -> None:
    from te_offload.errors import ArgumentError

    with pytest.raises(ArgumentError, match=message):
        invoke(*arguments)


def test_text_is_real_and_large_enough() -> None:
    text = training.read_text()
    assert len(text) > 300_000 and b"statement" in text


def test_first_difference_names_what_and_when() -> None:
    one = training.RunResult(digests=[{"the loss": "a"}, {"the loss": "b"}])
    other = training.RunResult(digests=[{"the loss": "a"}, {"the loss": "c"}])
    assert training.first_difference(one, one) is None
    assert training.first_difference(one, other) == "the loss in step 1"
