"""The fused op with weights that others rebind, shard, copy or store: nothing is packed, so all of it works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload.fused import fusions_in, hopper
from tests.support.mlp import assert_same_bits, make_mlp, run

ROOT = Path(__file__).parents[2]
SPLITS = (5, 0, 7, 4)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    where = str(request.param)
    if where == "cuda":
        pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the kernels are Hopper's (compute capability 9.0)")
    monkeypatch.setenv(hopper.SWITCH, "reference" if where == "cpu" else "1")
    return where


def mlp(device: str) -> te.ops.Sequential:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return make_mlp(experts=len(SPLITS), hidden=64, ffn=96, device=device, dtype=dtype)


def step(module: te.ops.Sequential) -> dict[str, torch.Tensor]:
    found = run(module, SPLITS, hidden=64)
    assert [fusion.handed_over for fusion in fusions_in(module)] == [0]
    return found


def test_weights_rebound_into_one_buffer_between_steps_give_the_same_bits(device: str) -> None:
    """What Megatron's distributed optimizer does with parameters."""
    module = mlp(device)
    expected = step(module)
    parameters = list(module.parameters())
    buffer = torch.cat([parameter.data.flatten() for parameter in parameters])
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.data.fill_(float("nan"))
        parameter.data = part.view(parameter.shape)
    assert_same_bits(expected, step(module))


def test_module_moved_to_another_dtype_between_steps_computes_in_it(device: str) -> None:
    module, other = mlp(device), torch.float64 if device == "cpu" else torch.float16
    step(module)
    fresh = mlp(device).to(other)
    module.to(other)
    found = step(module)
    assert found["output"].dtype == other
    assert_same_bits(step(fresh), found)


def test_weights_go_to_safetensors_and_back(device: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module = mlp(device)
    expected = step(module)
    state = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    safetensors.save_file(state, tmp_path / "weights.safetensors")  # refuses tensors that share memory
    torch.manual_seed(1)
    other = make_mlp(experts=len(SPLITS), hidden=64, ffn=96, device=device, dtype=next(module.parameters()).dtype)
    step(other)
    other.load_state_dict(safetensors.load_file(tmp_path / "weights.safetensors"), strict=False)
    assert_same_bits(expected, step(other))


@pytest.mark.parametrize("where", DEVICES)
def test_sharded_by_fsdp2_it_offloads_and_trains_as_it_does_unsharded(where: str, tmp_path: Path) -> None:
    ranks = 2 if where == "cpu" else torch.cuda.device_count()
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.fsdp2", str(ranks), where, str(tmp_path / "meeting")],
        cwd=ROOT,
        env=os.environ | {hopper.SWITCH: "reference" if where == "cpu" else "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Grouped MLPs that ran fused: 1 of 1." in ran.stdout
    bytes_out = 97 * (64 + 128) * (4 if where == "cpu" else 2)
    assert f"{bytes_out} bytes out" in ran.stdout
