"""What a session's step does to the host: it waits for nothing, and names its copies for profilers."""

from __future__ import annotations

import warnings

import pytest
import torch

from te_offload import OffloadSession

pytestmark = pytest.mark.gpu


def test_host_never_waits_in_a_step() -> None:
    def make() -> torch.nn.ModuleList:
        torch.manual_seed(0)
        return torch.nn.ModuleList(torch.nn.Linear(512, 512, device="cuda") for _ in range(4))

    def run_on(layers: torch.nn.ModuleList) -> torch.Tensor:
        y = x
        for layer in layers:
            y = torch.relu(layer(y))
        y.backward(dy)
        return y

    x = torch.randn(2048, 512, device="cuda", requires_grad=True)
    dy = torch.randn(2048, 512, device="cuda")
    layers = make()
    with OffloadSession(layers, min_bytes=0, max_in_flight=0) as session:
        for _ in range(4):  # pinned memory and streams are there after these
            with session.step():
                run_on(layers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(2):
                    with session.step():
                        run_on(layers)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert session.records[-1].bytes_out >= session.records[-1].bytes_back > 0


def test_copies_stand_in_profiler_ranges_named_by_their_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "NVTX_INJECTION64_PATH", "as a profiler sets it"
    )  # for the session; NVTX itself was set up before
    names: list[str] = []
    depth = 0

    def push(name: str) -> None:
        nonlocal depth
        depth += 1
        names.append(name)

    def pop() -> None:
        nonlocal depth
        depth -= 1

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, device="cuda") for _ in range(3))
    x = torch.randn(2048, 512, device="cuda", requires_grad=True)
    with OffloadSession(layers, min_bytes=0, max_in_flight=0) as session, session.step():
        y = x * 1
        for layer in layers:
            y = torch.relu(layer(y))
        y.sum().backward()
    assert depth == 0
    assert {f"layer{number}/other[0] out" for number in range(3)} <= set(names)
    assert "layer0/other[0] back" in names
