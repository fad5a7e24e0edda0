"""`te-offload doctor`: a reason for each no."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

from te_offload.cli import app, main
from te_offload.cli.doctor import _allocator_finding, _gpu_findings
from te_offload.ops import te_adapter


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


def test_doctor_says_yes_to_what_runs_here() -> None:
    status, text = doctor("--json")
    findings = {row["what"]: row for row in json.loads(text)["findings"]}
    assert status == 0
    assert findings["Transformer Engine"]["ok"]
    assert findings["ops and sessions on the CPU"]["ok"]


def test_every_no_has_a_reason() -> None:
    _, text = doctor("--json")
    for row in json.loads(text)["findings"]:
        assert row["ok"] or len(row["detail"]) > 5, row


def test_unsupported_release_is_status_1_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (te_adapter, te_adapter.layouts):
        monkeypatch.setattr(where, "installed_version", lambda: "2.17.1")
    status, text = doctor()
    assert status == 1
    assert "2.17.1 is not supported" in " ".join(text.split())


def test_error_of_ours_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["te-offload", "demo", "--no-offload", "weights"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "te-offload: --no-offload: 'weights' is no slot" in capsys.readouterr().err


def test_doctor_says_what_another_allocator_of_torchs_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _allocator_finding().ok
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    found = _allocator_finding()
    assert not found.ok and "cudaMallocAsync" in found.detail


@pytest.mark.parametrize(("connections", "said"), [(None, "unset"), ("8", "now 8"), ("1", "have the link")])
def test_doctor_says_what_the_split_path_does_to_copies(
    monkeypatch: pytest.MonkeyPatch, connections: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(te_adapter, "cublaslt_version", lambda: 130100)
    monkeypatch.setattr(te_adapter, "grouped_path_supported", lambda recipe, dtype: False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    rows = {found.what: found for found in itertools.islice(_gpu_findings(), 6)}
    seen, other = rows["unfused grouped path, bf16"], rows["unfused grouped path, FP8 current scaling"]
    assert not seen.ok and said in seen.detail
    assert not other.ok and "CUDA_DEVICE_MAX_CONNECTIONS" not in other.detail
