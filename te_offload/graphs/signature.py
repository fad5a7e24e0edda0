"""What a graph was captured for: the structure, shapes and values of its inputs, and the addresses of those that stay.

In: positional and keyword arguments, nested as they like. Out: `Signature`, a frozen value, which says how other arguments
differ. Keeps true: every tensor is compared with the one that comes in, never with itself; every value is compared, each
time. Does not: read tensors.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from te_offload.errors import ArgumentError


class Kind(enum.Enum):
    """What becomes of an input."""

    MOVES = "is copied into a buffer of the graph's before each replay"
    STAYS = "is read where it lies"
    VALUE = "is part of the graph"


@dataclass(frozen=True)
class Leaf:
    """One input.

    Attributes:
        name: ``args[0]``, ``kwargs['x']``. kind: see `Kind`.
        form: shape, dtype and device of a tensor. address: of one that stays. value: of what is no tensor.
    """

    name: str
    kind: Kind
    form: tuple[torch.Size, torch.dtype, torch.device] | None = None
    address: int = 0
    value: Any = None

    def difference(self, found: Any, *, placed: bool = True) -> str | None:
        """How an input differs from this one, but for its place unless ``placed``; ``None`` if the graph can take it."""
        if self.kind is Kind.VALUE:
            same = type(found) is type(self.value) and (found is self.value or found == self.value)
            return None if same else f"{self.name} was {self.value!r} and is {found!r}"
        if not isinstance(found, torch.Tensor):
            return f"{self.name} was a tensor and is {type(found).__name__}"
        form = found.shape, found.dtype, found.device
        if form != self.form:
            assert self.form is not None
            return f"{self.name} was {_text(*self.form)} and is {_text(*form)}"
        if placed and self.kind is Kind.STAYS and found.data_ptr() != self.address:
            return f"{self.name} stays in place, but was at {self.address:#x} and is at {found.data_ptr():#x}"
        return None


def _text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{tuple(shape)} {dtype} on {device}"


@dataclass(frozen=True)
class Signature:
    """Inputs of a graph.

    Attributes:
        structure: how they nest. leaves: each of them.
    """

    structure: Any
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], stay: Sequence[torch.Tensor], device: torch.device
    ) -> Signature:
        """Of some arguments.

        Args:
            args, kwargs: of a call. stay: tensors among them that stay in place, as parameters always do.
            device: of the graph.

        Raises:
            ArgumentError: a tensor on another device, or one in ``stay`` that is no input.
        """
        paths, structure = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        staying = {id(tensor) for tensor in stay}
        leaves = []
        for path, found in paths:
            name = ("args" if str(path[0]) == "[0]" else "kwargs") + pytree.keystr(path[1:])
            if not isinstance(found, torch.Tensor):
                leaves.append(Leaf(name, Kind.VALUE, value=found))
                continue
            if found.device != device:
                raise ArgumentError(
                    f"{name} is on {found.device}, but the graph on {device}. Move it there before the call, or make it "
                    "a value."
                )
            kind = Kind.STAYS if id(found) in staying or isinstance(found, torch.nn.Parameter) else Kind.MOVES
            staying.discard(id(found))
            form = found.shape, found.dtype, found.device
            leaves.append(Leaf(name, kind, form, found.data_ptr() if kind is Kind.STAYS else 0))
        if staying:
            raise ArgumentError(f"{len(staying)} tensors of stay are not among the inputs. Give the very objects.")
        return cls(structure, tuple(leaves))

    def placed(self, found: Sequence[Any]) -> Signature:
        """The same, with what stays where it is now.

        Args:
            found: the leaves.
        """
        leaves = [
            dataclasses.replace(leaf, address=one.data_ptr()) if leaf.kind is Kind.STAYS else leaf
            for leaf, one in zip(self.leaves, found, strict=True)
        ]
        return Signature(self.structure, tuple(leaves))

    def difference(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, placed: bool = True
    ) -> tuple[str | None, list[Any]]:
        """How other arguments differ, ``None`` if the graph can take them, and their leaves. Places count if ``placed``."""
        found, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if structure != self.structure:
            return f"the inputs nest otherwise: {structure} instead of {self.structure}", found
        for leaf, one in zip(self.leaves, found, strict=True):
            difference = leaf.difference(one, placed=placed)
            if difference is not None:
                return difference, found
        return None, found
