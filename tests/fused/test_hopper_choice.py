"""Which windows run fused on a machine, and how a session reports it."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe

from te_offload import OffloadSession, ops
from te_offload.fused import Fusion, Support, blackwell, find_windows, hopper, hopper_choice, machine, quantized
from te_offload.fused.calls import calls_of
from te_offload.fused.kernels.interface import Gate, Gated, SquaredReLU
from te_offload.ops.scaling import BlockFormat
from tests.support.mlp import make_inputs, make_mlp, run

SPLITS = (5, 0, 7, 4)


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")


def mlp(**options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=len(SPLITS), **options)


def test_switch_keeps_windows_unfused_and_is_on_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    window = next(find_windows(list(mlp())))
    monkeypatch.setenv(hopper.SWITCH, "0")
    assert hopper_choice.explain(window).reason == "TE_OFFLOAD_FUSED_MLP is 0"
    monkeypatch.delenv(hopper.SWITCH)
    monkeypatch.setattr(machine, "reason_against", lambda *_, **__: None)
    monkeypatch.setattr(machine, "broken_package", lambda **_: None)
    assert hopper_choice.explain(window).ok


def gated_window(columns: int, interleave: int | None = None) -> Any:
    linear: dict[str, Any] = {"bias": False, "device": "cpu"}
    fc1, fc2 = ops.GroupedLinear(4, 64, columns, **linear), ops.GroupedLinear(4, columns // 2, 64, **linear)
    return next(find_windows([fc1, ops.ScaledSwiGLU(interleave), fc2]))


def test_gated_activations_are_taken_where_kernels_can_tell_their_halves_and_torch_takes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_tensors, by_blocks = te_recipe.Float8CurrentScaling(), te_recipe.Float8BlockScaling()
    for recipe in (None, of_tensors, by_blocks):
        assert hopper_choice.explain(gated_window(256, 64), recipe).ok
    monkeypatch.setenv(hopper.SWITCH, "1")
    monkeypatch.setattr(machine, "reason_against", lambda *_, **__: None)
    monkeypatch.setattr(machine, "broken_package", lambda **_: None)
    for recipe in (None, of_tensors, by_blocks):
        assert all(hopper_choice.explain(window, recipe).ok for window in (gated_window(256), gated_window(192, 16)))
        reason = str(hopper_choice.explain(gated_window(256, 64), recipe).reason)
        assert "glu_interleave_size=64, which does not divide 32" in reason
        assert all(hopper_choice.explain(gated_window(192, interleave), recipe).ok for interleave in (1, 2, 4, 8, 32))
    narrow = gated_window(192)
    assert hopper_choice.explain(narrow).ok and hopper_choice.explain(narrow, of_tensors).ok
    reason = str(hopper_choice.explain(narrow, by_blocks).reason)
    assert "FC1 gives 192 columns to ScaledSwiGLU, which are not a multiple of 128" in reason


def test_report_says_how_grouped_mlps_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, glu, idle = mlp(), mlp(activation="swiglu", ffn=20), mlp()
    with OffloadSession([fused, glu, idle], min_bytes=0) as session, session.step():
        for module in (fused, glu):
            run(module, SPLITS)
        x, sizes, scales = make_inputs(SPLITS)
        fused(x.detach(), sizes, scales.detach(), sizes)
        for parameter in fused[0].parameters():
            parameter.requires_grad_(False)
        fused(x.detach(), sizes, scales.detach(), sizes).sum().backward()
    text = session.report()
    assert "Grouped MLPs that ran fused: 0 of 3." in text
    assert "layer0/0: 1 of 3 forwards op by op: a gradient is needed by some of its ops alone" in text
    assert re.search(r"layer1/0: op by op: Blackwell: \S.*; Hopper: FC2 is 20 x 16, which", text)
    assert "layer2/0: op by op: it has not run" in text


def test_window_that_blackwells_op_takes_has_no_reason_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our fusion function is asked first, and must not say that nobody takes what the next one does."""
    module = mlp(activation="swiglu")
    monkeypatch.setattr(blackwell, "explain", lambda window, recipe: Support(True))
    hopper_choice.fuse_windows(list(module))
    assert calls_of(module[0]).reason == ""
    monkeypatch.undo()
    hopper_choice.fuse_windows(list(module))
    assert "Blackwell: " in calls_of(module[0]).reason


def test_report_of_grouped_mlps_that_all_ran_fused_is_a_line() -> None:
    module = mlp()
    with OffloadSession([module], min_bytes=0) as session, session.step():
        run(module, SPLITS)
    assert session.report().endswith("Grouped MLPs that ran fused: 1 of 1.\n")
    assert session.fusions == (("layer0", Fusion("0", 1, 0, "")),)


