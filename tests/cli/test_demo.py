"""`te-offload demo`: what it shows, writes and returns."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from typer.testing import CliRunner

from te_offload.cli import app
from te_offload.demo import training
from te_offload.demo.model import ModelConfig, MoE, _padded
from te_offload.demo.recipes import RECIPES, choose_recipe
from te_offload.errors import ArgumentError
from te_offload.fused import hopper
from te_offload.offload.saved import Saved
from tests.support import te_on_cpu


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--steps", "2", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def no_amaxes_left() -> Iterator[None]:
    """Transformer Engine keeps those of delayed scaling for whoever runs a backward next."""
    yield
    FP8GlobalStateManager.reset()


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


def test_demo_that_computes_fc1_again_has_the_bits_of_runs_that_save_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    status, text = invoke("--out", str(tmp_path), "--recompute-act-input")
    assert status == 0, text
    report = json.loads((tmp_path / "report.json").read_text())
    fates = [
        {row["fate"] for row in report[step]["slots"] if row["slot"] == "act_input"}
        for step in ("last_step_without", "last_step_with")
    ]
    assert fates == [{"kept"}, {"recomputed"}] and report["recompute_act_input"]
    assert report["bytes_out"] == report["bytes_back"] > 0


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
        (("--recipe", "fp7"), "--recipe must be one of none, fp8, fp8-delayed, fp8-block, mxfp8, nvfp4"),
        (("--recipe", "nvfp4"), "--recipe nvfp4 quantizes on a GPU, but the device is cpu"),
    ],
    ids=["slot", "size", "recipe", "recipe on the CPU"],
)
def test_wrong_option_is_a_named_error(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        invoke(*arguments)


def test_recipe_that_a_gpu_cannot_run_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(te, "is_mxfp8_available", lambda return_reason: (False, "compute capability 10.x is needed"))
    with pytest.raises(
        ArgumentError, match=r"--recipe mxfp8 does not run on a GPU: compute capability 10\.x is needed"
    ):
        choose_recipe("mxfp8", torch.device("cuda"))


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"])
def test_demo_in_a_recipe_moves_quantized_slots_and_keeps_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """With Transformer Engine's kernels replaced; the CPU has none."""
    te_on_cpu.unfused(monkeypatch, grouped=False)
    command = importlib.import_module("te_offload.cli.demo")  # te_offload.cli has a function of this name
    monkeypatch.setattr(command, "choose_recipe", lambda name, device: RECIPES[name])
    with torch._dynamo.config.patch(disable=True):  # with which Transformer Engine updates delayed scales
        status, text = invoke("--out", str(tmp_path), "--recipe", recipe, "--min-bytes", "0")
    assert status == 0, text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["recipe"] == recipe and report["bytes_out"] == report["bytes_back"] > 0
    rows = [row for row in report["last_step_with"]["slots"] if row["op"].startswith("moe.mlp")]
    sizes = {slot: max(row["nbytes"] for row in rows if row["slot"] == slot) for slot in ("fc2_input", "act_input")}
    assert 0 < sizes["fc2_input"] < sizes["act_input"] / 2


def test_tokens_of_zeros_change_no_token() -> None:
    torch.manual_seed(0)
    plain = MoE(ModelConfig(dim=32, ffn=64), torch.device("cpu"), torch.float32)
    padded = copy.deepcopy(plain)
    padded.config = replace(plain.config, rows=16)
    x = torch.randn(3, 7, 32)
    assert torch.allclose(plain(x), padded(x), rtol=1e-5, atol=1e-6)
    sizes, places = _padded(torch.tensor([3, 0, 16, 17]), 16)
    assert sizes.tolist() == [16, 0, 16, 32]
    assert places.tolist() == [*range(3), *range(16, 32), *range(32, 49)]


def test_text_is_real_and_large_enough() -> None:
    text = training.read_text()
    assert len(text) > 300_000 and b"statement" in text


def test_first_difference_names_what_and_when() -> None:
    one = training.RunResult(digests=[{"the loss": "a"}, {"the loss": "b"}])
    other = training.RunResult(digests=[{"the loss": "a"}, {"the loss": "c"}])
    assert training.first_difference(one, one) is None
    assert training.first_difference(one, other) == "the loss in step 1"
