"""The fused grouped MLP's FP8 products on Hopper: compiles, caches and launches the kernels of `sm90_fp8_device`.

In: what `fp8` quantized, bf16 or fp16 results, offsets of experts on the GPU. Out: as in `interface.Kernels`. Keeps true:
no split size reaches the host; no weight is copied; two runs give the same bits. Does not: quantize. Needs quack-kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_offload.fused.kernels import fp8, sm90_fp8_device
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.fp8_current import CurrentQuantizers
from te_offload.fused.kernels.fp8_interface import QuantizedRows, QuantizedWeights
from te_offload.fused.kernels.interface import Activation, Orders, TileCount, TileOrder
from te_offload.fused.kernels.sm90 import DTYPE_NAMES, Sm90Kernels
from te_offload.fused.kernels.sm90_experts import TABLE
from te_offload.fused.kernels.sm90_launch import Tile, Way
from te_offload.fused.kernels.sm90_tiles import tile_for
from te_offload.ops.scaling import Scaling

# Experts up to which an expert's rows are quantized from one reading: in every task each thread looks at one of them. On an
# H100 (docs/results/) that takes a quarter less than Triton's two readings with 64 experts, with 512 a twelfth more.
_READ_ONCE = 256


class Sm90Fp8Kernels(Sm90Kernels):
    """See `Sm90Kernels`; ``fast`` asks for sums in the tensor cores alone, as Transformer Engine's forward does."""

    def __init__(self, activation: Activation, tiles: Callable[..., Tile] = tile_for) -> None:
        super().__init__(activation, tiles)
        self._current = CurrentQuantizers()

    def quantize_weights(self, weights: Experts, scaling: Scaling, *, by_column: bool = True) -> QuantizedWeights:
        """See `Fp8Kernels.quantize_weights`."""
        quantize = self._current.weights if scaling.given is None else fp8.quantize_weights
        return quantize(weights, scaling, by_column=by_column)

    def weight_columns(self, weights: Experts, quantized: QuantizedWeights, scaling: Scaling) -> QuantizedWeights:
        """See `Fp8Kernels.weight_columns`."""
        turned = fp8.weight_columns(weights, quantized, scaling)
        return QuantizedWeights(None, self._experts.get("columns", turned), quantized.inverses)

    def take_weights(
        self,
        name: str,
        rows: Sequence[torch.Tensor],
        columns: Sequence[torch.Tensor],
        inverses: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedWeights:
        """See `Fp8Kernels.take_weights`."""
        turned = self._experts.get(f"{name}, the other way round", columns, dtype=dtype) if columns else None
        return QuantizedWeights(self._experts.get(name, rows, dtype=dtype), turned, inverses)

    def quantize(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        scaling: Scaling,
        *,
        weights: torch.Tensor,
        magnitudes: torch.Tensor | None = None,
        router: torch.Tensor | None = None,
        by_column: bool = False,
    ) -> QuantizedRows:
        """See `Fp8Kernels.quantize`."""
        of_current = magnitudes is None and router is None and scaling.given is None
        if of_current and weights.shape[0] <= _READ_ONCE:
            return self._current.rows(x, offsets, scaling, weights=weights, by_column=by_column)
        activation = None if router is None else (self._activation, router)
        return fp8.quantize(
            x,
            offsets,
            scaling,
            weights=weights,
            magnitudes=magnitudes,
            activation=activation,
            by_column=by_column,
        )

    def quantize_dact(self, *args: Any, **kwargs: Any) -> QuantizedRows:
        """See `Fp8Kernels.quantize_dact`."""
        return self.quantize(*args, **kwargs)

    def turn(self, rows: QuantizedRows, offsets: torch.Tensor) -> QuantizedRows:
        """See `Fp8Kernels.turn`."""
        assert rows.rows is not None
        return rows._replace(rows=None, columns=fp8.turn(rows.rows, offsets))

    def rebuild(
        self,
        act_input: torch.Tensor,
        router: torch.Tensor,
        rows: QuantizedRows,
        offsets: torch.Tensor,
        dtype: torch.dtype,
    ) -> QuantizedRows:
        """See `Fp8Kernels.rebuild`."""
        columns = fp8.turn(act_input, offsets, activation=(self._activation, router, rows.scales, dtype))
        return rows._replace(rows=None, columns=columns)

    def fc1_fp8(
        self,
        x: QuantizedRows,
        weights: QuantizedWeights,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        *,
        fast: bool,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Fp8Kernels.fc1_fp8`."""
        act_input = torch.empty(x.scales.shape[0], weights.rows.view.shape[1], dtype=dtype, device=offsets.device)
        return act_input, self._fc1(act_input, x, weights, bias, scales, offsets, dtype, {}, count, fast=fast)

    @property
    def _two_passes(self) -> bool:
        """Whether FC1's epilogue does not quantize: its tanh is another than the backward's, which rebuilds the numbers."""
        return self._activation.clamp is not None

    def fc1_given(
        self,
        x: QuantizedRows,
        weights: QuantizedWeights,
        bias: torch.Tensor | None,
        router: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        scaling: Scaling,
        others: torch.Tensor,
        *,
        stores: bool,
        fast: bool,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor | None, QuantizedRows]:
        """See `Fp8Kernels.fc1_given`."""
        if self._two_passes:
            wide, magnitudes = self.fc1_fp8(x, weights, bias, router, offsets, dtype, fast=fast, count=count)
            found = self.quantize(wide, offsets, scaling, weights=others, magnitudes=magnitudes, router=router)
            return wide if stores else None, found
        tokens, columns, device = x.scales.shape[0], weights.rows.view.shape[1], offsets.device
        inverses, scales, factors = fp8.given_scales(offsets, scaling, weights=others, rows=tokens)
        fc2_input = torch.empty(tokens, columns, dtype=scaling.dtype, device=device)
        given = {"fp8_scale": scales, "fc2_input": fc2_input}
        act_input = torch.empty(tokens, columns, dtype=dtype, device=device) if stores else None
        magnitudes = self._fc1(act_input, x, weights, bias, router, offsets, dtype, given, count, fast=fast)
        fp8.keep_magnitudes(magnitudes, offsets, scaling, dtype)
        return act_input, QuantizedRows(fc2_input, None, scales, inverses, factors)

    def _fc1(
        self,
        act_input: torch.Tensor | None,
        x: QuantizedRows,
        weights: QuantizedWeights,
        bias: torch.Tensor | None,
        router: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        given: dict[str, torch.Tensor],
        count: TileCount | None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        """The activation's magnitudes. ``act_input``: is written, if there is one. ``given``: for the activation in FP8;
        empty: it is not stored.
        """
        assert x.rows is not None and x.factors is not None
        columns = weights.rows.view.shape[1]
        way = self._fc1_way(dtype, bias=bias is not None, given=bool(given), fast=fast)
        tile = self._tile(way.product, x.rows, weights.rows, columns)
        magnitudes = _parts(x.rows, tile, columns)
        values = {"factor": x.factors, "scale": router, **given, "magnitude": magnitudes, **self._numbers()}
        if bias is not None:
            values["bias"] = self._as_read(bias)
        self._multiply(way.kernel, tile, x.rows, weights.rows, act_input, None, values, offsets, count, **way.more)
        return magnitudes

    def _fc1_way(self, dtype: torch.dtype, *, bias: bool, given: bool, fast: bool) -> Way:
        tanh = "" if self._activation.clamp is None else "Tanh"
        name = f"{_way(fast)}{'Given' if given else ''}{'Bias' if bias else ''}{tanh}SReLUGemm{DTYPE_NAMES[dtype]}"
        return Way(getattr(sm90_fp8_device, name), product_name(fast))

    def _dact_way(self, *, fast: bool) -> Way:
        tanh = "" if self._activation.clamp is None else "Tanh"
        return Way(getattr(sm90_fp8_device, f"{_way(fast)}D{tanh}SReLUGemm"), f"{product_name(fast)} dact")

    def _as_read(self, bias: torch.Tensor) -> torch.Tensor:
        """FC1's bias in the order in which its kernels have columns."""
        return bias

    def _tiled(self, act_input: torch.Tensor) -> torch.Tensor:
        """Of act_input as many columns as FC2's dgrad has."""
        return act_input

    def linear_fp8(
        self,
        x: QuantizedRows,
        weights: Experts,
        out: torch.Tensor,
        offsets: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
        fast: bool,
        count: TileCount | None = None,
    ) -> None:
        """See `Fp8Kernels.linear_fp8`."""
        assert x.rows is not None and x.factors is not None
        values: dict[str, Any] = {"factor": x.factors}
        name = f"{_way(fast)}Gemm"
        if bias is not None:
            values["bias"] = bias
            name = f"{_way(fast)}BiasGemm"
            if bias_scales is not None:
                values["scale"] = bias_scales
                name = f"{_way(fast)}ScaledBiasGemm"
        tile = self._tile(product_name(fast), x.rows, weights, out.shape[1])
        self._multiply(getattr(sm90_fp8_device, name), tile, x.rows, weights, out, None, values, offsets, count)

    def fc2_dgrad_fp8(
        self,
        dy: QuantizedRows,
        weights: QuantizedWeights,
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        *,
        fast: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Orders]:
        """See `Fp8Kernels.fc2_dgrad_fp8`."""
        assert dy.rows is not None and dy.factors is not None
        way, tiled = self._dact_way(fast=fast), self._tiled(act_input)
        tile = self._tile(way.product, dy.rows, weights.columns, tiled.shape[1])
        dact_input = torch.empty_like(act_input)
        magnitudes, parts = (_parts(tiled, tile, tiled.shape[1]) for _ in range(2))
        values = {"factor": dy.factors, "scale": scales, "dscale": parts, "magnitude": magnitudes, **self._numbers()}
        count = self._backward_count(offsets)
        given = dy.rows, weights.columns, dact_input, act_input, values, offsets, count
        self._multiply(way.kernel, tile, *given, **way.more)
        return dact_input, magnitudes, *self._sums(parts, offsets, count)

    def wgrad_fp8(
        self,
        dy: QuantizedRows,
        x: QuantizedRows,
        offsets: torch.Tensor,
        out: Experts,
        *,
        accumulate: bool,
        fast: bool,
        order: TileOrder | None = None,
        padded: torch.Tensor | None = None,
    ) -> None:
        """See `Fp8Kernels.wgrad_fp8`."""
        assert dy.columns is not None and x.columns is not None
        kernel = getattr(sm90_fp8_device, f"{_way(fast)}{'Adding' if accumulate else ''}WgradGemm")
        factors = fp8.factors_of(dy.inverses, x.inverses, x.columns.shape[0])
        values = {TABLE: out.table, "factor": factors}
        tile = self._wgrad_tile(f"{product_name(fast)} wgrad", x.scales.shape[0], out)
        padded = fp8.padded_offsets(offsets) if padded is None else padded
        self._launch_wgrad(kernel, tile, dy.columns, x.columns, out.view, values, padded, order)

    def padded_offsets(self, offsets: torch.Tensor) -> torch.Tensor:
        """See `Fp8Kernels.padded_offsets`."""
        return fp8.padded_offsets(offsets)

    def _multiply(
        self,
        kernel: type[Any],
        tile: Tile,
        a: torch.Tensor,
        weights: Experts,
        d: torch.Tensor | None,
        c: torch.Tensor | None,
        values: dict[str, Any],
        offsets: torch.Tensor,
        count: TileCount | None,
        **ways: Any,
    ) -> None:
        self._launch(kernel, tile, a, weights.view, d, c, {**values, TABLE: weights.table}, offsets, count, **ways)


def _way(fast: bool) -> str:
    return "Fast" if fast else "Split"


def product_name(fast: bool) -> str:
    """What `sm90_tiles` calls a product by row."""
    return "fp8 fast" if fast else "fp8 split"


def _parts(rows: torch.Tensor, tile: Tile, columns: int) -> torch.Tensor:
    """A number for each row and column of tiles."""
    return torch.empty(rows.shape[0], tile.parts(columns), dtype=torch.float32, device=rows.device)
