"""Steps, exceptions, second and missing backwards: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_engine.pytorch import cpu_offload as te_cpu_offload

from te_offload import Fate, OffloadSession
from te_offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackwardTwiceError,
    ConflictError,
    SavedTensorModifiedError,
    StateError,
    StepEndedError,
)
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp, run

SPLITS = (4, 0, 6)


def top_hook() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class Stack(torch.nn.Module):
    """Some grouped MLPs, one behind the other."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(make_mlp() for _ in range(layers))

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def test_many_layers_and_steps_give_the_same_bits() -> None:
    expected, model = Stack(), Stack()
    with OffloadSession(model.layers, min_bytes=0) as session:
        for seed in range(5):
            with session.step():
                found = run(model, SPLITS, seed=seed)
            assert_same_bits(run(expected, SPLITS, seed=seed), found)
            assert session.records[-1].bytes_out == session.records[-1].bytes_back > 0
            assert session.host_bytes == 0
    assert [record.index for record in session.records] == [1, 2, 3, 4]


def test_every_layer_but_the_running_one_and_its_neighbour_is_off_the_device() -> None:
    model = Stack(6)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=10 * (16 + 32 + 32) * 4) as session:
        with session.step():
            run(model, SPLITS)
        with_offload = session.records[-1]
    with OffloadSession(model.layers, min_bytes=0, enabled=False) as session:
        with session.step():
            run(model, SPLITS)
        without = session.records[-1]
    assert with_offload.peak_resident * 3 == without.peak_resident == 6 * 10 * (16 + 32 + 32) * 4


def test_forwards_before_their_backwards_in_any_order() -> None:
    expected, model = Stack(), Stack()
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]
    with OffloadSession(model.layers, min_bytes=0) as session:
        for order in orders:
            for module, context in ((expected, None), (model, session)):
                module.zero_grad()
                inputs = [make_inputs(SPLITS, seed=seed) for seed in range(3)]
                if context is not None:
                    with context.step():
                        losses = [module(x, sizes, scales, sizes).square().sum() for x, sizes, scales in inputs]
                        for index in order:
                            losses[index].backward()
                    assert context.records[-1].bytes_back == context.records[-1].bytes_out > 0
                else:
                    losses = [module(x, sizes, scales, sizes).square().sum() for x, sizes, scales in inputs]
                    for index in order:
                        losses[index].backward()
                found = gradients(module, *(x for x, _, _ in inputs))
                if context is None:
                    wanted = found
            assert_same_bits(wanted, found)


def test_outside_of_a_step_nothing_is_taken() -> None:
    model = Stack()
    with OffloadSession(model.layers, min_bytes=0) as session:
        run(model, SPLITS)
        assert session.records == ()
        assert session.host_bytes == 0


def test_exception_in_forward_leaves_no_hook_and_no_memory() -> None:
    model = Stack()
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(model.layers, min_bytes=0) as session:
        with session.step():
            with pytest.raises(ArgumentError, match="sum to 10 tokens"):
                model(torch.cat([x, x]), sizes, scales, sizes)
            assert top_hook() is None
            found = run(model, SPLITS)  # the step goes on
        assert_same_bits(run(Stack(), SPLITS), found)
        assert session.host_bytes == 0


class Interrupted(BaseException):
    """Something like KeyboardInterrupt, which module hooks do not see."""


def test_interrupt_in_forward_leaves_no_hook_and_no_memory() -> None:
    class Breaks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = make_mlp()

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            self.mlp(*inputs)
            raise Interrupted

    model = Breaks()
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(model, min_bytes=0) as session:
        with pytest.raises(Interrupted), session.step():
            model(x, sizes, scales, sizes)
        assert top_hook() is None
        assert session.host_bytes == 0
        with session.step():
            run(model.mlp, SPLITS)


def test_exception_in_backward_leaves_no_memory() -> None:
    model = Stack()
    x, sizes, scales = make_inputs(SPLITS)

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")

    with OffloadSession(model.layers, min_bytes=0) as session:
        with pytest.raises(RuntimeError, match="on purpose"), session.step():  # noqa: PT012
            h = model.layers[0](x, sizes, scales, sizes)
            h.register_hook(fail)
            model.layers[1](h, sizes, scales, sizes).sum().backward()
        assert session.host_bytes == 0
        model.zero_grad()
        with session.step():
            found = run(model, SPLITS)
        assert_same_bits(run(Stack(), SPLITS), found)


