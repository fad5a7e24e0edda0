"""The fused grouped MLP with the arithmetic of its kernels in torch: weights, gradients and buffers of the caller's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from te_offload.errors import ArgumentError, SavedTensorModifiedError
from te_offload.fused import hopper, parameters
from te_offload.fused.kernels.reference import ReferenceKernels
from tests.fused.test_hopper_op import SPLITS, fused_ops, mlp
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run
from tests.support.tolerances import assert_close_to_fp64


@pytest.fixture(autouse=True)
def in_torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")


def test_callers_buffers_receive_output_and_input_gradient() -> None:
    module = mlp()
    x, sizes, scales = make_inputs(SPLITS)
    rows = sum(SPLITS)
    out, dgrad = torch.empty(rows, 16), torch.empty(rows, 16)
    y = module(x, sizes, scales, sizes, op_kwargs={2: {"output": out.detach()}, 0: {"grad_input": dgrad.detach()}})
    y.float().square().sum().backward()
    assert len(fused_ops(module)) == 1
    expected = run(mlp(), SPLITS)
    assert torch.equal(out, expected["output"]) and y.data_ptr() == out.data_ptr()
    assert torch.equal(dgrad, expected["input0"])


@pytest.mark.parametrize("splits", [(5,), SPLITS])
@pytest.mark.parametrize("bias", [False, True])
def test_weight_gradients_are_the_memory_that_the_kernels_wrote_also_of_one_expert(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, ...], bias: bool
) -> None:
    written: dict[str, torch.Tensor] = {}
    prepare = ReferenceKernels.prepare

    def listening(self: ReferenceKernels, name: str, tensors: Any, **options: Any) -> Any:
        written[name] = tensors
        return prepare(self, name, tensors, **options)

    monkeypatch.setattr(ReferenceKernels, "prepare", listening)
    module = make_mlp(experts=len(splits), bias=bias)
    x, sizes, scales = make_inputs(splits)
    output = module(x, sizes, scales, sizes)
    found = torch.autograd.grad(output.sum(), list(module.parameters()))
    assert len(fused_ops(module)) == 1
    grads = {name: grad for (name, _), grad in zip(module.named_parameters(), found, strict=True)}
    for op, name in (("0", "FC1's gradient"), ("2", "FC2's gradient")):
        packed = written[name]
        for expert in range(len(splits)):
            grad = grads[f"{op}.weight{expert}"]
            assert grad.shape == packed.shape[1:] and grad.data_ptr() == packed[expert].data_ptr()


@pytest.mark.filterwarnings("ignore:GroupedLinear")
@pytest.mark.parametrize("kind", ["apart", "of two dtypes", "one grouped bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_are_packed_as_transformer_engine_does_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    together = kind == "one grouped bias"
    op = make_mlp(experts=3, bias=True, single_grouped_weight=together, single_grouped_bias=together)[0]
    if kind == "of two dtypes":
        op.bias1.data = op.bias1.data.bfloat16()
    packed = parameters.bias(op, dtype)
    assert packed is not None and not packed.requires_grad and packed.dtype is dtype
    assert torch.equal(packed, op._get_packed_bias_tensor(dtype))


def test_bias_that_is_kept_elsewhere_is_an_error_that_says_so() -> None:
    module = mlp(bias=True)
    bias = module[0]._parameters.pop("bias2")
    module[0].bias2 = bias * 1.0  # as torch's parametrizations do
    x, sizes, scales = make_inputs(SPLITS)
    with pytest.raises(ArgumentError, match=r"bias2 is not among its parameters.*functional_call"):
        module(x, sizes, scales, sizes)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copy_of_a_module_that_has_run_computes_with_its_own_weights(copied: Any) -> None:
    module = mlp()
    run(module, SPLITS)
    other = copied(module)
    with torch.no_grad():
        other[0].weight2.mul_(2)
    assert not torch.equal(run(module, SPLITS)["output"], run(other, SPLITS)["output"])
    assert_same_bits(run(module, SPLITS), run(mlp(), SPLITS))


@pytest.mark.filterwarnings("ignore:GroupedLinear")
@pytest.mark.parametrize("name", ["0.weight1", "2.weight3", "0.bias2", "2.bias0", "0.weight", "2.weight", "2.bias"])
def test_parameter_written_to_between_forward_and_backward_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    module = mlp(
        bias="bias" in name,
        single_grouped_weight=name.endswith("weight"),
        single_grouped_bias=name.endswith("bias"),
    )
    x, sizes, scales = make_inputs(SPLITS)
    output = module(x, sizes, scales, sizes)
    with torch.no_grad():
        module.get_parameter(name).mul_(2)
    with pytest.raises(SavedTensorModifiedError, match=r"optimizer\.step"):
        output.sum().backward()


def test_weights_that_the_kernels_refuse_are_an_error_that_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, name: str, tensors: object) -> object:
        raise ArgumentError(f"{name}: not at a multiple of 16 bytes")

    monkeypatch.setattr(ReferenceKernels, "prepare", refuse)
    with pytest.raises(ArgumentError, match="FC1's weights: not at a multiple of 16 bytes"):
        run(mlp(), SPLITS)


@pytest.mark.parametrize("overwrite", [False, True], ids=["added", "overwritten"])
def test_main_grad_that_the_kernels_refuse_takes_a_buffer(monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    prepare = ReferenceKernels.prepare

    def refuse(self: ReferenceKernels, name: str, tensors: Any, *, written: bool = False) -> Any:
        if written:  # of what is read a copy could stand for it
            raise ArgumentError("not at a multiple of 16 bytes")
        return prepare(self, name, tensors)

    monkeypatch.setattr(ReferenceKernels, "prepare", refuse)
    expected, module = run(mlp(), SPLITS), mlp(accumulate_into_main_grad=True)
    for parameter in module.parameters():
        parameter.main_grad = torch.full_like(parameter, 0.5)
        parameter.overwrite_main_grad = overwrite
        parameter.grad_added_to_main_grad = False
    run(module, SPLITS)
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter.main_grad, expected[name] + (0.0 if overwrite else 0.5), rtol=1e-5)


@pytest.mark.parametrize("overwrite", [False, True], ids=["added", "overwritten"])
@pytest.mark.parametrize(
    "where", ["apart", "one behind the other", "in reverse", "at odd addresses", "one grouped weight"]
)
def test_main_grad_receives_the_weight_gradients(monkeypatch: pytest.MonkeyPatch, where: str, overwrite: bool) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    single, experts = where == "one grouped weight", range(len(SPLITS))
    expected = run(mlp(), SPLITS)
    module = mlp(accumulate_into_main_grad=True, single_grouped_weight=single)
    for layer in (0, 2):
        parameters = list(module[layer].parameters())
        sizes = [parameter.numel() for parameter in parameters]
        odd = where == "at odd addresses"  # of which TMA cannot write one
        together = torch.ones(sum(sizes) + odd)[int(odd) :].split(sizes)
        parts = [torch.ones(size) for size in sizes] if where == "apart" else list(together)
        parts = parts[::-1] if where == "in reverse" else parts  # as Megatron-core lays its buffers out
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.main_grad = part.view(parameter.shape)
            parameter.overwrite_main_grad = overwrite
            parameter.grad_added_to_main_grad = False
    run(module, SPLITS)
    assert len(fused_ops(module)) == 1
    for layer in (0, 2):
        main_grads = [p.main_grad for p in module[layer].parameters()]
        shape = expected[f"{layer}.weight0"].shape
        found = main_grads[0].view(len(SPLITS), *shape) if single else torch.stack(main_grads)
        for expert in experts:
            reference = expected[f"{layer}.weight{expert}"].double() + (0 if overwrite else 1)
            assert_close_to_fp64(found[expert], reference, torch.float32, f"{layer}.weight{expert}")
        assert all(p.grad_added_to_main_grad for p in module[layer].parameters())


@pytest.mark.parametrize(("overwrite", "left"), [(False, 0.5), (True, 0.0)], ids=["added", "overwritten"])
def test_main_grad_of_a_step_without_tokens_is_zero_or_stays(overwrite: bool, left: float) -> None:
    module = mlp(accumulate_into_main_grad=True)
    for parameter in module.parameters():
        parameter.main_grad = torch.full_like(parameter, 0.5)
        parameter.overwrite_main_grad = overwrite
        parameter.grad_added_to_main_grad = False
    run(module, (0,) * len(SPLITS))
    for parameter in module.parameters():
        assert torch.equal(parameter.main_grad, torch.full_like(parameter, left))
