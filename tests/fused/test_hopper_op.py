"""The fused grouped MLP with the arithmetic of its kernels in torch: slots, gradients, hand-over, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.pytorch import cpu_offload, cpu_offload_v1
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from te_offload import Fate, OffloadSession, Reason, ops
from te_offload.errors import ArgumentError, ArgumentTypeError
from te_offload.fused import find_windows, fuse, hopper, hopper_choice
from te_offload.fused.hopper import HopperGroupedMLP
from te_offload.fused.kernels.reference import ReferenceKernels
from te_offload.offload.saved import Saved
from te_offload.ops import te_adapter
from tests.layouts.test_unfused_layouts import listen
from tests.support.mlp import ACTIVATIONS, assert_same_bits, gradients, make_inputs, make_mlp, run
from tests.support.reference import activate, grouped_linear
from tests.support.tolerances import assert_close_to_fp64

SPLITS = (3, 0, 7, 1)


@pytest.fixture(autouse=True)
def in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")


def mlp(**options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=len(SPLITS), **options)


def fused_ops(sequential: te.ops.Sequential) -> list[HopperGroupedMLP]:
    """The fused ops that a Sequential ran with."""
    groups = [group for group in sequential._module_groups if hasattr(group, "_forward_ops")]
    return [op for group in groups for op, _ in group._forward_ops if isinstance(op, HopperGroupedMLP)]


def fc2_row(session: OffloadSession) -> Any:
    return next(row for row in session.records[-1].slots if row.slot == "fc2_input")


@pytest.mark.parametrize("splits", [SPLITS, (0, 0, 11, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_output_and_every_gradient_are_near_fp64(splits: Sequence[int], activation: str) -> None:
    module = mlp(activation=activation, ffn=64)  # of which an interleaved activation has two blocks of each half
    found = run(module, splits)
    assert len(fused_ops(module)) == 1
    x, _, scales = (tensor.detach() for tensor in make_inputs(splits))
    weights = [p.detach().double().requires_grad_() for p in module.parameters()]
    x, scales = x.double().requires_grad_(), scales.double().requires_grad_()
    act_input = grouped_linear(x, splits, weights[: len(splits)])
    output = grouped_linear(activate(activation, act_input, scales), splits, weights[len(splits) :])
    output.square().sum().backward()
    names = [name for name, _ in module.named_parameters()]
    expected = dict(zip(names, (weight.grad for weight in weights), strict=True))
    for name, reference in (expected | {"output": output, "input0": x.grad, "input1": scales.grad}).items():
        assert reference is not None
        assert_close_to_fp64(found[name], reference, torch.float32, name)


def test_two_linears_may_have_split_sizes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for switch in ("reference", "0"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS)
        output = module(x, sizes, scales, sizes.flip(0))
        output.square().sum().backward()
        assert x.grad is not None and scales.grad is not None
        results.append([output.detach(), x.grad, scales.grad, *(p.grad for p in module.parameters())])
    for number, (fused, unfused) in enumerate(zip(*results, strict=True)):
        assert_close_to_fp64(fused, unfused.double(), torch.float32, str(number))


def test_without_gradients_nothing_is_saved() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.no_grad():
            output = module(x, sizes, scales, sizes)
        assert not saved and not output.requires_grad
        assert torch.equal(module(x, sizes, scales, sizes), output)
    assert sum(tensor.nbytes for tensor in saved if tensor.is_floating_point()) == sum(SPLITS) * (16 + 32 + 1) * 4


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_and_unfused_agree(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    fused = run(mlp(activation=activation, ffn=64), SPLITS)
    monkeypatch.setenv(hopper.SWITCH, "0")
    module = mlp(activation=activation, ffn=64)
    unfused = run(module, SPLITS)
    assert not fused_ops(module)
    assert fused.keys() == unfused.keys()
    for name, value in fused.items():
        assert_close_to_fp64(value, unfused[name].double(), torch.float32, name)


@pytest.mark.parametrize("scale_bias", [False, True], ids=["bias", "scaled-bias"])
@pytest.mark.parametrize("grouped", ["", "single_grouped_weight", "single_grouped_bias", "both"])
@pytest.mark.parametrize("activation", ["srelu", "clamped-qgeglu"])
def test_biases_and_their_scales_agree_with_the_unfused_path(
    monkeypatch: pytest.MonkeyPatch, grouped: str, scale_bias: bool, activation: str
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    flags = {name: grouped in (name, "both") for name in ("single_grouped_weight", "single_grouped_bias")}
    results = []
    for switch in ("reference", "0"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp(bias=True, fc2={"scale_bias": scale_bias}, activation=activation, **flags)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "bias" in name:
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        results.append(run(module, SPLITS, extra=4 if scale_bias else 3))
        assert len(fused_ops(module)) == (switch == "reference")
    fused, unfused = results
    assert fused.keys() == unfused.keys()
    for name, value in fused.items():
        assert_close_to_fp64(value, unfused[name].double(), torch.float32, name)


@pytest.mark.parametrize(("activation", "columns"), [("srelu", 16 + 32), ("swiglu", 16 + 64)])
def test_fc2_input_is_rebuilt_and_the_two_others_move_without_changing_a_bit(activation: str, columns: int) -> None:
    expected, module = run(mlp(activation=activation), SPLITS), mlp(activation=activation)
    with OffloadSession([module], min_bytes=0) as session:
        with session.step():
            found = run(module, SPLITS)
        record = session.records[-1]
        assert record.bytes_out == record.bytes_back == sum(SPLITS) * columns * 4
        assert (fc2_row(session).fate, fc2_row(session).reason) == (Fate.RECOMPUTED, Reason.REBUILT)
    assert_same_bits(expected, found)


@pytest.mark.parametrize("keep", ["fc1_input", "act_input", "fc2_input"])
def test_kept_slot_stays_and_the_others_go(keep: str) -> None:
    expected, module = run(mlp(), SPLITS), mlp(keep=[keep])
    with OffloadSession([module], min_bytes=0) as session:
        with session.step():
            found = run(module, SPLITS)
        fates = {row.slot.value: row.fate for row in session.records[-1].slots}
    going = {"fc1_input": Fate.OFFLOADED, "act_input": Fate.OFFLOADED, "fc2_input": Fate.RECOMPUTED}
    if keep != "fc2_input":
        going[keep] = Fate.KEPT
    assert fates == going
    assert_same_bits(expected, found)


@pytest.mark.parametrize("kept", [False, True])
def test_fc1_input_is_waited_for_after_fc1s_dgrad_and_one_that_is_here_lets_both_products_go_at_once(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    module, events = mlp(keep=["fc1_input"] if kept else []), []

    def watch(owner: type, name: str, said: Callable[[Any], str] | None = None) -> None:
        real = getattr(owner, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(name if said is None else said(self))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("fc2_dgrad", "fc1_dgrad", "wgrad", "fc1_backward"):
        watch(ReferenceKernels, name)
    watch(Saved, "take", lambda saved: saved.entry.slot.value)
    with OffloadSession([module], min_bytes=0) as session, session.step():
        run(module, SPLITS)
    fc1 = ["fc1_input", "fc1_backward", "fc1_dgrad", "wgrad"] if kept else ["fc1_dgrad", "fc1_input", "wgrad"]
    assert events == ["act_input", "fc2_dgrad", "wgrad", *fc1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_window_gives_the_same_bits(reentrant: bool) -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self, inner: te.ops.Sequential) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, *extra: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, *extra, use_reentrant=reentrant)

    expected = run(mlp(), SPLITS)
    found = run(Checkpointed(mlp()), SPLITS)
    assert_same_bits(expected, {name.removeprefix("inner."): value for name, value in found.items()})


@pytest.mark.parametrize("frozen", ["0.", "2."])
def test_frozen_linear_gets_no_gradient_and_all_else_keeps_its_own(frozen: str) -> None:
    expected, module = run(mlp(), SPLITS), mlp()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    found = run(module, SPLITS)
    assert_same_bits({name: value for name, value in expected.items() if not name.startswith(frozen)}, found)


def test_input_of_a_frozen_fc1_is_not_saved() -> None:
    module = mlp()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    with OffloadSession([module], min_bytes=0) as session:
        with session.step():
            run(module, SPLITS)
        record = session.records[-1]
    fates = {row.slot.value: row.fate for row in record.slots}
    assert fates == {"fc1_input": Fate.NOT_SAVED, "act_input": Fate.OFFLOADED, "fc2_input": Fate.RECOMPUTED}
    assert record.bytes_out == sum(SPLITS) * 32 * 4


@pytest.mark.parametrize("needs_scales", [False, True], ids=["FC2", "the activation and FC2"])
def test_window_of_which_only_the_last_ops_need_a_gradient_runs_op_by_op(needs_scales: bool) -> None:
    expected, module = run(mlp(), SPLITS), mlp()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    x, sizes, scales = make_inputs(SPLITS)
    scales.requires_grad_(needs_scales)
    output = module(x.detach(), sizes, scales, sizes)
    output.square().sum().backward()
    assert len(fused_ops(module)) == 1
    assert torch.equal(output, expected["output"])
    found = gradients(module, x, scales)
    assert found.keys() == {name for name in expected if name.startswith("2.") or (needs_scales and name == "input1")}
    for name, grad in found.items():
        assert torch.allclose(grad, expected[name], rtol=1e-5), name


@pytest.mark.parametrize("keep", [None, "fc1_input", "act_input"])
def test_v1_context_is_told_of_the_two_slots_that_may_go(monkeypatch: pytest.MonkeyPatch, keep: str | None) -> None:
    monkeypatch.setattr(cpu_offload, "NVTE_CPU_OFFLOAD_V1", True)
    monkeypatch.setattr(cpu_offload_v1, "CPUOffloadEnabled", True)
    module = mlp(keep=[keep] if keep else [])
    listener = listen(module)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        run(module, SPLITS)
    for name, saved in zip(("fc1_input", "act_input"), listener.saved, strict=False):
        assert [hasattr(buffer, "activation_offloading") for buffer in saved.buffers] == [name != keep]
        assert not any(hasattr(tensor, "activation_offloading") for tensor in saved.exempt)
    assert listener.saved[2].buffers == ()


def test_non_contiguous_gradient_gives_what_a_contiguous_one_does() -> None:
    results = []
    for contiguous in (True, False):
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS)
        grad = torch.ones(1).expand(sum(SPLITS), 16)
        module(x, sizes, scales, sizes).backward(grad.contiguous() if contiguous else grad)
        assert x.grad is not None
        results.append(x.grad)
    assert torch.equal(*results)


def test_two_runs_give_the_same_bits() -> None:
    assert_same_bits(run(mlp(), SPLITS), run(mlp(), SPLITS))


def test_without_tokens_everything_is_empty_or_zero() -> None:
    found = run(mlp(), (0, 0, 0, 0))
    assert found["output"].shape == (0, 16)
    assert not found["0.weight1"].any() and not found["2.weight2"].any()


def test_rows_that_one_linear_may_leave_out_and_the_other_read_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split sizes of FC1 and FC2 that are two tensors may differ, and on a GPU nobody looks."""
    cleared: list[torch.Size] = []
    clear = ReferenceKernels.clear

    def note(self: ReferenceKernels, offsets: torch.Tensor, out: torch.Tensor) -> None:
        cleared.append(out.shape)
        clear(self, offsets, out)

    monkeypatch.setattr(ReferenceKernels, "clear", note)
    counts = []
    for apart in (False, True):
        module, (x, sizes, scales) = mlp(), make_inputs(SPLITS)
        cleared.clear()
        module(x, sizes, scales, sizes.clone() if apart else sizes).sum().backward()
        counts.append(cleared.count(torch.Size((sum(SPLITS), 32))))
    assert counts[1] - counts[0] == 3  # act_input, fc2_input, and act_input's gradient


