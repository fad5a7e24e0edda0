"""A GroupedLinear whose weights somebody else keeps, and gives for each call: as one tensor of all experts.

In: a weight (N, F, H), before a call. Out: its gradient, to whoever made that tensor. Keeps true: it has no parameter, and
no state, of its own; sizes are those of what was given last; between calls it holds nothing. Does not: run by itself; it is
FC1 or FC2 of a window that the fused op takes.
"""

from __future__ import annotations

from typing import Any

import torch

from te_offload.errors import ArgumentError, UnsupportedError
from te_offload.fused.calls import calls_of
from te_offload.ops import GroupedLinear, te_adapter

_NAME = "weight0"  # under which Transformer Engine asks an op for the kind of its weights


class GivenGroupedLinear(GroupedLinear):
    """``y_i = x_i @ w_i.T`` with weights that are given.

    Args:
        no_offload_activation, keep_quantized_weight: as of `GroupedLinear`.
    """

    def __init__(self, *, no_offload_activation: bool = False, keep_quantized_weight: bool = True) -> None:
        super().__init__(
            1,
            8,
            8,
            bias=False,
            device="meta",
            no_offload_activation=no_offload_activation,
            keep_quantized_weight=keep_quantized_weight,
        )
        self.take_back()

    def give(self, weight: torch.Tensor) -> None:
        """For the calls until `take_back`.

        Args:
            weight: (N, F, H), contiguous; a plain tensor, on the device of the input and of its dtype.

        Raises:
            ArgumentError: it has not three dimensions, or is not contiguous.
        """
        if weight.dim() != 3 or not weight.is_contiguous():
            raise ArgumentError(
                f"{type(self).__name__}: the weight must be a contiguous (experts, out_features, in_features), but has "
                f"shape {tuple(weight.shape)} and strides {weight.stride()}."
            )
        self.num_groups, self.out_features, self.in_features = weight.shape
        self._parameters[_NAME] = weight  # as torch.func.functional_call puts tensors there

    def take_back(self) -> None:
        """Hold nothing any more."""
        self._parameters.clear()

    @property
    def given(self) -> Any:
        """The weight.

        Raises:
            ArgumentError: there is none.
        """
        if _NAME not in self._parameters:
            raise ArgumentError(f"{type(self).__name__}: no weight was given; call `give` before each call.")
        return self._parameters[_NAME]

    def check_parameters(self) -> None:
        """Nothing: it has none."""

    def pre_first_fuser_forward(self) -> None:
        """Nothing: there are no parameters to fill."""

    def fuser_forward(
        self, basic_op_ctxs: list[te_adapter.OperationContext], input_: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """Not for this op.

        Raises:
            UnsupportedError: the call did not run fused; with the reason.
        """
        why = calls_of(self).reason
        raise UnsupportedError(
            f"{type(self).__name__}: weights that are given are for the fused grouped MLP, which did not take this call"
            f"{f': {why}' if why else ''}."
        )
