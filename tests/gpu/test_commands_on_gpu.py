"""The commands on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from te_offload.cli import app
from te_offload.fused import explain, find_windows
from tests.support.mlp import make_mlp

pytestmark = pytest.mark.gpu


def test_demo_trains_on_the_gpu_with_equal_bits(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--device", "cuda", "--steps", "6", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] != "cpu" and report["dtype"] == "bfloat16"
    assert all(check["holds"] for check in report["checks"].values())
    assert report["bytes_out"] >= report["bytes_back"] > 0  # what had not left yet was read where it was


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10, reason="has the card")
def test_explain_names_the_card_that_is_no_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    major, minor = torch.cuda.get_device_capability()
    support = explain(next(find_windows(list(make_mlp(device="cuda", dtype=torch.bfloat16)))))
    assert f"Blackwell: compute capability {major}.{minor} is not 10.x (Blackwell);" in support.reason


def test_doctor_names_the_card() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = {row["what"]: row for row in json.loads(result.output)["findings"]}
    assert findings["GPU"]["ok"] and "compute capability" in findings["GPU"]["detail"]
    assert findings["pinned memory"]["ok"] and findings["compiled copies"]["ok"]
