"""A chunk: an interval of one storage on its way to the host and back, and where its bytes are.

In: an interval. Out: its `Residence`, and the memory that holds it. Keeps true: residence changes only along
`TRANSITIONS`; anything else is a `StateError` that names both ends. Does not: copy (mover.py does).
"""

from __future__ import annotations

import enum
import weakref
from typing import Any

import torch

from te_offload.errors import StateError
from te_offload.offload.extents import Interval
from te_offload.offload.host_pool import Lease
from te_offload.offload.transfer import Done


class Residence(enum.Enum):
    """Where the bytes of a chunk are, and what that costs."""

    ON_DEVICE = "on the device"  # the saved tensors themselves hold the memory
    LEAVING = "leaving"  # device memory (held until the copy out has ended) and host memory
    ON_HOST = "on the host"  # host memory alone
    RETURNING = "returning"  # host memory and new device memory, being filled
    RETURNED = "returned"  # host memory and device memory, filled
    RELEASED = "released"  # none


TRANSITIONS: dict[Residence, frozenset[Residence]] = {
    Residence.ON_DEVICE: frozenset({Residence.LEAVING, Residence.RELEASED}),
    Residence.LEAVING: frozenset({Residence.ON_HOST}),
    Residence.ON_HOST: frozenset({Residence.RETURNING, Residence.RELEASED}),
    Residence.RETURNING: frozenset({Residence.RETURNED}),
    Residence.RETURNED: frozenset({Residence.ON_HOST, Residence.RELEASED}),
    Residence.RELEASED: frozenset(),
}


class Chunk:
    """An interval of one storage in one forward.

    Attributes:
        interval: the bytes.
        users: weak references to the handles in the autograd graph that read it, kept alive here for their callbacks.
        alive: how many of those handles are left. untaken: how many handles have not had their tensor yet.
        counted: whether its bytes are in the count of resident bytes.
        versions: the saved tensors with the version that each had when it was saved, until the copy out has ended.
        modified: a saved tensor was written to before its copy out had ended.
    """

    def __init__(self, interval: Interval) -> None:
        self.interval = interval
        self.residence = Residence.ON_DEVICE
        self.users: list[weakref.ref[Any]] = []
        self.alive = 0
        self.untaken = 0
        self.counted = False
        self.versions: list[tuple[torch.Tensor, int | None]] = []
        self.modified = False
        self.source: torch.Tensor | None = None
        self.lease: Lease | None = None
        self.memory: torch.Tensor | None = None
        self.out_done: Done | None = None
        self.back_done: Done | None = None

    def move(self, to: Residence) -> None:
        """Change the residence.

        Raises:
            StateError: `TRANSITIONS` has no such edge.
        """
        if to not in TRANSITIONS[self.residence]:
            raise StateError(
                f"A chunk of {self.interval.nbytes} bytes is {self.residence.value} and cannot become {to.value}."
            )
        self.residence = to


def version_of(tensor: torch.Tensor) -> int | None:
    """The in-place version of a tensor; ``None`` for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version
