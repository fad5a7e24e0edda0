"""One forward and backward of the fused grouped MLP in FP8, in the order in which things are quantized and multiplied.

In: kernels, weights and scalings of two linears, offsets, dense tensors. Out: dense tensors; FP8 rows to save. Keeps true:
each tensor is quantized once for forward and backward, but for weights of which no quantized copy is kept: the dgrad's is
made by the dgrad; the scale of what is made again is the forward's; no activation is kept here; where no weights are, what
the backward needs besides are the tensors of `Kept`. Does not: save, offload, or know of ops or autograd.

Transformer Engine sums up in FP8's accumulators in the forward, and in float32 in the backward (`_2X_ACC_FPROP` and others
of transformer_engine/pytorch/module/base.py); so does this.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_offload.fused.kernels.fp8_interface import Fp8Kernels, QuantizedRows, QuantizedWeights
from te_offload.fused.kernels.interface import Counts, Orders, TileCount
from te_offload.fused.parameters import LinearWeights
from te_offload.ops import te_adapter
from te_offload.ops.scaling import LinearScaling, Scaling

Beside = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Small tensors of integers that are saved with FC1's input, in the place of a linear's metadata."""
FC1, FC2 = "FC1's weights", "FC2's weights"  # names of sets of weights
_MULTIPLE = 16  # 8-bit numbers in TMA's 16 bytes


def structure_reason(ops: Sequence[tuple[str, Any]], recipe: Any) -> str | None:
    """Why linears, with names, do not go this way under a recipe; ``None`` if they do."""
    reason = te_adapter.fp8_recipe_reason(recipe)
    if reason is not None:
        return reason
    for name, op in ops:
        if op.in_features % _MULTIPLE or op.out_features % _MULTIPLE:
            return f"{name} is {op.in_features} x {op.out_features}; FP8 takes multiples of {_MULTIPLE}"
    return None


def scaling_of(op: Any) -> LinearScaling | str:
    """Of a linear in a call inside ``te.autocast``; or why it does not go this way."""
    return te_adapter.fp8_recipe_reason(te_adapter.active_recipe()) or te_adapter.fp8_scaling(op)


class Kept(NamedTuple):
    """What a backward needs of a forward that keeps no quantized weights, but for rows: tensors of N numbers each.

    Attributes:
        x: inverse scales of FC1's input. hidden_scales, hidden: of FC2's, of each row (T,), and inverse.
        weights1, known1, weights2, known2: inverse scales of weights, and what their numbers can be made from again.
    """

    x: torch.Tensor
    hidden_scales: torch.Tensor
    hidden: torch.Tensor
    weights1: torch.Tensor
    known1: torch.Tensor
    weights2: torch.Tensor
    known2: torch.Tensor


class Halfway(NamedTuple):
    """What FC1's half of a backward needs of FC2's, but for the gradient by the activation's input.

    Attributes:
        orders: of products. magnitudes: of that gradient, (T, parts) float32; ``None``: nothing reads them.
    """

    orders: Orders
    magnitudes: torch.Tensor | None = None


