"""One forward and backward of the fused grouped MLP in a block-scaled format: what is quantized and multiplied when.

In: kernels, weights and scalings of two linears, offsets, dense tensors. Out: dense tensors; columns to save. Keeps true: a
tensor is quantized from its dense numbers, rows and columns at once where both are needed, but for weights of which no
quantized copy is kept: the dgrad makes its own; of FC1's input the backward gets the columns alone, of FC2's none: it is
rebuilt, to the same numbers. Does not: save, offload, or know of ops or autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from te_offload.fused.fp8_pass import FC1, FC2, Beside, Halfway
from te_offload.fused.kernels.block_interface import BlockKernels, BlockNumbers, BlockWeights
from te_offload.fused.kernels.interface import Counts, Orders, TileCount
from te_offload.fused.parameters import LinearWeights
from te_offload.ops import te_adapter
from te_offload.ops.scaling import BlockFormat, BlockScaling, LinearBlockScaling

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of FC1's input, each flat: bytes of numbers, scales, and amaxes (N,) of NVFP4."""


def structure_reason(ops: Sequence[tuple[str, Any]], recipe: Any, *, reference: bool) -> str | None:
    """Why linears, with names, do not go this way under a recipe that scales by blocks; ``None`` if they do."""
    form = te_adapter.block_format(recipe)
    assert form is not None
    if getattr(recipe, "backward_override", None) is not None:
        return f"recipe {type(recipe).__name__} with backward_override={recipe.backward_override}"
    if not reference and format_reason(form) is not None:
        return format_reason(form)
    _, multiple = te_adapter.shape_multiples(recipe)
    for name, op in ops:
        if op.in_features % multiple or op.out_features % multiple:
            return f"{name} is {op.in_features} x {op.out_features}; {form.value} takes multiples of {multiple}"
    return None


def format_reason(form: BlockFormat) -> str | None:
    """Why Hopper's kernels do not take a format; ``None`` if they do."""
    return None if form is BlockFormat.FP8 else f"Hopper has no tensor cores for {form.value}"


