"""Checkpoints in, around and beside the layers of a session."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformer_engine.pytorch import distributed as te_distributed

from te_offload import Fate, OffloadSession, Reason
from te_offload.ops import te_adapter
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp, run


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside-the-layer", "around-the-layer"])
def test_checkpoint_keeps_recomputing_and_the_bits_stay(reentrant: bool, inside: bool) -> None:
    runs = 0

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.mlp = make_mlp()

        def forward(self, *inputs: torch.Tensor) -> Any:
            def body(*inner: torch.Tensor) -> Any:
                nonlocal runs
                runs += 1
                return self.mlp(*inner)

            return checkpoint(body, *inputs, use_reentrant=reentrant) if inside else body(*inputs)

    def call(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        x, sizes, scales = make_inputs(SPLITS)
        inputs = (x, sizes, scales, sizes)
        y = model(*inputs) if inside else checkpoint(model, *inputs, use_reentrant=reentrant)
        y.square().sum().backward()
        return gradients(model, x, scales)

    expected = call(Checkpointed())
    assert runs == 2
    model = Checkpointed()
    other = make_mlp()
    with OffloadSession([model, other], min_bytes=0) as session, session.step():
        found = call(model)
        run(other, SPLITS)
    assert runs == 4
    assert_same_bits(expected, found)
    assert session.records[-1].bytes_out > 0
    kept = {row.reason for row in session.records[-1].slots if row.layer == "layer0" and row.op}
    assert kept <= {Reason.IN_BACKWARD, Reason.CHECKPOINT}
    assert inside or kept


def test_memory_that_a_checkpoint_drops_is_not_held_by_the_session() -> None:
    memory: list[StorageWeakRef] = []

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = make_mlp()
            self.dropped: list[bool] = []

        def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
            def body(x: torch.Tensor, *rest: torch.Tensor) -> Any:
                h = x * 1
                memory.append(StorageWeakRef(h.untyped_storage()))
                return self.mlp(h, *rest)

            y = checkpoint(body, x, *rest, use_reentrant=False)
            self.dropped.append(memory[0].expired())
            return y

    module = Checkpointed()
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession([module, make_mlp()], min_bytes=0) as session, session.step():
        module(x, sizes, scales, sizes).sum().backward()
    assert module.dropped == [True]
    assert {(row.fate, row.reason) for row in session.records[-1].slots if row.op} == {
        (Fate.RECOMPUTED, Reason.CHECKPOINT)
    }


class AroundMlp(torch.nn.Module):
    """A grouped MLP of which a checkpoint keeps the input alone."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.mlp = make_mlp()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.mlp, x * 2, *rest, use_reentrant=self.reentrant)
        return y


def test_input_of_a_layer_within_torch_s_checkpoint_wrapper_goes() -> None:
    torch.manual_seed(0)
    model, expected = Stack(3), Stack(3)
    model.load_state_dict(expected.state_dict())
    model.layers = torch.nn.ModuleList(map(checkpoint_wrapper, model.layers))
    with OffloadSession(model.layers, min_bytes=64) as session:
        for seed in range(3):
            model.zero_grad()
            expected.zero_grad()
            with session.step():
                found = run(model, SPLITS, seed=seed)
            found = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.items()}
            assert_same_bits(run(expected, SPLITS, seed=seed), found)
            record = session.records[-1]
            assert record.bytes_out == record.bytes_back == 2 * sum(SPLITS) * 16 * 4
            (first,) = [row for row in record.slots if row.layer == "layer0" and row.reason is Reason.LEAF]
            assert first.nbytes == sum(SPLITS) * 16 * 4  # the model's input
            assert {row.reason for row in record.slots if row.op} == {Reason.CHECKPOINT}


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_input_of_a_checkpoint_inside_a_layer_goes_and_meets_a_budget_that_what_it_drops_does_not_count_in(
    reentrant: bool,
) -> None:
    def steps(number: int, layers: list[AroundMlp], step: Any) -> dict[str, torch.Tensor]:
        for seed in range(number):
            x, sizes, scales = make_inputs(SPLITS, seed=seed)
            y = x
            with step():
                for layer in layers:
                    layer.zero_grad()
                    y = layer(y, sizes, scales, sizes)
                y.square().sum().backward()
        return gradients(torch.nn.ModuleList(layers), x, scales)

    torch.manual_seed(0)
    layers = [AroundMlp(reentrant) for _ in range(3)]
    expected = steps(4, layers, contextlib.nullcontext)
    with OffloadSession(layers, min_bytes=64, budget_per_layer=256) as session:
        found = steps(4, layers, session.step)
    assert_same_bits(expected, found)
    assert session.plan is not None
    record = session.records[-1]
    inputs = sum([row.bytes_out for row in record.slots if not row.op])
    assert record.bytes_out == record.bytes_back == inputs > 0
    assert record.peak_resident < 10 * (16 + 32 + 32) * 4  # a layer's slots would be as much


