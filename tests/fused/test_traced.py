"""`te_offload.functional.grouped_mlp`: eager and traced, beside the ops of te_offload."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint

from te_offload import OffloadSession
from te_offload.errors import ArgumentError, UnsupportedError
from te_offload.functional import grouped_mlp
from te_offload.fused import hopper, traced
from tests.support.mlp import assert_same_bits, make_mlp, seeded

EXPERTS, HIDDEN, FFN = 3, 16, 64
SPLITS = (11, 0, 20)
# By the names of `tests.support.mlp`: gate, numbers, interleave.
HOW: dict[str, tuple[str, tuple[float, ...], int]] = {
    "srelu": ("", (), 0),
    "tanh-srelu": ("", (2.0,), 0),
    "swiglu": ("SwiGLU", (), 0),
    "swiglu-interleaved": ("SwiGLU", (), 32),
    "swiglu-pairs": ("SwiGLU", (), 1),
    "clamped-qgeglu": ("ClampedQGeGLU", (7.0, 1.702, 1.0), 0),
    "situ-glu": ("SiTUGLU", (4.0, 25.0), 0),
}
EVERY = pytest.mark.parametrize("activation", HOW)


@pytest.fixture(autouse=True)
def _fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(activation: str, splits: tuple[int, ...] = SPLITS, more: int = 0) -> dict[str, Any]:
    """Arguments that take gradients, and split sizes; ``more``: rows of no expert."""
    wide, tokens = FFN * (1 if "srelu" in activation else 2), sum(splits) + more
    found = {
        "x": seeded((tokens, HIDDEN), 1, dtype=torch.bfloat16),
        "w1": seeded((EXPERTS, wide, HIDDEN), 2, dtype=torch.bfloat16),
        "w2": seeded((EXPERTS, HIDDEN, FFN), 3, dtype=torch.bfloat16) / 8,
        "scales": seeded((tokens,), 4).abs(),
    }
    found = {name: tensor.requires_grad_() for name, tensor in found.items()}
    return found | {"split_sizes": torch.tensor(splits)}


def step(function: Any, given: dict[str, torch.Tensor], activation: str, **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients, by the names of what they are of."""
    gate, numbers, interleave = HOW[activation]
    y = function(**given, gate=gate, numbers=numbers, interleave=interleave, **options)
    y.backward(seeded(tuple(y.shape), 5, dtype=y.dtype))
    return {"y": y.detach()} | {name: one.grad for name, one in given.items() if one.grad is not None}


def by_ops(activation: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same by a Sequential of te_offload's."""
    mlp = make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, activation=activation, dtype=torch.bfloat16)
    with torch.no_grad():
        for number in range(EXPERTS):
            mlp[0].get_parameter(f"weight{number}").copy_(given["w1"][number])
            mlp[2].get_parameter(f"weight{number}").copy_(given["w2"][number])
    x, scales = (given[name].detach().requires_grad_() for name in ("x", "scales"))
    y = mlp(x, given["split_sizes"], scales, given["split_sizes"])
    y.backward(seeded(tuple(y.shape), 5, dtype=y.dtype))
    assert x.grad is not None and scales.grad is not None
    found = {"y": y.detach(), "x": x.grad, "scales": scales.grad}
    for name, linear in (("w1", mlp[0]), ("w2", mlp[2])):
        grads = [linear.get_parameter(f"weight{number}").grad for number in range(EXPERTS)]
        found[name] = torch.stack([grad for grad in grads if grad is not None])
    return found


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
        torch.library.opcheck(torch.ops.te_offload.grouped_mlp.default, (*inputs, saves))
    ops, how = torch.ops.te_offload, (gate, list(numbers), interleave)
    x, w1, w2, scales = (given[name].detach() for name in ("x", "w1", "w2", "scales"))
    y, offsets, act_input = ops.grouped_mlp(x, w1, w2, given["split_sizes"], scales, *how, True)
    of_fc2 = torch.ones_like(y), w2, scales, offsets, act_input, *how, True
    torch.library.opcheck(ops.grouped_mlp_fc2_backward.default, of_fc2)
    dact_input, _, _, work = ops.grouped_mlp_fc2_backward(*of_fc2)
    torch.library.opcheck(ops.grouped_mlp_fc1_backward.default, (dact_input, x, w1, offsets, work, *how, True))
    torch.library.opcheck(ops.grouped_mlp_fc1_again.default, (x, w1, offsets, *how))


