"""When the blocks of a product begin, and what they wait for: as mixins before QuACK's GEMM.

In: nothing when imported. Out: mixins, of which `sm90_device` makes kernels. Keeps true: a kernel is not over before those
ahead of it are, and reads nothing that one of them has still to write. Does not: know what is computed. Needs
quack-kernels.

QuACK launches its GEMMs so that they may begin while the kernel before them ends (CUDA's programmatic dependent launch).
A GEMM's last tiles leave SMs idle: what may begin on those early saves that time. Two products may: one that needs nothing
of the GEMM ahead of it, and one that needs each expert's rows of it, which says when they are there.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from te_offload.fused.kernels.sm90_experts import ByExpert, TableFound

READY = "ready"


class AfterWorkBefore:
    """Mixin before QuACK's GEMM: no warp asks for its first tile before the kernels before this one are over.

    QuACK launches its GEMMs so that they may begin while the kernel before them ends (CUDA's programmatic dependent
    launch), and lets only the warps that load operands wait for its end. The other warps find their first tile by
    themselves: from offsets that the kernel before may just have written, or of no tokens, whose zeros are then stored
    where that kernel may still read.
    """

    lets_next_begin = (
        False  # as soon as this one's blocks all run, if it is `BesideWorkBefore`; else near this one's end
    )

    def get_scheduler_class(self, varlen_m: bool = False) -> Any:
        """QuACK's."""
        base = super().get_scheduler_class(varlen_m)  # type: ignore[misc]
        lets_next_begin = self.lets_next_begin

        class Scheduler(base):  # type: ignore[misc]
            @classmethod
            def create(cls, *args: Any, **kwargs: Any) -> Any:
                cute.arch.griddepcontrol_wait()
                if lets_next_begin:  # not before the wait: the next one counts on what is over by then
                    cute.arch.griddepcontrol_launch_dependents()
                return super().create(*args, **kwargs)

        return Scheduler


class AheadOfAnother(AfterWorkBefore):
    """The same of a kernel after which one that is `BesideWorkBefore` may be launched."""

    lets_next_begin = True


class BesideWorkBefore:
    """Mixin before QuACK's GEMM, in place of `AfterWorkBefore`, for a product that has nothing to do with the kernel
    launched right before it, an `AheadOfAnother`: its blocks begin on the SMs that have no tile left of that one. It is not
    over before that one is, so that whatever comes after waits for both.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_pdl = False  # by which QuACK's warps that load operands would wait

    def kernel(self, *args: Any, **kwargs: Any) -> Any:
        """QuACK's, launched so that it may begin early all the same."""
        launcher = super().kernel(*args, **kwargs)  # type: ignore[misc]
        launch = launcher.launch
        launcher.launch = lambda *args, **kwargs: launch(*args, **kwargs | {"use_pdl": True})
        return launcher

    def get_scheduler_class(self, varlen_m: bool = False) -> Any:
        """QuACK's."""
        base = super().get_scheduler_class(varlen_m)  # type: ignore[misc]

        class Scheduler(base):  # type: ignore[misc]
            def producer_tail(self) -> None:
                super().producer_tail()
                cute.arch.griddepcontrol_wait()

        return Scheduler


class SaysWhenReady:
    """Mixin before QuACK's GEMM: counts an expert's tiles up to zero in ``ready`` (N,) int32, which begins at minus the
    number of them; a tile counts when all that it stores is in memory.
    """

    def epilogue(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """QuACK's, and the count."""
        found = super().epilogue(params, *args, **kwargs)  # type: ignore[misc]
        ready = getattr(params, READY)
        if ready is not None:
            _count(ready, kwargs["tile_coord_mnkl"][3], kwargs["is_tma_warp"])
        return found


@cute.jit  # type: ignore[untyped-decorator]
def _count(ready: cute.Tensor, expert: Int32, stores: Boolean) -> None:
    if stores:  # one thread of this warp has issued the stores, and waits until they are done, not just read
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.atomic_add((ready.iterator + expert).llvm_ptr, Int32(1), sem="release", scope="gpu")


class _WhenReady(ByExpert):
    """Weights of an expert, which are not read before its rows of the other operand are ready."""

    def __init__(self, tensor: Any, table: Any, ready: Any) -> None:
        super().__init__(tensor, table)
        self._ready = ready

    def __extract_mlir_values__(self) -> list[Any]:
        return [*super().__extract_mlir_values__(), *cutlass.extract_mlir_values(self._ready)]

    def __new_from_mlir_values__(self, values: list[Any]) -> _WhenReady:
        counts = [len(cutlass.extract_mlir_values(one)) for one in (self._tensor, self._table)]
        ends = counts[0], sum(counts)
        return _WhenReady(
            cutlass.new_from_mlir_values(self._tensor, values[: ends[0]]),
            cutlass.new_from_mlir_values(self._table, values[ends[0] : ends[1]]),
            cutlass.new_from_mlir_values(self._ready, values[ends[1] :]),
        )

    def __getitem__(self, place: Any) -> Any:
        _wait(self._ready, place[2])
        return super().__getitem__(place)


@cute.jit  # type: ignore[untyped-decorator]
def _wait(ready: cute.Tensor, expert: Int32) -> None:
    """Until an expert's rows are ready, and may be read by TMA."""
    counted = (ready.iterator + expert).llvm_ptr
    missing = cute.arch.load(counted, Int32, sem="acquire", scope="gpu")
    while missing < 0:
        missing = cute.arch.load(counted, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")


class WeightsWhenReady(TableFound):
    """Operand B goes through the table, by the warps that load operands, which ask for B's part of a tile before they load
    any: so those of A wait as well, until ``ready`` says that the kernel ahead, a `SaysWhenReady`, has written all rows of
    the tile's expert.
    """

    _ready: Any

    def _setup_attributes(self, epilogue_args: Any) -> None:
        self._ready = getattr(epilogue_args, READY)
        super()._setup_attributes(epilogue_args)

    def make_tma_load_atoms_and_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        *first, weights = super().make_tma_load_atoms_and_tensors(*args, **kwargs)  # type: ignore[misc]
        return (*first, _WhenReady(weights, self._table, self._ready))
