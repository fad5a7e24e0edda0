"""The order in which the ops of Transformer Engine save tensors.

In: ops of Transformer Engine and their contexts after a forward. Out: `Layout` values. Keeps true: a release without a
row in `RELEASES`, or a saved layout that does not look as its row says, raises before anything is offloaded; positions are
counted from the end of the saved tuple and every entry's kind is checked on each forward. Does not: move bytes.

Note [Saved layouts], read from Transformer Engine 2.20.2 (`ops/basic/grouped_linear.py`, `ops/basic/activation.py`,
`ops/basic/swiglu.py`, `ops/fused/grouped_mlp.py`), with N = num_groups:

    unfused split    5 metadata, [router scales], N inputs, N weights
    unfused grouped  5 metadata, [router scales], 1 input, weights (N, or 1 if single_grouped_weight)
    scaled activ.    1 input, router scales
    Blackwell fused  7 metadata, fc1 input, fc1 weights, activation input, router scales, fc2 input, fc2 weights
                     (all on the context of FC1; the fc2 input is None where the backward recomputes it)
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformer_engine.pytorch.ops.op import OperationContext
from transformer_engine.pytorch.tensor import GroupedTensorStorage, NVFP4Quantizer

from te_offload.errors import UnknownLayoutError, UnsupportedReleaseError
from te_offload.ops.te_adapter.carry import (
    PLAIN_TYPES,
    STORAGES,
    Layout,
    Saved,
    Taken,
    buffers_of,
    parts_of_slot,
)
from te_offload.ops.te_adapter.storages import bare, format_of, is_wrapper
from te_offload.slots import SavedSlot, SaveState, SlotName

# Releases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """How one series of Transformer Engine releases lays out saved tensors; see Note [Saved layouts].

    Attributes:
        series: major and minor number, as in ``(2, 20)``.
        unfused_metadata: entries before the first tensor of an unfused GroupedLinear.
        fused_metadata: entries before the first tensor of the Blackwell fused grouped MLP.
    """

    series: tuple[int, int]
    unfused_metadata: int
    fused_metadata: int


RELEASES: tuple[Release, ...] = (Release(series=(2, 20), unfused_metadata=5, fused_metadata=7),)


@functools.cache
def installed_version() -> str:
    """Version of the installed Transformer Engine, such as ``"2.20.2"``."""
    return importlib.metadata.version("transformer-engine")


def require_supported_release(version: str | None = None) -> Release:
    """The row of `RELEASES` for a version (default: the installed one).

    Raises:
        UnsupportedReleaseError: no row covers it.
    """
    return _release_of(installed_version() if version is None else version)


@functools.cache
def _release_of(version: str) -> Release:
    series = tuple(int(part) if part.isdigit() else -1 for part in version.split(".")[:2])
    for release in RELEASES:
        if release.series == series:
            return release
    known = ", ".join(f"{row.series[0]}.{row.series[1]}.x" for row in RELEASES)
    raise UnsupportedReleaseError(
        f"Transformer Engine {version} is not supported: the order in which its ops save tensors is known for {known} "
        "alone. Install one of these, or add a row to RELEASES in te_offload/ops/te_adapter/layouts.py and tests of it."
    )


# Saved layouts -------------------------------------------------------------------------------------------------------


def _layout_error(op: torch.nn.Module, path: str, saved: Sequence[Saved], expected: str) -> UnknownLayoutError:
    found = ", ".join(_describe(entry) for entry in saved[:16]) + (", ..." if len(saved) > 16 else "")
    return UnknownLayoutError(
        f"{type(op).__name__} of Transformer Engine {installed_version()} saved {len(saved)} tensors on its {path} path "
        f"in a layout that te_offload does not know. Expected {expected}; found [{found}]. Nothing was offloaded. "
        "Use a release listed in te_offload.ops.te_adapter.RELEASES."
    )


def _describe(entry: Saved) -> str:
    if isinstance(entry, torch.Tensor):
        return f"{type(entry).__name__}{tuple(entry.shape)} {str(entry.dtype).removeprefix('torch.')}"
    return "None" if entry is None else type(entry).__name__


def _are_metadata(entries: Sequence[Saved]) -> bool:
    """Whether all are tensors of integers, or None."""
    found = [entry for entry in entries if entry is not None]
    return False not in [isinstance(entry, torch.Tensor) and not entry.is_floating_point() for entry in found]


def _is_values(entry: Saved, *, none: bool) -> bool:
    """A high-precision tensor or a quantized storage; or None, where ``none`` allows it."""
    if entry is None:
        return none
    if isinstance(entry, STORAGES):
        return True
    return isinstance(entry, torch.Tensor) and entry.is_floating_point()


def _are_values(entries: Sequence[Saved]) -> bool:
    """`_is_values` or None for hundreds of entries of few types: each type once."""
    if len(entries) == 1:
        return _is_values(entries[0], none=True)
    kinds = list(map(type, entries))
    return False not in [_is_values(entries[kinds.index(kind)], none=True) for kind in set(kinds)]


def _is_scales(entry: Saved) -> bool:
    return entry is None or (isinstance(entry, torch.Tensor) and entry.is_floating_point())


def _num_weights(linear: Any) -> int:
    return 1 if linear.single_grouped_weight else int(linear.num_groups)


def _slot(name: SlotName | None, entries: Sequence[Saved], exempt: Sequence[Saved], *, absent: SaveState) -> SavedSlot:
    going, staying = parts_of_slot(entries)
    state = SaveState.SAVED if any(entry is not None for entry in entries) else absent
    return SavedSlot(name, state, tuple(going), (*_parts_of(exempt), *staying), format=format_of(entries))


def _parts_of(entries: Sequence[Saved]) -> Sequence[torch.Tensor]:
    """`buffers_of`, without its work where there is no storage to take apart."""
    if set(map(type, entries)) <= PLAIN_TYPES:
        return [entry for entry in entries if entry is not None]
    return buffers_of(*entries)


_Group = tuple[SlotName | None, range, Sequence[range], SaveState]  # a slot: name, entries, its exempt ones, if absent


def _layout(ctx: OperationContext, groups: Sequence[_Group], *, take: bool) -> Layout:
    saved = ctx.to_save
    assert saved is not None
    saved = _without_wrappers(ctx, saved, groups)
    exempt = [places for _, _, groups_of_slot, _ in groups for places in groups_of_slot]
    if not take:
        layout = Layout(ctx, exempt, None)
        layout.slots = tuple(
            _slot(
                name,
                saved[places.start : places.stop],
                [entry for group in groups_of_slot for entry in saved[group.start : group.stop]],
                absent=absent,
            )
            for name, places, groups_of_slot, absent in groups
        )
        return layout
    formats = [format_of(saved[places.start : places.stop]) for _, places, _, _ in groups]
    taken = [Taken(places, saved[places.start : places.stop]) for _, places, _, _ in groups]
    layout = Layout(ctx, exempt, taken)
    carried: Callable[[], int] | None = layout.carried_bytes
    slots = []
    for (name, _, _, absent), part, kind in zip(groups, taken, formats, strict=True):
        state = SaveState.SAVED if part.buffers else absent
        slots.append(SavedSlot(name, state, part.buffers, (), carried, format=kind))
        carried = None
    layout.slots = slots
    return layout


def _without_wrappers(ctx: OperationContext, saved: Sequence[Saved], groups: Sequence[_Group]) -> Sequence[Saved]:
    """What was saved, quantized wrappers in slots as storages, which are what the context then has."""
    kinds = [kind for kind in set(map(type, saved)) if kind not in PLAIN_TYPES and is_wrapper(kind)]
    if not kinds:
        return saved
    found = list(saved)
    for _, places, _, _ in groups:
        for place in places:
            if type(found[place]) in kinds:
                found[place] = bare(found[place])
    ctx.to_save = tuple(found)
    return found


def read_grouped_linear(op: Any, ctx: OperationContext, *, take: bool = False) -> Layout | None:
    """The slot of an unfused GroupedLinear after its forward, or ``None`` if no backward needs anything.

    Args:
        op, ctx: the op and its context.
        take: someone will take the slot, so that all of it passes no hook; `Layout.carry` has to follow.

    Raises:
        UnknownLayoutError: the saved tuple is not the one of Note [Saved layouts].
    """
    saved = ctx.to_save
    if saved is None:
        return None
    release = require_supported_release()
    grouped = bool(getattr(ctx, "use_grouped_tensor_path", False))
    inputs, weights = (1, _num_weights(op)) if grouped else (op.num_groups, op.num_groups)
    if getattr(ctx, "te_offload_weights_apart", False):
        weights = 0
    scales = 1 if op._scale_bias else 0
    rebuilt = bool(getattr(ctx, "te_offload_rebuilt", False))
    end_of_metadata, end_of_scales, groups = _unfused_places(len(saved), scales, inputs, weights, rebuilt)
    kinds_ok = (
        end_of_metadata == release.unfused_metadata
        and _are_metadata(saved[:end_of_metadata])
        and (not scales or _is_scales(saved[end_of_metadata]))
        and _are_values(saved[end_of_scales:])
    )
    if not kinds_ok:
        path = "unfused grouped" if grouped else "unfused split"
        metadata = release.unfused_metadata
        expected = f"{metadata} of metadata, {scales} of router scales, {inputs} of input, {weights} of weights"
        raise _layout_error(op, path, saved, expected)
    return _layout(ctx, groups, take=take)


@functools.lru_cache(maxsize=256)
def _unfused_places(
    count: int, scales: int, inputs: int, weights: int, rebuilt: bool
) -> tuple[int, int, tuple[_Group, ...]]:
    """Where metadata and router scales of an unfused GroupedLinear end, and its slot; ``count`` entries in all. The input
    may be absent because te_offload's fused op rebuilds it, which saves in this layout too, without weights.
    """
    end_of_input = count - weights
    end_of_scales = end_of_input - inputs
    exempt = (range(end_of_scales), range(end_of_input, count))
    absent = SaveState.RECOMPUTED if rebuilt else SaveState.NOT_SAVED
    group = (None, range(end_of_scales, end_of_input), exempt, absent)
    return end_of_scales - scales, end_of_scales, (group,)


_ACTIVATION: tuple[_Group, ...] = ((SlotName.ACT_INPUT, range(1), (range(1, 2),), SaveState.NOT_SAVED),)
_ACTIVATION_REBUILT: tuple[_Group, ...] = ((SlotName.ACT_INPUT, range(1), (range(1, 2),), SaveState.RECOMPUTED),)
_ACTIVATION_IN_FP8: tuple[_Group, ...] = ((SlotName.ACT_INPUT, range(2), (range(2, 3),), SaveState.NOT_SAVED),)


def read_activation(op: Any, ctx: OperationContext, *, take: bool = False) -> Layout | None:
    """The slot of an unfused scaled activation after its forward, or ``None`` if no backward needs anything. The input may
    be absent because te_offload's fused op rebuilds it, which saves in this layout too.

    Raises:
        UnknownLayoutError: the saved tuple is not the one of Note [Saved layouts].
    """
    saved = ctx.to_save
    if saved is None:
        return None
    require_supported_release()
    rebuilt = bool(getattr(ctx, "te_offload_rebuilt", False))
    if getattr(ctx, "te_offload_act_input", False):  # `save_act_input` has looked at the layout
        return _layout(ctx, _ACTIVATION_IN_FP8, take=take)
    if len(saved) != 2 or not _is_values(saved[0], none=rebuilt) or not _is_scales(saved[1]):
        raise _layout_error(op, "unfused", saved, "1 input, 1 of router scales")
    return _layout(ctx, _ACTIVATION_REBUILT if rebuilt else _ACTIVATION, take=take)


def save_act_input(
    ctx: OperationContext, quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Have a context keep an unfused scaled activation's input as numbers and scales, if it keeps it at all; what it keeps
    otherwise is as `read_activation` reads it.
    """
    saved = ctx.to_save
    if saved is None or len(saved) != 2 or type(saved[0]) is not torch.Tensor:
        return
    ctx.save_for_backward(*quantize(saved[0]), saved[1])
    ctx.te_offload_act_input = True


