"""What stands in the autograd graph for a saved tensor that no session touches.

In: a tensor. Out: the same one. Keeps true: a write to it between the forward and its backward is an error, as it is
without hooks. Does not: hold autograd's node of it, or its bytes anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_offload.errors import SavedTensorModifiedError


class Unmoved:
    """A saved tensor that no session touches: a parameter, or what is exempt or marked to stay.

    Args:
        tensor: which. layer: what saved it, for messages.
    """

    __slots__ = ("_layer", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, layer: str) -> None:
        self._tensor = without_graph(tensor)
        self._layer = layer
        self._version = version_of((tensor,))

    def take(self) -> torch.Tensor:
        """The tensor.

        Raises:
            SavedTensorModifiedError: it was written to since it was saved; where there are hooks, autograd does not look.
        """
        tensor = self._tensor
        if self._version >= 0 and tensor._version != self._version:
            raise SavedTensorModifiedError(
                f"{self._layer}: a weight, or another saved tensor of {tuple(tensor.shape)} {tensor.dtype} that stays as "
                "it is, was written to in place between the forward and its backward, so gradients would be wrong. Call "
                "optimizer.step() after the backward, or write to a clone."
            )
        return tensor


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its place in autograd's graph, which autograd knows by itself. A node that saved its own output, and
    holds what a pack hook made of it, is never freed if that holds the node, unless a backward goes through it.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def version_of(tensors: Sequence[torch.Tensor]) -> int:
    """The in-place version of tensors of one handle, which are parts of one tensor, or buffers that nobody but their op
    knows: that of the first one; -1 for an inference tensor, which has none.
    """
    try:
        return tensors[0]._version
    except RuntimeError:
        if tensors[0].is_inference():
            return -1
        raise
