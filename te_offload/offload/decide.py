"""What of one forward goes to the host: the fate of each slot, and the cargos that carry those that go.

In: the slots of a forward with their live handles, and the rules. Out: a fate and a reason for each slot; cargos with
their leases, small slots together in one. Keeps true: a slot moves whole or stays whole, but for what of a region cannot
go; memory that a staying tensor shares does not move (it would free nothing); each byte of a storage is copied once, with
the first slot that holds it; what the host has no room for stays. Does not: copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_offload.offload.extents import storage_key, storage_keys
from te_offload.offload.host_pool import HostPool
from te_offload.offload.load import Load, as_one
from te_offload.offload.plain import devices_of_plain, is_discarded, is_plain
from te_offload.offload.saved import Saved, SlotEntry
from te_offload.offload.shares import Shares, find_shares
from te_offload.offload.spots import Spot, covered_by
from te_offload.ops import te_adapter
from te_offload.slots import FORMATS, Fate, Reason, SlotName

if TYPE_CHECKING:
    from te_offload.offload.plan import Plan


_GOES, _NONE, _MARKED = Fate.OFFLOADED, Reason.NONE, Reason.MARKED
_FEW = 8 << 20  # bytes
_STORAGE, _MEMORY_OF = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_PLAIN = frozenset((torch.nn.Parameter, torch.Tensor))
# Reasons that one tensor of several can give.
_OF_SOME = frozenset((Reason.NOT_PLAIN, Reason.OTHER_DEVICE, Reason.DISCARDED, Reason.LEAF))
_NEEDS_GRAD = operator.attrgetter("requires_grad")


@dataclass(frozen=True)
class Rules:
    """What a session offloads.

    Attributes:
        enabled: whether it offloads at all; if not it only records.
        min_bytes: a slot with fewer bytes stays.
        plan: which slots go; ``None``: all that may.
        together: slots of fewer bytes than this go together with others of their forward: copies of more take so long that
            what the host needs to queue one by itself does not count.
        most_together: bytes that go as one, at most.
    """

    enabled: bool
    min_bytes: int
    plan: Plan | None = None
    together: int = 32 << 20
    most_together: int = 64 << 20


def decide(
    entries: Iterable[SlotEntry],
    owned_by_layer: Callable[[], frozenset[int]],
    staying: set[int],
    rules: Rules,
    device: torch.device,
    pool: HostPool,
    in_flight: int,
) -> tuple[list[Load], list[Load], Shares]:
    """Decide each slot's fate; the loads that go, with their cargos and leases, the loads that stay, and the memory that
    several of them hold.

    Args:
        entries: the slots of a forward, in the order in which they were saved.
        owned_by_layer: gives the storages of the layer's parameters, which stay; called where a tensor may be one.
        staying: storages that stay in any case.
        rules, device, pool: of the session. in_flight: most bytes that may be; slots that go as one are no more of them,
            unless they are few.
    """
    loads: list[Load] = []
    for entry in list(entries):
        load = _load(entry, rules, device)
        if entry.reason in _OF_SOME and entry.slot is SlotName.REGION:
            load = _without_odd_ones(load, rules, device, loads)
        loads.append(load)
    going = [load for load in loads if load.entry.fate is _GOES]
    if not going:
        return [], [load for load in loads if load.handles], find_shares(loads)
    for load in going:
        if not load.contiguous and load.spots is None:
            load.measure(device)
    named = False not in [load.entry.once for load in going]
    owned = frozenset() if named else owned_by_layer()
    while True:
        shares = _share_memory(loads, owned, staying)
        if shares:
            _keep_shared_memory(loads, owned, staying, rules, device)
            going = _divide([load for load in loads if load.entry.fate is _GOES], device)
        going = _together(going, rules.together, min(rules.most_together, max(in_flight, _FEW)), device)
        for load in going:
            load.make_cargo(device)
        refused = _lease(going, pool)
        if refused is None:
            stays = [load for load in loads if load.handles and load.entry.fate is not _GOES]
            return going, stays, find_shares(loads) if shares else {}
        refused.fate, refused.reason = Fate.KEPT, Reason.NO_ROOM
        for load in loads:
            load.entry.cargo, load.entry.bytes_out = None, 0
        going = [load for load in loads if load.entry.fate is _GOES]


def _load(entry: SlotEntry, rules: Rules, device: torch.device) -> Load:
    load = Load(entry, entry.live_handles())
    tensors = load.tensors
    if not tensors:
        if not entry.reason:  # saved, but not here; or not needed any more
            entry.reason = Reason.GRAPH_GONE if entry.handles else Reason.FOREIGN_HOOK
        return load
    entry.tensors = len(tensors)
    if not entry.format and tensors:
        entry.format = FORMATS.get(tensors[0].dtype, "")
    devices = _devices_of_plain(load)
    if devices and _any_discarded(load):
        entry.reason = Reason.DISCARDED
        return load
    if not devices:
        entry.nbytes = sum([tensor.numel() * tensor.element_size() for tensor in tensors])
    elif len(tensors) == 1 and tensors[0].is_contiguous():
        entry.nbytes = tensors[0].nbytes
        load.contiguous = True
    elif len(load.handles) == 1 and len(tensors) > 1 and (entry.keep or not rules.enabled):
        entry.nbytes = sum([tensor.nbytes for tensor in tensors])
    else:
        load.spots = load.few_spots()
        entry.nbytes = load.measure(device).covered if load.spots is None else covered_by(load.spots)
    load.nbytes = entry.nbytes
    entry.reason = _reason_to_stay(entry, tensors, devices, rules, device)
    if not entry.reason:
        entry.fate = _GOES
    return load


def _without_odd_ones(region: Load, rules: Rules, device: torch.device, loads: list[Load]) -> Load:
    """Of a region, which is whatever was saved in it, what can go. The rest becomes a slot of its own, in ``loads``; where
    nothing can go all of it stays one.
    """
    able: list[Saved] = []
    odd: list[Saved] = []
    for handle in region.handles:
        tensor = handle.held[0]
        goes = is_plain(tensor) and tensor.device == device and not (is_discarded(tensor) or _is_leaf(tensor))
        (able if goes else odd).append(handle)
    return _cut(region, able, odd, rules, device, loads) if able else region


def _cut(
    region: Load, rest: list[Saved], part: list[Saved], rules: Rules, device: torch.device, loads: list[Load]
) -> Load:
    """A region without a part, which becomes a slot of its own, the last one of ``loads``."""
    apart = region.entry.visit.entry_apart(part)
    apart.part_of = region.entry.title
    loads.append(_load(apart, rules, device))
    region.entry.hold(rest)
    region.entry.fate, region.entry.reason = Fate.KEPT, _NONE
    return _load(region.entry, rules, device)


def _devices_of_plain(load: Load) -> Collection[torch.device]:
    """Where its tensors are, if all are plain; else nothing. Those of one handle are of one kind, and on one device:
    Transformer Engine made them in one call.
    """
    tensors = load.tensors
    if len(load.handles) > 1:
        return devices_of_plain(tensors)
    plain = is_plain(tensors[0]) and (len(tensors) == 1 or set(map(type, tensors)) == {torch.Tensor})
    return (tensors[0].device,) if plain else ()


def _any_discarded(load: Load) -> bool:
    """Whether the memory of any of its tensors, which are plain, was given up. One handle's were made in one call."""
    tensors = load.tensors if len(load.handles) > 1 else load.tensors[:1]
    return 0 in map(_MEMORY_OF, map(_STORAGE, tensors)) and True in map(is_discarded, tensors)


