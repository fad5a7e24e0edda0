"""A pipeline that is one fused op passes by Transformer Engine's autograd function, and nobody can tell but by the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint

from te_offload import OffloadSession
from te_offload.fused import fusions_in, hopper, hopper_choice
from te_offload.fused.stand_ins import StandIns
from te_offload.ops import te_adapter
from te_offload.ops.te_adapter import pipeline
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp, run

SPLITS = (3, 0, 7, 1)
OWN = "_OneOpBackward"


@pytest.fixture(autouse=True)
def in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")


def mlp(*, seen: bool = True, **options: Any) -> te.ops.Sequential:
    """``seen``: Transformer Engine has looked for fusions in it, as it does at the first call."""
    torch.manual_seed(0)
    module = make_mlp(experts=len(SPLITS), **options)
    if seen:
        run(module, SPLITS, extra=4 if "fc2" in options else 3)
        module.zero_grad()
    return module


def node_of(module: te.ops.Sequential, *, x: torch.Tensor | None = None, **ways: Any) -> str:
    """Name of the autograd node of a forward."""
    own, sizes, scales = make_inputs(SPLITS)
    y = module(own if x is None else x, sizes, scales, sizes, **ways)
    return "" if y.grad_fn is None else y.grad_fn.name()


def by_transformer_engine(step: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_only_op", lambda *_: None)
        return step()


def test_first_forward_is_transformer_engines_and_the_next_one_is_not() -> None:
    module = mlp(seen=False)
    assert node_of(module) != OWN
    assert node_of(module) == OWN == node_of(module)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "tanh-srelu"},
        {"activation": "swiglu"},
        {"bias": True},
        {"fc2": {"bias": True, "scale_bias": True}},
        {"fc1": {"single_grouped_weight": True}},
        {"accumulate_into_main_grad": True},
    ],
    ids=["plain", "tanh", "gated", "bias", "scaled bias", "one grouped", "main_grad"],
)
def test_bits_are_those_of_transformer_engines_function(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    nodes = []

    def step() -> dict[str, torch.Tensor]:
        module = mlp(seen=False, **options)
        for weight in module.parameters():
            vars(weight).update(main_grad=torch.ones(weight.shape), grad_added_to_main_grad=False)
        found: dict[str, torch.Tensor] = {}
        for number in range(2):
            extra = 4 if "fc2" in options else 3
            found |= {f"{name} {number}": each for name, each in run(module, SPLITS, extra=extra).items()}
        if extra == 3:
            nodes.append(node_of(module))
        main = {f"{name} main": vars(weight)["main_grad"].clone() for name, weight in module.named_parameters()}
        dummies = [f"{name} {number}" for name, _ in module.named_parameters() for number in range(2)]
        if "accumulate_into_main_grad" in options:
            found = {name: each for name, each in found.items() if name not in dummies}
        return found | main

    assert_same_bits(by_transformer_engine(step), step())
    assert not nodes or (nodes[0] != OWN and nodes[1] == OWN)


def test_input_that_needs_no_gradient_goes_transformer_engines_way() -> None:
    module = mlp()
    x = make_inputs(SPLITS)[0].detach()
    assert node_of(module, x=x) not in ("", OWN)
    assert node_of(module) == OWN


def test_forward_without_gradients_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    packed: list[torch.Tensor] = []
    forward = hopper.HopperGroupedMLP.fuser_forward

    def watched(self: Any, contexts: list[Any], *args: Any, **kwargs: Any) -> Any:
        result = forward(self, contexts, *args, **kwargs)
        assert not any(context.requires_grad or context.to_save for context in contexts)
        return result

    monkeypatch.setattr(hopper.HopperGroupedMLP, "fuser_forward", watched)
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: x):
        y = module(x, sizes, scales, sizes)
    assert not packed and not y.requires_grad and y.grad_fn is None


@pytest.mark.parametrize("first", [False, True])
def test_pipeline_with_other_ops_goes_transformer_engines_way(first: bool) -> None:
    torch.manual_seed(0)
    window, other = list(make_mlp(experts=len(SPLITS))), [te.ops.Identity()]
    module = te.ops.Sequential(*(window + other if first else other + window))
    assert OWN not in (node_of(module), node_of(module))
    assert [fusion.fused for fusion in fusions_in(module)] == [2]


def test_call_that_the_kernels_do_not_take_goes_transformer_engines_way() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    y = module(x, sizes.short(), scales, sizes.short())
    assert y.grad_fn.name() != OWN and [fusion.handed_over for fusion in fusions_in(module)] == [1]
    assert node_of(module) == OWN


def test_wrong_number_of_extra_inputs_is_transformer_engines_error() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    for extra in ((sizes, scales), (sizes, scales, sizes, scales)):
        with pytest.raises(ValueError, match="extra inputs"):
            module._module_groups[0](x, *extra)
    assert node_of(module) == OWN


def test_buffers_of_the_caller_are_written() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    out, dx = torch.full_like(x, 7.0).detach(), torch.full_like(x, 7.0).detach()
    ways = {
        0: {te_adapter.GROUPED_LINEAR_GRAD_INPUT_KEY: dx},
        2: {te_adapter.GROUPED_LINEAR_OUTPUT_KEY: out},
    }
    y = module(x, sizes, scales, sizes, op_kwargs=ways)
    assert y.grad_fn.name() == OWN and y.data_ptr() == out.data_ptr()
    y.square().sum().backward()
    expected = run(mlp(), SPLITS)
    assert torch.equal(out, expected["output"]) and torch.equal(dx, expected["input0"])


def test_tensors_of_the_caller_are_marked_so_that_nobody_frees_them() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    y = module(x, sizes, scales, sizes)
    assert y.grad_fn.name() == OWN
    assert all(vars(tensor)["_do_not_clear"] for tensor in (x, sizes, scales, y))


def test_each_op_is_told_before_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mlp()
    told: list[Any] = []
    for number in (0, 2):
        monkeypatch.setattr(module[number], "begin_call", lambda n=number: told.append(n))
    monkeypatch.setattr(module[1], "pre_fuser_forward", lambda *, requires_grad: told.append((1, requires_grad)))
    assert node_of(module) == OWN and told == [0, (1, True), 2]


def test_plain_op_is_told_as_transformer_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ours = make_mlp(experts=len(SPLITS))
    size = ours[2].num_groups, ours[2].in_features, ours[2].out_features
    plain = te.ops.GroupedLinear(*size, bias=False, device="meta")
    module, told = te.ops.Sequential(ours[0], ours[1], plain), []
    monkeypatch.setattr(plain, "pre_fuser_forward", lambda *, requires_grad: told.append(requires_grad))
    (op,) = hopper_choice.fuse_windows(list(module))
    op.begin_call()
    assert told == [True]


def test_parameters_that_pass_themselves_leave_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mlp()
    assert node_of(module) == OWN and te_adapter.STAND_INS in vars(module[0])
    monkeypatch.setattr(StandIns, "of", lambda *_, **__: None)
    assert node_of(module) == OWN and te_adapter.STAND_INS not in vars(module[0])


def test_backward_leaves_nothing_that_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = mlp(), []
    backward = hopper.HopperGroupedMLP.fuser_backward

    def watched(self: Any, contexts: list[Any], *args: Any, **kwargs: Any) -> Any:
        seen.extend(contexts)
        assert any(context.saved_tensors for context in contexts)
        return backward(self, contexts, *args, **kwargs)

    monkeypatch.setattr(hopper.HopperGroupedMLP, "fuser_backward", watched)
    x, sizes, scales = make_inputs(SPLITS)
    y = module(x, sizes, scales, sizes)
    y.square().sum().backward()
    assert y.grad_fn.name() == OWN and [context.saved_tensors for context in seen] == [None] * 3


def test_backward_of_a_backward_is_refused() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    (grad,) = torch.autograd.grad(module(x, sizes, scales, sizes).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.fixture(params=["hooks", "reentrant checkpoint", "checkpoint", "session"])
def around(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    """A call of a module with something around it that sees what is saved."""

    def call(module: te.ops.Sequential, *inputs: torch.Tensor) -> torch.Tensor:
        way = request.param
        if way == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                return module(*inputs)  # type: ignore[no-any-return]
        if way == "session":
            return module(*inputs)  # type: ignore[no-any-return]
        return checkpoint(module, *inputs, use_reentrant=way.startswith("reentrant"))  # type: ignore[no-any-return]

    return call


def test_what_sees_saved_tensors_sees_the_same(around: Callable[..., torch.Tensor], request: Any) -> None:
    nodes = []

    def step() -> dict[str, torch.Tensor]:
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS)
        session = OffloadSession(module, min_bytes=0)
        with session.step():
            y = around(module, x, sizes, scales, sizes)
            nodes.append(y.grad_fn.name() if y.grad_fn is not None else "")
            y.square().sum().backward()
        moved = session.records[-1].bytes_out
        session.close()
        if "session" in request.node.name:
            assert moved > 0
        return gradients(module, x, scales) | {"y": y.detach().clone(), "moved": torch.tensor([moved])}

    assert_same_bits(by_transformer_engine(step), step())
    assert "reentrant" in request.node.name or (nodes[0] != OWN and nodes[1] == OWN)
