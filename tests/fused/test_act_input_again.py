"""`recompute_act_input`: the backward of the fused op computes FC1 again, and the activation's input is not saved."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from te_offload import Fate, OffloadSession, Reason, ops
from te_offload.errors import ArgumentError, ArgumentTypeError, SavedTensorModifiedError
from te_offload.fused import hopper
from te_offload.fused.calls import calls_of
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.offload.saved import Saved
from tests.support.act_input_again import make_again
from tests.support.mlp import ACTIVATIONS, assert_same_bits, gradients, make_inputs, run

SPLITS = (3, 0, 7, 1)
HIDDEN, FFN = 16, 64  # an interleaved activation has two blocks of each half


@pytest.fixture(autouse=True)
def in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")


def mlp(*, again: bool, **options: Any) -> te.ops.Sequential:
    return make_again(again=again, experts=len(SPLITS), ffn=FFN, **options)


def pair(**options: Any) -> tuple[te.ops.Sequential, te.ops.Sequential]:
    return mlp(again=False, **options), mlp(again=True, **options)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """The memory of each activation's input that FC1's kernel made."""
    made: list[StorageWeakRef] = []
    linear: Callable[..., torch.Tensor] = ReferenceKernels.fc1_linear  # the reference's others begin with it

    def noted(self: Any, *args: Any) -> torch.Tensor:
        found = linear(self, *args)
        made.append(StorageWeakRef(found.untyped_storage()))
        return found

    monkeypatch.setattr(ReferenceKernels, "fc1_linear", noted)
    return made


@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bits_are_those_of_a_saved_input_and_fc1_runs_once_more(
    counted: list[StorageWeakRef], activation: str, bias: bool
) -> None:
    saved, again = pair(activation=activation, bias=bias, fc2={"scale_bias": bias})
    expected, before = run(saved, SPLITS, extra=4 if bias else 3), len(counted)
    assert_same_bits(expected, run(again, SPLITS, extra=4 if bias else 3))
    assert (before, len(counted)) == (1, 3)
    assert calls_of(again[0]).fused == 1


def test_input_of_the_activation_is_gone_before_fc2_is_computed(
    monkeypatch: pytest.MonkeyPatch, counted: list[StorageWeakRef]
) -> None:
    gone: list[bool] = []
    fc2: Callable[..., Any] = ReferenceKernels.fc2

    def noted(self: Any, *args: Any) -> None:
        if args[5].shape[-1] == HIDDEN:  # the reference's FC1 is its FC2 in another width
            gone.append(counted[-1].expired())
        fc2(self, *args)

    monkeypatch.setattr(ReferenceKernels, "fc2", noted)
    for module in pair():
        run(module, SPLITS)
    assert gone == [False, True]


def test_a_session_has_less_to_offload_and_the_report_says_why() -> None:
    expected, module = run(mlp(again=False), SPLITS), mlp(again=True)
    with OffloadSession([module], min_bytes=0, verify=True) as session:
        with session.step():
            found = run(module, SPLITS)
        record = session.records[-1]
    assert_same_bits(expected, found)
    assert record.bytes_out == record.bytes_back == sum(SPLITS) * HIDDEN * 4
    assert {row.slot.value: (row.fate, row.reason) for row in record.slots} == {
        "fc1_input": (Fate.OFFLOADED, Reason.NONE),
        "act_input": (Fate.RECOMPUTED, Reason.REBUILT),
        "fc2_input": (Fate.RECOMPUTED, Reason.REBUILT),
    }


def test_fc1_input_is_taken_first_in_the_backward_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def watch(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    module = mlp(again=True)
    with OffloadSession([module], min_bytes=0) as session, session.step():
        x, sizes, scales = make_inputs(SPLITS)
        y = module(x, sizes, scales, sizes)
        for name in ("fc1", "fc1_activated", "fc1_linear", "fc2_dgrad", "fc1_backward"):
            watch(ReferenceKernels, name)
        watch(Saved, "take")
        y.sum().backward()
    assert events == ["take", "fc1_linear", "fc2_dgrad", "fc1_backward"]


def test_linears_with_split_sizes_of_their_own_have_the_same_bits() -> None:
    found = []
    for module in pair():
        x, sizes, scales = make_inputs(SPLITS)
        module(x, sizes, scales, sizes.flip(0)).square().sum().backward()
        found.append(gradients(module, x, scales))
    assert_same_bits(*found)


def test_rows_that_fc1_left_out_and_fc2_s_dgrad_reads_are_cleared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[torch.Size] = []
    clear: Callable[..., Any] = ReferenceKernels.clear

    def noted(self: Any, offsets: torch.Tensor, out: torch.Tensor) -> None:
        cleared.append(out.shape)
        clear(self, offsets, out)

    monkeypatch.setattr(ReferenceKernels, "clear", noted)
    counts = []
    for module in pair():
        x, sizes, scales = make_inputs(SPLITS)
        y = module(x, sizes, scales, sizes.clone())
        cleared.clear()
        y.sum().backward()
        counts.append(cleared.count(torch.Size((sum(SPLITS), FFN))))
    assert counts[1] - counts[0] == 1


@pytest.mark.parametrize("frozen", ["0.", "2.", ""], ids=["FC1", "FC2", "both"])
def test_frozen_linears_change_no_bit_of_the_others(frozen: str) -> None:
    found = []
    for module in pair():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        found.append(run(module, SPLITS))
    assert_same_bits(*found)
    assert "input0" in found[0] and not (frozen and any(name.startswith(frozen) for name in found[0]))


@pytest.mark.parametrize("hook", ["identity", "host", "checkpoint"])
def test_foreign_hooks_and_checkpoints_change_no_bit(hook: str) -> None:
    expected, module = run(mlp(again=False), SPLITS), mlp(again=True)

    class Within(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *inputs: torch.Tensor) -> Any:
            if hook == "checkpoint":
                return checkpoint(self.inner, *inputs, use_reentrant=False)
            hooks = torch.autograd.graph
            with hooks.saved_tensors_hooks(lambda t: t, lambda t: t) if hook == "identity" else hooks.save_on_cpu():
                return self.inner(*inputs)

    found = {name.removeprefix("inner."): value for name, value in run(Within(), SPLITS).items()}
    assert_same_bits(expected, found)


def test_delayed_wgrads_and_gradients_in_main_grad_have_the_same_bits() -> None:
    found = []
    for module in pair(delay_wgrad_compute=True, accumulate_into_main_grad=True):
        for parameter in module.parameters():
            parameter.main_grad = torch.ones_like(parameter)
        x, sizes, scales = make_inputs(SPLITS)
        module(x, sizes, scales, sizes).square().sum().backward()
        module[2].backward_dw()
        module[0].backward_dw()
        wgrads = {name: parameter.main_grad for name, parameter in module.named_parameters()}
        assert all((grad != 1).any() for name, grad in wgrads.items() if "weight1" not in name)
        assert x.grad is not None and scales.grad is not None
        found.append(wgrads | {"x": x.grad, "scales": scales.grad})
    assert_same_bits(*found)


def test_a_bias_that_changed_before_it_is_read_again_is_an_error() -> None:
    module = mlp(again=True, bias=True)
    x, sizes, scales = make_inputs(SPLITS)
    loss = module(x, sizes, scales, sizes).sum()
    with torch.no_grad():
        module[0].bias2.add_(1)
    with pytest.raises(SavedTensorModifiedError, match="a weight or a bias was written to"):
        loss.backward()


def test_an_input_that_changed_before_it_is_read_again_is_an_error() -> None:
    module = mlp(again=True)
    x, sizes, scales = make_inputs(SPLITS)
    doubled = x * 2
    loss = module(doubled, sizes, scales, sizes).sum()
    with torch.no_grad():
        doubled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients_nothing_is_held_and_nothing_said() -> None:
    module = mlp(again=True)
    x, sizes, scales = make_inputs(SPLITS)
    with torch.no_grad():
        y = module(x, sizes, scales, sizes)
    assert torch.equal(y, run(mlp(again=False), SPLITS)["output"])


def test_calls_op_by_op_save_it_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "0")
    saved, again = pair()
    expected = run(saved, SPLITS)
    with pytest.warns(UserWarning, match="ScaledSReLU: recompute_act_input=True, but this call runs op by op") as said:
        assert_same_bits(expected, run(again, SPLITS))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(again, SPLITS)
        with torch.no_grad():
            run_forward(mlp(again=True))


def run_forward(module: te.ops.Sequential) -> torch.Tensor:
    x, sizes, scales = make_inputs(SPLITS)
    y: torch.Tensor = module(x, sizes, scales, sizes)
    return y


@pytest.mark.parametrize(
    "make",
    [
        ops.ScaledSReLU,
        lambda **how: ops.ScaledTanhSReLU(tanh_clamp_scale=2.0, **how),
        ops.ScaledSwiGLU,
        ops.ScaledClampedQGeGLU,
        ops.ScaledSiTUGLU,
    ],
)
def test_every_scaled_activation_takes_the_keyword_and_nothing_but_true_or_false(make: Callable[..., Any]) -> None:
    assert make().recompute_act_input is False
    op = make(recompute_act_input=True)
    assert op.recompute_act_input and copy.deepcopy(op).recompute_act_input
    assert pickle.loads(pickle.dumps(op)).recompute_act_input
    with pytest.raises(ArgumentTypeError, match="recompute_act_input must be True or False, but is 1"):
        make(recompute_act_input=1)
    with pytest.raises(ArgumentError, match="Give one"):
        make(recompute_act_input=True, act_input_dtype=torch.float8_e4m3fn)


def test_a_module_that_was_pickled_before_the_keyword_saves_its_input(counted: list[StorageWeakRef]) -> None:
    module = mlp(again=True)
    del module[1].__dict__["recompute_act_input"]
    run(module, SPLITS)
    assert len(counted) == 1


def test_what_the_backward_needs_to_compute_again_is_let_go_of_with_it() -> None:
    module = mlp(again=True, bias=True)
    x, sizes, scales = make_inputs(SPLITS)
    y = module(x * 1, sizes, scales, sizes)
    held = weakref.ref(y.grad_fn)
    y.sum().backward()
    del y
    assert held() is None
