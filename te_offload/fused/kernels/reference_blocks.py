"""The grouped MLP in block-scaled formats in torch arithmetic: what the CPU computes, and what tests judge kernels by.

In: as in `block_interface.BlockKernels`, on any device. Out: as there. Keeps true: products are of the numbers and scales
that were written, in float32. Does not: keep the offsets from the host; add up as coarsely as tensor cores do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from te_offload.fused.kernels.block_interface import BlockNumbers, BlockWeights, Parts
from te_offload.fused.kernels.interface import Orders, TileCount, TileOrder
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.fused.kernels.reference_formats import Format, make_format
from te_offload.ops.scaling import BlockScaling

SQUARE = 128
"""Numbers each way that share a scale in weights of FP8 by blocks."""


class ReferenceBlockKernels(ReferenceKernels):
    """See `block_interface.BlockKernels`."""

    def block_weights(self, weights: Sequence[torch.Tensor], scaling: BlockScaling, *, by_column: bool) -> BlockWeights:
        """See `BlockKernels.block_weights`. Dense again: nobody keeps them."""
        rows = [_there_and_back(make_format(scaling), weight, by_column=False) for weight in weights]
        return BlockWeights(rows, self.block_weight_columns(weights, scaling).columns if by_column else None)

    def block_weight_columns(self, weights: Sequence[torch.Tensor], scaling: BlockScaling) -> BlockWeights:
        """See `BlockKernels.block_weight_columns`. As `take_block_weights` has them, for products with the same bits."""
        form = make_format(scaling)
        columns = [_there_and_back(form, weight, by_column=True).t().contiguous() for weight in weights]
        return BlockWeights(None, columns)

    def take_block_weights(self, name: str, rows: Parts, columns: Parts | None) -> BlockWeights:
        """See `BlockKernels.take_block_weights`."""
        found = [None if parts is None else _of_squares(*parts) for parts in (rows, columns)]
        return BlockWeights(*found)

    def block_rows(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        scaling: BlockScaling,
        *,
        by_column: bool,
        saved: bool = False,
        exact: bool = False,
    ) -> tuple[BlockNumbers, BlockNumbers | None]:
        """See `BlockKernels.block_rows`."""
        columns = _quantize(x, offsets, scaling, by_column=True) if by_column else None
        if columns is not None and exact:
            width, parts = x.shape[1], x.shape[0] // SQUARE + offsets.shape[0] - 1
            numbers = _lengthened(columns.numbers, x.numel())
            columns = dataclasses.replace(columns, numbers=numbers, scales=_lengthened(columns.scales, parts * width))
        return _quantize(x, offsets, scaling, by_column=False), columns

    def block_columns(self, x: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling) -> BlockNumbers:
        """See `BlockKernels.block_columns`."""
        return _quantize(x, offsets, scaling, by_column=True)

    def block_dact_rows(
        self, dact_input: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling, *, by_column: bool
    ) -> tuple[BlockNumbers, BlockNumbers | None]:
        """See `BlockKernels.block_dact_rows`."""
        return self.block_rows(dact_input, offsets, scaling, by_column=by_column)

    def turn_blocks(self, saved: BlockNumbers, offsets: torch.Tensor) -> BlockNumbers:
        """See `BlockKernels.turn_blocks`."""
        sizes = [make_format(saved.scaling).sizes(shape, by_column=True) for shape in _shapes(saved, offsets)]
        numbers, scales = (sum(those) for those in zip(*sizes, strict=True))
        return dataclasses.replace(saved, numbers=saved.numbers[:numbers], scales=saved.scales[:scales])

    def rebuild_blocks(
        self, act_input: torch.Tensor, router: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling
    ) -> BlockNumbers:
        """See `BlockKernels.rebuild_blocks`."""
        return _quantize(self._activate(act_input, router), offsets, scaling, by_column=True)

    def fc1_blocks(
        self,
        x: BlockNumbers,
        weights: BlockWeights,
        bias: torch.Tensor | None,
        router: torch.Tensor,
        offsets: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        scaling: BlockScaling,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, BlockNumbers]:
        """See `BlockKernels.fc1_blocks`."""
        act_input = torch.zeros(x.shape[0], weights.rows[0].shape[0], dtype=dtype, device=x.numbers.device)
        self.fc1_linear_blocks(x, weights, bias, act_input, offsets[0])
        return act_input, _quantize(self._activate(act_input, router), offsets[1], scaling, by_column=False)

    def fc1_linear_blocks(
        self,
        x: BlockNumbers,
        weights: BlockWeights,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """See `BlockKernels.fc1_linear_blocks`."""
        self.linear_blocks(x, weights.rows, out, offsets, bias=bias)

    def linear_blocks(
        self,
        x: BlockNumbers,
        weights: Sequence[torch.Tensor],
        out: torch.Tensor,
        offsets: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
        count: TileCount | None = None,
    ) -> None:
        """See `BlockKernels.linear_blocks`."""
        parts = zip(_dense(x, offsets, by_column=False), _places(offsets), strict=True)
        for expert, (rows, place) in enumerate(parts):
            found = rows @ weights[expert].t()
            if bias is not None:
                one = bias[expert].float().expand_as(found)
                found = found + (one if bias_scales is None else one * bias_scales[place, None])
            out[place] = found.to(out.dtype)

    def fc2_dgrad_blocks(
        self,
        dy: BlockNumbers,
        weights: BlockWeights,
        act_input: torch.Tensor,
        router: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Orders]:
        """See `BlockKernels.fc2_dgrad_blocks`. The gradient by fc2_input is not rounded in between, as in the kernel."""
        dfc2_input = torch.zeros(dy.shape[0], weights.columns[0].shape[0], device=act_input.device)
        self.linear_blocks(dy, weights.columns, dfc2_input, offsets)
        dact_input, dscales = self._dactivate(dfc2_input, act_input.float(), router)
        self.clear(offsets, dscales[:, None])
        return dact_input.to(act_input.dtype), dscales, Orders()

    def wgrad_blocks(
        self,
        dy: BlockNumbers,
        x: BlockNumbers,
        offsets: torch.Tensor,
        out: Sequence[torch.Tensor],
        *,
        accumulate: bool,
        order: TileOrder | None = None,
        padded: torch.Tensor | None = None,
    ) -> None:
        """See `BlockKernels.wgrad_blocks`."""
        parts = zip(_dense(dy, offsets, by_column=True), _dense(x, offsets, by_column=True), out, strict=True)
        for one, other, to in parts:
            found = one.t() @ other
            to.copy_(to.float() + found if accumulate else found)

    def padded_offsets(self, offsets: torch.Tensor) -> None:
        """See `BlockKernels.padded_offsets`."""


def _places(offsets: torch.Tensor) -> list[slice]:
    """Rows of each expert."""
    return [slice(begin, end) for begin, end in itertools.pairwise(offsets.tolist())]


def _quantize(x: torch.Tensor, offsets: torch.Tensor, scaling: BlockScaling, *, by_column: bool) -> BlockNumbers:
    form = make_format(scaling)
    parts = [x[place] for place in _places(offsets)]
    found = [form.quantize(part, by_column=by_column) for part in parts if part.shape[0]]
    nothing = [x.new_zeros(0, dtype=torch.uint8)]
    numbers = torch.cat([one for one, _, _ in found] or nothing)
    scales = torch.cat([one for _, one, _ in found] or nothing)
    amaxes = None
    largest = [one for _, _, one in found if one is not None]
    if largest:
        amaxes = torch.zeros(len(parts), device=x.device)
        amaxes[[part.shape[0] > 0 for part in parts]] = torch.cat(largest)
    return BlockNumbers((x.shape[0], x.shape[1]), scaling, numbers, scales, amaxes)


def _dense(x: BlockNumbers, offsets: torch.Tensor, *, by_column: bool) -> list[torch.Tensor]:
    """Of each expert."""
    form, shapes = make_format(x.scaling), _shapes(x, offsets)
    sizes = [form.sizes(shape, by_column=by_column) for shape in shapes]
    numbers = x.numbers.split([size for size, _ in sizes])
    scales = x.scales.split([count for _, count in sizes])
    found = []
    for expert, shape in enumerate(shapes):
        amax = None if x.amaxes is None else x.amaxes[expert : expert + 1]
        if shape[0]:
            found.append(form.dense((numbers[expert], scales[expert], amax), shape, by_column=by_column))
        else:
            found.append(torch.zeros(shape, device=x.numbers.device))
    return found


def _shapes(x: BlockNumbers, offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Of each expert."""
    return [(place.stop - place.start, x.shape[1]) for place in _places(offsets)]


def _lengthened(flat: torch.Tensor, size: int) -> torch.Tensor:
    """With zeros."""
    return torch.cat([flat, flat.new_zeros(size - flat.numel())])


def _there_and_back(form: Format, weight: torch.Tensor, *, by_column: bool) -> torch.Tensor:
    shape = weight.shape[0], weight.shape[1]
    return form.dense(form.quantize(weight, by_column=by_column), shape, by_column=by_column)


def _of_squares(numbers: Sequence[torch.Tensor], inverses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Dense again, of FP8 in square blocks."""
    found = []
    for one, scales in zip(numbers, inverses, strict=True):
        rows, columns = one.shape
        every = scales.repeat_interleave(SQUARE, 0).repeat_interleave(SQUARE, 1)
        found.append(one.view(torch.float8_e4m3fn).float() * every[:rows, :columns])
    return found
