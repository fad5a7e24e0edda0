"""When the blocks of a product begin, what they wait for, and which tiles they take first: as mixins before QuACK's GEMM.

In: nothing when imported. Out: mixins, of which `sm90_device` makes kernels. Keeps true: a kernel is not over before those
ahead of it are, and reads nothing that one of them has still to write. Does not: know what is computed. Needs
quack-kernels.

QuACK launches its GEMMs so that they may begin while the kernel before them ends (CUDA's programmatic dependent launch).
A GEMM's last tiles leave SMs idle; a product that needs nothing of that GEMM may begin on those.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from quack.tile_scheduler import RasterOrderOption


class AfterWorkBefore:
    """Mixin before QuACK's GEMM: no warp asks for its first tile before the kernels before this one are over.

    QuACK launches its GEMMs so that they may begin while the kernel before them ends (CUDA's programmatic dependent
    launch), and lets only the warps that load operands wait for its end. The other warps find their first tile by
    themselves: from offsets that the kernel before may just have written, or of no tokens, whose zeros are then stored
    where that kernel may still read.
    """

    lets_next_begin = False  # when all blocks of this one run; else when they are nearly done, as QuACK has it

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


class RowsTogether:
    """Mixin before QuACK's GEMM by rows: where clusters take their tiles one by one, those of one column of tiles and one
    expert come one after the other, so that all read the same weights while those are in the L2 cache.

    Of tiles that are given out from the start that order gained a step nothing (docs/results/).
    """

    def get_scheduler_arguments(self, a: Any, b: Any, d: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        """QuACK's."""
        found = super().get_scheduler_arguments(a, b, d, schedule, *args, **kwargs)  # type: ignore[misc]
        if schedule.tile_count_semaphore is not None:
            found.raster_order = RasterOrderOption.AlongM
        return found
