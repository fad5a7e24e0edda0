"""One tensor passes autograd for all weights of an op, and nobody who looks at gradients can tell."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload import ops
from te_offload.errors import ArgumentError
from te_offload.fused import fusions_in, hopper
from te_offload.fused.stand_ins import StandIns
from tests.support import process_groups
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp, run

SPLITS = (3, 0, 7, 1)


@pytest.fixture(autouse=True)
def in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")


def mlp(**options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=len(SPLITS), **options)


def themselves(step: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What a step gives where parameters pass autograd themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIns, "of", lambda *_, **__: None)
        return step()


def inputs_of(output: torch.Tensor) -> int:
    assert output.grad_fn is not None
    return len(output.grad_fn.next_functions)


@pytest.mark.parametrize("bias", [False, True])
def test_autograd_has_as_many_inputs_for_many_experts_as_for_few(bias: bool) -> None:
    counts = []
    for splits in ((2, 1), (1,) * 24):
        module = make_mlp(experts=len(splits), bias=bias)
        x, sizes, scales = make_inputs(splits)
        counts.append(inputs_of(module(x, sizes, scales, sizes)))
    assert counts[0] == counts[1] == inputs_of_one(bias)


def inputs_of_one(bias: bool) -> int:
    """The input, a tensor for each kind of parameter of both ops, sizes, scales, sizes."""
    return 1 + (4 if bias else 2) + 3


def main_grads(module: te.ops.Sequential) -> None:
    for weight in module.parameters():
        vars(weight).update(main_grad=torch.ones(weight.shape), grad_added_to_main_grad=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "tanh-srelu"},
        {"bias": True},
        {"fc2": {"bias": True, "scale_bias": True}},
        {"fc1": {"single_grouped_weight": True}},
        {"fc1": {"bias": True, "single_grouped_bias": True}},
        {"accumulate_into_main_grad": True},
    ],
    ids=["plain", "tanh", "bias", "scaled bias", "one grouped", "one grouped bias", "main_grad"],
)
def test_bits_are_those_of_parameters_that_pass_themselves(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    extra = 4 if "fc2" in options else 3

    def step() -> dict[str, torch.Tensor]:
        module = mlp(**options)
        if "accumulate_into_main_grad" in options:
            main_grads(module)
        found: dict[str, torch.Tensor] = {}
        for number in range(2):  # the second one's forward finds what stood for them in the first one's
            found |= {f"{name} {number}": each for name, each in run(module, SPLITS, extra=extra).items()}
        assert [fusion.handed_over for fusion in fusions_in(module)] == [0]
        for name, weight in module.named_parameters():
            if "accumulate_into_main_grad" in options:
                assert vars(weight)["grad_added_to_main_grad"], name
                found = {key: each for key, each in found.items() if not key.startswith(name)}  # dummies
                found[f"{name} main"] = vars(weight)["main_grad"].clone()
        return found

    assert_same_bits(themselves(step), step())


def test_module_that_runs_twice_in_one_graph_gets_both_gradients() -> None:
    def step() -> dict[str, torch.Tensor]:
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS)
        y = module(module(x, sizes, scales, sizes), sizes.flip(0), scales, sizes.flip(0))
        y.square().sum().backward()
        return gradients(module, x, scales)

    assert_same_bits(themselves(step), step())


def test_two_forwards_before_their_backwards_in_either_order_get_their_own_gradients() -> None:
    def step(order: tuple[int, int]) -> dict[str, torch.Tensor]:
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS)
        outputs = [module(x, sizes, scales, sizes), module(2 * x, sizes, scales, sizes)]
        found: dict[str, torch.Tensor] = {}
        for number in order:
            outputs[number].square().sum().backward()
            found |= {f"{name} {number}": each for name, each in gradients(module, x, scales).items()}
        return found

    for order in ((0, 1), (1, 0)):
        assert_same_bits(themselves(lambda order=order: step(order)), step(order))  # type: ignore[misc]


def test_gradients_of_some_tensors_alone_leave_nothing_for_the_next_backward() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    expected = run(mlp(), SPLITS)
    one = dict(module.named_parameters())["0.weight2"]
    (of_input,) = torch.autograd.grad(module(x, sizes, scales, sizes).square().sum(), [x])
    (of_weight,) = torch.autograd.grad(module(x, sizes, scales, sizes).square().sum(), [one])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(of_input, expected["input0"]) and torch.equal(of_weight, expected["0.weight2"])
    assert_same_bits(expected, run(module, SPLITS))


def test_hooks_of_parameters_run_once_each_and_before_the_backward_of_the_layer_ahead() -> None:
    """A sharding framework sends a layer's gradients off then, and frees its weights."""
    first, second = mlp(), mlp()
    events: list[str] = []
    for name, module in (("first", first), ("second", second)):
        for weight in module.parameters():
            weight.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    x, sizes, scales = make_inputs(SPLITS)
    for _ in range(2):
        events.clear()
        between = first(x, sizes, scales, sizes)
        between.register_hook(lambda _: events.append("between"))
        second(between, sizes, scales, sizes).square().sum().backward()
        assert events == ["second"] * 8 + ["between"] + ["first"] * 8


