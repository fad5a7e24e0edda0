"""Layers beside captured ones, without a GPU: what they save keeps out of the graphs' memory."""

from __future__ import annotations

import pytest
import torch

from te_offload import Fate, OffloadSession
from te_offload.graphs import capture_layers
from tests.support.paged_memory import PagedMemory
from tests.support.toy_layer import FakeGround, Toy, at, install

WIDTH, ROWS = 256, 512


class Neighbour(torch.nn.Module):
    """A layer that is not captured, and saves one tensor in memory that it is given."""

    def __init__(self, address: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, WIDTH))
        self.address = address
        self.freed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        saved = torch.empty_like(x) if not self.address else at(self.address, x.shape, gone=self._count)
        with torch.no_grad():
            saved.copy_(x)
        return saved * self.scale

    def _count(self) -> None:
        self.freed += 1


def run(stack: torch.nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients."""
    stack.zero_grad()
    for layer in stack:
        x = layer(x)
    x.square().sum().backward()
    grads = [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]
    assert len(grads) == len(list(stack.parameters()))
    return [x.detach().clone(), *[grad.clone() for grad in grads]]


def test_saved_tensor_of_a_neighbour_does_not_come_back_to_addresses_that_a_graph_has_taken_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a capture freed memory goes back to the driver, which may hand out the same addresses."""
    machine = install(monkeypatch)
    memory, nbytes = PagedMemory(), 2 << 20
    address, piece = memory.reserve(nbytes), memory.create(nbytes)
    assert piece is not None
    first = Neighbour(0)
    eager = torch.nn.ModuleList([Neighbour(0), Toy(WIDTH, machine)])
    stack = torch.nn.ModuleList([first, Toy(WIDTH, machine)])
    with OffloadSession(stack, min_bytes=0) as session, capture_layers([stack[1]], session=session, warmup=1) as graphs:
        ground = graphs._ground
        assert isinstance(ground, FakeGround)
        reserve = ground.memory.reserve

        def reserve_again(nbytes: int) -> int:
            if not first.freed or not memory.mapped:
                return reserve(nbytes)
            memory.unmap(address, nbytes)  # nobody has it now
            return address

        monkeypatch.setattr(ground.memory, "reserve", reserve_again)
        for number in range(2):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            if number == 1:  # in whose forward the graph is captured
                memory.map(address, [(piece, nbytes)])
                first.address = address
            expected = run(eager, x)
            with session.step():
                found = run(stack, x)
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert graphs.captured and not memory.mapped and ground.space.zones(address, 1)
        record = session.records[-1]
        assert {row.fate for row in record.slots} == {Fate.OFFLOADED} and record.bytes_back == 2 * ROWS * WIDTH * 4
