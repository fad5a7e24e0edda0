"""The fused grouped MLP's FP8 products on Hopper: compiles, caches and launches the kernels of `sm90_fp8_device`.

In: what `fp8` quantized, bf16 or fp16 results, offsets of experts on the GPU. Out: as in `interface.Kernels`. Keeps true:
no split size reaches the host; no weight is copied; two runs give the same bits. Does not: quantize. Needs quack-kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from quack.cute_dsl_utils import get_max_active_clusters
from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

from te_offload.fused.kernels import fp8, sm90_compile, sm90_device, sm90_fp8_device
from te_offload.fused.kernels.experts import Experts
from te_offload.fused.kernels.interface import QuantizedRows, QuantizedWeights
from te_offload.fused.kernels.progress import said_if_slow
from te_offload.fused.kernels.sm90 import Sm90Kernels
from te_offload.fused.kernels.sm90_launch import COMPILING, SWIZZLE, Tile

# Measured on an H200 at 64 experts (docs/results/).
FAST, SPLIT = Tile(128, 208, pingpong=True), Tile(128, 128)
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "FP16"}


class Sm90Fp8Kernels(Sm90Kernels):
    """See `Sm90Kernels`; ``fast`` asks for sums in the tensor cores alone, as Transformer Engine's forward does."""

    def __deepcopy__(self, memo: Any) -> Sm90Fp8Kernels:
        return Sm90Fp8Kernels(self._activation)

    def __reduce__(self) -> Any:
        return Sm90Fp8Kernels, (self._activation,)

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``act_input = x @ w1.T + bias`` (T, F), and magnitudes (T, parts) of what the activation makes of it.

        Args:
            x: with rows and factors. scales: of the router, (T,). dtype: of act_input.
        """
        assert x.rows is not None and x.factors is not None
        tile = FAST if fast else SPLIT
        tokens, columns = x.rows.shape[0], weights.rows.view.shape[1]
        act_input = torch.empty(tokens, columns, dtype=dtype, device=x.rows.device)
        magnitudes = _parts(act_input, tile)
        tanh = "" if self._activation.clamp is None else "Tanh"
        name = f"{_way(fast)}{'' if bias is None else 'Bias'}{tanh}SReLUGemm{_DTYPE_NAMES[dtype]}"
        values = {"factor": x.factors, "scale": scales, "magnitude": magnitudes, **self._numbers()}
        if bias is not None:
            values["bias"] = bias
        self._multiply(name, tile, x.rows, weights.rows, act_input, None, values, offsets)
        return act_input, magnitudes

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
    ) -> None:
        """``out = x @ w.T + bias * bias_scale``, in the experts' rows alone: FC2, or a dgrad with the weights' columns."""
        assert x.rows is not None and x.factors is not None
        values: dict[str, Any] = {"factor": x.factors}
        name = f"{_way(fast)}Gemm"
        if bias is not None:
            values["bias"] = bias
            name = f"{_way(fast)}BiasGemm"
            if bias_scales is not None:
                values["scale"] = bias_scales
                name = f"{_way(fast)}ScaledBiasGemm"
        self._multiply(name, FAST if fast else SPLIT, x.rows, weights, out, None, values, offsets)

    def fc2_dgrad_fp8(
        self,
        dy: QuantizedRows,
        weights: QuantizedWeights,
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        *,
        fast: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient by act_input (T, F), its magnitudes (T, parts), and the gradient by scales (T,) in float32."""
        assert dy.rows is not None and dy.factors is not None
        tile = FAST if fast else SPLIT
        dact_input = torch.empty_like(act_input)
        magnitudes, parts = _parts(act_input, tile), _parts(act_input, tile)
        values = {"factor": dy.factors, "scale": scales, "dscale": parts, "magnitude": magnitudes, **self._numbers()}
        tanh = "" if self._activation.clamp is None else "Tanh"
        name = f"{_way(fast)}D{tanh}SReLUGemm"
        self._multiply(name, tile, dy.rows, weights.columns, dact_input, act_input, values, offsets)
        dscales = torch.empty(act_input.shape[0], dtype=torch.float32, device=act_input.device)
        if act_input.shape[0]:
            self._rows("sums", torch.float32)(parts, offsets, dscales)
        return dact_input, magnitudes, dscales

    def wgrad_fp8(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        inverses: tuple[torch.Tensor, torch.Tensor],
        padded: torch.Tensor,
        out: Experts,
        *,
        accumulate: bool,
        fast: bool,
    ) -> None:
        """``out_i (+)= dy_i.T @ x_i``; zero for an expert without tokens.

        Args:
            dy, x: columns, (rows of out, P) and (columns of out, P). inverses: of both, (N,) each.
            padded: `fp8.padded_offsets`.
        """
        grads, tile = out.view, FAST if fast else SPLIT
        kernel = getattr(sm90_fp8_device, f"{_way(fast)}{'Adding' if accumulate else ''}WgradGemm")
        key = kernel, dy.dtype, x.dtype, grads.dtype
        found = self._functions.get(key)
        if found is None:
            cluster = tile.cluster_rows, tile.cluster_columns
            with said_if_slow(f"{COMPILING}: {kernel.__name__}"):
                function = sm90_compile.compiled_wgrad(
                    kernel.__name__,
                    (dy.dtype, x.dtype),
                    grads.dtype,
                    (tile.rows, tile.columns),
                    cluster,
                    tile.pingpong,
                )
            clusters = get_max_active_clusters(cluster[0] * cluster[1])
            found = self._functions[key] = function, make_scheduler_args(clusters, SWIZZLE, None)
        function, schedule = found
        factors = fp8.factors_of(*inverses, x.shape[0])
        values = kernel.EpilogueArguments(**{sm90_device.TABLE: out.table, "factor": factors})
        function(dy, x, grads, None, values, schedule, make_varlen_args(None, padded, None), None, None)

    def _multiply(
        self,
        name: str,
        tile: Tile,
        a: torch.Tensor,
        weights: Experts,
        d: torch.Tensor,
        c: torch.Tensor | None,
        values: dict[str, Any],
        offsets: torch.Tensor,
    ) -> None:
        kernel = getattr(sm90_fp8_device, name)
        self._launch(kernel, tile, a, weights.view, d, c, {**values, sm90_device.TABLE: weights.table}, offsets)


def _way(fast: bool) -> str:
    return "Fast" if fast else "Split"


def _parts(of: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A number for each row and column of tiles."""
    return torch.empty(of.shape[0], tile.parts(of.shape[1]), dtype=torch.float32, device=of.device)
