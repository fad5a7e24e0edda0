"""Functions whose output has no memory between forward and backward, as Megatron-core's `CheckpointWithoutOutput` has it.

In: a function of a tensor. Out: the same tensor, whose storage is empty from `Again.discard` until its gradient is about to
be computed. Keeps true: bits are those of the function. Does not: keep states of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: Again, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        again.ctx = ctx
        with torch.no_grad():
            found: torch.Tensor = again.function(x)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        torch.autograd.backward(ctx.outputs, grad)
        return None, ctx.inputs.grad


class Again:
    """A function whose output has no memory between the forward and the backward."""

    ctx: Any

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        self.function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Computed.apply(self, x)  # type: ignore[no-untyped-call]
        self.output = output
        return output

    def discard(self, before: torch.Tensor) -> None:
        """Give up the output's memory; it is there again when the gradient by ``before`` is."""
        self.output.untyped_storage().resize_(0)
        before.register_hook(self._fill)

    def _fill(self, _: torch.Tensor) -> None:
        (x,) = self.ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            found = self.function(x)
        storage, source = self.output.untyped_storage(), found.untyped_storage()
        storage.resize_(source.nbytes())
        storage.copy_(source)
        self.ctx.outputs, self.ctx.inputs = found, x
