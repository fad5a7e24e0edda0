"""Beside Transformer Engine: its switch, its v1 context, and a context of its own inside a layer of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformer_engine.pytorch import cpu_offload, cpu_offload_v1

from te_offload import OffloadSession
from te_offload.errors import ConflictError
from te_offload.ops import te_adapter
from tests.layouts.test_unfused_layouts import FORMATS, PATHS, listen, mlp, step
from tests.support import te_on_cpu
from tests.support.mlp import make_inputs, make_mlp

SLOTS = ("fc1_input", "act_input", "fc2_input")


def marks(tensors: Any) -> set[bool]:
    return {hasattr(tensor, "activation_offloading") or hasattr(tensor, "needs_force_clear") for tensor in tensors}


@PATHS
@FORMATS
@pytest.mark.parametrize("keep", [None, *SLOTS])
def test_v1_context_takes_the_slots_that_may_go_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, recipe: str, keep: str | None
) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    monkeypatch.setattr(cpu_offload, "NVTE_CPU_OFFLOAD_V1", True)
    monkeypatch.setattr(cpu_offload_v1, "CPUOffloadEnabled", True)
    module = mlp(keep=[keep] if keep else [])
    listener = listen(module)
    step(module, recipe)
    for name, saved in zip(SLOTS, listener.saved, strict=True):
        if name == keep:
            assert marks(saved.buffers) == {False}  # v1 reads its own marks and no other
        else:
            assert any(hasattr(buffer, "activation_offloading") for buffer in saved.buffers)
        assert marks(saved.exempt) == {False}  # the caller's split sizes among them, which v1 would empty


def test_switch_is_put_back_as_it_was_also_after_an_exception() -> None:
    switch, other = te_adapter.OffloadSwitch, object()
    assert cpu_offload.OFFLOAD_SYNCHRONIZER is None
    with switch(on=True):
        assert cpu_offload.is_cpu_offload_enabled()
        assert te_adapter.offload_context_active() is None
        with switch(on=False):
            assert not cpu_offload.is_cpu_offload_enabled()
            with switch(on=True):
                assert cpu_offload.is_cpu_offload_enabled()
            assert not cpu_offload.is_cpu_offload_enabled()
        with pytest.raises(ZeroDivisionError), switch(on=False):
            raise ZeroDivisionError
        assert cpu_offload.is_cpu_offload_enabled()
    assert cpu_offload.OFFLOAD_SYNCHRONIZER is None
    cpu_offload.OFFLOAD_SYNCHRONIZER = other
    try:
        with switch(on=False):  # another engine's is not ours to turn off
            assert cpu_offload.OFFLOAD_SYNCHRONIZER is other
    finally:
        cpu_offload.OFFLOAD_SYNCHRONIZER = None


def test_context_of_transformer_engine_inside_a_layer_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = make_mlp()

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            monkeypatch.setattr(cpu_offload, "OFFLOAD_SYNCHRONIZER", object())
            try:
                y: torch.Tensor = self.mlp(*inputs)
            finally:
                monkeypatch.undo()
            return y

    x, sizes, scales = make_inputs((4, 0, 6))
    layer = Inner()
    named = pytest.raises(ConflictError, match="was entered inside layer0, which an OffloadSession offloads")
    with OffloadSession(layer, min_bytes=0) as session, session.step(), named:
        layer(x, sizes, scales, sizes)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@PATHS
def test_weights_pass_no_hook_and_come_back_the_very_objects(monkeypatch: pytest.MonkeyPatch, grouped: bool) -> None:
    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    seen: list[Any] = []
    bring = te_adapter.bring_carried

    def watch(op: Any, ctx: Any) -> None:
        bring(op, ctx)
        seen.extend(entry for entry in ctx.saved_tensors if isinstance(entry, torch.nn.Parameter))

    monkeypatch.setattr(te_adapter, "bring_carried", watch)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        step(module)
    weights = {id(parameter) for parameter in module.parameters()}
    assert {id(entry) for entry in seen} == weights


@PATHS
def test_weight_changed_between_forward_and_backward_is_an_error(
    monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    from te_offload.errors import SavedTensorModifiedError

    te_on_cpu.unfused(monkeypatch, grouped=grouped)
    module = mlp()
    x, sizes, scales = make_inputs(
        (16, 304, 48, 144)[: module[0].num_groups], module[0].in_features, dtype=torch.bfloat16
    )
    with OffloadSession(module, min_bytes=0) as session, session.step():
        y = module(x, sizes, scales, sizes)
        with torch.no_grad():
            next(module[2].parameters()).add_(1)
        with pytest.raises(
            SavedTensorModifiedError,
            match="GroupedLinear: a weight, the router scales or the split sizes were written to in place",
        ):
            y.sum().backward()