def quantize_fc1(module: te.ops.Sequential) -> None:
    """As `te.quantized_model_init` leaves a weight."""
    shape = module[0].weight0.shape
    weight = Float8Tensor(
        shape=shape,
        dtype=torch.float32,
        data=torch.zeros(shape, dtype=torch.uint8),
        fp8_scale_inv=torch.ones(1),
        fp8_dtype=DType.kFloat8E4M3,
        device=torch.device("cpu"),
    )
    module[0].weight0 = torch.nn.Parameter(weight)


def quantize_grouped_fc2(module: te.ops.Sequential) -> None:
    data = module[2].weight.rowwise_data
    module[2].weight.rowwise_data = data.to(torch.uint8)


class OwnTensor(torch.Tensor):
    """A subclass, as DTensor is one."""


def subclass_fc2(module: te.ops.Sequential) -> None:
    module[2].weight0 = torch.nn.Parameter(module[2].weight0.detach().as_subclass(OwnTensor))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (subclass_fc2, "weights that are quantized, or no plain tensors"),
        (quantize_fc1, "weights that are quantized, or no plain tensors"),
        (quantize_grouped_fc2, "weights that are quantized, or no plain tensors"),
        (lambda module: module[2].double(), "FC1's weights are torch.float32, FC2's torch.float64"),
    ],
)
def test_weights_that_the_kernels_cannot_read_are_handed_over(
    monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    module = mlp(single_grouped_weight=change is quantize_grouped_fc2)
    run(module, SPLITS)
    fused = fused_ops(module)[0]
    x, sizes, scales = make_inputs(SPLITS)
    change(module)
    ctxs = [te_adapter.OperationContext() for _ in range(3)]
    for ctx in ctxs:
        ctx.requires_grad = True
    assert fused.support(ctxs, x, [[sizes], [scales], [sizes]]).reason == reason


def test_missing_main_grad_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="main_grad"):
        run(mlp(accumulate_into_main_grad=True), SPLITS)