def test_hook_of_a_weight_sees_its_gradient_and_may_change_it() -> None:
    module = mlp()
    expected = run(mlp(), SPLITS)
    weight = dict(module.named_parameters())["2.weight0"]
    weight.register_hook(lambda grad: grad * 2)
    assert torch.equal(run(module, SPLITS)["2.weight0"], expected["2.weight0"] * 2)


def test_weight_that_is_frozen_and_thawed_between_steps_has_a_gradient_when_it_asks() -> None:
    module = mlp()
    expected = run(mlp(), SPLITS)
    weight = dict(module.named_parameters())["0.weight2"]
    for frozen in (False, True, False):  # Transformer Engine takes no mixture before the first one
        weight.requires_grad_(not frozen)
        module.zero_grad()
        found = run(module, SPLITS)
        assert ("0.weight2" not in found) == frozen
        assert_same_bits({name: each for name, each in expected.items() if name in found}, found)


def test_op_whose_first_weight_alone_is_frozen_computes_none_as_transformer_engine_has_it() -> None:
    def step() -> dict[str, torch.Tensor]:
        module = mlp()
        run(module, SPLITS)  # before it Transformer Engine takes no mixture
        module.zero_grad()
        module[0].weight0.requires_grad_(False)
        return run(module, SPLITS)

    found = step()
    assert_same_bits(themselves(step), found)
    assert not [name for name in found if name.startswith("0.")]


def test_op_whose_weights_are_all_frozen_gives_none_of_them_a_gradient() -> None:
    module = mlp()
    module[0].requires_grad_(False)
    expected = run(mlp(), SPLITS)
    for _ in range(2):
        module.zero_grad()
        found = run(module, SPLITS)
        assert not [name for name in found if name.startswith("0.")]
        assert_same_bits({name: each for name, each in expected.items() if name in found}, found)
    module.requires_grad_(True)
    module.zero_grad()
    assert_same_bits(expected, run(module, SPLITS))


def test_weights_that_are_swapped_for_others_between_steps_get_the_gradients() -> None:
    """As load_state_dict does under `torch.__future__.set_swap_module_params_on_conversion`."""
    module = mlp()
    expected = run(module, SPLITS)
    module.zero_grad()
    for weight in module.parameters():
        torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach().clone()))
    assert_same_bits(expected, run(module, SPLITS))


def test_copies_and_pickles_of_a_module_that_ran_train_by_themselves() -> None:
    module = mlp()
    expected = run(module, SPLITS)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        other.zero_grad()
        before = gradients(module)
        assert_same_bits(expected, run(other, SPLITS))
        assert_same_bits(before, gradients(module))


def test_pipeline_has_all_parameters_again_after_each_call_also_one_that_raised() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    module(x, sizes, scales, sizes)
    fuser: Any = module._module_groups[0]

    def own() -> bool:
        held = [id(parameter) for parameter in fuser._flat_basic_op_params]
        return held == [id(p) for p in module.parameters()] and fuser._basic_op_num_params == [4, 0, 4]

    assert own()
    with pytest.raises(ArgumentError, match="columns"):
        module(x[:, :8], sizes, scales, sizes)
    assert own()
    expected = run(mlp(), SPLITS)
    assert_same_bits(expected, run(module, SPLITS))


def reshaped() -> te.ops.Sequential:
    """Its window's input is another one than the pipeline's, and one of its ops leaves errors to the judge."""
    first, _, last = mlp()
    return te.ops.Sequential(te.ops.Reshape((-1, 16)), first, te.ops.ScaledSReLU(), last)


def two_windows() -> te.ops.Sequential:
    return te.ops.Sequential(*mlp(), *mlp())


@pytest.mark.parametrize("make", [reshaped, two_windows])
def test_windows_behind_other_ops_run_fused_and_get_their_gradients(make: Callable[[], te.ops.Sequential]) -> None:
    def step() -> dict[str, torch.Tensor]:
        module = make()
        x, sizes, scales = make_inputs(SPLITS)
        windows = fusions_in(module)
        module(x if len(windows) == 2 else x[None], *[sizes, scales, sizes] * len(windows)).square().sum().backward()
        assert [fusion.fused for fusion in fusions_in(module)] == [1] * len(windows)
        return gradients(module, x, scales)

    assert_same_bits(themselves(step), step())


