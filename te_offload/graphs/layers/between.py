"""What lies between a captured forward and its backward: what a session or a hook may take meanwhile, and what stays.

In: what a recorder saw, and the allocations that live once the forward's outputs are let go of. Out: `Between`. Keeps true:
of an allocation that may go every byte that the backward may read comes back: those of slots and saved tensors are known,
and who else holds it may read all of it. Does not: move anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from te_offload.graphs.holding import users_of
from te_offload.graphs.layers.items import Extents, Item, span
from te_offload.graphs.layers.recorder import Recorder
from te_offload.graphs.layers.space import Extent
from te_offload.offload.transfer import Mark
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import Reason, SavedSlot, SaveState


@dataclass(frozen=True)
class Slot:
    """A slot of an op: its buffers, or why it stays; and since when in a replay the buffers are there."""

    op: SlotOwner
    saved: SavedSlot
    items: tuple[Item, ...]
    ready: Callable[[], Mark] | None


@dataclass(frozen=True)
class Between:
    """See above.

    Attributes:
        slots: of ops. others: saved tensors of no slot, which pass a hook.
        taken: allocations with something that may go. carried: those that stay until the backward.
    """

    slots: Sequence[Slot] = ()
    others: Sequence[Item] = ()
    taken: Sequence[Extent] = ()
    carried: Sequence[Extent] = ()

    @classmethod
    def of(
        cls,
        recorder: Recorder,
        live: Sequence[Extent],
        outputs: Sequence[torch.UntypedStorage],
        resident: str | None,
    ) -> Between:
        """Sort what a forward saved.

        Args:
            recorder: what saw it. live: allocations of the pool.
            outputs: storages; where nobody else holds them nobody will read. resident: why nothing may go.
        """
        # However often a storage is among them, it is one object of Python's.
        unread = {storage.data_ptr() for storage in outputs if users_of(storage) <= 1}
        extents = [extent for extent in live if extent.begin not in unread]
        places = Extents(extents)
        items = [tuple(_items(places, saved.buffers)) for _, saved, *_ in recorder.slots]
        others = [] if resident else _items(places, recorder.others)
        whys: list[Reason | None] = []
        for (_, saved, *_), found in zip(recorder.slots, items, strict=True):
            crosses = len(found) != len([buffer for buffer in saved.buffers if buffer.numel()])
            whys.append(Reason.CROSSES_BORDER if crosses else Reason.NO_VIRTUAL_MEMORY if resident else None)
        needs = _needs(recorder, places)
        while True:
            going = [item for found, why in zip(items, whys, strict=True) if why is None for item in found] + others
            stays = _not_covered(going, needs)
            if not stays:
                break
            for number, found in enumerate(items):
                if whys[number] is None and any(item.extent in stays for item in found):
                    whys[number] = Reason.ALIAS
            others = [item for item in others if item.extent not in stays]
        taken = {item.extent for item in going}
        slots = [_slot(*slot, found, why) for slot, found, why in zip(recorder.slots, items, whys, strict=True)]
        return cls(slots, others, sorted(taken), [extent for extent in extents if extent not in taken])


def _items(places: Extents, tensors: Sequence[torch.Tensor]) -> list[Item]:
    return [item for item in map(places.item, tensors) if item is not None]


def _slot(
    op: SlotOwner,
    saved: SavedSlot,
    ready: Callable[[], Mark] | None,
    versions: list[int],
    items: tuple[Item, ...],
    why: Reason | None,
) -> Slot:
    told = saved._replace(buffers=(), exempt=(), carried_bytes=None, stays=saved.stays or why)
    if why is not None and saved.state is SaveState.SAVED:
        told = told._replace(nbytes=sum([buffer.nbytes for buffer in saved.buffers]))
        items = ()
    written = [buffer._version for buffer in saved.buffers] != versions  # it is there when the forward ends
    return Slot(op, told, items, None if written else ready)


def _needs(recorder: Recorder, places: Extents) -> dict[Extent, list[tuple[int, int]]]:
    """Addresses (begin, end) that the backward may read: of tensors that the recorder has seen, and all that is held by
    someone else, who need not read what passed a hook alone.
    """
    needs: dict[Extent, list[tuple[int, int]]] = {}
    seen: dict[Extent, dict[int, torch.Tensor]] = {}
    for tensor in recorder.seen():
        item = places.item(tensor)
        if item is not None:
            needs.setdefault(item.extent, []).append(span(item))
            seen.setdefault(item.extent, {})[tensor._cdata] = tensor
    for extent, tensors in seen.items():
        storage = next(iter(tensors.values())).untyped_storage()
        if users_of(storage) > len(tensors) + 1:
            needs[extent].append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return needs


def _not_covered(items: Sequence[Item], needs: Mapping[Extent, Sequence[tuple[int, int]]]) -> set[Extent]:
    """Allocations of some items, where there are needs beside these."""
    spans: dict[Extent, list[tuple[int, int]]] = {}
    for item in items:
        spans.setdefault(item.extent, []).append(span(item))
    return {
        extent
        for extent, found in spans.items()
        if not all(_covers(sorted(found), begin, end) for begin, end in needs.get(extent, ()))
    }


def _covers(spans: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    for first, last in spans:
        if first > begin:
            break
        begin = max(begin, last)
    return begin >= end
