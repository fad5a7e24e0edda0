"""`te_offload.functional.grouped_mlp`: eager and traced, beside the ops of te_offload."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from te_offload import Fate, OffloadSession, Plan, PlannedSlot, Reason, SlotName
from te_offload.errors import ArgumentError, PlanError, UnsupportedError
from te_offload.functional import grouped_mlp
from te_offload.fused import hopper, traced_call
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.offload.others import OtherSlots
from tests.support.mlp import assert_same_bits
from tests.support.traced import FFN, HIDDEN, HOW, SPLITS, Layer, by_ops, run_layers, step, tensors

EVERY = pytest.mark.parametrize("activation", HOW)


@pytest.fixture(autouse=True)
def _fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@EVERY
@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_it_has_the_bits_of_the_ops(activation: str, *, again: bool, compiled: bool) -> None:
    function = torch.compile(grouped_mlp, backend="aot_eager", fullgraph=True) if compiled else grouped_mlp
    given = tensors(activation)
    assert_same_bits(by_ops(activation, given), step(function, given, activation, recompute_act_input=again))


@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_what_torch_asks_of_an_op_holds(activation: str) -> None:
    given, (gate, numbers, interleave) = tensors(activation), HOW[activation]
    inputs = given["x"], given["w1"], given["w2"], given["split_sizes"], given["scales"], gate, numbers, interleave
    for saves in (False, True):
        torch.library.opcheck(torch.ops.te_offload.grouped_mlp.default, (*inputs, saves, []))
    ops, how = torch.ops.te_offload, (gate, list(numbers), interleave)
    x, w1, w2, scales = (given[name].detach() for name in ("x", "w1", "w2", "scales"))
    whole: Any = x, w1, w2, given["split_sizes"], scales, *how, []
    torch.library.opcheck(ops.grouped_mlp_forward.default, whole)
    torch.library.opcheck(ops.grouped_mlp_fc1.default, whole)
    fc2_input, offsets, act_input = ops.grouped_mlp_fc1(*whole)
    torch.library.opcheck(ops.grouped_mlp_fc2.default, (fc2_input, w2, given["split_sizes"], *how))
    y = ops.grouped_mlp_fc2(fc2_input, w2, given["split_sizes"], *how)
    assert all(torch.equal(*pair) for pair in zip((y, offsets), ops.grouped_mlp_forward(*whole), strict=True))
    of_fc2 = torch.ones_like(y), w2, scales, offsets, act_input, *how, True
    torch.library.opcheck(ops.grouped_mlp_fc2_backward.default, of_fc2)
    dact_input, _, _, work = ops.grouped_mlp_fc2_backward(*of_fc2)
    torch.library.opcheck(ops.grouped_mlp_fc1_wgrad.default, (dact_input, x, w1, offsets, work, *how))
    torch.library.opcheck(ops.grouped_mlp_fc1_dgrad.default, (dact_input, w1, offsets, work, *how))
    torch.library.opcheck(ops.grouped_mlp_fc1_again.default, (x, w1, offsets, *how))


def test_one_graph_serves_any_split_sizes_and_any_number_of_tokens_after_the_second() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(grouped_mlp, backend=counter, fullgraph=True)
    for splits in ((11, 0, 20), (1, 2, 28), (5, 0, 0), (0, 0, 12), (100, 7, 9)):
        given = tensors("swiglu", splits)
        assert_same_bits(by_ops("swiglu", given), step(function, given, "swiglu"))
    assert counter.frame_count == 2  # the second one with any number of tokens


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "no gradient is needed"])
def test_where_no_backward_follows_the_activations_input_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, *, grad: bool
) -> None:
    def stores(*_: Any) -> None:
        raise AssertionError

    expected = step(grouped_mlp, tensors("swiglu"), "swiglu")["y"]
    monkeypatch.setattr(ReferenceKernels, "fc1", stores)
    given = {name: one.detach() if grad else one for name, one in tensors("swiglu").items()}
    with torch.set_grad_enabled(grad):
        assert torch.equal(grouped_mlp(**given), expected)


def noted_in(saved: list[torch.Tensor]) -> Any:
    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    return note


@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
def test_what_is_saved_for_the_backward_passes_hooks_of_saved_tensors(again: bool) -> None:
    given = tensors("swiglu")
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(noted_in(saved), lambda one: one):
        y = grouped_mlp(**given, recompute_act_input=again)
    shapes = [tuple(tensor.shape) for tensor in saved]
    assert ((sum(SPLITS), 2 * FFN) in shapes) is not again and (sum(SPLITS), HIDDEN) in shapes
    assert y.grad_fn is not None


def test_frozen_weights_take_no_gradient_and_fc1s_keep_no_input() -> None:
    given = tensors("swiglu")
    expected = step(grouped_mlp, tensors("swiglu"), "swiglu")
    for name in ("w1", "w2"):
        given[name].requires_grad_(False)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(noted_in(saved), lambda one: one):
        found = step(grouped_mlp, given, "swiglu")
    assert_same_bits({name: expected[name] for name in ("y", "x", "scales")}, found)
    assert (sum(SPLITS), HIDDEN) not in [tuple(tensor.shape) for tensor in saved]


@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
def test_rows_of_no_expert_are_zero_and_take_no_gradient(again: bool) -> None:
    found = step(grouped_mlp, tensors("swiglu", more=6), "swiglu", recompute_act_input=again)
    for name in ("y", "x", "scales"):
        assert not found[name][sum(SPLITS) :].any() and found[name][: sum(SPLITS)].any()


@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
def test_without_tokens_weights_have_gradients_of_zeros(again: bool) -> None:
    found = step(grouped_mlp, tensors("swiglu", (0, 0, 0)), "swiglu", recompute_act_input=again)
    assert found["y"].shape == (0, HIDDEN) and not found["w1"].any() and not found["w2"].any()


def test_without_router_scales_they_are_ones() -> None:
    given = tensors("swiglu")
    ones = given | {"scales": torch.ones(sum(SPLITS), requires_grad=True)}
    expected = step(grouped_mlp, ones, "swiglu")
    expected.pop("scales")
    for one in given.values():
        one.grad = None
    del given["scales"]
    assert_same_bits(expected, step(grouped_mlp, given, "swiglu"))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_within_a_checkpoint_bits_are_the_same(*, compiled: bool) -> None:
    def function(**given: Any) -> torch.Tensor:
        found: torch.Tensor = checkpoint(functools.partial(grouped_mlp, **given), use_reentrant=False)
        return found

    given = tensors("swiglu")
    expected = step(grouped_mlp, tensors("swiglu"), "swiglu")
    found: Any = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    assert_same_bits(expected, step(found, given, "swiglu"))


class GraphsOfAStep:
    """Of a forward and its backward, compiled within a checkpoint: the ops in them that mutate nothing, and the shapes of
    what the backward gets. ``options``: of torch's checkpoint.
    """

    def __init__(self, **options: Any) -> None:
        self.ops: list[list[str]] = []
        self.shapes: list[tuple[int, ...]] = []

        def function(**given: Any) -> torch.Tensor:
            y: torch.Tensor = checkpoint(functools.partial(grouped_mlp, **given), use_reentrant=False, **options)
            return y

        backend = aot_autograd(fw_compiler=self._compile, partition_fn=min_cut_rematerialization_partition)
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        self.found = step(compiled, tensors("swiglu"), "swiglu")

    def _compile(self, graph: torch.fx.GraphModule, given: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        self.ops.append([name.split(".")[1] for name in names if name.startswith("te_offload.")])
        self.shapes = [tuple(one.shape) for one in given if isinstance(one, torch.Tensor)]
        return make_boxed_func(graph.forward)


def test_a_checkpoints_second_forward_leaves_fc2_out_where_it_is_compiled() -> None:
    graphs = GraphsOfAStep()
    assert_same_bits(step(grouped_mlp, tensors("swiglu"), "swiglu"), graphs.found)
    assert graphs.ops == [["grouped_mlp_fc1", "grouped_mlp_fc2"], ["grouped_mlp_fc1", "grouped_mlp_fc2_backward"]]
    assert (sum(SPLITS), 2 * FFN) not in graphs.shapes


def test_a_selective_checkpoint_may_keep_what_fc1_gives_for_the_backward_and_nothing_more() -> None:
    kept: Any = [torch.ops.te_offload.grouped_mlp_fc1.default]
    graphs = GraphsOfAStep(context_fn=functools.partial(create_selective_checkpoint_contexts, kept))
    assert_same_bits(step(grouped_mlp, tensors("swiglu"), "swiglu"), graphs.found)
    assert graphs.ops == [["grouped_mlp_fc1", "grouped_mlp_fc2"], ["grouped_mlp_fc2_backward"]]
    assert (sum(SPLITS), 2 * FFN) in graphs.shapes and (sum(SPLITS), FFN) not in graphs.shapes


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("stays", [(), ("fc1_input",), ("act_input",)], ids=str)
def test_a_session_moves_its_slots_but_for_those_that_are_to_stay_and_changes_no_bit(
    stays: tuple[str, ...], *, compiled: bool
) -> None:
    layers = torch.nn.ModuleList(Layer(no_offload_activation=stays) for _ in range(2))
    expected = run_layers(layers)
    for layer in layers if compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    with OffloadSession(layers, min_bytes=0) as session:
        for _ in range(3):
            with session.step():
                found = run_layers(layers)
            assert_same_bits(expected, found)
            rows = {row.name: row for row in session.records[-1].slots}
            for name, columns in (("fc1_input", HIDDEN), ("act_input", 2 * FFN)):
                for layer_name in ("layer0", "layer1"):
                    row = rows[f"{layer_name}/grouped_mlp.{name}"]
                    fate, reason = (Fate.KEPT, Reason.ASKED) if name in stays else (Fate.OFFLOADED, Reason.NONE)
                    assert (row.fate, row.reason, row.nbytes) == (fate, reason, sum(SPLITS) * columns * 2)
            assert session.records[-1].bytes_back > 0


def test_two_in_a_layer_have_one_name_and_a_plan_that_has_it_is_one_of_the_model() -> None:
    class Twice(torch.nn.ModuleList):
        def forward(self, x: torch.Tensor, split_sizes: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(x, split_sizes)
            return x

    layers = torch.nn.ModuleList([Twice([Layer(), Layer()])])
    with OffloadSession(layers, min_bytes=0) as session:
        with session.step():
            expected = run_layers(layers)
        sizes = [row.nbytes for row in session.records[-1].slots if row.name == "layer0/grouped_mlp.act_input"]
    assert sizes == [sum(SPLITS) * 2 * FFN * 2] * 2
    going = {"layer0/grouped_mlp.act_input": True, "layer0/grouped_mlp.fc1_input": False}
    plan = Plan(tuple(PlannedSlot(name, 0, 1, goes) for name, goes in going.items()))
    with OffloadSession(layers, min_bytes=0, plan=plan) as session, session.step():
        found = run_layers(layers)
    fates = {row.name: row.fate for row in session.records[-1].slots}
    assert_same_bits(expected, found)
    assert going == {name: fates[name] is Fate.OFFLOADED for name in going}


def test_a_plan_that_names_another_op_of_no_layer_is_an_error() -> None:
    plan = Plan((PlannedSlot("layer0/grouped.act_input", 0, 1, goes=True),))
    with pytest.raises(PlanError, match=r"names layer0/grouped.act_input, but layer0 owns no slot"):
        OffloadSession([Layer()], plan=plan)


def test_a_storage_that_comes_to_be_where_a_named_one_was_does_not_have_its_name() -> None:
    others, visit, later = OtherSlots(), SimpleNamespace(entries=[]), []
    for _ in range(100):
        others.name("grouped_mlp", [(SlotName.ACT_INPUT, torch.ones(8), False)])
        later.append(torch.ones(8))
        assert others.entry_of(later[-1], visit).slot is SlotName.OTHER  # type: ignore[arg-type]
    kept = torch.ones(8)
    others.name("grouped_mlp", [(SlotName.ACT_INPUT, kept, False)])
    assert others.entry_of(kept.view(2, 4), visit).slot is SlotName.ACT_INPUT  # type: ignore[arg-type]


# Bad input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate": "ReGLU"}, "gate is 'ReGLU', but must be one of SwiGLU, ClampedQGeGLU, SiTUGLU, or empty"),
        ({"gate": ""}, r"w1 \(3, 128, 16\), w2 \(3, 16, 64\); they must be \(T, H\), \(N, F, H\) and"),
        ({"x": torch.ones(31, 24, dtype=torch.bfloat16)}, r"x is \(31, 24\).*must be \(T, H\), \(N, 2F, H\)"),
        ({"x": torch.ones(1, 31, 16, dtype=torch.bfloat16)}, r"must have 2, 3 and 3 dimensions, but are \(1, 31, 16\)"),
        (
            {"x": torch.ones(31, 16)},
            r"x is torch.float32 on cpu, w1 torch.bfloat16 on cpu.*the first three of one dtype",
        ),
        ({"split_sizes": torch.tensor([1, 2])}, r"split_sizes are \(2,\) of torch.int64; give 3 of int32 or int64"),
        ({"split_sizes": torch.ones(3)}, r"split_sizes are \(3,\) of torch.float32"),
        ({"scales": torch.ones(30)}, r"scales are \(30,\) on cpu; give one for each of 31 rows, on cpu"),
        ({"scales": torch.ones(31, 1)}, r"scales are \(31, 1\) on cpu; give one"),
        ({"interleave": 48}, "F=64 is no multiple of interleave=48"),
        ({"numbers": (1.0,)}, r"numbers are \(1.0,\), but gate='SwiGLU' takes 0"),
        ({"gate": "", "numbers": (1.0, 2.0)}, r"numbers are \(1.0, 2.0\), but gate='' takes 0 or 1"),
        (
            {"no_offload_activation": ["x"]},
            "no_offload_activation has x, but slots are fc1_input, act_input, fc2_input",
        ),
        ({"no_offload_activation": "fc3_input"}, "no_offload_activation has fc3_input, but"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        grouped_mlp(**(tensors("swiglu") | changed))


def test_inside_of_an_autocast_of_transformer_engines_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te.quantization.FP8GlobalStateManager, "is_fp8_enabled", lambda: True)
    with pytest.raises(UnsupportedError, match=r"inside te\.autocast, which says nothing to it. Give it a recipe"):
        grouped_mlp(**tensors("swiglu"))


@pytest.mark.parametrize(("switch", "message"), [("0", "TE_OFFLOAD_FUSED_MLP is 0"), ("1", "there is no CUDA device")])
def test_where_its_kernels_do_not_run_an_error_says_why(
    monkeypatch: pytest.MonkeyPatch, switch: str, message: str
) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    monkeypatch.setattr(traced_call, "in_torch_arithmetic", lambda _: False)
    if switch == "1" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UnsupportedError, match=f"its kernels do not run here: {message}"):
        grouped_mlp(**tensors("swiglu"))
