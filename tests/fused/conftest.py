"""What tests of the fused op in FP8 have in common; and the processes in which kernels compile beside all tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch._dynamo
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload.fused import hopper
from tests.support import te_on_cpu
from tests.support.compiling import Running

_COMPILES = "test_sm90_compiles.py"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for kernels to compile come last."""
    items.sort(key=lambda item: item.path.name == _COMPILES)


@pytest.fixture(scope="session", autouse=True)
def kernels_compile_meanwhile(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running | None]:
    """The processes, from before the first test of the fused op on; ``None``: no test asks for them."""
    asked = any(item.path.name == _COMPILES for item in request.session.items)
    if not asked or importlib.util.find_spec("quack") is None:
        yield None
        return
    running = Running(tmp_path_factory.mktemp)
    yield running
    running.end()


@pytest.fixture
def fp8_in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Grouped MLPs run fused, in torch arithmetic, under recipes too, and no state of recipes is left."""
    monkeypatch.setenv(hopper.SWITCH, "reference")
    te_on_cpu.unfused(monkeypatch, grouped=False)
    FP8GlobalStateManager.reset()
    with torch._dynamo.config.patch(disable=True):  # the update of scales would be compiled for 20 s
        yield
    FP8GlobalStateManager.reset()
