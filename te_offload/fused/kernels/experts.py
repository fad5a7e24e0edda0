"""The weights of all experts, or their gradients, as one tensor for TMA, without copying them.

In: the tensors of one GroupedLinear, wherever they lie. Out: `Experts`. Keeps true: nothing is copied or moved, but for
weights that lie too far apart for that; who rebinds a weight's memory gets another value. Does not: keep weights alive.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_offload.errors import ArgumentError

TMA_BYTES = 16  # what addresses and strides of a TMA descriptor must be multiples of (CUDA driver API, tensor map)
_ADDRESS = torch.Tensor.data_ptr
_COARSEST = 1 << 20  # bytes; a coarser step gains nothing
_KEPT = 4  # places of one set of tensors that are known: a table of a few hundred bytes each
_PLACES = 1 << 31  # that a TMA coordinate, and the table, can tell apart


class TooFarApartError(ArgumentError):
    """Tensors lie further apart than one TMA descriptor reaches."""


@dataclass(frozen=True)
class Experts:
    """N weights or gradients (F, H).

    Attributes:
        view: (J, F, H), J of which overlap. table: (N,) int32, the J of each expert.
    """

    view: torch.Tensor
    table: torch.Tensor

    @classmethod
    def of(cls, name: str, weights: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> Experts:
        """See `Experts`.

        Args:
            name: for errors. weights: of one shape, dtype and GPU, each contiguous.
            dtype: what their numbers are, if they are bytes.

        Raises:
            ArgumentError: they are not, or one does not begin at a multiple of 16 bytes.
            TooFarApartError: their places, in the largest step that leads to all, take more than 31 bits: they lie 32 GiB
                apart in steps of 16 bytes, or 1 TiB in those of torch's allocator, 512.
        """
        first = weights[0]
        for number, weight in enumerate(weights):
            if (weight.shape, weight.dtype, weight.device) != (first.shape, first.dtype, first.device):
                raise ArgumentError(
                    f"{name}: expert {number} has {tuple(weight.shape)} {weight.dtype} on {weight.device}, expert 0 has "
                    f"{tuple(first.shape)} {first.dtype} on {first.device}. Give all experts tensors of one kind."
                )
            if not weight.is_contiguous() or weight.data_ptr() % TMA_BYTES:
                raise ArgumentError(
                    f"{name}: expert {number}'s has strides {weight.stride()} and begins at {weight.data_ptr():#x}; it "
                    f"must be contiguous and begin at a multiple of {TMA_BYTES} bytes, as TMA and cuBLAS ask."
                )
        begins = [weight.data_ptr() for weight in weights]
        base, places, step = places_of(begins)
        if max(places) >= _PLACES:
            raise TooFarApartError(
                f"{name}: experts lie up to {max(begins) - base} bytes apart, in steps of {step}; TMA tells {_PLACES} "
                f"places apart, which are {_PLACES * step} bytes. Allocate them together, or use single_grouped_weight."
            )
        size = first.element_size()
        nbytes = max(begins) - base + first.nbytes
        storage = torch._C._construct_storage_from_data_pointer(base, first.device, nbytes)
        rows, columns = first.shape
        view = torch.empty(0, dtype=dtype or first.dtype, device=first.device)  # no part of any autograd graph
        view.set_(storage, 0, (max(places) + 1, rows, columns), (step // size, columns, 1))
        return cls(view, torch.tensor(places, dtype=torch.int32, device=first.device))


def places_of(begins: Sequence[int]) -> tuple[int, list[int], int]:
    """Addresses as multiples of a step from the lowest one: that one, the multiples, and the step in bytes."""
    base = min(begins)
    step = math.gcd(_COARSEST, *[begin - base for begin in begins])
    return base, [(begin - base) // step for begin in begins], step


class ExpertsCache:
    """The last few `Experts` of each of some names: tensors may lie elsewhere for a while, as weights do for an evaluation
    with their averages. And all that CUDA graphs read, whose tables must not be given up.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[Any, Experts]]] = {}  # the last one first
        self._captured: dict[tuple[Any, ...], Experts] = {}

    def __deepcopy__(self, memo: Any) -> ExpertsCache:
        return ExpertsCache()  # of other weights; and a view's memory must not be copied

    def __reduce__(self) -> Any:
        return ExpertsCache, ()

    def get(
        self,
        name: str,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        *,
        written: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Experts:
        """`Experts.of` the tensors, made only where they are not where they were before. Where they lie too far apart: of a
        copy, which each call makes anew and warns of, unless they are to be ``written``.

        Args:
            name: of this set of tensors. tensors: N (F, H), or one (N, F, H).
            dtype: what the numbers of N tensors are, if those are bytes.

        Raises:
            ArgumentError: TMA cannot reach one of them.
        """
        if isinstance(tensors, torch.Tensor):
            return self._together(name, tensors)
        key = dtype or tensors[0].dtype, *map(_ADDRESS, tensors)
        known = self._known.setdefault(name, [])
        if not known or known[0][0] != key:
            place = next((number for number, one in enumerate(known) if one[0] == key), None)
            if place is not None:
                known.insert(0, known.pop(place))
            else:
                try:
                    known.insert(0, (key, Experts.of(name, tensors, dtype)))
                except TooFarApartError as error:
                    if written:
                        raise
                    warnings.warn(f"{error} Until then they are copied in each forward and backward.", stacklevel=2)
                    stacked = _stacked(tensors)
                    return self._together(name, stacked if dtype is None else stacked.view(dtype))
                del known[_KEPT:]
        found = known[0][1]
        if _in_capture(tensors[0]):
            self._captured[name, key] = found
        return found

    def _together(self, name: str, tensor: torch.Tensor) -> Experts:
        """Each call makes a new value of two tensors that are there: nothing to look up, or to keep alive."""
        if not tensor.is_contiguous() or tensor.data_ptr() % TMA_BYTES:
            Experts.of(name, list(tensor.unbind(0)))  # raises
        return Experts(tensor, places_in_order(tensor.shape[0], tensor.device))


@functools.cache
def places_in_order(experts: int, device: torch.device) -> torch.Tensor:
    """The table of so many experts one after the other, made once: whatever reads it later must find it. So whoever may be
    called in the memory pool of a CUDA graph for the first time has it made before.
    """
    return torch.arange(experts, dtype=torch.int32, device=device)


def _in_capture(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if tensors[0].element_size() > 1:
        return torch.stack([*tensors])
    return torch.stack([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