def test_one_graph_serves_any_split_sizes_and_any_number_of_tokens_after_the_second() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(grouped_mlp, backend=counter, fullgraph=True)
    for splits in ((11, 0, 20), (1, 2, 28), (5, 0, 0), (0, 0, 12), (100, 7, 9)):
        given = tensors("swiglu", splits)
        assert_same_bits(by_ops("swiglu", given), step(function, given, "swiglu"))
    assert counter.frame_count == 2  # the second one with any number of tokens


@pytest.mark.parametrize("again", [False, True], ids=["act_input saved", "FC1 again"])
def test_what_is_saved_for_the_backward_passes_hooks_of_saved_tensors(again: bool) -> None:
    given, saved = tensors("swiglu"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
        y = grouped_mlp(**given, recompute_act_input=again)
    shapes = [tuple(tensor.shape) for tensor in saved]
    assert ((sum(SPLITS), 2 * FFN) in shapes) is not again and (sum(SPLITS), HIDDEN) in shapes
    assert y.grad_fn is not None


def test_frozen_weights_take_no_gradient_and_fc1s_keep_no_input() -> None:
    given = tensors("swiglu")
    expected = step(grouped_mlp, tensors("swiglu"), "swiglu")
    for name in ("w1", "w2"):
        given[name].requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
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


class Layer(torch.nn.Module):
    """Weights, and something before them."""

    def __init__(self) -> None:
        super().__init__()
        given = tensors("swiglu")
        self.w1, self.w2 = (torch.nn.Parameter(given[name].detach().clone()) for name in ("w1", "w2"))

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor) -> torch.Tensor:
        return x + grouped_mlp(torch.nn.functional.silu(x), self.w1, self.w2, split_sizes)


def test_a_session_around_compiled_layers_moves_what_they_save_and_changes_no_bit() -> None:
    layers, splits = torch.nn.ModuleList([Layer(), Layer()]), torch.tensor(SPLITS)

    def run() -> dict[str, torch.Tensor]:
        layers.zero_grad()
        x = y = seeded((sum(SPLITS), HIDDEN), 1, dtype=torch.bfloat16).requires_grad_()
        for layer in layers:
            y = layer(y, splits)
        y.backward(seeded((sum(SPLITS), HIDDEN), 2, dtype=torch.bfloat16))
        assert x.grad is not None
        grads = {name: one.grad.clone() for name, one in layers.named_parameters() if one.grad is not None}
        return {"y": y.detach(), "x": x.grad} | grads

    expected = run()
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with OffloadSession(layers, min_bytes=0) as session:
        for _ in range(3):
            with session.step():
                found = run()
            assert_same_bits(expected, found)
            assert session.records[-1].bytes_back > sum(SPLITS) * 2 * FFN * 2 * 2  # two layers' act_input in bf16


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
    ],
)
def test_arguments_that_do_not_fit_are_errors(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        grouped_mlp(**(tensors("swiglu") | changed))


def test_inside_of_an_autocast_of_transformer_engines_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te.quantization.FP8GlobalStateManager, "is_fp8_enabled", lambda: True)
    with pytest.raises(UnsupportedError, match=r"inside te\.autocast, and does not quantize"):
        grouped_mlp(**tensors("swiglu"))


@pytest.mark.parametrize(("switch", "message"), [("0", "TE_OFFLOAD_FUSED_MLP is 0"), ("1", "there is no CUDA device")])
def test_where_its_kernels_do_not_run_an_error_says_why(
    monkeypatch: pytest.MonkeyPatch, switch: str, message: str
) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    monkeypatch.setattr(traced, "in_torch_arithmetic", lambda _: False)
    if switch == "1" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UnsupportedError, match=f"its kernels do not run here: {message}"):
        grouped_mlp(**tensors("swiglu"))