def test_evaluation_passes_no_parameter_and_changes_nothing_for_training() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    expected = run(mlp(), SPLITS)
    for _ in range(2):
        with torch.no_grad():
            output = module(x, sizes, scales, sizes)
        assert not output.requires_grad and torch.equal(output, expected["output"])
        module.zero_grad()
        assert_same_bits(expected, run(module, SPLITS))


def test_weights_go_with_their_module() -> None:
    module = mlp()
    run(module, SPLITS)
    weights = [weakref.ref(parameter) for parameter in module.parameters()]
    del module
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)


@pytest.fixture
def process_group() -> Iterator[None]:
    with process_groups.alone("gloo"):
        yield


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_reduces_every_gradient() -> None:
    """Its hooks are on autograd's nodes of the parameters, which nothing but the graph leads to."""
    module = mlp()
    parallel = torch.nn.parallel.DistributedDataParallel(module)
    reduced: list[int] = []

    def count(bucket: Any) -> Any:
        reduced.extend(id(parameter) for parameter in bucket.parameters())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, lambda _, bucket: count(bucket))
    expected = run(mlp(), SPLITS)
    for _ in range(2):
        module.zero_grad()
        reduced.clear()
        found = run(parallel, SPLITS)
        assert sorted(reduced) == sorted(map(id, module.parameters()))
        assert_same_bits(expected, {name.removeprefix("module."): each for name, each in found.items()})


def test_ops_one_by_one_take_their_parameters_themselves() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    module[0].requires_grad_(False)
    output = module(x.detach(), sizes, scales.detach(), sizes)  # FC1 needs no backward, FC2 does
    assert [fusion.handed_over for fusion in fusions_in(module)] == [1]
    output.square().sum().backward()
    expected = run(mlp(), SPLITS)
    found = gradients(module)
    assert set(found) == {f"2.weight{number}" for number in range(len(SPLITS))}
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name])


def test_call_that_is_handed_over_though_all_ops_need_a_backward_takes_parameters_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step() -> tuple[te.ops.Sequential, dict[str, torch.Tensor]]:
        module = mlp()
        with torch.autocast("cpu", torch.bfloat16):  # and weights in float32
            return module, run(module, SPLITS)

    module, found = step()
    assert [fusion.handed_over for fusion in fusions_in(module)] == [1]
    monkeypatch.setenv(hopper.SWITCH, "0")
    assert_same_bits(step()[1], found)


def nodes_alive(module: te.ops.Sequential) -> int:
    """Parameters of which autograd's node is alive: it holds its parameter."""
    return sum(parameter._use_count() > 1 for parameter in module.parameters())


@pytest.mark.parametrize("how", ["handed over", "another pipeline, op by op"])
def test_forward_whose_parameters_pass_themselves_leaves_no_node_of_them_behind(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the capture of a CUDA graph, on another stream than the steps before it."""
    module = mlp()
    run(module, SPLITS)
    assert nodes_alive(module) == 8
    if how == "handed over":
        with torch.autocast("cpu", torch.bfloat16):
            run(module, SPLITS)
    else:
        monkeypatch.setenv(hopper.SWITCH, "0")
        run(te.ops.Sequential(*module), SPLITS)
    assert nodes_alive(module) == 0


def test_evaluation_between_steps_keeps_what_stood_for_the_parameters() -> None:
    module = mlp()
    run(module, SPLITS)
    with torch.no_grad():
        x, sizes, scales = make_inputs(SPLITS)
        module(x, sizes, scales, sizes)
    assert nodes_alive(module) == 8


def test_forward_leaves_its_input_as_it_was() -> None:
    """What a session keeps of it is another tensor, without the input's graph and marks."""
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    between = x * 2
    module(between, sizes, scales, sizes)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        module(between, sizes, scales, sizes)
    kept = [tensor for tensor in saved if tensor.data_ptr() == between.data_ptr()]
    assert len(kept) == 1 and kept[0] is not between and kept[0].grad_fn is None


def test_single_expert_keeps_its_parameter() -> None:
    module = te.ops.Sequential(
        ops.GroupedLinear(1, 16, 32, bias=False, device="cpu"),
        ops.ScaledSReLU(),
        ops.GroupedLinear(1, 32, 16, bias=False, device="cpu"),
    )
    assert set(run(module, (5,))) == {"output", "0.weight0", "2.weight0", "input0", "input1"}
    assert nodes_alive(module) == 0
