"""Saved leaves that need gradients: autograd holds them where their gradients are accumulated, so they stay."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from te_offload import OffloadSession, Reason
from te_offload.slots import Fate, SlotName
from tests.session.test_regions import Layer

ROWS = 100


class _SavesALeaf(torch.autograd.Function):
    """Saves its input as Megatron-core's checkpoint of a norm does: cut off, and needing a gradient again."""

    leaves: list[weakref.ref[torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leaves: list[Any]) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        ctx.save_for_backward(leaf)
        leaves.append(weakref.ref(leaf))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (y * 2).backward(grad)
        return y.grad, None


class Block(torch.nn.Module):
    """The leaf is ``x * scale``'s memory; ``square`` saves the same memory under another name, if asked."""

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, ROWS))
        self.shares = shares
        self.leaves: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        y: torch.Tensor = _SavesALeaf.apply(x, self.leaves)  # type: ignore[no-untyped-call]
        return torch.sin(y) + (x.square() if self.shares else 0)


def train(block: Block) -> torch.Tensor:
    block.zero_grad()
    block(torch.linspace(-1, 1, ROWS).requires_grad_() * 1).sum().backward()
    assert block.scale.grad is not None
    return block.scale.grad.clone()


def test_autograd_holds_a_leaf_until_the_backward_whatever_a_hook_makes_of_it() -> None:
    block = Block()
    copies: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        copies.append(tensor.clone())
        return len(copies) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, copies.__getitem__):
        y = block(torch.ones(ROWS, requires_grad=True) * 1)
    gc.collect()
    (leaf,) = block.leaves
    assert leaf() is not None, "torch lets go of leaves now: a session could move them"
    y.sum().backward()
    del y
    gc.collect()
    assert leaf() is None


def test_a_leaf_that_needs_a_gradient_stays_and_the_others_go() -> None:
    expected, block = train(Block()), Block()
    with OffloadSession(block, min_bytes=0) as session:
        for _ in range(3):
            with session.step():
                found = train(block)
            assert torch.equal(found, expected)
            record = session.records[-1]
            (row,) = [row for row in record.slots if row.reason is Reason.LEAF]
            assert (row.fate, row.nbytes, row.bytes_out) == (Fate.KEPT, ROWS * 4, 0)
            assert record.bytes_out == record.bytes_back == 2 * ROWS * 4  # what the product and the sine save
            assert "autograd holds it" in session.report()


def test_a_view_that_a_function_of_autograd_makes_of_its_input_is_no_such_leaf_and_goes() -> None:
    """It says that it is one, and that it needs a gradient; Transformer Engine's norms and linears save such."""
    seen: list[weakref.ref[torch.Tensor]] = []

    class SavesAView(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            view = x.view(-1, 10)
            assert view.is_leaf and view.requires_grad
            ctx.save_for_backward(view)
            seen.append(weakref.ref(view))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (view,) = ctx.saved_tensors
            assert torch.equal(view, torch.arange(100.0).view(-1, 10) * 3)
            return grad * 2

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = SavesAView.apply(x * 3)  # type: ignore[no-untyped-call]
            return y

    layer = Layer()
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        y = layer(torch.arange(100.0).requires_grad_() * 1)
        gc.collect()
        assert seen[0]() is None, "its memory is not free"
        y.sum().backward()
    record = session.records[-1]
    assert record.bytes_out == record.bytes_back == 400
    assert not [row for row in record.slots if row.reason is Reason.LEAF]


def test_what_shares_memory_with_such_a_leaf_stays_too() -> None:
    expected, block = train(Block(shares=True)), Block(shares=True)
    with OffloadSession(block, min_bytes=0) as session, session.step():
        found = train(block)
    assert torch.equal(found, expected)
    record = session.records[-1]
    (row,) = [row for row in record.slots if row.reason is Reason.LEAF]
    assert row.tensors == 2 and row.nbytes == ROWS * 4  # the leaf, and what the square saved
    assert record.bytes_out == record.bytes_back == 2 * ROWS * 4


def test_of_a_region_only_such_a_leaf_stays() -> None:
    leaf = torch.ones(50).requires_grad_()
    layer = Layer(lambda: [torch.ones(100), leaf, torch.full((30,), 2.0)], ("some",))
    with OffloadSession(layer, min_bytes=0) as session:
        layer.session = session
        with session.step():
            layer(torch.ones(1, requires_grad=True)).sum().backward()
    ((_, found, _),) = layer.seen
    assert found.data_ptr() == leaf.data_ptr()
    rows = session.records[-1].slots
    (region,) = [row for row in rows if row.slot is SlotName.REGION]
    (rest,) = [row for row in rows if row.slot is SlotName.OTHER]
    assert (region.fate, region.tensors, region.bytes_out) == (Fate.OFFLOADED, 2, 520)
    assert (rest.fate, rest.reason, rest.nbytes) == (Fate.KEPT, Reason.LEAF, 200)