def test_hooks_of_checkpoints_are_known_and_others_are_not_taken_for_them() -> None:
    seen = list[bool]()

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(te_adapter.checkpoint_hook_active())
        return x * x

    x = torch.ones(3, requires_grad=True)
    look(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        look(x)
    with torch.autograd.graph.save_on_cpu():
        look(x)
    assert seen == [False, False, False]
    checkpoint(look, x, use_reentrant=False)
    with te_distributed._checkpoint_hook(SimpleNamespace(count=0), (), {}):
        look(x)
    assert seen[3:] == [True, True]


@pytest.mark.parametrize("stops_early", [True, False])
def test_layer_that_a_checkpoint_computes_again_is_no_error_of_its_step(stops_early: bool) -> None:
    model, expected = Stack(3), Stack(3)

    def call(model: Stack, seed: int) -> dict[str, torch.Tensor]:
        x, sizes, scales = make_inputs(SPLITS, seed=seed)
        model.zero_grad()
        y = model.layers[0](x, sizes, scales, sizes)
        y = checkpoint(model.layers[1], y, sizes, scales, sizes, use_reentrant=False)
        model.layers[2](y, sizes, scales, sizes).sum().backward()
        return gradients(model, x, scales)

    with set_checkpoint_early_stop(stops_early), OffloadSession(model.layers, min_bytes=0, fraction=0.5) as session:
        for seed in range(6):
            with session.step():
                found = call(model, seed)
            assert_same_bits(call(expected, seed), found)
            assert not session.records[-1].raised and "raised" not in session.report()
        assert session._engine is not None and session._engine.may_be_captured  # no more host memory is taken
        assert session.plan is not None
        record = session.records[-1]
    assert 0 < record.bytes_out == record.bytes_back < 2 * 10 * (16 + 32 + 32) * 4
    reasons = [row.reason for row in record.slots if row.layer == "layer1"]
    assert set(reasons) == {Reason.CHECKPOINT, Reason.IN_BACKWARD} or record.unseen == 1


def test_forward_is_not_taken_for_one_that_a_checkpoint_computed_again() -> None:
    model = Stack(2)

    def forward(seed: int, *, again: bool) -> torch.Tensor:
        x, sizes, scales = make_inputs(SPLITS, seed=seed)
        y: torch.Tensor = model.layers[0](x, sizes, scales, sizes)
        last = model.layers[1]
        y = checkpoint(last, y, sizes, scales, sizes, use_reentrant=False) if again else last(y, sizes, scales, sizes)
        return y.sum()

    with OffloadSession(model.layers, min_bytes=0, host_reserve="1MiB") as session:
        for seed in range(10):
            with session.step():
                forward(seed, again=True).backward()
        assert not session.records[-1].timed and session.records[-1].unseen == 1
        with session.step():
            losses = [
                forward(seed, again=False) for seed in range(2)
            ]  # the second layer's second forward is another now
            for loss in losses:
                loss.backward()
        assert session.records[-1].unseen == 0
        assert session.records[-1].bytes_out == session.records[-1].bytes_back == 4 * 10 * (16 + 32 + 32) * 4


def test_error_of_what_a_checkpoint_computes_again_is_the_step_s() -> None:
    model, runs = Stack(2), 0

    def body(*inputs: torch.Tensor) -> Any:
        nonlocal runs
        runs += 1
        failing = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0 if runs == 2 else None)
        try:
            return model.layers[1](*inputs)
        finally:
            failing.remove()

    def step() -> None:
        with session.step():
            x, sizes, scales = make_inputs(SPLITS)
            y = model.layers[0](x, sizes, scales, sizes)
            checkpoint(body, y, sizes, scales, sizes, use_reentrant=False).sum().backward()

    with OffloadSession(model.layers, min_bytes=0) as session:
        with pytest.raises(ZeroDivisionError):
            step()
        with session.step():
            run(model, SPLITS)
        failed, sound = session.records
        assert failed.raised and not sound.raised and sound.bytes_back > 0


def test_forward_that_is_left_alone_has_a_row_that_says_so() -> None:
    layer = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    with set_checkpoint_early_stop(False), OffloadSession(layer, min_bytes=0) as session, session.step():
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert [(row.slot.value, row.fate, row.reason) for row in session.records[-1].slots] == [
        ("other", Fate.RECOMPUTED, Reason.CHECKPOINT),
        ("other", Fate.KEPT, Reason.IN_BACKWARD),
    ]
