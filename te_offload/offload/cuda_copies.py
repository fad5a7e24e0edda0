"""Asynchronous copies by address on a CUDA stream, many in one call.

In: pieces (source address, target address, bytes) and a stream. Out: copies queued on it. Keeps true: an error of the
driver is raised with its number and text, before anyone relies on the copy. Does not: know what is copied, or order it.

torch has no call for many copies at once. `cudaMemcpyBatchAsync` (CUDA 13's signature; NVIDIA's CUDA Runtime API, Memory
Management) takes 0.5 us of the host a copy instead of 6, and leaves no gap between copies on the link: 256 copies of 1 MiB
run at 53.9 GB/s, by single calls at 49.6 (docs/results/, transfer). Older runtimes get single calls.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence

import torch

from te_offload.errors import CopyError
from te_offload.offload.cuda_runtime import handled, runtime

_DEFAULT_KIND = 4  # cudaMemcpyDefault: the direction follows from the addresses
_FEW = 4  # pieces up to which single calls take the host less time
_ORDERED_BY_STREAM = 1  # cudaMemcpySrcAccessOrderStream


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def _address_of(numbers: array.array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


class Copier:
    """Queues copies on streams of one GPU.

    Args:
        device_index: the GPU.
    """

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        library = runtime()
        self._single = library.cudaMemcpyAsync
        self._single.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        self.batches = int((torch.version.cuda or "0").split(".")[0]) >= 13
        self.one_by_one = False  # even where there are batches
        if self.batches:
            self._batch = library.cudaMemcpyBatchAsync
        self._attributes = _Attributes(_ORDERED_BY_STREAM, _Location(0, 0), _Location(0, 0), 0)
        self._first = (ctypes.c_size_t * 1)(0)

    def start(self, pieces: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Queue the copies of all pieces on a stream, given by its handle.

        Raises:
            CopyError: the CUDA runtime refused.
        """
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                self._start(pieces, stream)
        elif len(pieces) == 1:
            source, target, nbytes = pieces[0]
            error = self._single(target, source, nbytes, _DEFAULT_KIND, stream)
            if error:
                self._check(error, 1, nbytes)
        else:
            self._start(pieces, stream)

    def _start(self, pieces: Sequence[tuple[int, int, int]], stream: int) -> None:
        if len(pieces) <= _FEW or not self.batches or self.one_by_one:
            for source, target, nbytes in pieces:
                self._check(self._single(target, source, nbytes, _DEFAULT_KIND, stream), 1, nbytes)
            return
        sources, targets, lengths = (array.array("Q", numbers) for numbers in zip(*pieces, strict=True))
        count = len(pieces)
        error = self._batch(
            _address_of(targets),
            _address_of(sources),
            _address_of(lengths),
            ctypes.c_size_t(count),
            ctypes.byref(self._attributes),
            self._first,
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
        )
        self._check(error, count, sum(lengths))

    def _check(self, error: int, count: int, nbytes: int) -> None:
        if error:
            raise CopyError(f"CUDA refused {count} copies of {nbytes} bytes together: {handled(error)}.")