class BlockPass:
    """See the module; its calls are those of `Fp8Pass`.

    Args:
        kernels: of one device. fc1, fc2: weights of the linears. scalings: theirs.
        offsets: of FC1's rows, and of FC2's. counts: of the forward's products. router: scales (T,); ``None``: no forward.
        backward: whether one will follow. again: whether it will begin with `fc1_again`. exact: what is saved of FC1's
            input has sizes that the numbers of tokens and of experts tell.
    """

    def __init__(
        self,
        kernels: BlockKernels,
        fc1: LinearWeights,
        fc2: LinearWeights,
        scalings: tuple[LinearBlockScaling, LinearBlockScaling],
        offsets: tuple[torch.Tensor, torch.Tensor],
        counts: Counts,
        router: torch.Tensor | None,
        *,
        backward: bool,
        again: bool = False,
        exact: bool = False,
    ) -> None:
        self._kernels = kernels
        self._again = again
        self._exact = exact
        self._fc1, self._fc2 = fc1, fc2
        self._offsets1, self._offsets2 = offsets
        self._counts = counts
        self._router = router
        self._backward = backward
        self._scaling1, self._scaling2 = scalings
        self._weights1 = BlockWeights(None, None)
        self._weights2 = BlockWeights(None, None)  # only when FC1 has read its own, which take as much memory
        self._rows: BlockNumbers | None = None  # of the next product
        self._columns: BlockNumbers | None = None  # of an output's gradient, for the next wgrad
        self._rebuilt: BlockNumbers | None = None
        self._orders = Orders()
        self._padded: torch.Tensor | None = None  # FC2's offsets in columns, once its wgrad has asked for them

    # Forward ---------------------------------------------------------------------------------------------------------

    def quantize_input(self, x: torch.Tensor, *, wgrad: bool) -> Columns | torch.Tensor | None:
        """What the backward needs of FC1's input; ``None`` if none follows. For `fc1_again` that is x as it is: FP8 in
        both directions takes as many bytes. ``wgrad``: FC1's weights take a gradient.
        """
        self._weights1 = _weights(self._kernels, FC1, self._fc1, self._scaling1.weight, backward=self._backward)
        ways: dict[str, bool] = {"by_column": self._backward and wgrad and not self._again, "saved": True}
        self._rows, columns = self._kernels.block_rows(
            x, self._offsets1, self._scaling1.input, **ways, exact=self._exact
        )
        if columns is None:
            return x if self._again else None
        return columns.numbers.flatten(), columns.scales.flatten(), columns.amaxes

    def beside_input(self) -> Beside:
        """Nothing: scales are saved with the numbers that they are of."""
        return None, None, None

    def fc1(self, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """The activation's input, if the backward needs it from here."""
        assert self._rows is not None and self._router is not None
        offsets = self._offsets1, self._offsets2
        act_input, self._rows = self._kernels.fc1_blocks(
            self._rows, self._weights1, bias, self._router, offsets, dtype, self._scaling2.input, self._counts.fc1
        )
        self._weights1 = BlockWeights(None, self._weights1.columns)
        return act_input if self._backward and not self._again else None

    def fc2(self, bias: torch.Tensor | None, bias_scales: torch.Tensor | None, out: torch.Tensor) -> None:
        """FC2, after FC1; the weights as the forward reads them are not needed any more."""
        assert self._rows is not None
        rows, self._rows = self._rows, None
        weights = _weights(self._kernels, FC2, self._fc2, self._scaling2.weight, backward=self._backward)
        self._kernels.linear_blocks(
            rows, weights.rows, out, self._offsets2, bias=bias, bias_scales=bias_scales, count=self._counts.fc2
        )
        self._router = None
        self._weights2 = BlockWeights(None, weights.columns)

    def resume(self, halfway: Halfway) -> None:
        """Before the second half of a backward whose first one was another one of these."""
        self._orders = halfway.orders

    def halfway(self) -> Halfway:
        """As of `Fp8Pass`."""
        return Halfway(self._orders)

    # Backward --------------------------------------------------------------------------------------------------------

    def fc1_again(
        self,
        x: torch.Tensor,
        beside: Beside,
        bias: torch.Tensor | None,
        router: torch.Tensor,
        dtype: torch.dtype,
        count: TileCount | None,
    ) -> torch.Tensor:
        """As of `Fp8Pass`."""
        kernels, offsets = self._kernels, self._offsets1
        rows, _ = kernels.block_rows(x, offsets, self._scaling1.input, by_column=False)
        weights = _weights(kernels, FC1, self._fc1, self._scaling1.weight, backward=False)
        out = x.new_empty(x.shape[0], self._fc1.out_features, dtype=dtype)
        kernels.fc1_linear_blocks(rows, weights, bias, out, offsets, count)
        return out

    def fc2_dgrad(
        self, dy: torch.Tensor, act_input: torch.Tensor, router: torch.Tensor, *, wgrad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients by the activation's input and by the router's scales. ``wgrad``: `fc2_wgrad` follows."""
        kernels, offsets = self._kernels, self._offsets2
        rows, self._columns = kernels.block_rows(dy, offsets, self._scaling2.grad_output, by_column=wgrad)
        weights = _turned(kernels, FC2, self._fc2, self._weights2, self._scaling2.weight)
        dact_input, dscales, self._orders = kernels.fc2_dgrad_blocks(rows, weights, act_input, router, offsets)
        del weights
        if self._offsets2 is not self._offsets1:
            kernels.clear(offsets, dact_input)
        self._weights2 = BlockWeights(None, None)
        if wgrad:
            self._rebuilt = kernels.rebuild_blocks(act_input, router, offsets, self._scaling2.input)
        return dact_input, dscales

    def fc2_wgrad(self, out: Any, accumulate: bool) -> None:
        """The gradients by FC2's weights."""
        assert self._columns is not None and self._rebuilt is not None
        padded = self._padded = self._kernels.padded_offsets(self._offsets2)
        ways: dict[str, Any] = {"accumulate": accumulate, "order": self._orders.fc2_wgrad, "padded": padded}
        self._kernels.wgrad_blocks(self._columns, self._rebuilt, self._offsets2, out, **ways)

    def for_later(self) -> BlockPass:
        """As of `Fp8Pass`."""
        later = copy.copy(self)
        later._weights1 = BlockWeights(None, None)
        return later

    def fc1_dgrad(self, dact_input: torch.Tensor, out: torch.Tensor, *, wgrad: bool) -> None:
        """The gradient by the input. ``wgrad``: `fc1_wgrad` follows."""
        kernels, offsets = self._kernels, self._offsets1
        self._rebuilt = self._columns = None
        rows, self._columns = kernels.block_dact_rows(dact_input, offsets, self._scaling1.grad_output, by_column=wgrad)
        weights = _turned(kernels, FC1, self._fc1, self._weights1, self._scaling1.weight)
        kernels.linear_blocks(rows, weights.columns, out, offsets, count=self._orders.fc1_dgrad)
        del weights
        kernels.clear(offsets, out)
        self._weights1 = BlockWeights(None, None)

    def fc1_wgrad(self, x: Columns | torch.Tensor, beside: Beside, out: Any, accumulate: bool) -> None:
        """The gradients by FC1's weights. ``x``: from `quantize_input`."""
        assert self._columns is not None
        if isinstance(x, torch.Tensor):
            turned = self._kernels.block_columns(x, self._offsets1, self._scaling1.input)
        else:
            shape = self._columns.shape[0], self._fc1.in_features
            saved = BlockNumbers(shape, self._scaling1.input, *x)
            turned = self._kernels.turn_blocks(saved, self._offsets1)
        padded = self._padded if self._offsets1 is self._offsets2 else None
        ways: dict[str, Any] = {"accumulate": accumulate, "order": self._orders.fc1_wgrad, "padded": padded}
        self._kernels.wgrad_blocks(self._columns, turned, self._offsets1, out, **ways)


def _weights(
    kernels: BlockKernels, name: str, linear: LinearWeights, scaling: BlockScaling, *, backward: bool
) -> BlockWeights:
    if linear.quantized:
        return kernels.take_block_weights(name, *te_adapter.block_weights(linear.quantized, columns=backward))
    by_column = backward and linear.keeps
    return kernels.block_weights(kernels.prepare(name, linear.dense), scaling, by_column=by_column)


def _turned(
    kernels: BlockKernels, name: str, linear: LinearWeights, weights: BlockWeights, scaling: BlockScaling
) -> BlockWeights:
    """As the dgrad reads them: kept from the forward, or made now."""
    if weights.columns is not None:
        return weights
    return kernels.block_weight_columns(kernels.prepare(name, linear.dense), scaling)