def _reason_to_stay(
    entry: SlotEntry,
    tensors: list[torch.Tensor],
    devices: Collection[torch.device],
    rules: Rules,
    device: torch.device,
) -> Reason:
    """Why a slot stays. ``devices``: of its tensors, if all are plain; else none."""
    if not rules.enabled:
        return Reason.DISABLED
    if entry.visit.keep:
        return entry.visit.keep
    if entry.keep:
        return Reason.ASKED
    if entry.reason is _MARKED or te_adapter.is_marked_not_offload(tensors[0]):
        return Reason.MARKED
    alike = entry.once and len(entry.handles) == 1  # made in one call: nobody could mark one of them
    if not alike and len(tensors) > 1 and te_adapter.any_marked_not_offload(tensors):
        return Reason.MARKED
    if not devices:
        return Reason.NOT_PLAIN
    if len(devices) > 1 or device not in devices:
        return Reason.OTHER_DEVICE
    if entry.nbytes < rules.min_bytes:
        return Reason.TOO_SMALL
    if not entry.once and True in map(_NEEDS_GRAD, tensors) and any(map(_is_leaf, tensors)):
        return Reason.LEAF
    if rules.plan is not None and not rules.plan.goes(entry.title, entry.visit.forward):
        return Reason.PLAN
    return _NONE


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether autograd itself holds a tensor, which a handle has without its graph: with the node that accumulates its
    gradient. Not so a view that a function of autograd made of its input: no flag of its own says that it needs one.
    """
    return tensor.requires_grad and tensor._base is None


def _share_memory(loads: list[Load], owned: frozenset[int], staying: set[int]) -> bool:
    """Whether any two slots, or a slot and what stays in any case, may have memory in common."""
    keys: list[int] = []
    for load in loads:
        if load.contiguous:
            keys.append(storage_key(load.tensors[0]))
        elif load.handles:
            keys += load.storages
    storages = set(keys)
    return len(storages) != len(keys) or not storages.isdisjoint(staying) or not storages.isdisjoint(owned)


def _keep_shared_memory(
    loads: list[Load], owned: frozenset[int], staying: set[int], rules: Rules, device: torch.device
) -> None:
    """Let stay what shares a storage with something that stays: to move it would free nothing. Of a region those tensors,
    which become a slot of their own, of other slots all.
    """
    for load in loads:
        if load.handles and load.entry.fate is not _GOES:
            staying |= load.storages
    while True:
        found = next((number for number, load in enumerate(loads) if _is_stuck(load, owned, staying)), None)
        if found is None:
            return
        load = loads[found]
        shared, reason = (staying, Reason.ALIAS) if load.storages.isdisjoint(owned) else (owned, Reason.PARAMETER)
        if load.entry.slot is SlotName.REGION:
            rest, part = list[Saved](), list[Saved]()
            for handle in load.handles:
                (part if storage_key(handle.held[0]) in shared else rest).append(handle)
            if rest:
                loads[found] = _cut(load, rest, part, rules, device, loads)
                load = loads[-1]
        load.entry.fate, load.entry.reason = Fate.KEPT, reason
        for one in (load, loads[found]):
            if one.entry.fate is not _GOES:
                staying |= one.storages


def _is_stuck(load: Load, owned: frozenset[int], staying: set[int]) -> bool:
    """Whether a slot that is to go shares a storage with something that stays."""
    goes = load.entry.fate is _GOES
    return goes and not (load.storages.isdisjoint(owned) and load.storages.isdisjoint(staying))


def _together(loads: list[Load], below: int, most: int, device: torch.device) -> list[Load]:
    """Let small slots that go and share no memory go as one: one lease, one copy each way, and one wait. Still in the order
    in which they were saved, of several the last one.
    """
    found: dict[int, Load] = {}
    group: list[Load] = []
    nbytes = last = 0
    for number, load in enumerate(loads):
        size = load.nbytes
        if size >= below:
            found[number] = load
            continue
        if group and nbytes + size > most:
            found[last] = as_one(group, device)
            group, nbytes = [], 0
        group.append(load)
        nbytes += size
        last = number
    if group:
        found[last] = as_one(group, device)
    return [found[number] for number in sorted(found)]


def _divide(loads: list[Load], device: torch.device) -> list[Load]:
    """Slots that go, as loads that share no memory: all of a storage goes with the first slot that has it. Those that share
    none are left as they are.
    """
    owners: dict[int, Load] = {}
    sharing: set[Load] = set()
    for load in loads:
        for storage in load.storages:
            owner = owners.setdefault(storage, load)
            if owner is not load:
                sharing |= {owner, load}
    order = {load: number for number, load in enumerate(loads)}
    shares: dict[Load, list[tuple[SlotEntry, Saved]]] = {load: [] for load in sharing}
    spots: dict[Saved, Spot] = {}
    for load in loads:
        if load in sharing:
            load.entry.cargo, load.entry.bytes_out = None, 0
            found = load.spots or load.few_spots()
            if found is not None:
                spots.update(zip(load.handles, found, strict=True))
            for handle in load.handles:
                spot = spots.get(handle)
                if spot is not None:
                    owner = owners[spot.storage]
                else:
                    owner = min([owners[storage_key(tensor)] for tensor in handle.held], key=order.__getitem__)
                shares[owner].append((load.entry, handle))
    divided = []
    for load in loads:
        if load not in sharing:
            divided.append(load)
        elif shares[load]:
            part = Load(load.entry, [handle for _, handle in shares[load]])
            part.last = shares[load][-1][0]
            if spots.keys() >= set(part.handles):
                part.spots = [spots[handle] for handle in part.handles]
                part.nbytes = covered_by(part.spots)
            else:
                part.nbytes = part.measure(device).covered
            divided.append(part)
    return divided


def _lease(loads: list[Load], pool: HostPool) -> SlotEntry | None:
    """Take host memory for all; if that fails take none, and say which slot found no room."""
    leased = 0
    try:
        for load in loads:
            cargo = load.cargo
            if cargo is not None and cargo.copied:
                cargo.lease = pool.acquire(cargo.copied)
                if cargo.lease is None:
                    return load.others[-1].entry if load.others else load.entry
            leased += 1
        return None
    finally:
        if leased < len(loads):
            for load in loads[:leased]:
                if load.cargo is not None and load.cargo.lease is not None:
                    load.cargo.lease.release()


def storages_of(module: torch.nn.Module) -> frozenset[int]:
    """Keys of the storages of a module's dense parameters and buffers; of a sharded one, of its local shard."""
    plain: list[torch.Tensor] = []
    odd: list[Any] = []
    for part in module.modules():
        for registered in (part._parameters, part._buffers):
            values = [tensor for tensor in registered.values() if tensor is not None]
            if _PLAIN.issuperset(map(type, values)):
                plain += values
            else:
                odd += values
    shards = [getattr(tensor, "_local_tensor", tensor) for tensor in odd]
    plain += [shard for shard in shards if type(shard.data) is torch.Tensor]
    try:
        return frozenset(storage_keys(plain))
    except NotImplementedError:  # a sparse one has none
        return frozenset(storage_keys([tensor for tensor in plain if tensor.layout is torch.strided]))