@pytest.mark.parametrize("keep", [(), ("fc1_input", "act_input", "fc2_input")], ids=["offloaded", "kept"])
def test_second_backward_is_a_named_error(keep: tuple[str, ...]) -> None:
    module = make_mlp(keep=keep)
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        loss = module(x, sizes, scales, sizes).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(BackwardTwiceError, match=r"layer0/2\.fc2_input: a second backward over one forward"):
            loss.backward()


def test_second_backward_of_what_is_not_te_ops_works_as_without_a_session() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    x = torch.ones(3, 8, requires_grad=True)
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        loss = layer(x).square().sum()
        loss.backward(retain_graph=True)
        once = gradients(layer, x)
        loss.backward()
    assert session.records[-1].bytes_back > session.records[-1].bytes_out > 0
    assert_same_bits({name: 2 * grad for name, grad in once.items()}, gradients(layer, x))


def test_backward_after_the_step_is_a_named_error() -> None:
    module = make_mlp()
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session:
        with session.step():
            loss = module(x, sizes, scales, sizes).sum()
        with pytest.raises(StepEndedError, match=r"layer0/2\.fc2_input was offloaded in a step that has ended"):
            loss.backward()


def test_backward_after_the_session_closed_is_a_named_error() -> None:
    module = make_mlp()
    x, sizes, scales = make_inputs(SPLITS)
    session = OffloadSession(module, min_bytes=0)
    with session.step():
        loss = module(x, sizes, scales, sizes).sum()
        session.close()
        with pytest.raises(StepEndedError, match="session was closed"):
            loss.backward()
    assert session.host_bytes == 0


