"""The fused grouped MLP on Hopper: compiles, caches and launches the kernels of `sm90_device`.

In: as in `interface.Kernels`, bf16 or fp16 on a GPU of compute capability 9.0. Out: as there. Keeps true: no split size
reaches the host, so all of it can be captured in a CUDA graph once it has run; no weight is copied; two runs give the
same bits. Does not: check shapes (hopper.py does). Needs quack-kernels.

Compiled kernels are kept on disk by QuACK (``QUACK_CACHE_DIR``, or a folder under the system's for temporary files).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from quack.gemm import gemm
from quack.gemm_runtime.host import GemmEpiPlan, build_gemm_epi_plan, run_gemm_epi_plan

from te_offload.fused.kernels import sm90_device
from te_offload.fused.kernels.experts import Experts, ExpertsCache
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.fused.kernels.progress import said_if_slow

CAPABILITY = (9, 0)
_COMPILING = "Compiling a kernel of the fused grouped MLP for Hopper; it is kept on disk"


class Tile(NamedTuple):
    """How a GEMM is cut: rows and columns of a tile, tiles of a cluster each way, whether two warp groups take turns."""

    rows: int
    columns: int
    cluster_rows: int = 2
    cluster_columns: int = 1
    pingpong: bool = False

    def padded(self, columns: int) -> int:
        """``columns`` rounded up to whole tiles."""
        return -(-columns // self.columns) * self.columns


# Measured on an H200 (docs/results/): each tile with its time a padded column, relative to the first one's.
_FC1_TILES = ((Tile(128, 256), 1.0), (Tile(256, 128), 1.085))
_DACT_TILES = ((Tile(128, 192, pingpong=True), 1.0), (Tile(128, 128, pingpong=True), 1.045))
_PLAIN_TILES = ((Tile(128, 192, pingpong=True), 1.0), (Tile(128, 160, pingpong=True), 1.01))
_WGRAD_TILE = Tile(128, 192, 1, 2, pingpong=True)
_WGRAD_TILE_MANY_ROWS = Tile(128, 256)
_MANY_ROWS = 1024  # tokens an expert
_NARROW = 8  # columns; the fewest that TMA takes
_NARROW_TILE = Tile(128, 128, pingpong=True)
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "FP16"}


def choose_tile(tiles: Sequence[tuple[Tile, float]], columns: int) -> Tile:
    """The tile with the least time for so many columns of the result."""
    return min(tiles, key=lambda entry: entry[0].padded(columns) * entry[1])[0]


@functools.cache
def _source_key() -> tuple[tuple[str, str], ...]:
    """Part of the key under which QuACK keeps a compiled kernel: its own code it knows, ours it does not."""
    digest = hashlib.sha256(inspect.getsource(sm90_device).encode()).hexdigest()
    return (("te_offload_source", digest),)


class Sm90Kernels:
    """See `interface.Kernels`. One a window: it knows where its weights are.

    Args:
        activation: between FC1 and FC2.
    """

    def __init__(self, activation: SquaredReLU) -> None:
        self._activation = activation
        self._experts = ExpertsCache()
        self._plans: dict[Any, GemmEpiPlan] = {}
        self._launched: set[Any] = set()

    def __deepcopy__(self, memo: Any) -> Sm90Kernels:
        return Sm90Kernels(self._activation)

    def __reduce__(self) -> Any:
        return Sm90Kernels, (self._activation,)

    def prepare(self, name: str, weights: Sequence[torch.Tensor]) -> Experts:
        """See `Kernels.prepare`."""
        return self._experts.get(name, weights)

    def offsets(self, split_sizes: torch.Tensor, tokens: int) -> torch.Tensor:
        """See `Kernels.offsets`."""
        offsets = torch.zeros(split_sizes.numel() + 1, dtype=torch.int32, device=split_sizes.device)
        torch.cumsum(split_sizes, 0, dtype=torch.int32, out=offsets[1:])
        return offsets.clamp_(max=tokens)

    def fc1(
        self,
        x: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.fc1`."""
        act_input = x.new_empty(x.shape[0], weights.view.shape[1])
        fc2_input = torch.empty_like(act_input)
        tanh = self._activation.clamp is not None
        kernel = getattr(sm90_device, sm90_device.fc1_name(_DTYPE_NAMES[x.dtype], bias=bias is not None, tanh=tanh))
        values = {"scale": scales, "fc2_input": fc2_input, sm90_device.TABLE: weights.table, **self._numbers()}
        if bias is not None:
            values["bias"] = bias
        tile = choose_tile(_FC1_TILES, act_input.shape[1])
        self._launch(kernel, tile, x, weights.view, act_input, None, values, offsets)
        return act_input, fc2_input

    def fc2(
        self,
        fc2_input: torch.Tensor,
        weights: Experts,
        bias: torch.Tensor | None,
        bias_scales: torch.Tensor | None,
        offsets: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `Kernels.fc2`."""
        tile = choose_tile(_PLAIN_TILES, out.shape[1])
        kernel, values = sm90_device.PlainGemm, {sm90_device.TABLE: weights.table}
        if bias is not None:
            kernel, values["bias"] = sm90_device.BiasGemm, bias
        if bias is not None and bias_scales is not None:
            kernel, values["scale"] = sm90_device.ScaledBiasGemm, bias_scales
        self._launch(kernel, tile, fc2_input, weights.view, out, None, values, offsets)

    def fc2_dgrad(
        self,
        dy: torch.Tensor,
        weights: Experts,
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernels.fc2_dgrad`."""
        tile = choose_tile(_DACT_TILES, act_input.shape[1])
        dact_input, fc2_input = torch.empty_like(act_input), torch.empty_like(act_input)
        tokens, columns = act_input.shape
        parts = torch.empty(tokens, tile.padded(columns) // tile.columns, dtype=torch.float32, device=dy.device)
        values = {"scale": scales, "fc2_input": fc2_input, "dscale": parts, sm90_device.TABLE: weights.table}
        values |= self._numbers()
        kernel = sm90_device.DSReLUGemm if self._activation.clamp is None else sm90_device.DTanhSReLUGemm
        self._launch(kernel, tile, dy, weights.view.mT, dact_input, act_input, values, offsets)
        return dact_input, fc2_input, parts.sum(1)

    def fc1_dgrad(self, dact_input: torch.Tensor, weights: Experts, offsets: torch.Tensor, out: torch.Tensor) -> None:
        """See `Kernels.fc1_dgrad`."""
        tile = choose_tile(_PLAIN_TILES, out.shape[1])
        values = {sm90_device.TABLE: weights.table}
        self._launch(sm90_device.PlainGemm, tile, dact_input, weights.view.mT, out, None, values, offsets)

    def wgrad(
        self, dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, *, accumulate: bool
    ) -> None:
        """See `Kernels.wgrad`. To accumulate, TMA adds each tile to what is there, once: bits depend on no order."""
        if not x.shape[0]:
            if not accumulate:
                out.zero_()
            return
        tile = _WGRAD_TILE_MANY_ROWS if x.shape[0] >= _MANY_ROWS * out.shape[0] else _WGRAD_TILE
        key = "wgrad", tile, dy.dtype, out.dtype, accumulate
        slow: Any = contextlib.nullcontext() if key in self._launched else said_if_slow(f"{_COMPILING}: wgrad")
        self._launched.add(key)
        with slow:
            gemm(
                dy.mT,
                x.mT,
                out,
                None,
                None,
                tile.rows,
                tile.columns,
                tile.cluster_rows,
                tile.cluster_columns,
                pingpong=tile.pingpong,
                cu_seqlens_k=offsets,
                add_to_output=accumulate,
            )

    def bias_grads(
        self, dy: torch.Tensor, bias: torch.Tensor, bias_scales: torch.Tensor | None, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Kernels.bias_grads`. Two narrow GEMMs, since sums by atomics would not give the same bits twice."""
        experts, columns = bias.shape
        factors = dy.new_zeros(dy.shape[0], _NARROW)  # what each row counts, in as many columns as it takes
        if bias_scales is None:
            factors[:, 0] = 1
        else:
            factors[:, 0] = bias_scales
            factors[:, 1] = bias_scales - factors[:, 0]  # what its rounding took away
        sums = torch.empty(experts, columns, _NARROW, dtype=torch.float32, device=dy.device)
        self.wgrad(dy, factors, offsets, sums, accumulate=False)
        dbias = sums.sum(2).to(dy.dtype)
        if bias_scales is None:
            return dbias, None
        rows = dy.new_zeros(experts, _NARROW, columns)
        rows[:, 0] = bias
        table = torch.arange(experts, dtype=torch.int32, device=dy.device)
        products = torch.empty(dy.shape[0], _NARROW, dtype=torch.float32, device=dy.device)
        values = {sm90_device.TABLE: table}
        self._launch(sm90_device.PlainGemm, _NARROW_TILE, dy, rows, products, None, values, offsets)
        return dbias, products[:, 0]

    def _numbers(self) -> dict[str, Any]:
        clamp = self._activation.clamp
        return {} if clamp is None else {"clamp": clamp, "inverse": 1 / clamp}

    def _launch(
        self,
        kernel: type[Any],
        tile: Tile,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        c: torch.Tensor | None,
        values: dict[str, Any],
        offsets: torch.Tensor,
    ) -> None:
        """Launch ``d = epilogue(a @ b.T, c)``; a kernel is compiled, or found on disk, when it is first needed."""
        if not a.shape[0]:
            return
        key = (
            kernel,
            tile,
            a.dtype,
            d.dtype,
            b.stride(-1) == 1,
            tuple([getattr(v, "dtype", None) for v in values.values()]),
        )
        plan = self._plans.get(key)
        if plan is None:
            with said_if_slow(f"{_COMPILING}: {kernel.__name__}"):
                plan = self._plans[key] = build_gemm_epi_plan(
                    kernel,
                    CAPABILITY,
                    a,
                    b,
                    d,
                    c,
                    epi_values=values,
                    tile_M=tile.rows,
                    tile_N=tile.columns,
                    cluster_M=tile.cluster_rows,
                    cluster_N=tile.cluster_columns,
                    pingpong=tile.pingpong,
                    varlen_m=True,
                    post_init_attrs=_source_key(),
                )
        run_gemm_epi_plan(plan, a, b, d, c, values, cu_seqlens_m=offsets)
