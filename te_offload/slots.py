"""The vocabulary: slots, fates, and what an op tells about the tensors that it saved.

In: nothing. Out: the types that the rooms hand to one another. Keeps true: frozen values, no device and no stream.
Does not: know Transformer Engine (ops/te_adapter.py does) or move a byte (offload/ does).

A *slot* is the input that an op saves for its backward: one tensor, one per expert, or the buffers of a quantized
storage, but always one thing to the user. Its *fate* is what happened to it in one step.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch


class SlotName(str, enum.Enum):
    """Names of slots, each owned by the op whose input it is."""

    FC1_INPUT = "fc1_input"
    ACT_INPUT = "act_input"
    FC2_INPUT = "fc2_input"
    GROUPED_LINEAR_INPUT = "grouped_linear_input"
    """Input of a GroupedLinear that stands in no grouped-MLP window."""
    REGION = "region"
    """What a layer saved inside a ``with session.region(...)``."""
    OTHER = "other"
    """Tensors that a layer saved outside the ops of te_offload."""


def slot_title(layer: str, op: str, slot: SlotName) -> str:
    """``layer/op.slot``: the one name of a slot in errors, reports and profiler ranges. ``op`` may be empty."""
    return f"{layer}/{op}.{slot.value}" if op else f"{layer}/{slot.value}"


TENSORS_OP = "grouped_mlp"
"""What an op of tensors alone (`te_offload.functional.grouped_mlp`) is called in titles: nobody knows its place."""


class Fate(str, enum.Enum):
    """What happened to a slot in one step."""

    OFFLOADED = "offloaded"
    KEPT = "kept"
    RECOMPUTED = "recomputed"
    NOT_SAVED = "not saved"


class Reason(str, enum.Enum):
    """Why a slot was not offloaded."""

    NONE = ""
    ASKED = "asked by the user"
    MARKED = "marked not to go"
    TOO_SMALL = "too small"
    NO_ROOM = "no room on the host"
    PLAN = "kept by the plan"
    ALIAS = "shares memory that stays"
    PARAMETER = "a parameter's memory"
    LEAF = "autograd holds it"
    OTHER_DEVICE = "on another device"
    NOT_PLAIN = "not a dense tensor"
    IN_BACKWARD = "saved in a backward"
    IN_CAPTURE = "in a CUDA graph's capture"
    FOREIGN_HOOK = "another hook takes it"
    CHECKPOINT = "by a checkpoint"
    GRAPH_GONE = "its graph is gone"
    DISCARDED = "its memory was given up"
    DISABLED = "session disabled"
    REFUSED = "its copy was refused"
    FROZEN = "no gradient needs it"
    REBUILT = "the backward rebuilds it"
    CROSSES_BORDER = "crosses the graph's border"
    NO_VIRTUAL_MEMORY = "in a graph without virtual memory"


FORMATS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "FP8 by row",
    torch.float8_e5m2: "FP8 by row",
}


class SaveState(str, enum.Enum):
    """Whether an op's forward saved its slot."""

    SAVED = "saved"
    RECOMPUTED = "recomputed"
    NOT_SAVED = "not saved"


class SavedSlot(NamedTuple):
    """What one forward of one op saved.

    Attributes:
        name: the slot's name where the op's path knows its place in a window, else ``None``.
        state: whether the op's input was saved, will be recomputed, or is not needed.
        buffers: the tensors that hold the slot, quantized storages taken apart (data and scales).
        exempt: tensors saved beside it that are never offloaded: weights and their quantized copies, split sizes,
            offsets, router scales, the few bytes of scales of a quantized storage.
        carried_bytes: counts the bytes of exempt tensors that do not pass the saved-tensor hooks at all; to be asked
            while the forward runs. ``None``: there are none.
        stays: why the slot does not go in any case, where a layer's graph has it; ``None``: it may.
        nbytes: of a slot that does not go in any case, whose buffers are not given.
        ready: a `Mark` of the moment since when the buffers are there, in a graph that was replayed; ``None``: now.
        format: of the numbers, and for which direction of a GEMM, such as ``"MXFP8 by column"``.
    """

    name: SlotName | None
    state: SaveState
    buffers: tuple[torch.Tensor, ...]
    exempt: tuple[torch.Tensor, ...]
    carried_bytes: Callable[[], int] | None = None
    stays: Reason | None = None
    nbytes: int = 0
    ready: Any = None
    format: str = ""


class Watch(enum.Enum):
    """How an observer follows a forward that runs now."""

    NOT = "not"
    """It does not look."""
    HOOKS = "through hooks"
    """It wants to be told of slots; their tensors pass the saved-tensor hooks."""
    TAKES = "takes"
    """It takes the tensors of slots from the op, since its own hook alone would see them."""


class SlotHandle(Protocol):
    """Stands for the buffers of a slot between its op's forward and backward. Its owner keeps nothing else of them."""

    @property
    def name(self) -> str:
        """The slot's, for messages."""

    @property
    def is_here(self) -> bool:
        """Whether the buffers are on the device, so that `take` has nothing to wait for."""

    def take(self) -> list[torch.Tensor]:
        """The buffers, ready for work queued from now on. Called once."""


class SlotObserver(abc.ABC):
    """Someone who wants to know which saved tensors are which slot: an offload session, or one forward in it."""

    @abc.abstractmethod
    def watch(self) -> Watch:
        """How it follows a forward that runs now."""

    @abc.abstractmethod
    def slot_saved(self, op: torch.nn.Module, saved: SavedSlot, *, take: bool) -> SlotHandle | None:
        """Called in the forward of ``op``, before its tensors reach the saved-tensor hooks.

        Args:
            op: who saved. saved: what. take: the op asks for a handle in place of the buffers.
        """


class StorageObserver(abc.ABC):
    """Whose hook sees saved tensors, and who wants to know which storages are which slot."""

    @abc.abstractmethod
    def name_storages(self, op: str, slots: Iterable[tuple[SlotName, torch.Tensor, bool]]) -> None:
        """Called in the forward of an op of tensors alone, to which nobody could be attached, before its tensors reach the
        saved-tensor hooks: whoever saves a storage of these tensors, saves that slot.

        Args:
            op: a name for it. slots: of each its name, a tensor, and whether it is to stay on the device.
        """
