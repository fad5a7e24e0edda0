"""`te_offload.get_cpu_offload_context` in the loops that Transformer Engine's function of that name is written for."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import te_offload
from te_offload import Fate, Outcome, Reason
from te_offload.errors import ArgumentError, ConflictError, StateError
from te_offload.offload import engine as engine_module
from te_offload.offload.dropin import MIN_BYTES, OffloadContext
from te_offload.offload.timeline import Departures
from tests.support.late_copies import LateTransfer
from tests.support.mlp import make_inputs, make_mlp

WIDTH, ROWS = 256, 600  # 600 KiB a tensor, above MIN_BYTES


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These layers are on the CPU; with a GPU in the machine the context would leave them alone, as tensors elsewhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Layers(torch.nn.Module):
    """Linear layers in the loop of Transformer Engine's documentation."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(count)
        )

    def forward(self, x: torch.Tensor, context: Any = None, sync: Any = None) -> torch.Tensor:
        for layer in self.layers:
            with context if context is not None else contextlib.nullcontext():
                x = layer(x)
            x = sync(x) if sync is not None else x
        return x


def gradients(model: Layers, *contexts: Any, micro: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    xs = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(micro)]
    losses = [model(x, *contexts).square().sum() for x in xs]
    for loss in losses:
        loss.backward()
    return [g for g in (*(x.grad for x in xs), *(p.grad for p in model.parameters())) if g is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def last_record(context: OffloadContext) -> Any:
    engine = context._engine
    assert engine is not None
    engine.end_step()
    record = engine.records()[-1]
    engine.begin_step()
    return record


def test_signature_is_that_of_transformer_engine() -> None:
    ours = inspect.signature(te_offload.get_cpu_offload_context).parameters
    theirs = inspect.signature(te.get_cpu_offload_context).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_loop_gives_the_same_bits_and_offloads_the_first_layers() -> None:
    expected = gradients(Layers())
    context, sync = te_offload.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=4)
    model = Layers()
    for _ in range(3):
        assert same(expected, gradients(model, context, sync))
    record = last_record(context)
    fates = {(row.layer, row.fate) for row in record.slots if row.nbytes >= MIN_BYTES}
    assert ("layer0", Fate.OFFLOADED) in fates and ("layer1", Fate.OFFLOADED) in fates
    assert ("layer2", Fate.OFFLOADED) not in fates and ("layer3", Fate.OFFLOADED) not in fates
    assert all(row.reason is Reason.PLAN for row in record.slots if row.layer in ("layer2", "layer3"))
    assert record.bytes_back == record.bytes_out > 0
    assert [record.index for record in context.records] == [0, 1, 2]


def test_last_layer_may_go_too_and_micro_batches_need_no_counting() -> None:
    context, sync = te_offload.get_cpu_offload_context(enabled=True, num_layers=4, model_layers=4)
    expected, model = Layers(), Layers()
    for micro in (3, 1, 2):
        assert same(gradients(expected, micro=micro), gradients(model, context, sync, micro=micro))
    assert last_record(context).bytes_back > 0


def test_evaluation_in_between_is_left_alone() -> None:
    context, sync = te_offload.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=4)
    expected, model = gradients(Layers()), Layers()
    for _ in range(2):
        assert same(expected, gradients(model, context, sync))
        with torch.no_grad():
            model(torch.zeros(ROWS, WIDTH), context)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stops_early", [True, False])
