"""Outputs of a graph that may be read until its next replay.

In: tensors in a graph's memory. Out: tensors of the same memory whose every use asks whether it is theirs still. Keeps
true: a read that would see another replay's numbers is a `StaleOutputError`. Does not: notice a use that was queued in
time and runs late; the stream orders that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from te_offload.errors import StaleOutputError


class Lease:
    """How long the outputs of one replay may be read. ``ended`` says what ended it."""

    def __init__(self) -> None:
        self.ended: str | None = None


class WeakOutput(torch.Tensor):
    """A tensor on lease. What is computed from it is an ordinary tensor."""

    _lease: Lease

    @classmethod
    def of(cls, tensor: torch.Tensor, lease: Lease) -> torch.Tensor:
        """The same memory, on lease."""
        output = tensor.detach().as_subclass(cls)
        output._lease = lease
        return output

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Every use of the tensor comes here.

        Raises:
            StaleOutputError: the lease has ended.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for one in pytree.tree_leaves((args, kwargs)):
                if isinstance(one, WeakOutput):
                    ended = one._lease.ended
                    if ended is not None:
                        raise StaleOutputError(
                            f"This output of a captured graph was read after {ended}, when its memory had other numbers. "
                            "Read it before, clone it, or capture with clone_outputs=True."
                        )
            return func(*args, **(kwargs or {}))
