"""Levels, markers and the report's header.

Level 0 (the default) runs anywhere in minutes. Level 1 is everything: GPU tests too; what cannot run here is skipped
with its reason, and all reasons are listed at the end.
"""

from __future__ import annotations

import datetime
import functools
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from te_offload.fused import hopper
from te_offload.ops import te_adapter

ROOT = Path(__file__).parent.parent

hypothesis.settings.register_profile("te_offload", deadline=None)  # no test is about time
hypothesis.settings.load_profile("te_offload")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--level", type=int, choices=(0, 1), default=0, help="0: runs anywhere in minutes; 1: everything")


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [
        f"level {config.getoption('--level')}, commit {commit()}, {datetime.date.today().isoformat()}",
        f"torch {torch.__version__}, Transformer Engine {te_adapter.installed_version()}",
    ]
    if torch.cuda.is_available():
        number = te_adapter.cublaslt_version()
        lines.append(f"{torch.cuda.get_device_name()}, cuBLASLt {number // 10000}.{number // 100 % 100}")
    return lines


def commit() -> str:
    """The commit under test: from git, or from TE_OFFLOAD_COMMIT where the sources travel without their history."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = git.stdout.strip() if git.returncode == 0 else ""
    return os.environ.get("TE_OFFLOAD_COMMIT") or found or "unknown"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    level = config.getoption("--level")
    for item in items:
        for marker in ("gpu", "slow"):
            if level == 0 and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"level 1 ({marker}); run with --level 1"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """What was there before a module's tests is not looked at by each garbage collection of theirs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped MLPs run op by op, as te.ops with the same bits, unless a test says otherwise."""
    monkeypatch.setenv(hopper.SWITCH, "0")


@pytest.fixture(autouse=True)
def no_hook_left() -> Iterator[None]:
    """Every test leaves autograd's stack of saved-tensor hooks as it found it."""
    before = torch._C._autograd._top_saved_tensors_default_hooks(False)
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) == before, "a saved-tensor hook was left behind"


@pytest.fixture(
    scope="module",
    params=["each slot alone", "each aligned slot alone", "small slots together", "small aligned slots together"],
)
def alone_and_together(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's tests four times: slots as small as a test's go alone, as large ones do, or together; each also as if they
    were aligned as a GPU's are.
    """
    from te_offload.offload import cargo, load, session
    from te_offload.offload.decide import Rules

    with pytest.MonkeyPatch.context() as patch:
        if "alone" in request.param:
            patch.setattr(session, "Rules", functools.partial(Rules, together=0))
        if "aligned" in request.param:
            for module in (cargo, load):
                patch.setattr(module, "ALIGNMENT", 64)  # what torch gives on a CPU
        yield