def test_what_a_checkpoint_computes_again_counts_in_no_round(reentrant: bool, stops_early: bool) -> None:
    context, sync = te_offload.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=4)

    def step(model: Layers, *contexts: Any) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        around, synced = contexts or (contextlib.nullcontext(), lambda y: y)

        def run(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            with around:
                y: torch.Tensor = layer(x)
            return synced(y) if y.requires_grad else y

        y = x
        for number, layer in enumerate(model.layers):
            y = checkpoint(run, layer, y, use_reentrant=reentrant) if number == 1 else run(layer, y)
        y.square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    with set_checkpoint_early_stop(stops_early):
        expected, model = step(Layers()), Layers()
        for _ in range(3):
            assert same(expected, step(model, context, sync))
    record = last_record(context)
    assert [row.index for row in context.records] == [0, 1, 2] and not record.raised
    gone = {row.layer for row in record.slots if row.fate is Fate.OFFLOADED}
    assert gone == {"layer0"} if reentrant else gone == {"layer0", "layer1"}  # whose first forward saves nothing if so
    assert record.bytes_back == record.bytes_out > 0


def test_forward_whose_graph_is_dropped_gives_its_memory_back() -> None:
    context, sync = te_offload.get_cpu_offload_context(enabled=True, num_layers=4, model_layers=4)
    model = Layers()
    y = model(torch.zeros(ROWS, WIDTH, requires_grad=True), context, sync)
    assert context._engine is not None and context._engine.pool.live_bytes > 0
    del y
    assert context._engine.pool.live_bytes == 0
    context.close()
    assert context.records == ()


def test_manual_controller_starts_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: LateTransfer())
    context, sync, controller = te_offload.get_cpu_offload_context(
        enabled=True, model_layers=4, manual_synchronization=True
    )
    expected, model = gradients(Layers()), Layers()
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = x
    for number, layer in enumerate(model.layers):
        with context:
            y = layer(y)
        y = sync(y)
        if number != 2:
            controller.start_offload_layer(number)
    engine = context._engine
    assert engine is not None
    left = [sum(cargo.copied for cargo in engine.visits[number].cargos) for number in (0, 1, 3)]
    assert min(left) > 0 and engine.mover.in_flight == sum(left)
    for number in (0, 1, 3):
        controller.release_activation_forward_gpu_memory(number)
        left.pop(0)
        assert engine.mover.in_flight == sum(left)
    for number in (3, 1):
        before = engine.mover.counts.bytes_back
        controller.start_reload_layer(number)
        assert engine.mover.counts.bytes_back - before == sum(cargo.copied for cargo in engine.visits[number].cargos)
    y.square().sum().backward()
    assert same(expected, [x.grad, *(p.grad for p in model.parameters())])  # type: ignore[list-item]
    record = last_record(context)
    went = {row.layer for row in record.slots if row.fate is Fate.OFFLOADED}
    assert went == {"layer0", "layer1", "layer3"}
    assert record.bytes_back == record.bytes_out > 0  # layer0, which nobody reloaded, came back when it was read
    assert all(row.outcome is not Outcome.UNREAD for row in record.slots)
    with pytest.raises(ArgumentError, match=r"Layer 7 has not run in this round; \[0, 1, 2, 3\] have"):
        controller.start_offload_layer(7)


