"""Two warp groups at one tile that part company once the products are done: mixins before QuACK's GEMM.

In: nothing when imported. Out: `GroupsApart`, of which `sm90_device` makes kernels, `OwnCopy`, `wait_for_own`. Keeps true:
the numbers of a result, and who computes them. Does not: know what is computed. Needs quack-kernels.

QuACK has two ways to give tiles to two warp groups. Either each has a tile of its own, whose sums must fit into one
group's registers, and one multiplies while the other one stores; or each has half of a tile's rows, and both store at once,
in step, while the tensor cores rest. Here each has half of a tile's rows and stores them by itself, so that one may
multiply for the next tile while the other one still stores; both read the same operands, and a tile is loaded once.

Sums of float32 (`sm90_sums`) keep the tensor cores waiting where both groups add at the same time: apart, they multiply by
turns, and one adds while the other one multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from quack.epilogue.ops import EpiOp
from quack.gemm_base import NamedBarrierGemm
from quack.gemm_sm90 import GemmSm90

_GROUP = 128  # threads
_ROWS = 64  # of a tile, that a warp group has


def wait_for_own(group: Any) -> None:
    """Until all threads of a warp group have come, which ask together."""
    cute.arch.barrier(barrier_id=int(NamedBarrierGemm.EpiWG0) + group, number_of_threads=_GROUP)


class _OwnBarrier:
    """Of the warp group that asks."""

    def arrive_and_wait(self) -> None:
        """Once all threads of the warp group have come."""
        wait_for_own(_group())


class _Place(NamedTuple):
    index: Any
    phase: Any


class _OwnPipeline:
    """Of the warp group that asks: half of a pipeline's stages."""

    def __init__(self, both: Any, stages: int) -> None:
        self._both, self._stages = both, stages

    def __extract_mlir_values__(self) -> list[Any]:
        return []  # it is the same wherever a loop has come to

    def __new_from_mlir_values__(self, values: list[Any]) -> _OwnPipeline:
        return self

    def _own(self, state: Any) -> _Place:
        return _Place(state.index + self._stages * _group(), state.phase)

    def producer_acquire(self, state: Any) -> None:
        """QuACK's."""
        self._both.producer_acquire(self._own(state))

    def producer_get_barrier(self, state: Any) -> Any:
        """QuACK's."""
        return self._both.producer_get_barrier(self._own(state))

    def producer_commit(self, state: Any) -> None:
        """QuACK's: what was loaded says so itself."""

    def consumer_wait(self, state: Any) -> None:
        """QuACK's."""
        self._both.consumer_wait(self._own(state))

    def consumer_release(self, state: Any) -> None:
        """QuACK's."""
        self._both.consumer_release(self._own(state))


