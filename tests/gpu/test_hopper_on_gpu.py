"""The fused grouped MLP on a Hopper GPU: near FP64, deterministic, the same bits with and without offloading."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload import Fate, OffloadSession
from te_offload.errors import ArgumentError
from te_offload.fused import hopper
from te_offload.fused.hopper import HopperGroupedMLP
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.fused.kernels.reference import ReferenceKernels
from tests.support.mlp import ACTIVATIONS, assert_same_bits, is_glu, make_inputs, make_mlp, run, seeded
from tests.support.reference import activate
from tests.support.tolerances import assert_close_to_fp64

pytestmark = pytest.mark.gpu

HIDDEN, FFN = 256, 384
SPLITS = {
    "even": (128, 128, 128, 128),
    "ragged": (16, 301, 47, 148),
    "empty and one-token": (0, 355, 1, 0),
    "no tokens": (0, 0, 0, 0),
    "one with most of more tokens": (97, 900, 0, 3),  # for which other tiles are taken
    "many tokens": (8000, 0, 200, 57),  # and here
}
GLU = [name for name in ACTIVATIONS if is_glu(name)]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")
    monkeypatch.setenv(hopper.SWITCH, "1")


def mlp(dtype: torch.dtype = torch.bfloat16, **options: Any) -> te.ops.Sequential:
    torch.manual_seed(0)
    return make_mlp(experts=4, hidden=HIDDEN, ffn=FFN, device="cuda", dtype=dtype, **options)


def fused_run(module: te.ops.Sequential, splits: Sequence[int], *, extra: int = 3) -> dict[str, torch.Tensor]:
    """One step, of which the fused op's kernels took both ways."""
    found = run(module, splits, hidden=HIDDEN, extra=extra)
    assert_fused(module)
    return found


def assert_fused(module: te.ops.Sequential) -> None:
    fused = next(op for op, _ in module._module_groups[0]._forward_ops)
    assert isinstance(fused, HopperGroupedMLP) and not isinstance(fused._kernels[True, "dense"], ReferenceKernels)


def poison() -> None:
    """Leave NaN in the memory that the next allocations get."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 10, 1 << 16, 1 << 20, 1 << 22) * 4]
    del blocks


def step(module: te.ops.Sequential, splits: Sequence[int], dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step from a given gradient: no result depends on how another one was rounded."""
    x, sizes, scales = make_inputs(splits, HIDDEN, device="cuda", dtype=next(module.parameters()).dtype)
    sized = [sizes, scales] if module[2]._scale_bias else [sizes]
    output = module(x, sizes, scales, *sized)
    output.backward(dy.to(output))
    results = {"output": output.detach(), "input0": x.grad, "input1": scales.grad}
    results |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def fp64_run(
    module: te.ops.Sequential,
    splits: Sequence[int],
    activation: str = "srelu",
    dy: torch.Tensor | None = None,
    hidden: int = HIDDEN,
) -> dict[str, torch.Tensor]:
    """The same step in float64 on the CPU, from the same bits; ``None``: the gradient is that of the sum of squares."""
    weights = {name: p.detach().cpu().double().requires_grad_() for name, p in module.named_parameters()}
    dtype = next(module.parameters()).dtype
    x, _, scales = (t.detach().double() for t in make_inputs(splits, hidden, dtype=dtype))
    x.requires_grad_()
    scales.requires_grad_()
    none = torch.zeros(1, dtype=torch.float64)
    outputs = []
    for i, (part, scale) in enumerate(zip(x.split(list(splits)), scales.split(list(splits)), strict=True)):
        act_input = part @ weights[f"0.weight{i}"].T + weights.get(f"0.bias{i}", none)
        fc2_input = activate(activation, act_input, scale)
        outputs.append(fc2_input @ weights[f"2.weight{i}"].T + weights.get(f"2.bias{i}", none) * scale[:, None])
    output = torch.cat(outputs)
    output.backward(2 * output.detach().to(dtype).double() if dy is None else dy.double())
    results: dict[str, torch.Tensor] = {"output": output.detach()}
    for name, tensor in (weights | {"input0": x, "input1": scales}).items():
        assert tensor.grad is not None
        results[name] = tensor.grad
    return results