def restore_act_input(
    ctx: OperationContext, dequantize: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
) -> None:
    """Undo `save_act_input` before the backward, if it was done."""
    if getattr(ctx, "te_offload_act_input", False):
        data, inverse, scales = ctx.saved_tensors
        ctx.saved_tensors = (dequantize(data, inverse, ctx.dtype), scales)


def drop_unread_rows(basic_ops: Sequence[Any], ctxs: Sequence[OperationContext], wgrad_kernel: Any) -> None:
    """Let go of what of the inputs no backward of the Blackwell fused op reads: in NVFP4 Transformer Engine saves both
    directions, for GEMMs that take a whole grouped tensor; its own wgrad kernel reads columns (`_cudnn_compute_wgrad`).

    Args:
        basic_ops, ctxs: the three ops and their contexts, after a forward.
        wgrad_kernel: the one that the backward will use; ``None``: it has none, and all stays.
    """
    saved = ctxs[0].to_save
    if saved is None or wgrad_kernel is None or basic_ops[0].num_groups == 1:  # a single expert has GEMMs of its own
        return
    at_fc1_input, _, at_fc2_input = fused_places(basic_ops, len(saved))
    if at_fc1_input < 0:  # a layout that `read_fused` will refuse
        return
    for entry in (saved[at_fc1_input], saved[at_fc2_input]):
        if not isinstance(entry, GroupedTensorStorage) or not isinstance(entry.quantizer, NVFP4Quantizer):
            continue
        if entry.columnwise_data is not None and entry.columnwise_amax is not None:
            entry.rowwise_data = entry.scale_inv = entry.amax = None


