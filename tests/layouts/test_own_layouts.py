"""What te_offload's own forward declares without reading a layout is what the reader of layouts makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformer_engine.pytorch.ops.op import OperationContext

from te_offload import ops
from te_offload.errors import SavedTensorModifiedError
from te_offload.fused import hopper
from te_offload.ops import te_adapter
from te_offload.ops.slot_owner import SlotOwner
from te_offload.slots import SavedSlot, SaveState, SlotName, SlotObserver, Watch
from tests.support.mlp import make_inputs, make_mlp

EXPERTS, TOKENS, HIDDEN = 3, 8, 16


class Handle:
    """Holds what was taken."""

    name = "a slot"

    def __init__(self, buffers: tuple[torch.Tensor, ...], *, is_here: bool) -> None:
        self._buffers = buffers
        self._is_here = is_here

    @property
    def is_here(self) -> bool:
        return self._is_here

    def take(self) -> list[torch.Tensor]:
        return list(self._buffers)


class Taker(SlotObserver):
    """Takes what ops save."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.saved: list[SavedSlot] = []
        self._keeps = keeps

    def watch(self) -> Watch:
        return Watch.TAKES

    def slot_saved(self, op: torch.nn.Module, saved: SavedSlot, *, take: bool) -> Handle | None:
        assert take
        beside = 0 if saved.carried_bytes is None else saved.carried_bytes()
        self.saved.append(saved._replace(carried_bytes=None, nbytes=beside))
        return Handle(saved.buffers, is_here=self._keeps) if saved.buffers else None


class Case(NamedTuple):
    """What a forward of ours saved, and how it says so."""

    op: SlotOwner
    entries: tuple[torch.Tensor | None, ...]
    read: Callable[..., Any]
    place: int
    said: dict[str, Any]


def linear_case(x: torch.Tensor | None, *scales: torch.Tensor, absent: SaveState = SaveState.NOT_SAVED) -> Case:
    options = {"bias": True, "scale_bias": True} if scales else {"bias": False}
    op = ops.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, device="cpu", **options)
    entries = (torch.tensor([3, 0, 5]), torch.tensor([0, 3, 3, 8], dtype=torch.int32), None, None, None, *scales, x)
    return Case(op, entries, te_adapter.read_grouped_linear, len(entries) - 1, {"absent": absent})


def activation_case(x: torch.Tensor) -> Case:
    said = {"name": SlotName.ACT_INPUT}
    return Case(ops.ScaledSReLU(), (x, torch.rand(TOKENS)), te_adapter.read_activation, 0, said)


CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: linear_case(torch.rand(TOKENS, HIDDEN)),
    "linear in bf16": lambda: linear_case(torch.rand(TOKENS, HIDDEN).bfloat16()),
    "scaled bias": lambda: linear_case(torch.rand(TOKENS, HIDDEN), torch.rand(TOKENS)),
    "frozen": lambda: linear_case(None),
    "rebuilt": lambda: linear_case(None, absent=SaveState.RECOMPUTED),
    "activation": lambda: activation_case(torch.rand(TOKENS, HIDDEN)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def context_of(case: Case) -> OperationContext:
    ctx = OperationContext()
    ctx.use_grouped_tensor_path = ctx.te_offload_weights_apart = True
    ctx.te_offload_rebuilt = case.said.get("absent") is SaveState.RECOMPUTED
    ctx.to_save = case.entries
    return ctx


def declared(case: Case, *, read: bool, keeps: bool = False) -> tuple[SavedSlot, OperationContext]:
    taker, ctx = Taker(keeps=keeps), context_of(case)
    case.op.observe_slot(taker)
    if read:
        case.op.declare(case.read, ctx)
    else:
        case.op.declare_one(case.read, ctx, case.place, **case.said)
    assert ctx.to_save is None
    (saved,) = taker.saved
    return saved, ctx


def test_slot_is_the_one_that_the_reader_finds(case: Case) -> None:
    expected, found = declared(case, read=True)[0], declared(case, read=False)[0]
    assert [buffer.data_ptr() for buffer in found.buffers] == [buffer.data_ptr() for buffer in expected.buffers]
    assert found._replace(buffers=()) == expected._replace(buffers=())


def test_backward_finds_the_very_entries_that_the_forward_saved(case: Case) -> None:
    _, ctx = declared(case, read=False)
    te_adapter.bring_carried(case.op, ctx)  # type: ignore[arg-type]
    assert len(ctx.saved_tensors) == len(case.entries)
    for found, expected in zip(ctx.saved_tensors, case.entries, strict=True):
        assert found is expected


@pytest.mark.parametrize("read", [False, True])
def test_slot_that_is_away_comes_back_when_asked_for_and_all_else_before(case: Case, read: bool) -> None:
    _, ctx = declared(case, read=read)
    bring = te_adapter.bring_exempt(case.op, ctx)  # type: ignore[arg-type]
    has_slot = case.entries[case.place] is not None
    assert (bring is not None) == has_slot
    for number, (found, expected) in enumerate(zip(ctx.saved_tensors, case.entries, strict=True)):
        assert found is (None if number == case.place else expected)
    if bring is not None:
        bring()
        assert ctx.saved_tensors[case.place] is case.entries[case.place]


@pytest.mark.parametrize("read", [False, True])
def test_slot_that_never_left_is_there_at_once(case: Case, read: bool) -> None:
    _, ctx = declared(case, read=read, keeps=True)
    assert te_adapter.bring_exempt(case.op, ctx) is None  # type: ignore[arg-type]
    for found, expected in zip(ctx.saved_tensors, case.entries, strict=True):
        assert found is expected


def test_exempt_tensor_that_was_written_to_since_is_an_error(case: Case) -> None:
    for number, entry in enumerate(case.entries):
        if number != case.place and entry is not None:
            _, ctx = declared(case, read=False)
            entry.add_(1)
            with pytest.raises(SavedTensorModifiedError, match="written to in place"):
                te_adapter.bring_carried(case.op, ctx)  # type: ignore[arg-type]


def test_exempt_tensors_of_inference_mode_have_no_version_to_look_at() -> None:
    with torch.inference_mode():
        scales = torch.rand(TOKENS)
    case = activation_case(torch.rand(TOKENS, HIDDEN))
    case = case._replace(entries=(case.entries[0], scales))
    _, ctx = declared(case, read=False)
    te_adapter.bring_carried(case.op, ctx)  # type: ignore[arg-type]
    assert ctx.saved_tensors[1] is scales


def test_slot_of_another_kind_is_left_to_the_reader() -> None:
    """A quantized input is no plain tensor."""

    class Odd(torch.Tensor):
        """Some wrapper."""

    case = activation_case(torch.rand(TOKENS, HIDDEN).as_subclass(Odd))
    asked = []

    def read(op: Any, ctx: OperationContext, *, take: bool) -> None:
        asked.append(take)

    taker, ctx = Taker(), context_of(case)
    case.op.observe_slot(taker)
    case.op.declare_one(read, ctx, 0, name=SlotName.ACT_INPUT)
    assert asked == [True] and not taker.saved and ctx.to_save is not None


def test_fused_forward_names_its_activation_and_says_what_its_backward_rebuilds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    module, taker = make_mlp(), Taker()
    for op in module:
        op.observe_slot(taker)
    x, sizes, scales = make_inputs((3, 0, 5))
    module(x, sizes, scales, sizes)
    assert [(saved.name, saved.state) for saved in taker.saved] == [
        (None, SaveState.SAVED),
        (SlotName.ACT_INPUT, SaveState.SAVED),
        (None, SaveState.RECOMPUTED),
    ]