def of_whole_ops(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of all weights, or biases, of an op as one: the largest error of an expert with one token is chance."""
    names = {name: re.sub(r"(weight|bias)\d+", r"\1", name) for name in results}
    return {
        whole: torch.cat([results[name].flatten() for name in results if names[name] == whole])
        for whole in names.values()
    }


def errors(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """RMS and largest error."""
    off = found.cpu().double() - expected
    return off.square().mean().sqrt().item(), off.abs().max().item()


def half_a_step(reference: torch.Tensor, dtype: torch.dtype) -> float:
    """What rounding alone makes of the largest number at most."""
    return 2.0 ** math.floor(math.log2(reference.abs().max().item())) * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "scale-bias"])
@pytest.mark.parametrize("activation", ["srelu", "tanh-srelu"])
def test_errors_against_fp64_are_no_larger_than_those_of_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, ...], dtype: torch.dtype, bias: bool, activation: str
) -> None:
    options: dict[str, Any] = {"bias": bias, "fc2": {"scale_bias": bias}}
    assert_as_near_to_fp64_as_transformer_engine(monkeypatch, splits, dtype, activation, **options)


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "scale-bias"])
@pytest.mark.parametrize(
    ("activation", "dtype"), [*((name, torch.bfloat16) for name in GLU), ("swiglu", torch.float16)], ids=str
)
def test_errors_of_gated_activations_are_no_larger_either(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, ...], bias: bool, activation: str, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"bias": bias, "fc2": {"scale_bias": bias}}
    assert_as_near_to_fp64_as_transformer_engine(monkeypatch, splits, dtype, activation, **options)


def assert_as_near_to_fp64_as_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, ...], dtype: torch.dtype, activation: str, **options: Any
) -> None:
    def make() -> te.ops.Sequential:
        module = mlp(dtype, activation=activation, **options)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "bias" in name:
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
        return module

    module, dy = make(), seeded((sum(splits), HIDDEN), 7).to(dtype)
    poison()
    found, expected = step(module, splits, dy), fp64_run(module, splits, activation, dy)
    assert_fused(module)
    monkeypatch.setenv(hopper.SWITCH, "0")
    unfused = step(make(), splits, dy)
    assert found.keys() == unfused.keys() == expected.keys()
    for name in expected:
        assert found[name].shape == expected[name].shape
        assert expected[name].any() or not found[name].any(), name  # an expert without tokens
    found, unfused, expected = of_whole_ops(found), of_whole_ops(unfused), of_whole_ops(expected)
    for name, reference in expected.items():
        if reference.numel() == 0 or not reference.any():
            assert not found[name].any(), name
            continue
        (ours, our_most), (theirs, their_most) = errors(found[name], reference), errors(unfused[name], reference)
        print(f"{name}: rms {ours:.3e} (te {theirs:.3e}), max {our_most:.3e} (te {their_most:.3e})")
        most = 1.5 * their_most
        if "bias" in name:  # a few hundred numbers: whether one lies halfway between two of dtype's is chance
            most = max(most, 1.05 * half_a_step(reference, dtype))
        assert ours <= 1.05 * theirs and our_most <= most, name


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("bias", "activation"), [(False, "srelu"), (True, "srelu"), (True, "swiglu")])
def test_two_runs_give_the_same_bits(splits: tuple[int, ...], bias: bool, activation: str) -> None:
    options: dict[str, Any] = {"bias": bias, "fc2": {"scale_bias": bias}, "activation": activation}
    first = fused_run(mlp(**options), splits, extra=4 if bias else 3)
    poison()
    assert_same_bits(first, fused_run(mlp(**options), splits, extra=4 if bias else 3))


@pytest.mark.parametrize("overwrite", [False, True], ids=["added", "overwritten"])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "one behind the other"])
@pytest.mark.parametrize("activation", ["srelu", "swiglu", "swiglu-interleaved"])
def test_main_grad_in_float32_receives_the_weight_gradients(together: bool, overwrite: bool, activation: str) -> None:
    plain = fp64_run(mlp(activation=activation), SPLITS["ragged"], activation)
    module = mlp(accumulate_into_main_grad=True, activation=activation)
    for layer in (0, 2):
        parameters = list(module[layer].parameters())
        sizes = [parameter.numel() for parameter in parameters]
        one = torch.full((sum(sizes),), 0.5, device="cuda").split(sizes)
        parts = one if together else [torch.full((size,), 0.5, device="cuda") for size in sizes]
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.main_grad = part.view(parameter.shape)
            parameter.overwrite_main_grad = overwrite
            parameter.grad_added_to_main_grad = False
    fused_run(module, SPLITS["ragged"])
    for name, parameter in module.named_parameters():
        expected = plain[name] + (0.0 if overwrite else 0.5)
        assert_close_to_fp64(parameter.main_grad, expected, torch.bfloat16, name)


def test_non_contiguous_gradient_gives_what_a_contiguous_one_does() -> None:
    results = []
    for contiguous in (True, False):
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
        grad = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(sum(SPLITS["ragged"]), HIDDEN)
        module(x, sizes, scales, sizes).backward(grad.contiguous() if contiguous else grad)
        assert x.grad is not None
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_router_scales_that_lie_apart_give_what_those_side_by_side_do(dtype: torch.dtype, activation: str) -> None:
    results = []
    for apart in (False, True):
        module = mlp(bias=True, fc2={"scale_bias": True}, activation=activation)
        x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
        routed = torch.stack([scales.detach(), -scales.detach()], dim=1).to(dtype).requires_grad_()  # as of two experts
        column = routed[:, 0]
        assert not column.is_contiguous()
        column = column if apart else column.contiguous()
        module(x, sizes, column, sizes, column).square().sum().backward()
        assert_fused(module)
        grads = {name: p.grad for name, p in module.named_parameters()}
        results.append(grads | {"input": x.grad, "scales": routed.grad})
    assert_same_bits(*results)


def test_weights_that_moved_between_steps_are_found() -> None:
    module = mlp()
    expected = fused_run(module, SPLITS["ragged"])
    kept = [parameter.data for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    for old in kept:
        old.fill_(float("nan"))
    assert_same_bits(expected, fused_run(module, SPLITS["ragged"]))


def test_weights_that_tma_cannot_read_are_an_error() -> None:
    module = mlp()
    for parameter in module.parameters():
        flat = torch.empty(parameter.numel() + 1, device="cuda", dtype=torch.bfloat16)
        flat[1:].copy_(parameter.data.flatten())
        parameter.data = flat[1:].view(parameter.shape)
    with pytest.raises(ArgumentError, match=r"FC1's weights: expert 0's .* multiple of 16 bytes"):
        run(module, SPLITS["ragged"], hidden=HIDDEN)


def test_inputs_and_gradients_at_odd_addresses_give_the_same_bits() -> None:
    def odd(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)
        flat[1:].copy_(tensor.detach().flatten())
        return flat[1:].view(tensor.shape)

    results = []
    for where in (torch.Tensor.detach, odd):
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
        x = where(x).requires_grad_()
        module(x, sizes, scales, sizes).backward(where(torch.ones_like(x)))
        results.append({name: p.grad for name, p in module.named_parameters()} | {"input": x.grad})
    assert_same_bits(*results)


@pytest.mark.parametrize(("bias", "activation"), [(False, "srelu"), (True, "srelu"), (False, "swiglu")])
def test_rows_of_no_expert_are_not_read_come_out_zero_and_take_no_gradient(bias: bool, activation: str) -> None:
    splits, more = SPLITS["ragged"], 77
    rows, results = sum(splits), []
    for beyond in (0, more):
        module = mlp(bias=bias, fc2={"scale_bias": bias}, activation=activation)
        poison()
        inputs = make_inputs((*splits, beyond), HIDDEN, device="cuda", dtype=torch.bfloat16)
        x, scales = (tensor.detach().clone() for tensor in (inputs[0], inputs[2]))
        for tensor in (x, scales):
            tensor[rows:] = float("nan")
            tensor.requires_grad_()
        sizes = torch.tensor(splits, device="cuda")
        output = module(x, sizes, scales, sizes, *([scales] if bias else []))
        dy = seeded((rows + beyond, HIDDEN), 7, device="cuda", dtype=torch.bfloat16)
        dy[rows:] = float("nan")
        output.backward(dy)
        ours = {"output": output.detach(), "x": x.grad, "scales": scales.grad}
        for tensor in ours.values():
            assert tensor is not None and not tensor[rows:].any()
        grads = {name: p.grad for name, p in module.named_parameters()}
        results.append({name: tensor[:rows] for name, tensor in ours.items() if tensor is not None} | grads)
        assert_fused(module)
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", ["int32", "apart"])
def test_split_sizes_of_another_kind_give_the_same_bits(kind: str) -> None:
    results = []
    for other in (False, True):
        module = mlp()
        x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
        sizes = sizes.to(torch.int32) if other and kind == "int32" else sizes
        module(x, sizes, scales, sizes.clone() if other and kind == "apart" else sizes).sum().backward()
        results.append({name: p.grad for name, p in module.named_parameters()} | {"input": x.grad})
    assert_same_bits(*results)


@pytest.mark.parametrize("tokens", [3, 40, 300, 1500])
def test_many_experts_get_the_rows_that_their_split_sizes_say(tokens: int) -> None:
    from te_offload.fused.kernels.sm90 import Sm90Kernels

    for experts in (1, 31, 32, 33, 500):
        sizes = torch.randint(0, 2 * tokens // experts + 2, (experts,), generator=torch.Generator().manual_seed(tokens))
        out = torch.full((tokens, 24), float("nan"), device="cuda", dtype=torch.bfloat16)
        offsets, counts = Sm90Kernels(SquaredReLU()).offsets(sizes.cuda(), out)
        expected = [0, *sizes.cumsum(0).clamp(max=tokens).tolist()]
        assert offsets.tolist() == expected
        assert counts.fc1 is not None and counts.fc2 is not None
        assert [int(count.work[count.place]) for count in (counts.fc1, counts.fc2)] == [0, 0]
        assert out[: expected[-1]].isnan().all() and not out[expected[-1] :].any()


def test_single_grouped_weight_gives_the_bits_of_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    separate, grouped = mlp(), mlp(single_grouped_weight=True)
    expected = fused_run(separate, SPLITS["ragged"])
    run(grouped, SPLITS["ragged"], hidden=HIDDEN)  # which makes the grouped weight
    with torch.no_grad():
        for layer in (0, 2):
            packed = grouped[layer].weight.rowwise_data.view(4, -1)
            packed.copy_(torch.stack([getattr(separate[layer], f"weight{i}").flatten() for i in range(4)]))
    found = fused_run(grouped, SPLITS["ragged"])
    for layer in (0, 2):
        gradient = found.pop(f"{layer}.weight")
        found |= {f"{layer}.weight{i}": part for i, part in enumerate(gradient.unbind(0))}
    assert_same_bits(dict(sorted(expected.items())), dict(sorted(found.items())))


@pytest.mark.parametrize("where", ["separate weights", "one grouped weight"])
@pytest.mark.parametrize(("activation", "columns"), [("srelu", HIDDEN + FFN), ("swiglu", HIDDEN + 2 * FFN)])
@pytest.mark.usefixtures("copies_out_end")
def test_offloading_changes_no_bit_and_moves_two_slots(
    monkeypatch: pytest.MonkeyPatch, where: str, activation: str, columns: int
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    options: dict[str, Any] = {"single_grouped_weight": where == "one grouped weight", "activation": activation}
    splits, expected, module = SPLITS["ragged"], fused_run(mlp(**options), SPLITS["ragged"]), mlp(**options)
    with OffloadSession([module], min_bytes=0, max_in_flight=0, verify=True) as session:
        for _ in range(3):
            with session.step():
                found = fused_run(module, splits)
            assert_same_bits(expected, found)
        record = session.records[-1]
    assert record.bytes_out == record.bytes_back >= sum(splits) * columns * 2
    assert {row.slot.value: row.fate for row in record.slots}["fc2_input"] is Fate.RECOMPUTED


def test_split_sizes_on_the_host_go_op_by_op() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
    on_host = sizes.cpu()
    expected = run(mlp(), SPLITS["ragged"], hidden=HIDDEN)["output"]
    output = module(x, on_host, scales, on_host)
    fused = next(op for op, _ in module._module_groups[0]._forward_ops)
    assert not fused._kernels
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)


def test_split_sizes_that_ask_for_too_many_rows_touch_no_other_memory() -> None:
    x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
    module = mlp()
    expected = module(x, sizes, scales, sizes)
    more = sizes + torch.tensor([0, 0, 0, 4096], device="cuda")
    assert torch.equal(module(x, more, scales, more), expected)


@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_forward_and_backward_are_captured_in_a_cuda_graph_and_follow_new_split_sizes(activation: str) -> None:
    module = mlp(activation=activation)
    x, sizes, scales = make_inputs(SPLITS["ragged"], HIDDEN, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x).detach()
    parameters = list(module.parameters())

    def step() -> tuple[torch.Tensor, ...]:
        output = module(x, sizes, scales, sizes)
        return output, *torch.autograd.grad(output, [x, scales, *parameters], dy)

    side = torch.cuda.Stream()  # all on one stream: autograd warns of gradients that change theirs
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            captured = step()
        for splits in ((16, 301, 47, 148), (500, 0, 12, 0)):
            sizes.copy_(torch.tensor(splits))
            graph.replay()
            for one, other in zip(captured, step(), strict=True):
                assert torch.equal(one, other)
    torch.cuda.current_stream().wait_stream(side)
