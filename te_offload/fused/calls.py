"""How the calls of each grouped-MLP window ran: fused, or op by op and why.

In: fused ops and fusion functions count here. Out: `Fusion` values, for a report. Keeps true: counts are kept on the
window's first op, so they go with it, and a copy of it goes on counting for itself. Does not: decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformer_engine.pytorch as te

from te_offload.fused.window import Window, find_windows
from te_offload.ops.inside import named_parts

_CALLS = "_te_offload_calls"


@dataclass
class Calls:
    """Counts of one window: calls that ran fused, calls that a fused op handed over, and why the last one was, or why no
    fused op takes the window; bytes of quantized weights that the last one that ran fused kept for its backward.
    """

    fused: int = 0
    handed_over: int = 0
    reason: str = ""
    kept_weight_bytes: int = 0


def calls_of(fc1: torch.nn.Module) -> Calls:
    """The counts of the window that begins with an op."""
    calls = fc1.__dict__.get(_CALLS)
    if calls is None:
        calls = fc1.__dict__[_CALLS] = Calls()
    found: Calls = calls
    return found


@dataclass(frozen=True)
class Fusion:
    """One window of a module.

    Attributes:
        name: of its first op in the module.
        fused, handed_over: forwards so far that ran fused, and that a fused op handed over to the three ops.
        reason: why the last one was handed over, or why no fused op takes the window; empty if all ran fused.
        kept_weight_bytes: of quantized weights that the last one that ran fused keeps on the GPU until its backward.
    """

    name: str
    fused: int
    handed_over: int
    reason: str
    kept_weight_bytes: int = 0


def fusions_in(module: torch.nn.Module) -> list[Fusion]:
    """Every window of a module, in order."""
    found = []
    for name, sequential in named_parts(module):
        if isinstance(sequential, te.ops.Sequential):
            children = list(sequential.named_children())
            for window in find_windows([op for _, op in children]):
                found.append(_fusion(".".join(filter(None, (name, children[window.start][0]))), window))
    return found


def _fusion(name: str, window: Window) -> Fusion:
    calls = calls_of(window.fc1)
    reason = calls.reason if calls.fused or calls.reason else "it has not run"
    return Fusion(name, calls.fused, calls.handed_over, reason, calls.kept_weight_bytes)
