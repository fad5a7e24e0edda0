"""The fused grouped MLP on Hopper: compiles, caches and launches the kernels of `sm90_device`.

In: as in `interface.Kernels`, bf16 or fp16 on a GPU of compute capability 9.0. Out: as there. Keeps true: no split size
reaches the host, so all of it can be captured in a CUDA graph once it has run; no weight is copied; two runs give the
same bits. Does not: check shapes (hopper.py does). Needs quack-kernels.

Compiled kernels are kept on disk by QuACK (``QUACK_CACHE_DIR``, or a folder under the system's for temporary files).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quack.cute_dsl_utils import get_max_active_clusters
from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

from te_offload.fused.kernels import bias_device, sm90_compile, sm90_device
from te_offload.fused.kernels.experts import Experts, ExpertsCache
from te_offload.fused.kernels.interface import Activation, Counts, Gated, Orders, Tensors, TileCount, TileOrder
from te_offload.fused.kernels.progress import said_if_slow
from te_offload.fused.kernels.sm90_experts import TABLE
from te_offload.fused.kernels.sm90_launch import COMPILING, SWIZZLE, Launches, Tile
from te_offload.fused.kernels.sm90_tiles import Regime, tile_for

_FORWARD = 2  # products that count their tiles
DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "FP16"}


class Sm90Kernels:
    """See `interface.Kernels`. One a window: it knows where its weights are.

    Args:
        activation: between FC1 and FC2. tiles: which tile each product takes, as `tile_for`.
    """

    def __init__(self, activation: Activation, tiles: Callable[..., Tile] = tile_for) -> None:
        self._activation: Any = activation
        self._tile_for = tiles
        self._experts = ExpertsCache()
        self._launch = Launches()
        self._functions: dict[Any, Any] = {}

    def __deepcopy__(self, memo: Any) -> Sm90Kernels:
        return type(self)(self._activation, self._tile_for)

    def __reduce__(self) -> Any:
        return type(self), (self._activation, self._tile_for)

    def _tile(self, product: str, x: torch.Tensor, weights: Experts, columns: int) -> Tile:
        tokens, depth = x.shape
        return self._tile_for(product, Regime.of(tokens, weights.table.shape[0]), None, columns, depth)

    def _wgrad_tile(self, product: str, tokens: int, out: Experts) -> Tile:
        return self._tile_for(product, Regime.of(tokens, out.table.shape[0]), *out.view.shape[1:])

    def prepare(self, name: str, tensors: Tensors, *, written: bool = False) -> Experts:
        """See `Kernels.prepare`."""
        return self._experts.get(name, tensors, written=written)

    def offsets(self, split_sizes: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, Counts]:
        """See `Kernels.offsets`."""
        offsets = split_sizes.shape[0] + 1
        if not out.shape[0]:
            return torch.zeros(offsets, dtype=torch.int32, device=out.device), Counts()
        work = torch.empty(offsets + _FORWARD, dtype=torch.int32, device=out.device)
        self._rows("offsets", out.dtype, split_sizes.dtype)(split_sizes.contiguous(), work, out)
        return work[:offsets], Counts(TileCount(work, offsets), TileCount(work, offsets + 1))

    def clear(self, offsets: torch.Tensor, out: torch.Tensor) -> None:
        """See `Kernels.clear`."""
        if out.shape[0]:
            self._rows("clear", out.dtype)(offsets, out)

    def fc1(
        self,
        x: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.fc1`."""
        act_input = x.new_empty(x.shape[0], weights.view.shape[1])
        return act_input, self._fc1_into(act_input, x, weights, bias, scales, offsets, count)

    def fc1_activated(
        self,
        x: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> torch.Tensor:
        """See `Kernels.fc1_activated`."""
        return self._fc1_into(None, x, weights, bias, scales, offsets, count)

    def _fc1_into(
        self,
        act_input: torch.Tensor | None,
        x: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None,
    ) -> torch.Tensor:
        """fc2_input. ``act_input``: is written; ``None``: it is not."""
        fc2_input = x.new_empty(x.shape[0], weights.view.shape[1])
        tanh = self._activation.clamp is not None
        kernel = getattr(sm90_device, sm90_device.fc1_name(DTYPE_NAMES[x.dtype], bias=bias is not None, tanh=tanh))
        values = {"scale": scales, "fc2_input": fc2_input, TABLE: weights.table, **self._numbers()}
        if bias is not None:
            values["bias"] = bias
        tile = self._tile("fc1", x, weights, fc2_input.shape[1])
        self._launch(kernel, tile, x, weights.view, act_input, None, values, offsets, count)
        return fc2_input

    def fc1_linear(
        self,
        x: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> torch.Tensor:
        """See `Kernels.fc1_linear`."""
        act_input = x.new_empty(x.shape[0], weights.view.shape[1])
        self.fc2(x, weights, bias, None, offsets, act_input, count)
        return act_input

    def fc2(
        self,
        fc2_input: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        bias_scales: torch.Tensor | None,
        offsets: torch.Tensor,
        out: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """See `Kernels.fc2`."""
        tile = self._tile("fc2", fc2_input, weights, out.shape[1])
        kernel, values = sm90_device.PlainGemm, {TABLE: weights.table}
        if bias is not None:
            kernel, values["bias"] = sm90_device.BiasGemm, bias
        if bias is not None and bias_scales is not None:
            kernel, values["scale"] = sm90_device.ScaledBiasGemm, bias_scales
        self._launch(kernel, tile, fc2_input, weights.view, out, None, values, offsets, count)

    def fc2_dgrad(
        self,
        dy: torch.Tensor,
        weights: Experts,
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Orders]:
        """See `Kernels.fc2_dgrad`."""
        tile = self._tile("dact", dy, weights, act_input.shape[1])
        dact_input, fc2_input = torch.empty_like(act_input), torch.empty_like(act_input)
        tokens, columns = act_input.shape
        parts = torch.empty(tokens, tile.parts(columns), dtype=torch.float32, device=dy.device)
        values = {"scale": scales, "fc2_input": fc2_input, "dscale": parts, TABLE: weights.table}
        values |= self._numbers()
        kernel = sm90_device.DSReLUGemm if self._activation.clamp is None else sm90_device.DTanhSReLUGemm
        count = self._backward_count(offsets)
        self._launch(kernel, tile, dy, weights.view, dact_input, act_input, values, offsets, count, transposed=True)
        return dact_input, fc2_input, *self._sums(parts, offsets, count)

    @staticmethod
    def _backward_count(offsets: torch.Tensor) -> TileCount:
        """Of FC2's dgrad, with room before it for an order of experts and behind it for the counts of what follows."""
        experts = offsets.shape[0] - 1
        return TileCount(offsets.new_zeros(Orders.room(experts)), experts)

    def _sums(self, parts: torch.Tensor, offsets: torch.Tensor, count: TileCount) -> tuple[torch.Tensor, Orders]:
        """Of each row of parts; and how the products that follow FC2's dgrad, which had ``count``, take their tiles."""
        sums = torch.empty(parts.shape[0], dtype=torch.float32, device=parts.device)
        work, place = count
        if parts.shape[0]:
            self._rows("sums", torch.float32)(parts, offsets, sums, work)
        return sums, Orders.within(work, place)

    def fc1_dgrad(
        self,
        dact_input: torch.Tensor,
        weights: Experts,
        offsets: torch.Tensor,
        out: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """See `Kernels.fc1_dgrad`."""
        self.clear(offsets, out)
        tile, kernel = self._tile("dgrad", dact_input, weights, out.shape[1]), self._dgrad_kernel()
        values, pairs = {TABLE: weights.table}, self._pairs
        ways: dict[str, Any] = {"transposed": True, "pairs": pairs}
        self._launch(kernel, tile, dact_input, weights.view, out, None, values, offsets, count, **ways)

    def wgrad(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        offsets: torch.Tensor,
        out: Experts,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
    ) -> None:
        """See `Kernels.wgrad`. To accumulate, TMA adds each tile to what is there, once: bits depend on no order."""
        kernel = sm90_device.AddingWgradGemm if accumulate else sm90_device.WgradGemm
        self._wgrad(kernel, dy, x, offsets, out, order)

    def fc1_wgrad(
        self,
        dact_input: torch.Tensor,
        x: torch.Tensor,
        offsets: torch.Tensor,
        out: Experts,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
    ) -> None:
        """See `Kernels.fc1_wgrad`."""
        kernel = self._fc1_wgrad_kernel(accumulate=accumulate, beside=False)
        self._wgrad(kernel, dact_input, x, offsets, out, order, self._pairs)

    def fc1_backward(
        self,
        dact_input: torch.Tensor,
        x: torch.Tensor,
        weights: Experts,
        offsets: torch.Tensor,
        dx: torch.Tensor,
        dweights: Experts,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
        count: TileCount | None = None,
    ) -> None:
        """See `Kernels.fc1_backward`. Tiles of the wgrad fill the SMs for which the dgrad has no more."""
        self.fc1_dgrad(dact_input, weights, offsets, dx, count)
        # Nothing may be launched, or given memory, between the two: the wgrad does not wait for it.
        kernel = self._fc1_wgrad_kernel(accumulate=accumulate, beside=True)
        self._wgrad(kernel, dact_input, x, offsets, dweights, order, self._pairs)

    @property
    def _pairs(self) -> int | None:
        """What `Launches` is told of the order of FC1's weights."""
        return None

    def _dgrad_kernel(self) -> type[Any]:
        return sm90_device.DgradGemm

    def _fc1_wgrad_kernel(self, *, accumulate: bool, beside: bool) -> type[Any]:
        if beside:
            return sm90_device.AddingBesideWgradGemm if accumulate else sm90_device.BesideWgradGemm
        return sm90_device.AddingWgradGemm if accumulate else sm90_device.WgradGemm

    def _wgrad(
        self,
        kernel: type[Any],
        dy: torch.Tensor,
        x: torch.Tensor,
        offsets: torch.Tensor,
        out: Experts,
        order: TileOrder | None,
        pairs: int | None = None,
    ) -> None:
        tile = self._wgrad_tile("wgrad", x.shape[0], out)
        self._launch_wgrad(kernel, tile, dy.mT, x.mT, out.view, {TABLE: out.table}, offsets, order, pairs)

    def _launch_wgrad(
        self,
        kernel: type[Any],
        tile: Tile,
        a: torch.Tensor,
        b: torch.Tensor,
        grads: torch.Tensor,
        values: dict[str, torch.Tensor],
        offsets: torch.Tensor,
        order: TileOrder | None = None,
        pairs: int | None = None,
    ) -> None:
        """``grads_i (+)= a_i @ b_i.T``, compiled when first needed. a (rows, T), b (columns, T); offsets: along T. pairs:
        as in `Launches`.
        """
        ordered = order is not None
        key = kernel, tile, ordered, a.dtype, b.dtype, grads.dtype, pairs
        found = self._functions.get(key)
        if found is None:
            cluster = tile.cluster_rows, tile.cluster_columns
            with said_if_slow(f"{COMPILING}: {kernel.__name__}"):
                function = sm90_compile.compiled_wgrad(
                    kernel.__name__,
                    (a.dtype, b.dtype),
                    grads.dtype,
                    tile[:2] if tile.per_stage is None else (*tile[:2], tile.per_stage),
                    cluster,
                    pingpong=tile.pingpong,
                    ordered=ordered,
                    pairs=pairs,
                    apart=tile.apart,
                )
            clusters = get_max_active_clusters(cluster[0] * cluster[1])
            found = self._functions[key] = function, make_scheduler_args(clusters, SWIZZLE, None)
        function, schedule = found
        if order is not None:
            schedule = schedule._replace(tile_count_semaphore=order.data_ptr(), batch_idx_permute=order.work)
        arguments, varlen = kernel.EpilogueArguments(**values), make_varlen_args(None, offsets, None)
        function(a, b, grads, None, arguments, schedule, varlen, None, None)

    def bias_grads(
        self,
        dy: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Kernels.bias_grads`."""
        return self._bias_grads(dy, offsets, bias, bias_scales, None)

    def fc1_bias_grads(self, dact_input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `Kernels.fc1_bias_grads`."""
        gated = isinstance(self._activation, Gated)
        return self._bias_grads(dact_input, offsets, None, None, self._activation.interleave if gated else None)[0]

    def _bias_grads(
        self,
        dy: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None,
        bias_scales: torch.Tensor | None,
        pairs: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        (tokens, columns), experts = dy.shape, offsets.shape[0] - 1
        dscales = None if bias_scales is None else torch.empty_like(bias_scales)
        if not tokens:
            return dy.new_zeros(experts, columns), dscales
        grads = dy.new_empty(experts, columns)
        parts = torch.empty(bias_device.parts_of(tokens, experts), columns, dtype=torch.float32, device=dy.device)
        sums, totals = self._sums_of_rows(dy.dtype, pairs, factors=bias is not None)
        biases = None if bias is None else bias.view(torch.int32)
        beside = bias_device.blocks_beside(tokens, columns) if bias is None else 1
        sums(dy.view(torch.int32), offsets, bias_scales, biases, parts, dscales, beside)
        totals(parts, offsets, grads)
        return grads, dscales

    def _sums_of_rows(self, dtype: torch.dtype, pairs: int | None, *, factors: bool) -> tuple[Any, Any]:
        key = "sums of rows", dtype, pairs, factors
        found = self._functions.get(key)
        if found is None:
            with said_if_slow(f"{COMPILING}: sums of rows"):
                sums = sm90_compile.compiled_row_parts(dtype, factors=factors)
                found = self._functions[key] = sums, sm90_compile.compiled_part_totals(dtype, pairs=pairs)
        return found

    def _numbers(self) -> dict[str, Any]:
        clamp = self._activation.clamp
        return {} if clamp is None else {"clamp": clamp, "inverse": 1 / clamp}

    def _rows(self, name: str, dtype: torch.dtype, sizes_dtype: torch.dtype | None = None) -> Any:
        key = name, dtype, sizes_dtype
        function = self._functions.get(key)
        if function is None:
            with said_if_slow(f"{COMPILING}: {name}"):
                function = self._functions[key] = sm90_compile.compiled_rows(name, dtype, sizes_dtype)
        return function