def test_report_of_layers_without_grouped_mlps_says_nothing_of_them() -> None:
    layer = torch.nn.Linear(8, 8)
    with OffloadSession([layer], min_bytes=0) as session, session.step():
        layer(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert "Grouped MLP" not in session.report()


@pytest.mark.parametrize(
    ("card", "installed", "reason"),
    [
        (None, True, "there is no CUDA device"),
        ((10, 0), True, "compute capability 10.0 is not 9.0"),
        ((9, 0), False, "quack-kernels is not installed"),
        ((9, 0), True, ""),
    ],
)
def test_machine_without_kernels_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, card: tuple[int, int] | None, installed: bool, reason: str
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(machine, "_import_error", lambda module: None)
    support = hopper_choice.explain(next(find_windows(list(mlp()))))
    assert support.ok == (not reason) and reason in support.reason


@pytest.mark.parametrize(
    ("card", "nbytes", "quick"), [("H100", 85e9, False), ("H200", 150.1e9, True), (None, 0, False)]
)
def test_kernels_take_the_tiles_of_the_card_whose_memory_they_run_in(
    monkeypatch: pytest.MonkeyPatch, card: str | None, nbytes: float, quick: bool
) -> None:
    pytest.importorskip("quack", reason="quack-kernels, which has the kernels, is not installed here")
    from te_offload.fused.kernels import sm90_tiles

    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=int(nbytes)))
    assert machine.has_quick_memory() is quick
    asked = "wgrad", sm90_tiles.Regime.MODEST, 1408, 2048
    for way in (quantized.DENSE, quantized.TENSOR_SCALES, BlockFormat.FP8):
        for activation in (SquaredReLU(), Gated(Gate.SWIGLU)):
            kernels: Any = copy.deepcopy(quantized.make_kernels(way, activation, reference=False))
            assert kernels._tile_for(*asked) == sm90_tiles.tile_for(*asked, quick_memory=quick)


@pytest.mark.parametrize(
    ("found", "told", "reason"),
    [
        ("0.6.5", False, ""),
        ("0.7.0", False, "quack-kernels is 0.7.0, but 0.6.5 was tested; TE_OFFLOAD_FUSED_MLP=1 takes it all the same"),
        ("0.7.0", True, ""),
        (None, False, ""),
    ],
)
def test_kernels_of_another_version_are_used_only_if_told_to(
    monkeypatch: pytest.MonkeyPatch, found: str | None, told: bool, reason: str
) -> None:
    monkeypatch.delenv(hopper.SWITCH)
    if told:
        monkeypatch.setenv(hopper.SWITCH, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(machine, "_import_error", lambda module: None)
    versions = {name: tested for name, _, tested in machine.KERNEL_PACKAGES} | {"quack-kernels": found}
    monkeypatch.setattr(machine, "_installed", versions.get)
    support = hopper_choice.explain(next(find_windows(list(mlp()))))
    assert support.ok == (not reason) and support.reason == reason


def test_kernels_whose_package_is_there_but_broken_leave_windows_unfused_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As nvidia-cutlass-dsl without the part for this CUDA."""
    (tmp_path / "broken_cutlass.py").write_text("raise RuntimeError('No CTK flavor installed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(hopper.SWITCH, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(machine, "KERNEL_PACKAGES", (("nvidia-cutlass-dsl", "broken_cutlass", "4.8.1"),))
    module = mlp()
    hopper_choice.fuse_windows(list(module))
    broken = "nvidia-cutlass-dsl is installed, but cannot be imported: RuntimeError: No CTK flavor installed"
    assert f"Hopper: {broken}" in calls_of(module[0]).reason


def test_triton_is_asked_for_only_where_numbers_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_import_error", {"triton": "ImportError: no libcuda"}.get)
    assert machine.broken_package(quantizes=False) is None
    broken = "triton is installed, but cannot be imported: ImportError: no libcuda"
    assert machine.broken_package(quantizes=True) == broken


@pytest.mark.parametrize("kind", ["wide blocks", "plain te.ops", "taken"])
def test_kernels_are_imported_only_for_windows_that_are_taken(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Their import takes seconds."""
    monkeypatch.setenv(hopper.SWITCH, "1")
    monkeypatch.setattr(machine, "reason_against", lambda *_, **__: None)
    asked: list[str] = []
    monkeypatch.setattr(machine, "_import_error", asked.append)
    if kind == "plain te.ops":
        size: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.float32}
        fc1, fc2 = te.ops.GroupedLinear(4, 16, 8, **size), te.ops.GroupedLinear(4, 8, 16, **size)
        module = te.ops.Sequential(fc1, te.ops.ScaledSReLU(), fc2)
    else:
        module = te.ops.Sequential(*gated_window(256, 64).ops) if kind == "wide blocks" else mlp()
    fused = hopper_choice.fuse_windows(list(module))
    assert bool(asked) == (kind == "taken") == (len(fused) == 1)


def test_versions_that_were_tested_are_those_of_the_extra() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package, _, tested in machine.KERNEL_PACKAGES:
        assert re.search(rf'"{package}(\[\w+\])?=={re.escape(tested)}"', text), package
