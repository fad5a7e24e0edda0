"""Memory that several slots of a forward hold: how much of it each slot has, and which have it.

In: the loads of a forward, decided on. Out: what is shared, and on each entry how much of it is. Keeps true: a storage is
one slot's or it is shared, all of it, since that is how it stays or goes; the bytes of slots that they share with none and
what is shared are the forward's memory, each byte once. Does not: decide; know the memory of parameters, or of other
forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from te_offload.offload.extents import extent, storage_key, union
from te_offload.offload.load import Load
from te_offload.offload.plain import has_storage
from te_offload.slots import Fate

Shares = dict[tuple[str, ...], int]
"""The names of slots, in the order in which they were saved, and the bytes that they share."""


def find_shares(loads: Sequence[Load]) -> Shares:
    """What loads share; notes on their entries how much of each that is, and what of it counts with each that stays."""
    holders: dict[int, list[Load]] = {}
    for load in loads:
        for storage in load.storages if load.handles else ():
            holders.setdefault(storage, []).append(load)
    order = {name: number for number, name in enumerate(dict.fromkeys(load.entry.whole for load in loads))}
    names = {
        storage: tuple(sorted({load.entry.whole for load in some}, key=order.__getitem__))
        for storage, some in holders.items()
        if len(some) > 1
    }
    names = {storage: slots for storage, slots in names.items() if len(slots) > 1}
    ranges = {
        load: _ranges_in(load, names) for load in dict.fromkeys(load for storage in names for load in holders[storage])
    }
    for load, mine in ranges.items():
        load.entry.shared = load.entry.counts_elsewhere = sum(map(union, mine.values()))
    found: Shares = {}
    for storage, slots in names.items():
        some = [load for load in holders[storage] if storage in ranges[load]]
        nbytes = union([piece for load in some for piece in ranges[load][storage]])
        found[slots] = found.get(slots, 0) + nbytes
        first = next((load for load in some if load.entry.fate is Fate.KEPT), None)
        if first is not None:
            first.entry.counts_elsewhere -= nbytes
    return found


def _ranges_in(load: Load, storages: dict[int, tuple[str, ...]]) -> dict[int, list[tuple[int, int]]]:
    """In each of some storages the addresses that its tensors have."""
    found: dict[int, list[tuple[int, int]]] = {}
    for tensor in load.tensors:
        storage = storage_key(tensor) if has_storage(tensor) and tensor.numel() else 0
        if storage in storages:
            begin = tensor.data_ptr()
            end = begin + extent(tensor.shape, tensor.stride()) * tensor.element_size()
            found.setdefault(storage, []).append((begin, end))
    return found
