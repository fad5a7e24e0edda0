"""Slots of one forward that no op of te_offload declares: regions, what an op of tensors alone names, and all else.

In: tensors from the pack hook, whose slot is not known otherwise. Out: the slot of each. Keeps true: a storage is in one
slot, whoever saves it and however often, but for what is saved in a region, which is the region's; a name is of storages,
not of one that comes to lie where one was. Does not: pack (visit.py does), or choose what goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_offload.offload.extents import storage_key
from te_offload.offload.plain import is_plain
from te_offload.offload.saved import SlotEntry
from te_offload.ops import te_adapter
from te_offload.slots import Reason, SlotName

if TYPE_CHECKING:
    from te_offload.offload.visit import LayerVisit, Region


class OtherSlots:
    """See the module. It does not refer to its forward, which may be left to nobody but the garbage collector otherwise.

    Attributes:
        staying: storages of tensors that stay and belong to no slot.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, SlotEntry] = {}
        self._by_region: dict[str, SlotEntry] = {}
        self._by_name: dict[tuple[str, SlotName, int | None], SlotEntry] = {}
        self._regions: list[Region] = []
        self._marked: SlotEntry | None = None
        # A weak reference keeps the storage's identity from being another one's.
        self._named: dict[int, tuple[StorageWeakRef, str, SlotName, bool, int | None]] = {}
        self._times: dict[str, int] = {}
        self._unnamed = 0
        self.staying: set[int] = set()

    def enter(self, region: Region) -> SlotEntry | None:
        """What is saved from now on is the region's; its entry, if it has saved before."""
        self._regions.append(region)
        return self._by_region.get(region.name)

    def leave(self, region: Region) -> tuple[SlotEntry | None, SlotEntry | None]:
        """The region ends: its entry, and that of the one around it, of those that have saved."""
        self._regions.remove(region)
        around = self._by_region.get(self._regions[-1].name) if self._regions else None
        return self._by_region.get(region.name), around

    def name(self, op: str, slots: Iterable[tuple[SlotName, torch.Tensor, bool]]) -> None:
        """See `StorageObserver.name_storages`."""
        times = self._times[op] = self._times.get(op, -1) + 1
        for slot, tensor, keep in slots:
            storage = StorageWeakRef(tensor.untyped_storage())
            self._named.setdefault(storage_key(tensor), (storage, op, slot, keep, times or None))

    def entry_of(self, tensor: torch.Tensor, visit: LayerVisit) -> SlotEntry:
        """Of a tensor that no op declared, and the forward saves: its region's, else one for each storage."""
        region = self._regions[-1] if self._regions else None
        key = 0
        if region is not None:
            entry = self._by_region.get(region.name)
        else:
            key = storage_key(tensor) if is_plain(tensor) else id(tensor)
            entry = self._by_storage.get(key)
        if entry is None:
            named = self._named.get(key)
            if region is not None:
                entry = SlotEntry(visit, region.name, SlotName.REGION, keep=region.keep, once=False)
                self._by_region[region.name] = entry
            else:
                if named is not None:
                    _, op, slot, keep, times = named
                    entry = self._by_name.get((op, slot, times))
                    if entry is not None:
                        self._by_storage[key] = entry
                        return entry
                    entry = SlotEntry(visit, op, slot, keep=keep, once=False, ordinal=times)
                    self._by_name[op, slot, times] = entry
                else:
                    entry = SlotEntry(visit, "", SlotName.OTHER, keep=False, once=False, ordinal=self._unnamed)
                    self._unnamed += 1
                self._by_storage[key] = entry
            visit.entries.append(entry)
        return entry

    def count_marked(self, tensor: torch.Tensor, visit: LayerVisit) -> None:
        """A tensor that no op of te_offload named carries the mark to stay: all of them are one row of the record."""
        if self._marked is None:
            self._marked = SlotEntry(visit, "", SlotName.OTHER, keep=False, once=False)
            self._marked.reason = Reason.MARKED
            visit.entries.append(self._marked)
        buffers = [tensor] if type(tensor) is torch.Tensor else te_adapter.take_apart(tensor)
        for buffer in buffers[1] if isinstance(buffers, tuple) else buffers or [tensor]:
            if buffer is not None:
                self._marked.tensors += 1
                self._marked.nbytes += buffer.nbytes
                if is_plain(buffer):
                    self.staying.add(storage_key(buffer))

    def forget(self) -> None:
        """The forward is over, and decided on."""
        self._by_storage.clear()
        self._by_region.clear()
        self._by_name.clear()
        self._named.clear()
        self.staying.clear()
        self._regions.clear()
        self._marked = None
