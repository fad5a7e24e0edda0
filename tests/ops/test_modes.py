"""The ops in every way in which te.ops can be used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import Float8CurrentScaling

from te_offload import OffloadSession, ops
from te_offload.errors import UnsupportedError
from tests.support.mlp import assert_same_bits, gradients, make_inputs, make_mlp, run

SPLITS = (4, 0, 6)


def pair(**arguments: Any) -> tuple[te.ops.Sequential, te.ops.Sequential]:
    module = make_mlp(**arguments)
    return module, copy.deepcopy(module)


def test_alone_is_the_same_as_in_a_sequential() -> None:
    module, other = pair()
    x, sizes, scales = make_inputs(SPLITS)
    y = other[2](other[1](other[0](x, sizes), scales), sizes)
    y.float().square().sum().backward()
    assert_same_bits(run(module, SPLITS), {"output": y.detach()} | gradients(other, x, scales))


def test_mixed_with_plain_te_ops() -> None:
    x, sizes, scales = make_inputs(SPLITS)
    first = make_mlp()
    mixed = te.ops.Sequential(first[0], te.ops.ScaledTanhSReLU(tanh_clamp_scale=2.0), first[2], te.ops.Identity())
    ours = te.ops.Sequential(first[0], ops.ScaledTanhSReLU(tanh_clamp_scale=2.0), first[2])
    # Transformer Engine empties a plain op's saved input with a CUDA tensor after backward: forward only, without a GPU
    assert torch.equal(mixed(x, sizes, scales, sizes), ours(x, sizes, scales, sizes))


def test_no_grad_gives_the_same_output_and_saves_nothing() -> None:
    module, other = pair()
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session:
        with session.step(), torch.no_grad():
            y = module(x, sizes, scales, sizes)
        assert session.records[-1].slots == ()
    assert not y.requires_grad
    assert torch.equal(y, other(x, sizes, scales, sizes))


@pytest.mark.parametrize("frozen", [[0], [2], [0, 2]], ids=["fc1", "fc2", "both"])
def test_frozen_weights_get_no_gradient_and_the_rest_is_unchanged(frozen: list[int]) -> None:
    module, other = pair()
    for index in frozen:
        for parameter in module[index].parameters():
            parameter.requires_grad_(False)
    found, expected = run(module, SPLITS), run(other, SPLITS)
    gone = {f"{index}.weight{i}" for index in frozen for i in range(3)}
    assert_same_bits(found, {name: value for name, value in expected.items() if name not in gone})


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_gradients_are_the_same(reentrant: bool) -> None:
    module, other = pair()

    def checkpointed(*inputs: torch.Tensor) -> Any:
        return checkpoint(module, *inputs, use_reentrant=reentrant)

    checkpointed.parameters = module.parameters  # type: ignore[attr-defined]
    x, sizes, scales = make_inputs(SPLITS)
    y = checkpointed(x, sizes, scales, sizes)
    y.float().square().sum().backward()
    assert_same_bits(run(other, SPLITS), {"output": y.detach()} | gradients(module, x, scales))


@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
@pytest.mark.parametrize("single", [False, True], ids=["weights", "one-grouped-weight"])
@pytest.mark.parametrize("delay", [False, True], ids=["at-once", "delayed"])
def test_main_grad_receives_the_weight_gradients(
    monkeypatch: pytest.MonkeyPatch, overwrite: bool, single: bool, delay: bool
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    torch.manual_seed(0)
    expected = run(make_mlp(), SPLITS)
    torch.manual_seed(0)
    module = make_mlp(single_grouped_weight=single, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    for parameter in module.parameters():
        parameter.main_grad = torch.ones(parameter.shape, dtype=torch.float64)
        parameter.overwrite_main_grad = overwrite
        parameter.grad_added_to_main_grad = False
    run(module, SPLITS)
    if delay:
        module[0].backward_dw()
        module[2].backward_dw()
    start = 0.0 if overwrite else 1.0
    for index in (0, 2):
        for expert in range(3):
            found = (
                module[index].weight.main_grad.view(3, *expected[f"{index}.weight0"].shape)[expert]
                if single
                else getattr(module[index], f"weight{expert}").main_grad
            )
            assert torch.equal(found, expected[f"{index}.weight{expert}"].double() + start)
    assert all(parameter.grad_added_to_main_grad for parameter in module.parameters())


def test_missing_main_grad_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="main_grad"):
        run(make_mlp(accumulate_into_main_grad=True), SPLITS)


@pytest.mark.parametrize("single", [False, True], ids=["weights", "one-grouped-weight"])
def test_delayed_wgrad_gives_the_same_gradients_later(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    torch.manual_seed(0)
    expected = run(make_mlp(single_grouped_weight=single), SPLITS)
    torch.manual_seed(0)
    module = make_mlp(single_grouped_weight=single, delay_wgrad_compute=True)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = run(module, SPLITS)
        assert not any("weight" in name for name in found)
        for index in (0, 2):
            assert module[index].need_backward_dw()
            module[index].backward_dw()
    assert session.records[-1].bytes_out > 0
    weights = {name: p.grad for name, p in module.named_parameters()}
    assert_same_bits({n: v for n, v in expected.items() if "weight" in n}, weights)


@pytest.mark.parametrize("single", [False, True], ids=["weights", "one-grouped-weight"])
def test_delayed_wgrads_of_several_backwards_add_up(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    found = []
    for delays in (False, True):
        torch.manual_seed(0)
        module = make_mlp(single_grouped_weight=single, delay_wgrad_compute=delays)
        for seed in range(3):
            x, sizes, scales = make_inputs(SPLITS, seed=seed)
            module(x, sizes, scales, sizes).float().square().sum().backward()
            for index in (2, 0):
                module[index].backward_dw()
        module[0].backward_dw()  # nothing is left
        found.append({name: parameter.grad.clone() for name, parameter in module.named_parameters()})
    assert_same_bits(*found)


def test_a_hook_that_takes_the_delayed_wgrads_leaves_what_was_there_before() -> None:
    module = make_mlp(delay_wgrad_compute=True)
    x, sizes, scales = make_inputs(SPLITS)
    module(x, sizes, scales, sizes).float().square().sum().backward()
    weights = [getattr(module[0], f"weight{expert}") for expert in range(len(SPLITS))]
    before = [torch.ones_like(weight) for weight in weights]
    taken: list[torch.Tensor | None] = []

    def take() -> None:
        for weight in weights:
            taken.append(weight.grad)
            weight.grad = None

    module[0].register_wgrad_accumulation_and_reduce_hooks(take)
    for weight, grad in zip(weights, before, strict=True):
        weight.grad = grad
    module[0].backward_dw()
    assert all(weight.grad is grad and bool((grad == 1).all()) for weight, grad in zip(weights, before, strict=True))
    assert any(grad is not None and bool(grad.any()) for grad in taken)


@pytest.mark.parametrize("bias", ["discrete", "grouped"])
def test_one_grouped_weight_gives_the_gradients_of_many(monkeypatch: pytest.MonkeyPatch, bias: str) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    torch.manual_seed(0)
    expected = run(make_mlp(bias=True, fc2={"scale_bias": True}), SPLITS, extra=4)
    torch.manual_seed(0)
    module = make_mlp(
        bias=True, fc2={"scale_bias": True}, single_grouped_weight=True, single_grouped_bias=bias == "grouped"
    )
    with OffloadSession(module, min_bytes=0) as session, session.step():
        found = run(module, SPLITS, extra=4)
    assert session.records[-1].bytes_out > 0
    for index in (0, 2):
        stacked = torch.stack([expected[f"{index}.weight{i}"] for i in range(3)])
        assert torch.equal(found[f"{index}.weight"].view_as(stacked), stacked)
        if bias == "grouped":
            stacked = torch.stack([expected[f"{index}.bias{i}"] for i in range(3)])
            assert torch.equal(found[f"{index}.bias"].view_as(stacked), stacked)
        else:
            assert all(torch.equal(found[f"{index}.bias{i}"], expected[f"{index}.bias{i}"]) for i in range(3))
    assert_same_bits(
        {n: expected[n] for n in ("output", "input0", "input1")}, {n: found[n] for n in ("output", "input0", "input1")}
    )


def test_torch_autocast_computes_in_its_dtype() -> None:
    module = make_mlp()
    x, sizes, scales = make_inputs(SPLITS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, sizes, scales, sizes)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert module[0].weight0.grad.dtype == torch.float32


def test_te_autocast_that_is_off_changes_nothing() -> None:
    module, other = pair()
    with te.autocast(enabled=False, recipe=Float8CurrentScaling()):
        found = run(module, SPLITS)
    assert_same_bits(run(other, SPLITS), found)


def test_te_autocast_on_cpu_tensors_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.pytorch.quantization as te_quantization

    monkeypatch.setattr(te_quantization, "_FP8_SUPPORT", (True, ""))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with (
        pytest.raises(UnsupportedError, match=r"GroupedLinear: te\.autocast quantizes on a GPU"),
        te.autocast(enabled=True, recipe=Float8CurrentScaling()),
    ):
        run(make_mlp(), SPLITS)


def test_caller_buffers_receive_output_and_grad_input() -> None:
    module, other = pair()
    x, sizes, scales = make_inputs(SPLITS)
    out, dgrad = torch.empty(10, 16), torch.empty(10, 16)
    y = module(x, sizes, scales, sizes, op_kwargs={2: {"output": out.detach()}, 0: {"grad_input": dgrad.detach()}})
    y.float().square().sum().backward()
    expected = run(other, SPLITS)
    assert torch.equal(out, expected["output"])
    assert torch.equal(dgrad, expected["input0"])


def test_second_forward_accumulates_into_grad() -> None:
    module, other = pair()
    x, sizes, scales = make_inputs(SPLITS)
    for _ in range(2):
        module(x, sizes, scales, sizes).float().square().sum().backward()
    once = run(other, SPLITS)
    assert torch.equal(module[2].weight0.grad, 2 * once["2.weight0"])
