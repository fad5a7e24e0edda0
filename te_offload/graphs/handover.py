"""What a captured forward hands to its captured backward: a pool of memory, and saved tensors whose memory serves again.

In: a forward's outputs that only its backward reads. Out: the same memory without ownership; ownership once, for the
capture of the backward, which lets go of each after its last use. Keeps true: the backward works where it has read, as an
eager backward does; nobody reads there afterwards, or it is an error; the memory is there as long as a tensor over it.
Does not: capture.

Without it the graphs of both would hold what both need at their most, since a graph's outputs are never freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from te_offload.errors import BackwardTwiceError, CaptureError
from te_offload.graphs.backend import Pool
from te_offload.graphs.holding import PATIENCE
from te_offload.graphs.layers.space import storage_over, tensor_of


class Lent:
    """What one capture of the forward lent.

    Attributes:
        pool: with the memory. fresh: the forward has been replayed, and the backward not since.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.fresh = True


class Handover:
    """Between one graph of a forward and the one of its backward.

    Attributes:
        pool: for both. renews: both have to be captured anew, since the backward's capture cannot be repeated alone.
        taken: whether the backward was captured with what was lent.
        backward_holds: whether somebody holds what the backward's graph has returned. restart_backward: warm up anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pool = Pool.kept(device)
        self.renews = False
        self.taken = False
        self.backward_holds: Callable[[], bool] = _nobody
        self.restart_backward: Callable[[], None] = _nothing
        self._held = 0  # forwards, one after the other, that found something of the backward's held
        self._first: int | None = None  # number of the first input of the backward's that was lent
        self._owners: dict[int, torch.UntypedStorage] = {}
        self._lent: Lent | None = None
        self._places: weakref.WeakValueDictionary[int, Lent] = weakref.WeakValueDictionary()

    @property
    def has_lent(self) -> bool:
        """Whether there is something for a capture of the backward to take."""
        return self._lent is not None

    def waits_for_others(self, inputs: Sequence[Any]) -> bool:
        """Whether something was lent to a capture of the backward, and not with these inputs: their forward was another."""
        return bool(self._owners) and not any(
            type(one) is torch.Tensor and one.untyped_storage().data_ptr() in self._owners for one in inputs
        )

    def lend(self, outputs: Sequence[Any], saved: Collection[int], others: Collection[int]) -> list[Any]:
        """The outputs, of which those that are saved own their memory no more.

        Args:
            outputs: of the forward's graph. saved: numbers of those that only the backward reads.
            others: addresses of storages that are someone else's.
        """
        kept = set(others)
        for number, one in enumerate(outputs):
            if isinstance(one, torch.Tensor) and number not in saved:
                kept.add(one.untyped_storage().data_ptr())
        self._lent = lent = Lent(self.pool)
        self._owners, self.taken = {}, False
        over: dict[int, torch.UntypedStorage] = {}
        found = list(outputs)
        for number in saved:
            one = outputs[number]
            if type(one) is not torch.Tensor or one.layout is not torch.strided or one.device != self._device:
                continue
            storage = one.untyped_storage()
            begin = storage.data_ptr()
            if begin in kept or not storage.nbytes():
                continue
            if begin not in over:
                over[begin] = storage_over(begin, storage.nbytes(), self._device, lent)
                self._owners[begin] = storage
                self._places[begin] = lent
            offset = int(one.storage_offset()) * one.element_size()
            found[number] = tensor_of(over[begin], one.dtype, one.size(), one.stride(), offset)
        return found

    def owned(self, inputs: list[Any]) -> list[Any]:
        """Inputs of the backward's capture, of which those that were lent own their memory again: nobody else does.

        Raises:
            CaptureError: an earlier capture has used up what was lent.
        """
        owners, self._owners = self._owners, {}
        found = []
        for one in inputs:
            address = one.untyped_storage().data_ptr() if type(one) is torch.Tensor else 0
            owner = owners.get(address)
            if owner is None and address in self._places:
                self.renews = True
                raise CaptureError("What the forward's graph saved was captured over before. Both are captured anew.")
            if owner is not None:
                offset = int(one.storage_offset()) * one.element_size()
                one = tensor_of(owner, one.dtype, one.size(), one.stride(), offset)
            found.append(one)
        inputs.clear()
        self.taken = True
        return found

    def gradient_held(self) -> bool:
        """Before a forward: whether someone holds what the backward's graph has returned, where the forward may work. If it
        is held for long, both are to be captured anew.
        """
        held = self.backward_holds()
        self._held = self._held + 1 if held else 0
        self.renews = self.renews or self._held >= PATIENCE
        return held

    def forward_replayed(self) -> None:
        """What was lent has its numbers again."""
        if self._lent is not None:
            self._lent.fresh = True

    def check(self, inputs: Sequence[Any]) -> None:
        """Before a backward.

        Raises:
            BackwardTwiceError: another one has worked where its inputs lie.
        """
        if not self._places:
            return
        if self._first is None:  # until one is found
            numbers = [number for number, one in enumerate(inputs) if self._lent_with(one) is not None]
            self._first = numbers[0] if numbers else None
        lent = self._lent_with(inputs[self._first]) if self._first is not None else None
        if lent is not None and not lent.fresh:
            raise BackwardTwiceError(
                "A second backward over one forward: its CUDA graph works where the first one has read. Run the forward "
                "again instead of retain_graph=True."
            )

    def _lent_with(self, one: Any) -> Lent | None:
        return self._places.get(one.untyped_storage().data_ptr()) if type(one) is torch.Tensor else None

    def backward_replayed(self) -> None:
        """What was lent is over."""
        if self._lent is not None:
            self._lent.fresh = False

    def renew(self) -> None:
        """Both are captured anew, into another pool."""
        self.pool = Pool.kept(self._device)
        self.renews, self.taken = False, False
        self._owners, self._lent, self._first, self._held = {}, None, None, 0


def _nobody() -> bool:
    return False


def _nothing() -> None:
    """There is no backward yet."""
