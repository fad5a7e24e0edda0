"""The one matcher of grouped-MLP windows, and the names of slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload import SlotName, fused, ops
from te_offload.errors import ArgumentError
from te_offload.fused import Support, find_windows, named_slot_owners
from tests.support.mlp import ACTIVATIONS, make_mlp


def linear(cls: Any = ops.GroupedLinear) -> Any:
    return cls(2, 8, 8, bias=False, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_scaled_activation_makes_a_window(activation: str) -> None:
    (window,) = find_windows(list(make_mlp(activation=activation)))
    assert window.start == 0 and window.has_slot_owner


def test_windows_are_found_among_other_ops_and_do_not_overlap() -> None:
    line = [
        te.ops.Identity(),
        linear(),
        ops.ScaledSReLU(),
        linear(),
        ops.ScaledSReLU(),
        linear(),
        linear(),
        ops.ScaledSReLU(),
        linear(),
    ]
    assert [window.start for window in find_windows(line)] == [1, 6]


def test_plain_te_ops_make_a_window_without_owner() -> None:
    (window,) = find_windows([linear(te.ops.GroupedLinear), te.ops.ScaledSReLU(), linear(te.ops.GroupedLinear)])
    assert not window.has_slot_owner


@pytest.mark.parametrize("length", [0, 1, 2])
def test_too_few_ops_make_no_window(length: int) -> None:
    assert list(find_windows([linear(), ops.ScaledSReLU(), linear()][:length])) == []


def test_slots_are_named_by_their_place() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = make_mlp()
            self.alone = linear()
            self.loose = ops.ScaledSwiGLU()
            self.plain = linear(te.ops.GroupedLinear)

    assert [(name, slot) for name, _, slot in named_slot_owners(Layer())] == [
        ("mlp.0", SlotName.FC1_INPUT),
        ("mlp.1", SlotName.ACT_INPUT),
        ("mlp.2", SlotName.FC2_INPUT),
        ("alone", SlotName.GROUPED_LINEAR_INPUT),
        ("loose", SlotName.ACT_INPUT),
    ]


def test_support_says_why_exactly_when_it_says_no() -> None:
    assert Support(True).reason == ""
    assert Support(False, "no card").reason == "no card"
    for ok, reason in ((True, "but why"), (False, "")):
        with pytest.raises(ArgumentError, match="needs a reason exactly when it says no"):
            Support(ok, reason)


def test_registering_again_adds_nothing() -> None:
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    before = list(OperationFuser.forward_backward_fusion_functions)
    assert fused.blackwell.fuse_unary_windows in before
    fused.blackwell.register()
    assert before == OperationFuser.forward_backward_fusion_functions