def test_split_sizes_of_the_two_linears_are_checked_each() -> None:
    x, sizes, scales = make_inputs(SPLITS)
    with pytest.raises(ArgumentError, match="sum to 12 tokens"):
        mlp()(x, sizes, scales, sizes + torch.tensor([1, 0, 0, 0]))


def test_input_of_twice_the_columns_is_an_error_and_not_twice_the_rows() -> None:
    x, _, scales = make_inputs((6, 0, 14, 2))
    with pytest.raises(ArgumentError, match="FC1: its input has 32 columns, but in_features=16"):
        mlp()(x.detach().view(11, 32), torch.tensor(SPLITS), scales[:11], torch.tensor(SPLITS))


@pytest.mark.parametrize("wrong", [0, 2])
def test_another_number_of_split_sizes_than_experts_is_an_error(wrong: int) -> None:
    x, sizes, scales = make_inputs(SPLITS)
    both = [sizes, sizes]
    both[wrong // 2] = torch.tensor([11])
    with pytest.raises(ArgumentError, match=rf"FC{1 + wrong // 2}: got split sizes of shape \(1,\) for 4 experts"):
        mlp()(x, both[0], scales, both[1])


def test_router_scales_of_another_shape_are_an_error() -> None:
    x, sizes, scales = make_inputs(SPLITS)
    with pytest.raises(ArgumentError, match="one scale a row"):
        mlp()(x, sizes, scales[:-1], sizes)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "swiglu-interleaved", "ffn": 24}, "FC1 gives 48 columns, which are not a multiple of 64"),
        ({"fc1": {"bias": True, "scale_bias": True}}, "FC1 scales its bias"),
        ({"hidden": 20}, "FC1 is 20 x 32, which are not both multiples of 8"),
    ],
)
def test_window_that_is_not_taken_says_why(options: dict[str, Any], reason: str) -> None:
    module = mlp(**options)
    window = next(find_windows(list(module)))
    assert reason in hopper_choice.explain(window).reason
    assert hopper_choice.fuse_windows(list(module)) == list(module)


