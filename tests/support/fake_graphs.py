"""A backend of captures that needs no GPU: a recording runs its function again, into the same outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


class FakeRecording:
    """Runs its function again, into the outputs of the first time."""

    def __init__(self, backend: FakeBackend, function: Callable[[], Any], outputs: list[Any]) -> None:
        self.backend, self.outputs = backend, outputs
        self.function = weakref.WeakMethod(function)  # as a graph, which does not know it

    def replay(self) -> None:
        self.backend.step("replay")
        function = self.function()
        assert function is not None
        for old, new in zip(self.outputs, pytree.tree_leaves(function()), strict=True):
            if isinstance(old, torch.Tensor):
                old.data.copy_(new)

    def close(self) -> None:
        self.backend.step("close")


class FakeBackend:
    """Keeps what was asked of it, and fails where it is told to."""

    device = torch.device("cpu")

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.log = fails_at, list[Any]()
        self.captures = False  # someone else
        self.written: list[torch.Tensor] = []  # by the function, which a capture does not run

    def in_capture(self) -> bool:
        return self.captures

    def step(self, name: str) -> None:
        self.log.append(name)
        if name == self.fails_at:
            raise RuntimeError(f"injected: {name}")

    def warm_up(self, function: Callable[[], Any]) -> Any:
        self.step("warm up")
        return function()

    def record(self, function: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[FakeRecording, Any]:
        self.step("begin")
        before = [tensor.detach().clone() for tensor in self.written]
        result = function()
        for tensor, value in zip(self.written, before, strict=True):
            tensor.data.copy_(value)
        self.step("end")
        return FakeRecording(self, function, pytree.tree_leaves(result)), result

    def wait_for(self, producer: Any) -> None:
        self.log.append(("wait", producer))

    def settle(self) -> None:
        self.log.append("settle")