def test_forward_whose_backward_never_comes_gives_its_memory_back_at_once() -> None:
    module = make_mlp()
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        y = module(x, sizes, scales, sizes)
        assert session.host_bytes == -(-10 * 4 * (16 + 32 + 32) // 512) * 512  # small slots go together
        del y
        gc.collect()
        assert session.host_bytes == 0


def test_forward_still_held_at_the_end_of_the_step_gives_its_memory_back_and_is_counted() -> None:
    module = make_mlp()
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session:
        with session.step():
            y = module(x, sizes, scales, sizes)
        assert session.host_bytes == 0
        assert session.records[-1].abandoned == 3
        assert y.requires_grad


def test_saved_tensors_are_not_held_by_the_session() -> None:
    module = make_mlp(keep=["fc1_input", "act_input", "fc2_input"])
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        h = x * 1
        memory = StorageWeakRef(h.untyped_storage())
        y = module(h, sizes, scales, sizes)
        del h
        assert not memory.expired()
        y.sum().backward()
        del y
        assert memory.expired()
    assert session.records[-1].residency[-1].nbytes == 0


def test_offloaded_memory_is_free_after_the_forward_also_with_an_empty_expert() -> None:
    module = make_mlp()
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        h = x * 1
        memory = StorageWeakRef(h.untyped_storage())
        y = module(h, sizes, scales, sizes)
        del h
        assert memory.expired()
        y.sum().backward()
    assert session.records[-1].bytes_back == session.records[-1].bytes_out > 0


def test_tensor_changed_after_it_was_saved_is_an_error() -> None:
    layer = torch.nn.Linear(4, 4)
    with OffloadSession(layer, enabled=False) as session, session.step():
        x = torch.ones(2, 4, requires_grad=True) * 1
        y = layer(x)
        x.add_(1)
        with pytest.raises(
            SavedTensorModifiedError, match=r"layer0/other\[\d\]: a saved tensor was written to in place"
        ):
            y.sum().backward()


def test_step_inside_a_step_is_an_error() -> None:
    with (
        OffloadSession(make_mlp()) as session,
        session.step(),
        pytest.raises(StateError, match="steps do not nest"),
        session.step(),
    ):
        pass


def test_session_entered_twice_is_an_error() -> None:
    with OffloadSession(make_mlp()) as session, pytest.raises(StateError, match="entered before"), session:
        pass


def test_closed_session_is_an_error_and_closing_again_is_not() -> None:
    session = OffloadSession(make_mlp())
    session.close()
    session.close()
    with pytest.raises(StateError, match="closed"), session.step():
        pass


def test_report_before_the_first_step_is_an_error() -> None:
    with OffloadSession(make_mlp()) as session, pytest.raises(StateError, match="nothing to report"):
        session.report()


def test_session_inside_transformer_engines_context_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_mlp()
    with OffloadSession(module) as session:
        monkeypatch.setattr(te_cpu_offload, "OFFLOAD_SYNCHRONIZER", object())
        with pytest.raises(ConflictError, match="get_cpu_offload_context \\(v2\\) is active"), session.step():
            pass


def test_transformer_engines_context_inside_a_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_mlp()
    with OffloadSession(module) as session, session.step():
        monkeypatch.setattr(te_cpu_offload, "OFFLOAD_SYNCHRONIZER", object())
        with pytest.raises(ConflictError, match="two engines"):
            run(module, SPLITS)
    assert top_hook() is None


def test_layer_given_twice_is_an_error() -> None:
    module = make_mlp()
    with pytest.raises(ArgumentError, match=r"layers\[1\] is the same module as layers\[0\]"):
        OffloadSession([module, module])


def test_layer_inside_another_is_an_error() -> None:
    module = make_mlp()
    with pytest.raises(ArgumentError, match=r"layers\[1\] is inside layers\[0\]"):
        OffloadSession([module, module[0]])


def test_layer_attached_to_two_sessions_is_an_error_and_the_first_goes_on() -> None:
    other, module = make_mlp(), make_mlp()
    with OffloadSession(module, min_bytes=0) as session:
        with pytest.raises(ArgumentError, match=r"layer1 .* is attached to an OffloadSession already"):
            OffloadSession([other, module])
        assert not other._forward_hooks
        with session.step():
            run(module, SPLITS)
        assert session.records[-1].bytes_out > 0
    OffloadSession(module).close()


def test_two_sessions_on_different_layers_live_side_by_side() -> None:
    expected, model = Stack(2), Stack(2)
    with OffloadSession(model.layers[0], min_bytes=0) as one, OffloadSession(model.layers[1], min_bytes=0) as two:
        with one.step(), two.step():
            found = run(model, SPLITS)
        assert_same_bits(run(expected, SPLITS), found)
        assert one.records[-1].bytes_out == two.records[-1].bytes_out > 0


def test_closed_session_leaves_the_layers_as_they_were() -> None:
    module = make_mlp()
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    OffloadSession(module).close()
    for name, part in module.named_modules():
        assert vars(part).keys() == before[name].keys()
        assert not part._forward_hooks and not part._forward_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layers": []}, ArgumentError, "layers is empty"),
        ({"layers": [3]}, ArgumentTypeError, "layers must be modules"),
        ({"layers": torch.nn.ReLU()}, ArgumentError, "no parameters"),
        ({"layers": torch.nn.Linear(2, 2, device="meta")}, ArgumentError, "on meta"),
        ({"min_bytes": "lots"}, ArgumentError, "min_bytes must be a size"),
        ({"host_limit": -1}, ArgumentError, "host_limit must not be negative"),
        ({"max_in_flight": 1.5}, ArgumentTypeError, "max_in_flight must be a number of bytes"),
        ({"enabled": 1}, ArgumentTypeError, "enabled must be True or False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OffloadSession(**({"layers": make_mlp()} | arguments))


def test_fate_of_a_frozen_input_slot_is_not_saved() -> None:
    module = make_mlp()
    for parameter in module[2].parameters():
        parameter.requires_grad_(False)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        run(module, SPLITS)
    rows = {row.name: row for row in session.records[-1].slots}
    assert rows["layer0/2.fc2_input"].fate is Fate.NOT_SAVED
    assert rows["layer0/2.fc2_input"].nbytes == 0
    assert rows["layer0/0.fc1_input"].fate is Fate.OFFLOADED


def test_a_slot_counts_as_on_the_device_until_the_op_before_takes_its_own() -> None:
    module = make_mlp()
    with OffloadSession(module, min_bytes=0, enabled=False) as session, session.step():
        run(module, SPLITS)
    record = session.records[-1]
    fc1, act, fc2 = (row.nbytes for row in record.slots)
    taken = [moment.nbytes for moment in record.residency if moment.label == "taken"]
    assert taken == [fc2 + act + fc1, act + fc1, fc1]
    assert record.residency[-1].nbytes == 0