class Fp8Pass:
    """See the module.

    Args:
        kernels: of one device. fc1, fc2: weights of the linears. scalings: theirs, from `scaling_of`.
        offsets: of FC1's rows, and of FC2's. counts: of the forward's products. router: scales (T,); ``None``: no forward.
        backward: whether one will follow. again: whether it will begin with `fc1_again`.
    """

    def __init__(
        self,
        kernels: Fp8Kernels,
        fc1: LinearWeights,
        fc2: LinearWeights,
        scalings: tuple[LinearScaling, LinearScaling],
        offsets: tuple[torch.Tensor, torch.Tensor],
        counts: Counts,
        router: torch.Tensor | None,
        *,
        backward: bool,
        again: bool = False,
    ) -> None:
        self._kernels = kernels
        self._again = again
        self._fc1, self._fc2 = fc1, fc2
        self._offsets1, self._offsets2 = offsets
        self._counts = counts
        self._router = router
        self._scaling1, self._scaling2 = scalings
        self._backward = backward
        self._weights1: QuantizedWeights | None = None
        self._weights2: QuantizedWeights | None = None  # only when FC1 has read its own, which take as much memory
        self._x: QuantizedRows | None = None  # after the forward only its scales, as of the next
        self._hidden: QuantizedRows | None = None
        self._dy: QuantizedRows | None = None
        self._rebuilt: QuantizedRows | None = None
        self._magnitudes: torch.Tensor | None = None
        self._orders = Orders()
        self._padded: torch.Tensor | None = None  # FC2's offsets in columns, once its wgrad has asked for them

    # Forward ---------------------------------------------------------------------------------------------------------

    def quantize_input(self, x: torch.Tensor, *, wgrad: bool) -> torch.Tensor:
        """FP8 rows of FC1's input: what the backward needs of it. ``wgrad``: FC1's weights take a gradient."""
        weights = _weights(self._kernels, FC1, self._fc1, self._scaling1.weight, backward=self._backward)
        self._weights1 = weights
        self._x = self._kernels.quantize(x, self._offsets1, self._scaling1.input, weights=weights.inverses)
        assert self._x.rows is not None
        return self._x.rows

    def beside_input(self) -> Beside:
        """What the backward needs with those rows, saved with them, as integers: inverse scales, and for `fc1_again`
        factors and, of delayed scaling, FC1's weights' scales. A checkpoint's second forward has others than the first.
        """
        assert self._x is not None and self._weights1 is not None
        of_again = (self._x.factors, self._weights1.scales) if self._again else (None, None)
        one, two, three = (None if of is None else of.view(torch.int32) for of in (self._x.inverses, *of_again))
        return one, two, three

    def fc1(self, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """The activation's input, if the backward needs it from here."""
        assert self._x is not None and self._router is not None and self._weights1 is not None
        kernels, stores = self._kernels, self._backward and not self._again
        if self._scaling2.input.given is not None and self._offsets2 is self._offsets1:
            weights = self._quantize_weights2()
            stored, self._hidden = kernels.fc1_given(
                self._x,
                self._weights1,
                bias,
                self._router,
                self._offsets1,
                dtype,
                self._scaling2.input,
                weights.inverses,
                stores=stores,
                fast=True,
                count=self._counts.fc1,
            )
            self._let_go_of_fc1()
            return stored
        act_input, magnitudes = kernels.fc1_fp8(
            self._x, self._weights1, bias, self._router, self._offsets1, dtype, fast=True, count=self._counts.fc1
        )
        self._let_go_of_fc1()
        weights = self._quantize_weights2()
        if self._offsets2 is not self._offsets1:  # FC2 may read rows that FC1 did not write
            kernels.clear(self._offsets1, act_input)
            kernels.clear(self._offsets1, magnitudes)
        self._hidden = kernels.quantize(
            act_input,
            self._offsets2,
            self._scaling2.input,
            weights=weights.inverses,
            magnitudes=magnitudes,
            router=self._router,
        )
        return act_input if stores else None

    def _quantize_weights2(self) -> QuantizedWeights:
        self._weights2 = _weights(self._kernels, FC2, self._fc2, self._scaling2.weight, backward=self._backward)
        return self._weights2

    def _let_go_of_fc1(self) -> None:
        """Of what the forward alone reads."""
        assert self._x is not None and self._weights1 is not None
        self._x = self._x._replace(rows=None, factors=None)
        self._weights1 = self._weights1._replace(rows=None)

    def fc2(self, bias: torch.Tensor | None, bias_scales: torch.Tensor | None, out: torch.Tensor) -> None:
        """FC2, after FC1; the weights as the forward reads them are not needed any more."""
        assert self._hidden is not None and self._weights2 is not None
        self._kernels.linear_fp8(
            self._hidden,
            self._weights2.rows,
            out,
            self._offsets2,
            bias=bias,
            bias_scales=bias_scales,
            fast=True,
            count=self._counts.fc2,
        )
        self._hidden = self._hidden._replace(rows=None, factors=None)
        self._router = None
        self._weights2 = self._weights2._replace(rows=None)

    def kept(self) -> Kept:
        """After the forward, what `resume` takes."""
        assert self._x is not None and self._hidden is not None
        of_weights = []
        for weights in (self._weights1, self._weights2):
            assert weights is not None and weights.columns is None
            known = weights.magnitudes if weights.scales is None else weights.scales
            assert known is not None
            of_weights += [weights.inverses, known.clone()]  # it may be a part of what is larger
        return Kept(self._x.inverses, self._hidden.scales, self._hidden.inverses, *of_weights)

    def resume(self, kept: Kept, halfway: Halfway | None = None) -> None:
        """Before a backward, or its second half, whose forward was another one of these."""
        by_scales = kept.known1.dtype is torch.float32  # as of `QuantizedWeights`
        known1, known2 = ((known, None) if by_scales else (None, known) for known in (kept.known1, kept.known2))
        self._weights1 = QuantizedWeights(None, None, kept.weights1, *known1)
        self._weights2 = QuantizedWeights(None, None, kept.weights2, *known2)
        self._x = QuantizedRows(
            None, None, kept.hidden_scales, kept.x, None
        )  # of these scales only their number counts
        self._hidden = QuantizedRows(None, None, kept.hidden_scales, kept.hidden, None)
        if halfway is not None:
            self._orders, self._magnitudes = halfway

    def halfway(self) -> Halfway:
        """After `fc2_wgrad`, for `resume`."""
        return Halfway(self._orders, self._magnitudes)

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
        """What `fc1` gave. ``x``: from `quantize_input`. ``beside``: `beside_input`. ``count``: of this product alone."""
        assert self._x is not None
        _, factors, scales = (None if of is None else of.view(torch.float32) for of in beside)
        rows, scaling = self._x._replace(rows=x, factors=factors), self._scaling1.weight
        if scaling.given is not None and scales is not None:  # by now others are given for the next step
            scaling = dataclasses.replace(scaling, given=scales, kept=torch.zeros_like(scales))
        weights = _weights(self._kernels, FC1, self._fc1, scaling, backward=False)
        ways: dict[str, Any] = {"fast": True, "count": count}
        return self._kernels.fc1_fp8(rows, weights, bias, router, self._offsets1, dtype, **ways)[0]

    def fc2_dgrad(
        self, dy: torch.Tensor, act_input: torch.Tensor, router: torch.Tensor, *, wgrad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients by the activation's input and by the router's scales. ``wgrad``: `fc2_wgrad` follows."""
        assert self._hidden is not None and self._weights2 is not None
        kernels, offsets = self._kernels, self._offsets2
        scaling = self._scaling2.grad_output
        self._dy = kernels.quantize(dy, offsets, scaling, weights=self._weights2.inverses, by_column=wgrad)
        weights = _turned(kernels, FC2, self._fc2, self._weights2, self._scaling2.weight)
        dact_input, magnitudes, dscales, self._orders = kernels.fc2_dgrad_fp8(
            self._dy, weights, act_input, router, offsets, fast=False
        )
        del weights
        if self._offsets2 is not self._offsets1:
            kernels.clear(offsets, dact_input)
            kernels.clear(offsets, magnitudes)
        self._weights2 = self._weights2._replace(columns=None)
        self._dy = self._dy._replace(rows=None)
        if wgrad:
            self._rebuilt = kernels.rebuild(act_input, router, self._hidden, offsets, self._scaling2.input.dtype)
        self._magnitudes = magnitudes
        return dact_input, dscales

    def fc2_wgrad(self, out: Any, accumulate: bool) -> None:
        """The gradients by FC2's weights."""
        assert self._dy is not None and self._rebuilt is not None
        padded = self._padded = self._kernels.padded_offsets(self._offsets2)
        ways: dict[str, Any] = {"accumulate": accumulate, "fast": False, "order": self._orders.fc2_wgrad}
        self._kernels.wgrad_fp8(self._dy, self._rebuilt, self._offsets2, out, **ways, padded=padded)

    def for_later(self) -> Fp8Pass:
        """What `fc2_wgrad` needs, for a call that comes after this backward."""
        later = copy.copy(self)
        later._weights1 = later._magnitudes = later._x = None
        return later

    def fc1_dgrad(self, dact_input: torch.Tensor, out: torch.Tensor, *, wgrad: bool) -> None:
        """The gradient by the input. ``wgrad``: `fc1_wgrad` follows."""
        kernels, offsets = self._kernels, self._offsets1
        assert self._magnitudes is not None and self._weights1 is not None
        self._rebuilt = self._dy = None
        self._dy = kernels.quantize_dact(
            dact_input,
            offsets,
            self._scaling1.grad_output,
            weights=self._weights1.inverses,
            magnitudes=self._magnitudes,
            by_column=wgrad,
        )
        count = self._orders.fc1_dgrad
        weights = _turned(kernels, FC1, self._fc1, self._weights1, self._scaling1.weight)
        kernels.linear_fp8(self._dy, weights.columns, out, offsets, fast=False, count=count)
        del weights
        kernels.clear(offsets, out)
        self._magnitudes = None
        self._weights1 = self._weights1._replace(columns=None)
        self._dy = self._dy._replace(rows=None)

    def fc1_wgrad(self, x: torch.Tensor, beside: Beside, out: Any, accumulate: bool) -> None:
        """The gradients by FC1's weights. ``x``: from `quantize_input`. ``beside``: `beside_input`."""
        assert self._dy is not None and self._x is not None and beside[0] is not None
        rows = self._x._replace(rows=x, inverses=beside[0].view(torch.float32))
        turned = self._kernels.turn(rows, self._offsets1)
        padded = self._padded if self._offsets1 is self._offsets2 else None
        ways: dict[str, Any] = {"accumulate": accumulate, "fast": False, "order": self._orders.fc1_wgrad}
        self._kernels.wgrad_fp8(self._dy, turned, self._offsets1, out, **ways, padded=padded)


def _weights(
    kernels: Fp8Kernels, name: str, linear: LinearWeights, scaling: Scaling, *, backward: bool
) -> QuantizedWeights:
    if linear.quantized:
        return kernels.take_weights(name, *te_adapter.fp8_weights(linear.quantized, columns=backward))
    by_column = backward and linear.keeps
    return kernels.quantize_weights(kernels.prepare(name, linear.dense), scaling, by_column=by_column)


def _turned(
    kernels: Fp8Kernels, name: str, linear: LinearWeights, weights: QuantizedWeights, scaling: Scaling
) -> QuantizedWeights:
    """As the dgrad reads them: kept from the forward, or made now."""
    if weights.columns is not None:
        return weights
    return kernels.weight_columns(kernels.prepare(name, linear.dense), weights, scaling)
