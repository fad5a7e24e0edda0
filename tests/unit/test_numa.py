"""Host memory on a node, as far as this machine has nodes."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import pytest
import torch

from te_offload.offload import numa


def region(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def test_pages_of_touched_memory_lie_on_a_node_of_this_machine() -> None:
    memory = region(1 << 20)
    memory.fill_(1)
    found = numa.nodes_of(memory.data_ptr(), memory.numel())
    nodes = {int(path.name.removeprefix("node")) for path in Path("/sys/devices/system/node").glob("node[0-9]*")}
    if not found:
        pytest.skip("the system does not tell where pages lie")
    assert found <= nodes


def test_bound_memory_lies_on_the_node_that_was_asked_for() -> None:
    memory = region(1 << 20)
    if not numa.bind(memory.data_ptr(), memory.numel(), 0):
        pytest.skip("the system lets no one bind memory to a node")
    memory.fill_(1)
    assert numa.nodes_of(memory.data_ptr(), memory.numel()) in ({0}, set())


def test_node_that_is_not_there_is_refused_and_nothing_raises() -> None:
    memory = region(1 << 20)
    assert not numa.bind(memory.data_ptr(), memory.numel(), 1000)
    assert numa.nodes_of(memory.data_ptr(), 0) == set()


def test_machine_whose_calls_are_unknown_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    memory = region(1 << 20)
    memory.fill_(1)
    assert not numa.bind(memory.data_ptr(), memory.numel(), 0)
    assert numa.nodes_of(memory.data_ptr(), memory.numel()) == set()


def test_cpu_has_no_node_of_its_own() -> None:
    assert numa.node_of_gpu(torch.device("cpu")) is None
