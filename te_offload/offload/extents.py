"""Runs of memory: what is copied, once, however many views of it were saved; and how a view comes back.

In: saved tensors. Out: `Run` values (addresses) and the place of each tensor in them. Keeps true: overlapping and
touching tensors share one run, also tensors of different storages that lie side by side on a GPU (one expert behind
the other, say); a restored tensor has the original's size, strides, dtype, aliasing, and address modulo 512 bytes
(kernels choose by alignment). Does not: copy, or decide.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

_FEW = 4  # tensors up to which one loop finds their runs in less time than functions over all of them
ALIGNMENT = 512  # bytes; what CUDA's caching allocator gives
SEGMENT = 2 << 20  # bytes; the allocator's segments begin at multiples, and a copy must not span two of them
_ADDRESS, _STORAGE, _IS_CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.is_contiguous
_split = torch.unsafe_split_with_sizes  # without autograd's record of views, which nobody reads here
_IDENTITY, _SHAPE, _DTYPE, _NBYTES = map(attrgetter, ("_cdata", "shape", "dtype", "nbytes"))


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of 512."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Strip(NamedTuple):
    """The bytes of one tensor, or of several of one dtype, each dense: one behind the other, or of one size at one pitch
    with less than 512 bytes between them.

    Attributes:
        begin, end: addresses; equal if there are no elements.
        storage_begin: address of the first byte of the (first) storage.
        storages: identities of the storages, valid while something holds them.
        members: which of the tensors it is.
        dtype: of the tensors. ndim, dims: their sizes, one behind the other: thousands of size objects a step would keep
            Python's garbage collector busy.
        stride: of a single tensor; ``None`` for several, which are contiguous.
        pitch: bytes from one tensor's begin to the next one's, if that is more than a tensor's length; else 0.
    """

    begin: int
    end: int
    storage_begin: int
    storages: frozenset[int]
    members: Sequence[int]
    dtype: torch.dtype
    ndim: int
    dims: Sequence[int]
    stride: tuple[int, ...] | None
    pitch: int = 0

    def views(self, whole: torch.Tensor, offset: int) -> Sequence[torch.Tensor]:
        """The tensors over ``whole``, which has their dtype and one dimension, from its byte ``offset`` on."""
        size, stride = (self.dims, self.stride) if self.stride is not None else self._whole()
        return self.cut(whole.as_strided(size, stride, offset // self.dtype.itemsize))

    def without_elements(self, device: torch.device) -> list[torch.Tensor]:
        """The tensors, which have no elements."""
        pairs = [(size, self.stride or _strides(size)) for size in self.sizes()]
        return [torch.empty_strided(size, stride, dtype=self.dtype, device=device) for size, stride in pairs]

    def cut(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors of ``whole``, which has the `shape`."""
        if self.stride is not None:
            return [whole]
        if self.pitch:
            size = self.dims[: self.ndim]
            return whole.unbind(0) if self.ndim == 1 else [part.view(size) for part in whole.unbind(0)]
        if self.ndim == 1 or self._rows() is not None:
            return _split(whole, self.dims[:: self.ndim])
        sizes = self.sizes()
        flat = _split(whole, [math.prod(size) for size in sizes])
        return [part.view(size) for part, size in zip(flat, sizes, strict=True)]

    def sizes(self) -> list[Sequence[int]]:
        """The size of each tensor."""
        if self.stride is not None:
            return [self.dims]
        return [self.dims[begin : begin + self.ndim] for begin in range(0, len(self.dims), self.ndim)]

    def shape(self) -> tuple[Sequence[int], Sequence[int], torch.dtype] | None:
        """Size, stride and dtype of one tensor that has just these bytes; ``None`` if there is none."""
        if self.pitch:
            return None
        if self.stride is None:
            return (*self._whole(), self.dtype)
        dense = math.prod(self.dims) * self.dtype.itemsize == self.end - self.begin
        return (self.dims, self.stride, self.dtype) if dense else None

    def parts(self) -> list[tuple[int, int]]:
        """Begin and end of what has no gap."""
        if not self.pitch:
            return [(self.begin, self.end)]
        length = math.prod(self.dims[: self.ndim]) * self.dtype.itemsize
        begins = range(self.begin, self.end, self.pitch)
        return [(begin, begin + length) for begin in begins]

    def gaps(self) -> int:
        """Bytes between the tensors."""
        if not self.pitch:
            return 0
        length = math.prod(self.dims[: self.ndim]) * self.dtype.itemsize
        return (len(self.members) - 1) * (self.pitch - length)

    def _whole(self) -> tuple[Sequence[int], Sequence[int]]:
        if self.pitch:
            count = math.prod(self.dims[: self.ndim])
            return (len(self.members), count), (self.pitch // self.dtype.itemsize, 1)
        row = self._rows()
        if row is not None:
            return (sum(self.dims[:: self.ndim]), *row), (math.prod(row), *_strides(row))
        return (sum([math.prod(size) for size in self.sizes()]),), (1,)

    def _rows(self) -> Sequence[int] | None:
        """The size of one row, if it is the same for all of them."""
        if self.ndim == 1:
            return ()
        row = self.dims[1 : self.ndim]
        same = all(self.dims[place :: self.ndim].count(size) == len(self.members) for place, size in enumerate(row, 1))
        return row if same else None


def usual_strides(
    tensors: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], *, alike: bool = False
) -> list[bool]:
    """Of each whether it is contiguous and its strides follow from its size: those of a dimension of 1 may be any, and of a
    tensor without elements.

    Args:
        shapes: of the tensors. alike: whether all are the same.
    """
    contiguous = map(_IS_CONTIGUOUS, tensors)
    if True not in [1 in shape or 0 in shape for shape in (shapes[:1] if alike else shapes)]:
        return list(contiguous)
    three = zip(tensors, shapes, contiguous, strict=True)
    return [
        so and (not (1 in shape or 0 in shape) or tensor.stride() == _strides(shape)) for tensor, shape, so in three
    ]


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def strips_of(tensors: Sequence[torch.Tensor], *, across_storages: bool = True) -> list[Strip]:
    """The strips of strided tensors. ``across_storages``: as for `find_runs`."""
    if len(tensors) == 1:
        only = tensors[0]
        return [_strip(0, only, only.data_ptr(), only.nbytes, storage_key(only), only.shape)]
    begins = list(map(_ADDRESS, tensors))
    keys = storage_keys(tensors)
    shapes = list(map(_SHAPE, tensors))
    dtypes = list(map(_DTYPE, tensors))
    alike = shapes.count(shapes[0]) == len(shapes) and dtypes.count(dtypes[0]) == len(dtypes)
    if not alike:
        found = _in_order(tensors, begins, keys, shapes, dtypes)
        if found is not None:
            return found
    usual = usual_strides(tensors, shapes, alike=True) if alike else None  # else where neighbours ask
    lengths = [tensors[0].nbytes] * len(tensors) if alike else list(map(_NBYTES, tensors))
    strips: list[Strip] = []
    members: list[int] = []
    pitch, end, storage, shape, dtype = 0, -1, -1, shapes[0], dtypes[0]
    length = lengths[0] if usual is not None and len(shape) > 0 and False not in usual else -1
    if not across_storages and keys.count(keys[0]) < len(keys):
        length = -1
    if length > 0 and begins == list(range(begins[0], begins[0] + len(begins) * length, length)):
        held = frozenset(keys)
        if len(held) == 1 or begins[0] // SEGMENT == begins[-1] // SEGMENT:  # one behind the other, in this order
            dims = list(shape) * len(begins)
            first = tensors[0].untyped_storage().data_ptr()
            return [
                Strip(begins[0], begins[-1] + length, first, held, range(len(begins)), dtype, len(shape), dims, None)
            ]

    def is_usual(index: int) -> bool:
        return usual[index] if usual is not None else usual_strides([tensors[index]], [shapes[index]])[0]

    def finish() -> None:
        if len(members) == 1:
            only = members[0]
            strips.append(_strip(only, tensors[only], begins[only], lengths[only], keys[only], shapes[only]))
        elif members:
            first = members[0]
            held = frozenset([keys[member] for member in members])
            dims = list(shape) * len(members) if alike else [size for member in members for size in shapes[member]]
            storage_begin = tensors[first].untyped_storage().data_ptr()
            strips.append(Strip(begins[first], end, storage_begin, held, members, dtype, len(shape), dims, None, pitch))

    for index in sorted(range(len(tensors)), key=begins.__getitem__):
        begin = begins[index]
        if begin == end and length >= 0 and begin % SEGMENT and not pitch:  # all are alike: no need to look at each
            members.append(index)
            end, storage = begin + length, keys[index]
            continue
        gap = begin - end
        joins = 0 <= gap < ALIGNMENT and dtypes[index] is dtype and is_usual(index)
        if joins:  # of another storage: in the same segment?
            joins = keys[index] == storage or (across_storages and (end - 1) // SEGMENT == begin // SEGMENT)
        if joins and not gap:
            joins = not pitch and len(shapes[index]) == len(shape) > 0
        elif joins:
            step = begin - begins[members[-1]]
            joins = shapes[index] == shape and len(shape) > 0
            joins = joins and (step == pitch or (len(members) == 1 and step % dtype.itemsize == 0))
        if joins and (len(members) > 1 or is_usual(members[0])):
            if gap:
                pitch = begin - begins[members[-1]]
            members.append(index)
        else:
            finish()
            members, pitch, shape, dtype = [index], 0, shapes[index], dtypes[index]
        end, storage = begin + lengths[index], keys[index]
    finish()
    return strips


def _in_order(
    tensors: Sequence[torch.Tensor],
    begins: list[int],
    keys: list[int],
    shapes: list[torch.Size],
    dtypes: list[torch.dtype],
) -> list[Strip] | None:
    """The strips of tensors of one storage that lie one behind the other in this order, as split sizes cut one: what
    `strips_of` says, in less time. ``None``: they lie otherwise. Those without elements have no address.
    """
    dtype, ndim = dtypes[0], len(shapes[0])
    if keys.count(keys[0]) < len(keys) or dtypes.count(dtype) < len(dtypes) or set(map(len, shapes)) != {ndim}:
        return None
    ends = list(map(operator.add, begins, map(_NBYTES, tensors)))
    full, empty = range(len(tensors)), [number for number, begin in enumerate(begins) if not begin]
    numbers: Sequence[int] = [number for number in full if begins[number]] if empty else full
    if empty:
        begins, ends = [begins[number] for number in numbers], [ends[number] for number in numbers]
    if begins[1:] != ends[:-1] or False in usual_strides(tensors, shapes):
        return None
    held = frozenset(keys[:1])

    def strip(members: Sequence[int], begin: int, end: int) -> Strip:
        of = shapes if len(members) == len(shapes) else [shapes[member] for member in members]
        first = tensors[members[0]].untyped_storage().data_ptr()
        dims = list(itertools.chain.from_iterable(of))
        return Strip(begin, end, first, held, members, dtype, ndim, dims, None)

    strips = [strip(empty, 0, 0)] if empty else []
    return [*strips, strip(numbers, begins[0], ends[-1])] if numbers else strips


def _strip(index: int, tensor: torch.Tensor, begin: int, nbytes: int, key: int, shape: Sequence[int]) -> Strip:
    """The strip of one tensor, of which some is known."""
    end, stride = begin, tensor.stride()
    if tensor.is_contiguous():
        end = begin + nbytes
    elif 0 not in shape:
        end = begin + extent(shape, stride) * tensor.element_size()
    storage_begin = tensor.untyped_storage().data_ptr()
    return Strip(begin, end, storage_begin, frozenset((key,)), (index,), tensor.dtype, len(shape), tuple(shape), stride)


def lone(tensor: torch.Tensor) -> tuple[Strip, Runs]:
    """The strip of one contiguous tensor, and its runs: what `strips_of` and `find_runs` say, in less time."""
    storage = tensor.untyped_storage()
    begin = start = tensor.data_ptr()
    nbytes = tensor.nbytes
    first = storage.data_ptr()
    lead = begin % ALIGNMENT
    if lead:
        start = max(begin - lead, first)
        lead = begin - start
    keys = frozenset((storage._cdata,))
    size, stride = tuple(tensor.shape), tensor.stride()
    strip = Strip(begin, begin + nbytes, first, keys, (0,), tensor.dtype, len(size), size, stride)
    if not nbytes:
        return strip, Runs((), (None,), 0)
    return strip, Runs((Run(start, nbytes + lead),), ((0, lead),), nbytes)


class Apart(NamedTuple):
    """Contiguous tensors with elements, each of a storage that no other one of them has, at multiples of 512.

    Attributes:
        begins: their addresses. lengths: their bytes. keys: identities of their storages, valid while something holds them.
    """

    begins: list[int]
    lengths: list[int]
    keys: list[int]


class Scattered(NamedTuple):
    """Tensors of one dtype, contiguous, at places of one allocation. As `Strip` where that is read.

    Attributes:
        begin: first byte of the first one, from the allocation's begin.
        members: which of the tensors it is, in the order of their places.
        places: first byte of each, a multiple of 512. lengths: bytes of each. sizes: of each. dtype: of all.
    """

    begin: int
    members: Sequence[int]
    places: Sequence[int]
    lengths: Sequence[int]
    sizes: Sequence[Sequence[int]]
    dtype: torch.dtype

    def views(self, whole: torch.Tensor, offset: int) -> Sequence[torch.Tensor]:
        """The tensors over ``whole``, which has their dtype and one dimension, the first one from byte ``offset`` on."""
        width, shift = self.dtype.itemsize, offset - self.begin
        begins = [(place + shift) // width for place in self.places]
        counts = [length // width for length in self.lengths]
        ends = list(map(operator.add, begins, counts))
        gaps = map(operator.sub, begins, [0, *ends])
        flat = _split(whole, [*itertools.chain(*zip(gaps, counts, strict=False)), whole.numel() - ends[-1]])[1::2]
        if set(map(len, self.sizes)) == {1}:
            return flat
        return [part.view(size) for part, size in zip(flat, self.sizes, strict=True)]

    def cut(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The one tensor that is all of its allocation."""
        return [whole]

    def parts(self) -> list[tuple[int, int]]:
        """Begin and end of each."""
        return list(zip(self.places, map(operator.add, self.places, self.lengths), strict=True))


def apart(tensors: Sequence[torch.Tensor], begins: list[int]) -> Apart | None:
    """Strided tensors as `Apart` values; ``None`` if they are not, or most lie one behind the other: then strips, which are
    cut at once, take less time.

    Args:
        begins: their addresses, multiples of 512.
    """
    lengths = list(map(_NBYTES, tensors))
    touching = sum(map(operator.eq, begins[1:], map(operator.add, begins, lengths)))
    if 2 * touching > len(begins) or 0 in lengths:
        return None
    keys = storage_keys(tensors)
    if len(set(keys)) < len(keys) or False in usual_strides(tensors, list(map(_SHAPE, tensors))):
        return None
    return Apart(begins, lengths, keys)


def lone_runs(begins: Sequence[int], lengths: Sequence[int], *, across_storages: bool) -> tuple[Runs, list[int]]:
    """The runs of tensors that are `Apart`: what `find_runs` says, in less time; and the order of their addresses.

    Args:
        begins: their addresses. lengths: their bytes. across_storages: as for `find_runs`.
    """
    order = sorted(range(len(begins)), key=begins.__getitem__)
    places: list[tuple[int, int]] = [(0, 0)] * len(begins)
    if len(order) > _FEW:
        sorted_begins, sorted_lengths = [begins[index] for index in order], [lengths[index] for index in order]
        room = map(operator.sub, sorted_begins[1:], map(operator.add, sorted_begins, sorted_lengths))
        if not across_storages or min(room) >= ALIGNMENT:  # each is a run
            for number, index in enumerate(order):
                places[index] = number, 0
            return Runs(tuple(map(Run, sorted_begins, sorted_lengths)), tuple(places), sum(lengths)), order
    runs: list[Run] = []
    first, end = begins[order[0]], -1
    for index in order:
        begin = begins[index]
        if begin >= end + ALIGNMENT or not across_storages or not begin % SEGMENT:
            if end >= 0:
                runs.append(Run(first, end - first))
            first = begin
        places[index] = (len(runs), begin - first)
        end = begin + lengths[index]
    runs.append(Run(first, end - first))
    return Runs(tuple(runs), tuple(places), sum(lengths)), order


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first of a tensor with elements to its last."""
    return 1 + sum([(length - 1) * step for length, step in zip(size, stride, strict=True)])


class Run(NamedTuple):
    """Bytes at ``address`` that are copied in one piece."""

    address: int
    nbytes: int


class Runs(NamedTuple):
    """The runs of some strips.

    Attributes:
        runs: in the order of their addresses.
        places: for each strip the number of its run and the distance from the run's begin in bytes; ``None`` for one
            without elements.
        covered: bytes that the strips have, each byte once.
    """

    runs: tuple[Run, ...]
    places: tuple[tuple[int, int] | None, ...]
    covered: int


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, valid while something holds the storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_keys(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`storage_key` of each."""
    return list(map(_IDENTITY, map(_STORAGE, tensors)))


def find_runs(strips: Sequence[Strip], *, across_storages: bool) -> Runs:
    """The runs of strips.

    Args:
        strips: in any order.
        across_storages: whether strips of two storages may share a run where less than 512 bytes lie between them:
            they may on a GPU, whose allocator owns those bytes.
    """
    if len(strips) == 1:
        strip = strips[0]
        if strip.begin == strip.end:
            return Runs((), (None,), 0)
        start = max(strip.begin - strip.begin % ALIGNMENT, strip.storage_begin)
        return Runs(
            (Run(start, strip.end - start),), ((0, strip.begin - start),), strip.end - strip.begin - strip.gaps()
        )
    runs: list[Run] = []
    places: list[tuple[int, int] | None] = [None] * len(strips)
    covered, begin, end, read_to = 0, 0, -1, -1
    storages: frozenset[int] = frozenset()
    overlap = False
    for index in sorted(range(len(strips)), key=[strip[:2] for strip in strips].__getitem__):
        strip = strips[index]
        first, last, storage_begin, keys = strip[:4]
        if first == last:
            continue
        start = first - first % ALIGNMENT
        if start < storage_begin:
            start = storage_begin
        joins = end >= 0 and start < end + ALIGNMENT
        if joins and not (across_storages and storage_begin % SEGMENT):
            joins = not storages.isdisjoint(keys)
        if not joins:
            if end >= 0:
                runs.append(Run(begin, end - begin))
            begin, end = start, last
        places[index] = (len(runs), first - begin)
        storages = keys
        if last > end:
            end = last
        if first < read_to:
            overlap = True
        if last > read_to:
            covered += last - max(first, read_to) - (strip.gaps() if strip.pitch else 0)
            read_to = last
    if end >= 0:
        runs.append(Run(begin, end - begin))
    return Runs(tuple(runs), tuple(places), _covered(strips) if overlap else covered)


def _covered(strips: Sequence[Strip]) -> int:
    """Bytes of strips that may overlap."""
    return union([part for strip in strips for part in strip.parts()])


def union(ranges: list[tuple[int, int]]) -> int:
    """Bytes of ranges (begin, end) that may overlap."""
    total, read_to = 0, 0
    for begin, end in sorted(ranges):
        total += max(0, end - max(begin, read_to))
        read_to = max(read_to, end)
    return total
