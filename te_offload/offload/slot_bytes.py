"""Bytes of a recorded step's slots: what of them leaves with any choice of those that may go.

In: a record. Out: bytes, and parcels as `timeline` takes them. Keeps true: each byte of a forward's memory counts once;
what slots share leaves with all of them or not at all, and what decide.py lets stay for another slot's sake stays here too.
Does not: choose.
"""

from __future__ import annotations

from collections.abc import Collection

from te_offload.offload.device_budget import as_they_go
from te_offload.offload.record import SharedMemory, SlotRecord, StepRecord
from te_offload.offload.timeline import Key, Parcel
from te_offload.slots import Fate, Reason, SlotName

SlotKey = tuple[str, int]  # the name of a slot, and its forward

_MAY_GO = (Reason.NONE, Reason.PLAN, Reason.NO_ROOM)
_IN_PARTS = (SlotName.REGION, SlotName.OTHER)  # of which only what is shared stays with what others let stay


def may_go(row: SlotRecord) -> bool:
    """Whether a plan decides on a slot."""
    return row.fate in (Fate.OFFLOADED, Fate.KEPT) and row.reason in _MAY_GO and row.nbytes > 0


def bytes_by_slot(record: StepRecord) -> dict[SlotKey, int]:
    """Bytes of every slot that may go, by name and forward, with what it shares; what nobody named is one slot of its
    forward. The same whatever a plan let stay.
    """
    found: dict[SlotKey, int] = {}
    for row in rows_that_may_go(record):
        key = row.whole, row.forward
        found[key] = found.get(key, 0) + row.nbytes
    return found


def rows_that_may_go(record: StepRecord) -> list[SlotRecord]:
    """Also of those that stayed, or parts of them, since they share memory with slots that may go and did not."""
    beside: dict[SlotKey, set[SlotKey]] = {}  # of each slot those that share memory with it
    for piece in record.shared_memory:
        holders = [(name, piece.forward) for name in piece.slots]
        for holder in holders:
            beside.setdefault(holder, set()).update(holders)
    aliases = {row for row in record.slots if row.reason is Reason.ALIAS and row.shared}
    while True:
        rows = [row for row in record.slots if may_go(row) or row in aliases]
        keys = {(row.whole, row.forward) for row in rows}
        stuck = {row for row in aliases if not keys.issuperset(beside.get((row.whole, row.forward), ()))}
        if not stuck:
            return rows
        aliases -= stuck


class SlotBytes:
    """See the module.

    Attributes:
        slots: bytes of every slot that may go, with what it shares. layers: of each the layer.
        stuck: of each forward what stays whatever the choice.
    """

    def __init__(self, record: StepRecord) -> None:
        rows = rows_that_may_go(record)
        self.slots: dict[SlotKey, int] = {}
        self.layers: dict[SlotKey, str] = {}
        self._own: dict[SlotKey, int] = {}  # what it shares with none
        self._whole: set[SlotKey] = set()  # those that stay as a whole
        sizes: dict[SlotKey, list[int]] = {}
        for row in rows:
            key = row.whole, row.forward
            self.layers[key] = row.layer
            self.slots[key] = self.slots.get(key, 0) + row.nbytes
            self._own[key] = self._own.get(key, 0) + row.nbytes - row.shared
            sizes.setdefault(key, []).extend(filter(None, row.sizes or (row.nbytes - row.shared,)))
            if row.slot not in _IN_PARTS:
                self._whole.add(key)
        self._sizes = {key: as_they_go(found) for key, found in sizes.items()}
        pieces = [(piece, [(name, piece.forward) for name in piece.slots]) for piece in record.shared_memory]
        self._pieces = [(piece, holders) for piece, holders in pieces if self.slots.keys() >= set(holders)]
        self._first: dict[SlotKey, list[tuple[SharedMemory, list[SlotKey]]]] = {}
        for piece, holders in self._pieces:
            self._first.setdefault(holders[0], []).append((piece, holders))
        going = set(rows)
        self.stuck = record.bytes_of(lambda row: row.fate is Fate.KEPT and row not in going)

    @property
    def largest(self) -> int:
        """Bytes of what goes as one, at most."""
        pieces = (piece.nbytes for piece, _ in self._pieces)
        return max([nbytes for sizes in self._sizes.values() for nbytes in sizes] + [*pieces], default=0)

    def leaving(self, choice: Collection[SlotKey]) -> Collection[SlotKey]:
        """A choice without the slots that stay as a whole for the sake of one that does."""
        if not self._pieces:
            return choice
        gone = set(choice)
        while True:
            stay = [
                key
                for _, holders in self._pieces
                if not gone.issuperset(holders)
                for key in holders
                if key in gone and key in self._whole
            ]
            if not stay:
                return gone
            gone.difference_update(stay)

    def moved(self, choice: Collection[SlotKey]) -> int:
        """Bytes that leave with a choice."""
        gone = self.leaving(choice)
        shared = sum(piece.nbytes for piece, holders in self._pieces if all(key in gone for key in holders))
        return sum(self._own[key] for key in gone) + shared

    def freed_by(self, key: SlotKey, choice: Collection[SlotKey]) -> int:
        """Bytes of those that stay if one slot of a choice stays."""
        if not self._pieces:
            return self.slots[key]
        return self.moved(choice) - self.moved([other for other in choice if other != key])

    def parcels(self, choice: Collection[SlotKey], *, in_pieces: bool = False) -> dict[Key, list[Parcel]]:
        """Of a choice, in the order in which slots were saved. ``in_pieces``: what nobody named not as one."""
        gone = self.leaving(choice)
        parcels: dict[Key, list[Parcel]] = {}
        for key, own in self._own.items():
            goes = key in gone
            mine = parcels.setdefault((self.layers[key], key[1]), [])
            mine += [Parcel(nbytes, goes) for nbytes in (self._sizes[key] if in_pieces and goes else [own]) if nbytes]
            mine += [
                Parcel(piece.nbytes, all(other in gone for other in holders))
                for piece, holders in self._first.get(key, ())
            ]
        return parcels