def fused_places(basic_ops: Sequence[Any], count: int) -> tuple[int, int, int]:
    """Where FC1's input, the activation's input and FC2's input lie in the ``count`` entries that the Blackwell fused op
    saves; weights are between the first two, and behind the last one. Negative: they are too few.
    """
    at_fc2_input = count - _num_weights(basic_ops[2]) - 1
    at_act_input = at_fc2_input - 2
    return at_act_input - _num_weights(basic_ops[0]) - 1, at_act_input, at_fc2_input


def read_fused(basic_ops: Sequence[Any], ctxs: Sequence[OperationContext], *, take: bool = False) -> Layout | None:
    """The slots of FC1, activation and FC2 after a forward of the Blackwell fused op, or ``None`` if nothing was saved.

    Args:
        basic_ops, ctxs: the three ops and their contexts.
        take: as in `read_grouped_linear`; on the context of FC1.

    Raises:
        UnknownLayoutError: the saved tuple is not the one of Note [Saved layouts].
    """
    fc1, _, fc2 = basic_ops
    saved = ctxs[0].to_save
    if saved is None:
        return None
    release = require_supported_release()
    weights1, weights2 = _num_weights(fc1), _num_weights(fc2)
    expected = (
        f"{release.fused_metadata} of metadata, fc1 input, {weights1} of fc1 weights, activation input, router scales, "
        f"fc2 input or None, {weights2} of fc2 weights; nothing on the contexts of the other two ops"
    )
    at_fc1_input, at_act_input, at_fc2_input = fused_places(basic_ops, len(saved))
    at_weights1, at_scales = at_fc1_input + 1, at_act_input + 1
    kinds_ok = (
        at_fc1_input == release.fused_metadata
        and all(ctx.to_save is None for ctx in ctxs[1:])
        and _are_metadata(saved[:at_fc1_input])
        and _is_values(saved[at_fc1_input], none=True)
        and _are_values(saved[at_weights1:at_act_input])
        and isinstance(saved[at_act_input], torch.Tensor)
        and saved[at_act_input].is_floating_point()
        and _is_scales(saved[at_scales])
        and _is_values(saved[at_fc2_input], none=True)
        and _are_values(saved[at_fc2_input + 1 :])
    )
    if not kinds_ok:
        raise _layout_error(fc1, "Blackwell fused", saved, expected)
    rebuilt = bool(getattr(ctxs[2], "recompute_input_from_dsrelu", False))
    not_saved = SaveState.NOT_SAVED
    groups: tuple[_Group, ...] = (
        (
            SlotName.FC1_INPUT,
            range(at_fc1_input, at_weights1),
            (range(at_fc1_input), range(at_weights1, at_act_input)),
            not_saved,
        ),
        (SlotName.ACT_INPUT, range(at_act_input, at_scales), (range(at_scales, at_fc2_input),), not_saved),
        (
            SlotName.FC2_INPUT,
            range(at_fc2_input, at_fc2_input + 1),
            (range(at_fc2_input + 1, len(saved)),),
            SaveState.RECOMPUTED if rebuilt else not_saved,
        ),
    )
    return _layout(ctxs[0], groups, take=take)
