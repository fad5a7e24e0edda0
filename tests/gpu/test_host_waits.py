"""The host runs ahead of the GPU, also in a session's step."""

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
