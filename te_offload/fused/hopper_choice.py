"""Which windows the fused grouped MLP on Hopper takes, and the fusion function that puts it in their place.

In: windows of GroupedLinear, a scaled activation, GroupedLinear with an op of `te_offload.ops`, or asked for. Out: fused
ops; of the others a reason. Keeps true: structure, card and packages are all that it asks, no shape of a call's (`judge`
does). Does not: compute.

``TE_OFFLOAD_FUSED_MLP``, when a Sequential runs first: ``1`` takes windows on Hopper, ``0`` takes none, ``reference`` takes
them everywhere and computes in torch arithmetic. Unset is ``1`` where the kernels' packages are of the versions tested.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from te_offload.fused import activations, blackwell, machine, quantized
from te_offload.fused.calls import calls_of
from te_offload.fused.hopper import HopperGroupedMLP
from te_offload.fused.judge import SWITCH
from te_offload.fused.support import Support
from te_offload.fused.window import Window, find_windows
from te_offload.ops import te_adapter

_ALIGNED = 8  # 16-bit elements in TMA's 16 bytes


def explain(window: Window, recipe: Any = None) -> Support:
    """Whether the fused op takes a window, as far as its structure says.

    Args:
        window: from `find_windows`. recipe: a Transformer Engine recipe; ``None``: no quantization.
    """
    mode = os.environ.get(SWITCH, "1")
    if mode not in ("1", "reference"):
        return Support(False, f"{SWITCH} is {mode}")
    reason = None if mode == "reference" else machine.reason_against(SWITCH, quantizes=recipe is not None)
    by_blocks = recipe is not None and te_adapter.block_format(recipe) is not None
    reference = mode == "reference"
    reason = reason or activations.reason_against(
        window, quantizes=recipe is not None, by_blocks=by_blocks, reference=reference
    )
    reason = reason or _structure_reason(window)
    if reason is None and recipe is not None:
        linears = ("FC1", window.fc1), ("FC2", window.fc2)
        reason = quantized.structure_reason(linears, recipe, reference=mode == "reference")
    if reason is None and mode != "reference":
        reason = machine.broken_package(quantizes=recipe is not None)
    return Support(True) if reason is None else Support(False, reason)


def _structure_reason(window: Window) -> str | None:
    if window.needs_ops is not None:
        return window.needs_ops
    for name, linear in (("FC1", window.fc1), ("FC2", window.fc2)):
        op: Any = linear
        if name == "FC1" and op._scale_bias:
            return "FC1 scales its bias"
        if op.in_features % _ALIGNED or op.out_features % _ALIGNED:
            return f"{name} is {op.in_features} x {op.out_features}, which are not both multiples of {_ALIGNED}"
    fc1: Any = window.fc1
    fc2: Any = window.fc2
    halves = 2 if activations.is_gated(window.activation) else 1
    if (fc1.num_groups, fc1.out_features) != (fc2.num_groups, halves * fc2.in_features):
        return (
            f"FC1 gives {fc1.num_groups} experts {fc1.out_features} columns, FC2 takes {fc2.num_groups} experts of "
            f"{fc2.in_features}{' for twice as many' if halves == 2 else ''}"
        )
    return None


def fuse_windows(ops: list[Any], *, recipe: Any = None, **_: Any) -> list[Any]:
    """The fusion function, as `te.ops.register_forward_backward_fusion` wants it."""
    fused: list[Any] = []
    position = 0
    for window in find_windows(ops):
        if window.has_slot_owner or window.asked_for:
            support = explain(window, recipe)
            calls_of(window.fc1).reason = reason_unfused(window, recipe)
        else:
            support = Support(False, "its ops are of plain te.ops, and te_offload.fused.fuse was not called")
            calls_of(window.fc1).reason = support.reason
        if support.ok:
            fused += [*ops[position : window.start], HopperGroupedMLP(window.ops)]
            position = window.start + 3
    return fused + ops[position:]


def reason_unfused(window: Window, recipe: Any = None) -> str:
    """Why neither this op nor Transformer Engine's for Blackwell takes a window; empty if one does."""
    reasons = []
    for path, support in (("Blackwell", blackwell.explain(window, recipe)), ("Hopper", explain(window, recipe))):
        if support.ok:
            return ""
        reasons.append(f"{path}: {support.reason}")
    return "; ".join(reasons)


@functools.cache
def register() -> None:
    """Put the fusion function before Transformer Engine's own. Does nothing the second time."""
    te_adapter.register_joint_fusion(fuse_windows)
    te_adapter.use_stand_ins(HopperGroupedMLP)
