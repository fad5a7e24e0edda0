"""What of one forward goes to the host: the fate of each slot, and the cargos that carry those that go.

In: the slots of a forward with their live handles, and the rules. Out: a fate and a reason for each slot; cargos with
their leases. Keeps true: a slot moves whole or stays whole; memory that a staying tensor shares does not move (it would
free nothing); each byte of a storage is copied once, with the first slot that holds it; what the host has no room for
stays. Does not: copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

from te_offload.offload.cargo import Cargo
from te_offload.offload.extents import Runs, Strip, find_runs, storage_key, strips_of
from te_offload.offload.host_pool import HostPool
from te_offload.offload.saved import Saved, SlotEntry, is_plain
from te_offload.ops import te_adapter
from te_offload.slots import Fate, Reason

if TYPE_CHECKING:
    from te_offload.offload.plan import Plan


@dataclass(frozen=True)
class Rules:
    """What a session offloads.

    Attributes:
        enabled: whether it offloads at all; if not it only records.
        min_bytes: a slot with fewer bytes stays.
        plan: which slots go; ``None``: all that may.
    """

    enabled: bool
    min_bytes: int
    plan: Plan | None = None


class Load:
    """One slot while it is decided on.

    Attributes:
        entry: the slot. handles: its live handles. tensors: their tensors, dense ones if the slot may go.
        strips: of each handle, runs: of all strips, where they were needed.
    """

    __slots__ = ("_storages", "entry", "handles", "runs", "strips", "tensors")

    def __init__(self, entry: SlotEntry) -> None:
        self.entry = entry
        self.handles = entry.live_handles()
        self.tensors = (
            self.handles[0].held
            if len(self.handles) == 1
            else [tensor for handle in self.handles for tensor in handle.held]
        )
        self.strips: list[list[Strip]] = []
        self.runs: Runs | None = None
        self._storages: frozenset[int] | None = None

    @property
    def goes(self) -> bool:
        """Whether the slot goes, as far as decided."""
        return self.entry.fate is Fate.OFFLOADED

    @property
    def storages(self) -> frozenset[int]:
        """Identities of the storages of its dense tensors."""
        if self._storages is None:
            if self.strips:
                self._storages = frozenset().union(*(strip.storages for strips in self.strips for strip in strips))
            else:
                self._storages = frozenset([storage_key(tensor) for tensor in self.tensors if is_plain(tensor)])
        return self._storages

    def measure(self, device: torch.device) -> None:
        """Find strips and runs of its tensors, which are dense."""
        if self.runs is None:
            self.strips = [strips_of(handle.held) for handle in self.handles]
            self.runs = find_runs(list(chain.from_iterable(self.strips)), across_storages=device.type == "cuda")


@dataclass(eq=False, slots=True)
class Shipment:
    """A cargo, the handles whose bytes it has, and their strips."""

    cargo: Cargo
    entry: SlotEntry
    handles: list[Saved]
    strips: list[list[Strip]]
    runs: Runs

    def load(self) -> list[Saved]:
        """Let the handles go with the cargo; those that do. The others have no elements."""
        places, alone = iter(self.runs.places), len(self.runs.places) == 1
        going = []
        for handle, strips in zip(self.handles, self.strips, strict=True):
            if handle.go_with(self.cargo, [(strip, next(places)) for strip in strips], alone=alone):
                going.append(handle)
            else:
                handle.let_go()  # it would hold a storage for nothing
        return going


def decide(
    entries: Iterable[SlotEntry],
    owned_by_layer: Callable[[], frozenset[int]],
    staying: set[int],
    rules: Rules,
    device: torch.device,
    pool: HostPool,
) -> tuple[list[Shipment], list[Load]]:
    """Decide each slot's fate; shipments for those that go, their leases taken, and the loads that stay.

    Args:
        entries: the slots of a forward, in the order in which they were saved.
        owned_by_layer: gives the storages of the layer's parameters, which stay; called where a tensor may be one.
        staying: storages that stay in any case.
        rules, device, pool: of the session.
    """
    loads = [_load(entry, rules, device) for entry in entries]
    if not any(load.goes for load in loads):
        return [], [load for load in loads if load.handles]
    unnamed = any(load.goes and not load.entry.once for load in loads)
    owned = owned_by_layer() if unnamed else frozenset()
    while True:
        _keep_shared_memory(loads, owned, staying)
        shipments = _shipments([load for load in loads if load.goes], device)
        refused = _lease(shipments, pool)
        if refused is None:
            return shipments, [load for load in loads if load.handles and not load.goes]
        refused.fate, refused.reason = Fate.KEPT, Reason.NO_ROOM


def _load(entry: SlotEntry, rules: Rules, device: torch.device) -> Load:
    load = Load(entry)
    tensors = load.tensors
    if not tensors:
        if entry.reason is Reason.NONE:  # saved, but not here; or not needed any more
            entry.reason = Reason.GRAPH_GONE if entry.handles else Reason.FOREIGN_HOOK
        return load
    entry.tensors = len(tensors)
    plain = _are_plain(load)
    if not plain:
        entry.nbytes = sum([tensor.numel() * tensor.element_size() for tensor in tensors])
    elif len(load.handles) == 1 and (len(tensors) > 1 or tensors[0].is_contiguous()):
        entry.nbytes = sum([tensor.nbytes for tensor in tensors])
    else:
        load.measure(device)
        assert load.runs is not None
        entry.nbytes = load.runs.covered
    entry.reason = _reason_to_stay(entry, tensors, plain, rules, device)
    entry.fate = Fate.KEPT if entry.reason is not Reason.NONE else Fate.OFFLOADED
    return load


def _are_plain(load: Load) -> bool:
    """Whether all tensors are dense. Those of one handle are of one kind: Transformer Engine made them in one call."""
    for handle in load.handles:
        tensors = handle.held
        if not is_plain(tensors[0]) or (len(tensors) > 1 and set(map(type, tensors)) != {torch.Tensor}):
            return False
    return True


def _reason_to_stay(
    entry: SlotEntry, tensors: list[torch.Tensor], plain: bool, rules: Rules, device: torch.device
) -> Reason:
    if not rules.enabled:
        return Reason.DISABLED
    if entry.visit.keep is not Reason.NONE:
        return entry.visit.keep
    if entry.keep:
        return Reason.ASKED
    if entry.reason is Reason.MARKED or any(te_adapter.is_marked_not_offload(tensor) for tensor in tensors):
        return Reason.MARKED
    if not plain:
        return Reason.NOT_PLAIN
    if any(tensor.device != device for tensor in tensors):
        return Reason.OTHER_DEVICE
    if entry.nbytes < rules.min_bytes:
        return Reason.TOO_SMALL
    if rules.plan is not None and not rules.plan.goes(entry.title, entry.visit.forward):
        return Reason.PLAN
    return Reason.NONE


def _keep_shared_memory(loads: list[Load], owned: frozenset[int], staying: set[int]) -> None:
    changed = True
    while changed:
        changed = False
        for load in loads:
            if load.goes and load.storages & owned:
                load.entry.fate, load.entry.reason, changed = Fate.KEPT, Reason.PARAMETER, True
            elif load.goes and load.storages & staying:
                load.entry.fate, load.entry.reason, changed = Fate.KEPT, Reason.ALIAS, True
            if load.handles and not load.goes:
                staying |= load.storages


def _shipments(loads: list[Load], device: torch.device) -> list[Shipment]:
    owners: dict[int, Load] = {}
    shared = False
    for load in loads:
        load.measure(device)
        for storage in load.storages:
            shared = owners.setdefault(storage, load) is not load or shared
    shipments = []
    for load in loads:
        load.entry.cargo, load.entry.bytes_out = None, 0
        handles, strips, runs = load.handles, load.strips, load.runs
        if shared:
            pairs = [pair for other in loads for pair in zip(other.handles, other.strips, strict=True)]
            pairs = [pair for pair in pairs if _first_owner(pair[1], loads, owners) is load]
            handles, strips = [handle for handle, _ in pairs], [found for _, found in pairs]
            runs = find_runs(list(chain.from_iterable(strips)), across_storages=device.type == "cuda")
        if handles and runs is not None:
            cargo = Cargo(load.entry.name, runs.covered, runs.runs)
            load.entry.cargo, load.entry.bytes_out = cargo, cargo.copied
            shipments.append(Shipment(cargo, load.entry, handles, strips, runs))
    return shipments


def _first_owner(strips: list[Strip], loads: list[Load], owners: dict[int, Load]) -> Load:
    """The first slot that holds memory of some strips: all of them go with it."""
    found = {id(owners[storage]) for strip in strips for storage in strip.storages}
    return next(load for load in loads if id(load) in found)


def _lease(shipments: list[Shipment], pool: HostPool) -> SlotEntry | None:
    """Take host memory for all; if that fails take none, and say which slot found no room."""
    for number, shipment in enumerate(shipments):
        if shipment.cargo.copied:
            shipment.cargo.lease = pool.acquire(shipment.cargo.copied)
            if shipment.cargo.lease is None:
                for earlier in shipments[:number]:
                    if earlier.cargo.lease is not None:
                        earlier.cargo.lease.release()
                return shipment.entry
    return None


def storages_of(module: torch.nn.Module) -> frozenset[int]:
    """Keys of the storages of a module's dense parameters and buffers; of a sharded one, of its local shard."""
    owned = [getattr(tensor, "_local_tensor", tensor) for tensor in (*module.parameters(), *module.buffers())]
    return frozenset(
        storage_key(tensor) for tensor in owned if type(tensor.data) is torch.Tensor and tensor.device.type != "meta"
    )
