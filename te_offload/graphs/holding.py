"""Outputs of graphs that may be held as long as one likes: no replay writes where somebody still reads.

In: what a call returns, and the inputs of the next one. Out: tensors over the graphs' memory, or copies; why a call must
not be replayed. Keeps true: whoever holds an output, or a view of it, has its numbers for good. Does not: replay.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch

PATIENCE = 3  # calls after which new addresses are believed, and what is held is taken to be held for good


class Holding:
    """Follows the outputs of one graphed module.

    Args:
        eager: runs a call without graphs, given the list of its inputs, which it may empty.
        static: which inputs stay in place. saved: which outputs another graph reads.

    Attributes:
        eager: calls that ran without graphs, by reason. copied: outputs of which copies are returned.
    """

    def __init__(self, eager: Callable[[list[Any]], Any], static: Sequence[bool], saved: Sequence[int]) -> None:
        self.eager: collections.Counter[str] = collections.Counter()
        self.copied: set[int] = set()
        self._run = eager
        self._static = [number for number, stays in enumerate(static) if stays]
        self._saved = frozenset(saved)
        self._places: list[int] | None = None  # of the static inputs
        self._moved: tuple[list[int], int] = ([], 0)  # other places, and how often they came one after the other
        self._held = 0  # calls that found an output held, one after the other
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}  # of outputs, and who holds them in any case

    def why_eagerly(self, inputs: Sequence[Any]) -> str | None:
        """Why a call must not be replayed; ``None`` if it may."""
        held = self.find_held()
        self._held = self._held + 1 if held else 0
        if held:
            waits = self._saved.intersection(held)
            return "a backward is still to come" if waits else "an output of an earlier call is held"
        if self._places is not None:
            places = self.places_of(inputs)
            if places != self._places:
                before, times = self._moved
                self._moved = places, times + 1 if places == before else 1
                if self._moved[1] < PATIENCE:
                    return "a static input is somewhere else"
                self._places = None
        return None

    @property
    def saved(self) -> frozenset[int]:
        """Which outputs another graph reads."""
        return self._saved

    def find_held(self) -> list[int]:
        """Outputs that somebody holds; of those that wait for no other graph copies are returned from now on."""
        held = [number for number, (storage, count) in self._storages.items() if users_of(storage) > count]
        self.copied.update(number for number in held if number not in self._saved)
        return held

    @property
    def is_stuck(self) -> bool:
        """Whether what is held has been held so long that the graphs had better leave it to its holder."""
        return self._held >= PATIENCE

    def start_over(self) -> None:
        """The graphs are gone; what is held is its holder's alone."""
        self._held, self._storages, self._places = 0, {}, None

    def places_of(self, inputs: Sequence[Any]) -> list[int]:
        """Where the static inputs of a call lie."""
        return [inputs[number].data_ptr() for number in self._static]

    def run_eagerly(self, why: str, inputs: list[Any]) -> Any:
        """Run a call without graphs."""
        self.eager[why] += 1
        return self._run(inputs)

    def hand_out(self, outputs: Sequence[Any], leased: Sequence[bool], places: list[int], *, copies: bool) -> list[Any]:
        """What a replayed call returns.

        Args:
            outputs: the graphs' own. leased: which lie in the graphs' memory. places: of the static inputs.
            copies: return copies of all, since not every part is a graph yet.
        """
        self._places = None if copies else places
        found = list(outputs)
        self._storages = {}
        for number, (lies, one) in enumerate(zip(leased, outputs, strict=True)):
            if not lies or not isinstance(one, torch.Tensor):
                continue
            if copies or number in self.copied:
                found[number] = one.clone()
            else:
                storage = one.untyped_storage()
                self._storages[number] = storage, users_of(storage)
        for number in self._storages:
            found[number] = found[number].detach()
        return found


def users_of(storage: torch.UntypedStorage) -> int:
    """How many hold a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))