def _group() -> Any:
    thread, _, _ = cute.arch.thread_idx()
    return cute.arch.make_warp_uniform(thread // _GROUP)


@cute.jit
def _let_stores_end(goes_on):
    """Before a warp ends, whose stores read the block's shared memory."""
    if not goes_on:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


class GroupsApart:
    """Mixin before QuACK's GEMM.

    Attributes:
        te_offload_apart: whether each warp group stores by itself. Set before the kernel is traced.
    """

    te_offload_apart = False
    atom_layout_mnk: Any
    epi_tile: Any
    num_epi_warps: int
    epi_c_stage: int
    _epi_ops: tuple[Any, ...]

    def _setup_attributes(self, epilogue_args: Any) -> None:
        super()._setup_attributes(epilogue_args)  # type: ignore[misc]
        if not self.te_offload_apart:
            return
        assert self.atom_layout_mnk == (2, 1, 1), "two warp groups above each other"
        assert self.epi_tile[0] == 2 * _ROWS, "a part that is stored at once has all rows"
        self.epilogue_barrier = _OwnBarrier()

    def _compute_stages(
        self,
        tile: Any,
        epi_tile: Any,
        a: Any,
        b: Any,
        d: Any,
        c: Any,
        arguments: Any,
        room: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """QuACK's, in the shared memory that second copies leave."""
        if self.te_offload_apart:
            for op in self._epi_ops:
                value = getattr(arguments, op.name)
                if isinstance(op, OwnCopy) and value is not None:
                    room -= op.smem_bytes(value, tile, epi_tile).unstaged
        return super()._compute_stages(tile, epi_tile, a, b, d, c, arguments, room, *args, **kwargs)  # type: ignore[misc]

    def _make_tma_epi_atoms_and_tensors(self, tensor: Any, layout: Any, tile: Any, op_type: str) -> Any:
        """QuACK's, for a warp group's rows, which lie together in each stage."""
        if self.te_offload_apart:
            halves = cute.flat_divide(layout, (_ROWS, tile[1]))
            layout, tile = cute.slice_(halves, (None, None, 0, 0, None)), (_ROWS, tile[1])
        return GemmSm90._make_tma_epi_atoms_and_tensors(tensor, layout, tile, op_type)

    def epilog_gmem_copy_and_partition(
        self, atom: Any, out: Any, shape: Any, tile: Any, shared: Any, coord: Any
    ) -> tuple[Any, Any, Any]:
        """QuACK's; of a warp group's rows."""
        real = super().epilog_gmem_copy_and_partition  # type: ignore[misc]
        if not self.te_offload_apart:
            return real(atom, out, shape, tile, shared, coord)  # type: ignore[no-any-return]
        group, own = _group(), (_ROWS, tile[1])
        halves = cute.flat_divide(shared, own)
        copy, *rest = real(atom, out, shape, own, halves[None, None, group, 0, None], coord)

        def load(src_idx: Any, dst_idx: Any, **kwargs: Any) -> None:
            copy(src_idx=(group, src_idx[1]), dst_idx=dst_idx, **kwargs)

        def store(src_idx: Any, dst_idx: Any) -> None:
            copy(src_idx=src_idx, dst_idx=(group, dst_idx[1]))

        return (load if isinstance(atom.op, cpasync.CopyBulkTensorTileG2SOp) else store, *rest)

    def make_epi_pipeline(self, tx_count: int) -> Any:
        """QuACK's; each warp group has one, for its rows of what is loaded for the epilogue."""
        if not self.te_offload_apart:
            return super().make_epi_pipeline(tx_count)  # type: ignore[misc]
        warps, stages = self.num_epi_warps, self.epi_c_stage
        self.num_epi_warps, self.epi_c_stage = warps // 2, 2 * stages
        both = super().make_epi_pipeline(tx_count // 2)  # type: ignore[misc]
        self.num_epi_warps, self.epi_c_stage = warps, stages
        return _OwnPipeline(both, stages)

    def epilogue(self, *args: Any, is_tma_warp: Any, **kwargs: Any) -> Any:
        """QuACK's, where one warp stores; here one of each group."""
        if self.te_offload_apart:
            is_tma_warp = Boolean(cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0)
        return super().epilogue(*args, is_tma_warp=is_tma_warp, **kwargs)  # type: ignore[misc]

    def get_scheduler_class(self, varlen_m: bool = False) -> Any:
        """QuACK's."""
        base = super().get_scheduler_class(varlen_m)  # type: ignore[misc]
        if not self.te_offload_apart:
            return base

        class Scheduler(base):  # type: ignore[misc, valid-type]
            def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
                work = super().get_current_work(loc=loc, ip=ip)
                _let_stores_end(work.is_valid_tile)
                return work

        return Scheduler

    def make_epi_store_pipeline(self) -> Any:
        """QuACK's, where its warps that multiply and store begin."""
        if self.te_offload_apart:
            self.let_first_begin(_group())
        return super().make_epi_store_pipeline()  # type: ignore[misc]

    @cute.jit
    def let_first_begin(self, group):
        """The first turn is the first group's."""
        if group == 0:
            self.end_turn(1)

    @cute.jit
    def begin_turn(self, group):
        """Before a group's products."""
        if const_expr(self.te_offload_apart):
            cute.arch.barrier(barrier_id=_turn(group), number_of_threads=2 * _GROUP)

    @cute.jit
    def end_turn(self, group):
        """When the other group may begin its products."""
        if const_expr(self.te_offload_apart):
            cute.arch.barrier_arrive(barrier_id=_turn(1 - group), number_of_threads=2 * _GROUP)


def _turn(group: Any) -> Any:
    return Int32(int(NamedBarrierGemm.MmaWG0)) + group


class OwnCopy(EpiOp):  # type: ignore[misc]
    """Mixin before QuACK's loads of a row or a column: of two warp groups at one tile each has a copy of its own."""

    def smem_struct_field(self, gemm: Any, params: Any) -> Any:
        """QuACK's."""
        if not gemm.te_offload_apart:
            return super().smem_struct_field(gemm, params)
        dtype, size = getattr(params, self.name).element_type, self._tile_size(gemm.cta_tile_shape_mnk)
        return f"s_{self.name}", cute.struct.Align[cute.struct.MemRange[dtype, 2 * size], 16]

    def get_smem_tensor(self, gemm: Any, params: Any, storage_epi: Any) -> Any:
        """QuACK's."""
        if not gemm.te_offload_apart:
            return super().get_smem_tensor(gemm, params, storage_epi)
        both = cute.make_layout((self._tile_size(gemm.cta_tile_shape_mnk), 2))
        return getattr(storage_epi, f"s_{self.name}").get_tensor(both)

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        """QuACK's."""
        if not gemm.te_offload_apart:
            return super().begin(gemm, param, smem_tensor, ctx)
        ctx.num_epi_threads, thread = _GROUP, ctx.tidx
        ctx.tidx = thread % _GROUP
        found = super().begin(gemm, param, smem_tensor[None, _group()], ctx)
        ctx.num_epi_threads, ctx.tidx = 2 * _GROUP, thread
        return found
