"""Launches of grouped GEMMs by row: how they are cut into tiles, compiled when first needed, and called.

In: kernel classes of `sm90_device` and `sm90_fp8_device`, and tensors. Out: launches on the current stream. Keeps true: no
number reaches the host. Does not: choose tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from quack.cute_dsl_utils import torch2cute_dtype_map
from quack.gemm_runtime.host import GemmEpiPlan, build_gemm_epi_plan
from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

from te_offload.fused.kernels import sm90_compile
from te_offload.fused.kernels.interface import TileCount
from te_offload.fused.kernels.progress import said_if_slow

COMPILING = "Compiling a kernel of the fused grouped MLP for Hopper; it is kept on disk"
SWIZZLE = 8  # tiles side by side that are computed one after the other, for the L2 cache


class Tile(NamedTuple):
    """How a GEMM is cut: rows and columns of a tile, tiles of a cluster each way, whether two warp groups take turns, and
    how many products of each sum a stage of operands holds (``None``: QuACK's 128 bytes); apart: see `sm90_apart`.
    """

    rows: int
    columns: int
    cluster_rows: int = 2
    cluster_columns: int = 1
    pingpong: bool = False
    per_stage: int | None = None
    apart: bool = False

    def parts(self, columns: int) -> int:
        """Tiles side by side that cover so many columns."""
        return -(-columns // self.columns)

    def padded(self, rows: int | None, columns: int) -> int:
        """What a result of so many rows and columns takes in whole clusters of tiles; rows ``None``: of one row."""
        return (1 if rows is None else up(rows, self.rows * self.cluster_rows)) * up(
            columns, self.columns * self.cluster_columns
        )


class Way(NamedTuple):
    """How a product with an activation is computed: by which kernel, what `sm90_tiles` calls it, and what its launch takes
    beside tensors.
    """

    kernel: type[Any]
    product: str
    more: dict[str, Any] = {}  # noqa: RUF012


def up(size: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-size // step) * step


class Ready:
    """A plan of QuACK's as a call. It hands over what QuACK's `run_gemm_epi_plan` would; what is the same in all launches
    is made once, which takes the host 9 us less a launch (docs/results/, grouped MLP).
    """

    __slots__ = ("_before", "_behind", "_function", "_make", "_make_schedule", "_static", "_takes")

    def __init__(self, plan: GemmEpiPlan) -> None:
        assert plan.split_k == 1 and plan.cu_tiles_tile_m is None
        self._function = plan.compiled_fn
        self._make = plan.gemm_cls.EpilogueArguments._make
        by_name = {name: (name, convert, key) for name, convert, key in plan.call_ops}
        self._takes = [by_name.get(name, ("", None, None)) for name in plan.arg_template]
        self._static = plan.scheduler_static
        schedule = make_scheduler_args(plan.max_active_clusters, plan.max_swizzle_size, None)
        place = schedule._fields.index("tile_count_semaphore")
        self._before, self._behind = schedule[:place], schedule[place + 1 :]
        self._make_schedule = schedule._make

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor | None,
        c: torch.Tensor | None,
        values: dict[str, Any],
        offsets: torch.Tensor,
        count: TileCount | None,
    ) -> None:
        """Launch it; arguments are those of `Launches`."""
        get = values.get
        arguments = self._make(
            [get(name) if convert is None else convert(get(name), key) for name, convert, key in self._takes]
        )
        schedule = self._static
        if schedule is None:
            pointer = None if count is None else count.data_ptr()
            schedule = self._make_schedule((*self._before, pointer, *self._behind))
        self._function(a, b, d, c, arguments, schedule, make_varlen_args(offsets, None, None), None, None)


class Launches:
    """Kernels that have been launched, ready to be launched again."""

    def __init__(self) -> None:
        self._ready: dict[Any, Ready] = {}

    def __call__(
        self,
        kernel: type[Any],
        tile: Tile,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor | None,
        c: torch.Tensor | None,
        values: dict[str, Any],
        offsets: torch.Tensor,
        count: TileCount | None = None,
        *,
        transposed: bool = False,
        pairs: int | None = None,
        packed: bool = False,
    ) -> None:
        """Launch ``d = epilogue(a @ b.T, c)``, or ``a @ b`` if transposed; a kernel is compiled, or found on disk, when it
        is first needed.

        Args:
            a: (T, K). b: (J, columns, K), or (J, K, columns) if transposed, through the table in ``values``.
            d, c: (T, columns); d ``None``: what the epilogue makes for it is not stored.
            offsets: (N + 1,) int32. count: ``None``: clusters have their tiles from the start.
            pairs: of a kernel of `sm90_glu_device`, its ``te_offload_interleave``. packed: d and c are (T, columns, 2).
        """
        if not a.shape[0]:
            return
        dtypes = [getattr(value, "dtype", None) for value in (a, b, d, *values.values())]
        key = kernel, tile, transposed, count is None, pairs, *dtypes
        ready = self._ready.get(key)
        if ready is None:
            attributes: dict[str, Any] = {"te_offload_source": sm90_compile.source_key()}
            if pairs is not None:
                attributes["te_offload_interleave"] = pairs
            if tile.apart:
                attributes["te_offload_apart"] = True
            if packed and d is not None:
                attributes["implicit_dtype"] = torch2cute_dtype_map[d.dtype]
            with said_if_slow(f"{COMPILING}: {kernel.__name__}"):
                plan = build_gemm_epi_plan(
                    kernel,
                    sm90_compile.CAPABILITY,
                    a,
                    b,
                    d,
                    c,
                    epi_values=values,
                    tile_M=tile.rows,
                    tile_N=tile.columns,
                    tile_K=tile.per_stage,
                    cluster_M=tile.cluster_rows,
                    cluster_N=tile.cluster_columns,
                    pingpong=tile.pingpong,
                    is_dynamic_persistent=count is not None,
                    max_swizzle_size=SWIZZLE,
                    varlen_m=True,
                    b_kn=transposed,
                    post_init_attrs=tuple(attributes.items()),
                    packed_cd="n" if packed else None,
                )
            ready = self._ready[key] = Ready(plan)
        ready(a, b, d, c, values, offsets, count)
