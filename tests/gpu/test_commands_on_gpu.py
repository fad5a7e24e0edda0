"""The commands on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from te_offload.cli import app

pytestmark = pytest.mark.gpu


def test_demo_trains_on_the_gpu_with_equal_bits(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--device", "cuda", "--steps", "6", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] != "cpu" and report["dtype"] == "bfloat16"
    assert all(check["holds"] for check in report["checks"].values())
    assert report["bytes_back"] == report["bytes_out"] > 0


def test_doctor_names_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = {row["what"]: row for row in json.loads(result.output)["findings"]}
    assert findings["GPU"]["ok"] and "compute capability" in findings["GPU"]["detail"]
    assert findings["pinned memory"]["ok"]
