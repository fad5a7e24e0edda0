"""Marks on tensors, and the switches of Transformer Engine's own offloading.

In: saved tensors. Out: marks, and answers about other engines. Keeps true: a switch is put back as it was, also after an
exception. Does not: offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch import cpu_offload, cpu_offload_v1

from te_offload.slots import SavedSlot

NOT_OFFLOAD = "_TE_do_not_offload"  # the attribute that `mark_not_offload` sets
_V1_MARKS = ("activation_offloading", "needs_force_clear")
_CHECKPOINTS = ("torch.utils.checkpoint", "transformer_engine.pytorch.distributed")


def mark_exempt_and_kept(slot: SavedSlot, *, keep_input: bool) -> None:
    """Mark what must stay on the GPU in the way that Transformer Engine's v2 context and Megatron's manager read.

    Weights, their quantized copies and metadata always; every buffer of the slot if ``keep_input``. The buffers are
    marked one by one because a mark on a quantized wrapper, or on a base, does not reach its parts. The attribute is the
    one that `mark_not_offload` sets; it is set here directly because that function would take the same storages apart
    again.

    The v1 context (``NVTE_CPU_OFFLOAD_V1=1``) does not read that mark. It takes what Transformer Engine's own op has marked
    to go, and empties part of it in place, the caller's split sizes among them; from what must stay those marks go.
    """
    staying = (*slot.exempt, *slot.buffers) if keep_input else slot.exempt
    for tensor in staying:
        tensor._TE_do_not_offload = True  # type: ignore[attr-defined]
    if cpu_offload.NVTE_CPU_OFFLOAD_V1:
        for tensor in staying:
            for mark in _V1_MARKS:
                tensor.__dict__.pop(mark, None)


def mark_activations(*tensors: torch.Tensor | None) -> None:
    """Say of tensors that they may go, as Transformer Engine's ops do; only its v1 context asks."""
    if cpu_offload.NVTE_CPU_OFFLOAD_V1 and cpu_offload_v1.is_cpu_offload_enabled():
        cpu_offload_v1.mark_activation_offload(*tensors)


def is_marked_not_offload(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries the mark of `mark_not_offload`."""
    return bool(getattr(tensor, NOT_OFFLOAD, False))


def any_marked_not_offload(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of some tensors carries the mark of `mark_not_offload`."""
    return True in [getattr(tensor, NOT_OFFLOAD, False) for tensor in tensors]


def saved_tensor_hook_active() -> bool:
    """Whether a saved-tensor hook of anyone will see what is saved now; without one no mark can have an effect."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def saved_tensor_hook_owner() -> object:
    """The object whose method is the innermost pack hook; ``None`` if it is no method, or there is none."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else getattr(top[0], "__self__", None)


def checkpoint_hook_active() -> bool:
    """Whether what is saved now is a checkpoint's, torch's or Transformer Engine's, that drops it and computes it again.

    Such a checkpoint (``use_reentrant=False``) pushes a hook for saved tensors, known by where it is written, since it has
    no public name. A reentrant one runs without gradients, and nothing is saved in it.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if top is None or getattr(top[0], "__module__", None) not in _CHECKPOINTS:
        return False
    return top[0].__qualname__.startswith("_checkpoint_hook.")


def offload_context_active() -> str | None:
    """The name of Transformer Engine's own offloading context if the caller stands inside one, else ``None``."""
    if cpu_offload.OFFLOAD_SYNCHRONIZER not in (None, _OURS):
        return "transformer_engine.pytorch.get_cpu_offload_context (v2)"
    if cpu_offload_v1.is_cpu_offload_enabled():
        return "transformer_engine.pytorch.get_cpu_offload_context (v1)"
    return None


class _Ours:
    """Stands where Transformer Engine keeps its own synchronizer while an `OffloadSession` takes what is saved."""


_OURS = _Ours()


class OffloadSwitch:
    """Transformer Engine's process-wide switch that tells its modules that offloading is on; re-entrant.

    With it on, its modules mark their weights' copies to stay and keep bulk allocations out of the way, as under its own
    context. It is put back as it was, also after an exception. Without effect under ``NVTE_CPU_OFFLOAD_V1=1``.

    Args:
        on: ``False`` turns it off inside: ops that declare their slots themselves need none of what it triggers.
    """

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = cpu_offload.OFFLOAD_SYNCHRONIZER
        if self._on or self._before is _OURS:  # another engine's is left alone
            cpu_offload.OFFLOAD_SYNCHRONIZER = _OURS if self._on else None

    def __exit__(self, *_: object) -> None:
        cpu_offload.OFFLOAD_SYNCHRONIZER = self._before


def keep_after_backward(*tensors: torch.Tensor | None) -> None:
    """Stop Transformer Engine from emptying tensors after backward; on the CPU its way to do so needs a driver."""
    for tensor in tensors:
        if tensor is not None:
            tensor._do_not_clear = True  # type: ignore[attr-defined]