def test_manual_controller_alone_says_when_memory_is_given_up_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where timed steps show that copies are over at once."""
    keys = [(f"layer{number}", 0) for number in range(4)]
    at_once = Departures(dict.fromkeys(keys, 1), dict.fromkeys(keys, ((1, 0),)))
    monkeypatch.setattr(engine_module, "departures_for", lambda _: at_once)
    monkeypatch.setattr(engine_module, "make_transfer", lambda *_: LateTransfer())
    context, sync, controller = te_offload.get_cpu_offload_context(
        enabled=True, model_layers=4, manual_synchronization=True
    )
    model = Layers()
    for _ in range(5):
        y = torch.randn(ROWS, WIDTH, requires_grad=True)
        for layer in model.layers:
            with context:
                y = layer(y)
            y = sync(y)
        engine = context._engine
        assert engine is not None and engine.mover.in_flight == 0
        for number in range(4):  # not behind its forward, where timed steps have it
            controller.start_offload_layer(number)
            began = [cargo.copied for visit in engine.visits[: number + 1] for cargo in visit.cargos]
            assert engine.mover.in_flight == sum(began) > 0
        y.square().sum().backward()
    assert len(context.records) > 2 and all(record.bytes_out for record in context.records)


def test_manual_without_a_call_offloads_nothing() -> None:
    context, sync, _ = te_offload.get_cpu_offload_context(enabled=True, model_layers=4, manual_synchronization=True)
    assert same(gradients(Layers()), gradients(Layers(), context, sync))
    assert last_record(context).bytes_out == 0


def test_exception_in_a_layer_leaves_the_loop_usable() -> None:
    context, sync = te_offload.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=4)
    model = Layers()
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 7), context, sync)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    context.close()
    assert same(gradients(Layers()), gradients(model, context, sync))


def test_round_in_which_a_layer_raised_is_over() -> None:
    context, sync = te_offload.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=4)
    model = Layers()
    failing = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.zeros(ROWS, WIDTH, requires_grad=True), context, sync)
    failing.remove()
    assert same(gradients(Layers()), gradients(model, context, sync))
    assert sorted(context.round) == [0, 1, 2, 3]
    away = {row.layer for row in last_record(context).slots if row.bytes_out}
    assert away == {"layer0", "layer1"}


def test_disabled_contexts_do_nothing() -> None:
    context, sync = te_offload.get_cpu_offload_context(enabled=False)
    assert same(gradients(Layers()), gradients(Layers(), context, sync))
    assert te_offload.get_cpu_offload_context(enabled=False, manual_synchronization=True)[2] is None


def test_wrong_use_is_a_named_error_of_the_kind_that_transformer_engine_raises() -> None:
    get = te_offload.get_cpu_offload_context
    with pytest.raises(ValueError, match="neither offload_activations nor offload_weights"):
        get(enabled=True, offload_activations=False)
    with pytest.raises(ValueError, match="offload_stream needs manual_synchronization"):
        get(enabled=True, offload_stream=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_layers=5 of model_layers=4 cannot be"):
        get(enabled=True, num_layers=5, model_layers=4)
    with pytest.warns(DeprecationWarning, match="weights are never offloaded"):
        get(enabled=True, offload_weights=True, model_layers=2)
    context, sync = get(enabled=True, num_layers=1, model_layers=2)
    with pytest.raises(StateError, match="before the context was entered"):
        sync(torch.zeros(1, requires_grad=True))
    with context:
        y = torch.ones(1, requires_grad=True) * 2
        with pytest.raises(StateError, match="inside the offloading context"):
            sync(y)
    with pytest.raises(StateError, match="entered again before the synchronization function"):
        context.__enter__()
    with pytest.raises(ValueError, match="requires no gradient"):
        sync(torch.zeros(1))
    sync(y)


def test_other_engine_around_it_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.pytorch import cpu_offload

    context, _ = te_offload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
    monkeypatch.setattr(cpu_offload, "OFFLOAD_SYNCHRONIZER", object())
    with pytest.raises(ConflictError, match=r"get_cpu_offload_context \(v2\) is active"):
        context.__enter__()


def test_our_ops_inside_hand_their_slots_over_and_their_argument_counts() -> None:
    def model() -> torch.nn.ModuleList:
        torch.manual_seed(0)
        return torch.nn.ModuleList(make_mlp(hidden=256, ffn=512, keep=["act_input"]) for _ in range(3))

    def step(layers: torch.nn.ModuleList, context: Any, sync: Any) -> list[torch.Tensor]:
        x, splits, scales = make_inputs((300, 0, 400), 256)
        y = x
        for layer in layers:
            with context:
                y = layer(y, splits, scales, splits)
            y = sync(y)
        y.sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]

    expected = step(model(), contextlib.nullcontext(), lambda y: y)
    context, sync = te_offload.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=3)
    assert same(expected, step(model(), context, sync))
    record = last_record(context)
    rows = [(row.op, row.fate, row.reason) for row in record.slots if row.layer == "layer0" and row.op]
    assert rows == [
        ("GroupedLinear", Fate.OFFLOADED, Reason.NONE),
        ("ScaledSReLU", Fate.KEPT, Reason.ASKED),
        ("GroupedLinear", Fate.OFFLOADED, Reason.NONE),
    ]
    assert not [row for row in record.slots if not row.op]  # nothing of these layers passed the hooks
    assert record.bytes_out == record.bytes_back > 0


class ReadsItsMemory(torch.autograd.Function):
    """Saves a weight, and other tensors over its memory, which the context cannot tell from others by themselves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight.detach(), weight, weight.detach().view(torch.int16))
        ctx.seen = seen
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.append(ctx.saved_tensors)
        x, weight, *_ = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad, None


@pytest.mark.parametrize("packed", [False, True], ids=["a parameter", "a view of one"])
def test_what_shares_the_memory_of_a_parameter_that_was_saved_beside_it_stays(packed: bool) -> None:
    weights = [torch.nn.Parameter(torch.eye(WIDTH * 3)) for _ in range(2)]
    context, sync = te_offload.get_cpu_offload_context(True, 1, 2)
    seen: list[Any] = []
    for _ in range(2):
        y = torch.randn(ROWS, WIDTH * 3, requires_grad=True) * 1
        for weight in weights:
            with context:
                y = ReadsItsMemory.apply(y, weight.view(WIDTH * 3, -1) if packed else weight, seen)  # type: ignore[no-untyped-call]
            y = sync(y)
        y.sum().backward()
    rows = last_record(context).slots
    assert [row.bytes_out for row in rows if row.fate is Fate.OFFLOADED] == [ROWS * WIDTH * 3 * 4]
    assert Reason.ALIAS in {row.reason for row in rows if row.layer == "layer0"}
    for saved in seen:
        assert len({tensor.data_ptr() for tensor in saved[1:]}) == 1
    context.close()