def test_gated_window_whose_linears_do_not_fit_is_not_taken() -> None:
    linear: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.float32}
    fc1, fc2 = (ops.GroupedLinear(len(SPLITS), *size, **linear) for size in ((16, 64), (64, 16)))
    window = next(find_windows([fc1, ops.ScaledSwiGLU(), fc2]))
    assert hopper_choice.explain(window).reason.endswith("64 columns, FC2 takes 4 experts of 64 for twice as many")


def test_plain_te_ops_are_fused_if_asked_for_and_give_the_same_bits() -> None:
    expected, ours = run(mlp(), SPLITS), mlp()
    linear = {"bias": False, "device": "cpu", "dtype": torch.float32}
    plain = te.ops.Sequential(
        te.ops.GroupedLinear(len(SPLITS), 16, 32, **linear),
        te.ops.ScaledSReLU(),
        te.ops.GroupedLinear(len(SPLITS), 32, 16, **linear),
    )
    plain.load_state_dict(ours.state_dict())
    assert [support.ok for support in fuse(plain)] == [True]
    found = run(plain, SPLITS)
    assert len(fused_ops(plain)) == 1
    assert_same_bits(expected, found)


def test_asking_for_what_is_not_taken_says_why() -> None:
    assert "FC1 is 20 x 32, which are not both multiples of 8" in fuse(mlp(hidden=20))[0].reason
    with pytest.raises(ArgumentTypeError, match=r"te\.ops\.Sequential"):
        fuse(torch.nn.Sequential())


def test_autocast_to_another_dtype_goes_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for switch in ("reference", "0"):
        monkeypatch.setenv(hopper.SWITCH, switch)
        module = mlp()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(run(module, SPLITS))
    assert_same_bits(*results)


def test_window_of_plain_te_ops_is_left_alone() -> None:
    linear = {"bias": False, "device": "cpu", "dtype": torch.float32}
    plain = [te.ops.GroupedLinear(2, 16, 32, **linear), te.ops.ScaledSReLU(), te.ops.GroupedLinear(2, 32, 16, **linear)]
    assert hopper_choice.fuse_windows(plain) == plain
    assert isinstance(hopper_choice.fuse_windows([plain[0], ops.ScaledSReLU(), plain[2]])[0], HopperGroupedMLP)
