"""A torchtitan MoE layer with our experts or its own, on one rank or shared by several; what a step of it gives.

In: sizes, whose experts. Out: modules, outputs and gradients. Keeps true: the same seed fills the same weights, whole or as
DTensors; a rank's plain shards are given theirs (`take_weights`). Does not: build a torchtitan model, whose other modules
need a newer torch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import transformer_engine.pytorch as te

from tests.support.mlp import make_mlp

EXPERTS, TOP, DIM, HIDDEN, LENGTH = 4, 2, 32, 48, 24
BACKENDS = {"cpu": ("partial_dtensor",), "cuda": ("spmd_types", "partial_dtensor")}
"""``spmd_backend`` of torchtitan 0.3.0, the first one by default, which needs what gloo does not have."""


def fill(parameter: Any, *, seed: int) -> None:
    """The same numbers for the same name, of a whole tensor or a DTensor."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator(parameter.device.type).manual_seed(seed)
    whole = torch.randn(tuple(parameter.shape), generator=generator, device=parameter.device) * 0.1
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.copy_(whole)


def moe_config(kind: str, **settings: Any) -> Any:
    """Of an MoE layer whose experts are ``"stock"`` or ``"fused"``, torchtitan's, or ``"ours"``, with settings."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    from torchtitan.overrides.fused_swiglu import fused_grouped_experts

    from te_offload.torchtitan import grouped_experts

    of_experts = {
        name: functools.partial(fill, seed=seed) for seed, name in enumerate(("w1_EFD", "w2_EDF", "w3_EFD"), start=1)
    }
    experts = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS, param_init=of_experts)
    gate = Linear.Config(in_features=DIM, out_features=EXPERTS, param_init={"weight": functools.partial(fill, seed=4)})
    layer = MoE.Config(
        num_experts=EXPERTS,
        routed_experts=RoutedExperts.Config(
            inner_experts=experts, token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP)
        ),
        router=TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=TOP, score_func="softmax"),
        load_balance_coeff=None,
    )
    replace = {"stock": lambda config: config, "fused": fused_grouped_experts}.get(kind)
    layer.routed_experts.inner_experts = replace(experts) if replace else grouped_experts(experts, **settings)
    return layer


def make(kind: str, device: str = "cpu", **settings: Any) -> Any:
    """An MoE layer, filled."""
    moe = moe_config(kind, **settings).build().to(device)
    moe.init_states(buffer_device=torch.device(device))
    return moe


@contextlib.contextmanager
def expert_parallel(backend: str, device: str, ranks: int) -> Iterator[Any]:
    """The same with experts shared by all ranks, as torchtitan's models have it under an ``spmd_backend``."""
    import spmd_types as spmd
    from torchtitan.distributed import parallel_dims, utils
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    parallel_dims.device_type = device  # asked for when it was imported
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # of newer torches: a compiler's question, no here
        torch.compiler._is_non_strict_tracing = lambda: False  # type: ignore[attr-defined]
    config = moe_config("stock")
    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=layout)
    from te_offload.torchtitan import grouped_experts

    config.routed_experts.inner_experts = grouped_experts(config.routed_experts.inner_experts)
    utils.set_spmd_backend(backend)
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=ranks, world_size=ranks, spmd_backend=backend
    )
    dims.build_mesh()
    with utils.get_spmd_context(parallel_dims=dims)():
        moe = config.build().to(device)
        moe.parallelize(dims)
        moe.init_states(buffer_device=torch.device(device))
        yield moe


@contextlib.contextmanager
def traced_as_by_torchtitan() -> Iterator[None]:
    """torch.compile as torchtitan's `apply_compile` sets it up, for a torch older than it is for."""
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(capture_scalar_outputs=True):
        if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # of newer torches: a compiler's question, no here
            patch.setattr(torch.compiler, "_is_non_strict_tracing", lambda: False, raising=False)
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def inputs(
    batch: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a step, (batch, LENGTH, DIM), and the gradient of its output."""
    generator = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(batch, LENGTH, DIM, generator=generator).to(device, dtype) for _ in range(2))
    return x, grad


def step(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients; those of ``w13`` by the names of torchtitan's stock experts, all of this rank's shard."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x * 1)
    y.backward(grad)
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad
        gradient = getattr(gradient, "to_local", lambda gradient=gradient: gradient)()
        if name.endswith("w13"):
            name = name.removesuffix("w13")
            found |= {f"{name}w1_EFD": gradient[:, :, 0], f"{name}w3_EFD": gradient[:, :, 1]}
        else:
            found[name] = gradient
    return {name: tensor.clone() for name, tensor in found.items()}


def beside_linears(experts: Any, recipe: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs and gradients of linears of te_offload's own with these weights under a recipe, and of these experts as they
    are. Rows: in bf16, of ragged experts, one of them empty.
    """
    mlp = make_mlp(
        experts=EXPERTS,
        hidden=DIM,
        ffn=HIDDEN,
        activation="swiglu-pairs",
        dtype=torch.bfloat16,
        device=experts.w13.device,
    )
    counts = torch.tensor([10, 0, 20, 5], device=experts.w13.device)
    generator = torch.Generator().manual_seed(0)
    size = int(counts.sum()), DIM
    x, grad = (torch.randn(size, generator=generator).to(counts.device, torch.bfloat16) for _ in range(2))
    scales = torch.ones(size[0], device=counts.device)
    found: list[dict[str, torch.Tensor]] = []
    with torch.no_grad():
        for number in range(EXPERTS):
            mlp[0].get_parameter(f"weight{number}").copy_(experts.w13[number].flatten(0, 1))
            mlp[2].get_parameter(f"weight{number}").copy_(experts.w2_EDF[number])
    ways: list[Any] = [lambda x: mlp(x, counts, scales, counts), lambda x: experts(x, counts)]
    for call in ways:
        x = x.detach().requires_grad_()
        with te.autocast(enabled=not found, recipe=recipe):  # of the linears
            y = call(x)
        y.backward(grad)
        assert x.grad is not None
        found.append({"y": y.detach(), "x": x.grad})
    for name, linear in (("w13", mlp[0]), ("w2", mlp[2])):
        found[0][name] = torch.stack([linear.get_parameter(f"weight{number}").grad for number in range(EXPERTS)])
    found[1] |= {"w13": experts.w13.grad.flatten(1, 2), "w2": experts.w2_EDF.grad}
    return found[0], found[1]


def main(rank: int, device: str, meeting: str) -> None:
    """One rank of two that share the experts, with half of the batch each: prints of each of `BACKENDS` that what they
    found is what one rank finds with all of it, and in a session the same bits; and so of FSDP2.
    """
    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    x, grad = inputs(device=device)
    whole = make("ours", device)
    expected = step(whole, x, grad)
    for backend in BACKENDS[device]:
        with traced_as_by_torchtitan(), expert_parallel(backend, device, 2) as moe:
            take_weights(moe, whole, rank)
            compare(rank, moe, expected, x, grad)
            print("same under", backend, flush=True)
            compare_compiled(moe, x[rank : rank + 1], grad[rank : rank + 1])
            print("same, compiled, under", backend, flush=True)
    compare_sharded(rank, whole, x.bfloat16(), grad.bfloat16())
    print("same, sharded", flush=True)
    with traced_as_by_torchtitan():
        compare_sharded(rank, whole, x.bfloat16(), grad.bfloat16(), compiled=True)
    print("same, compiled and sharded", flush=True)


def main_quantized(rank: int, device: str, meeting: str) -> None:
    """One rank of two between which FSDP2 shards layers whose experts compute in FP8, as of `main`."""
    from te_offload.torchtitan import RECIPES

    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    x, grad = inputs(device=device, dtype=torch.bfloat16)
    for recipe in RECIPES:
        # An expert's scale is of its rows on a rank, so numbers of 8 bits are others.
        compare_sharded(rank, make("ours", device, recipe=recipe), x, grad, most=0.1)
        print(f"same, sharded, in {recipe}", flush=True)
        with traced_as_by_torchtitan():
            compare_sharded(rank, make("ours", device, recipe=recipe), x, grad, most=0.1, compiled=True)
        print(f"same, compiled and sharded, in {recipe}", flush=True)


def compare_sharded(
    rank: int, whole: Any, x: torch.Tensor, grad: torch.Tensor, *, most: float = 3e-2, compiled: bool = False
) -> None:
    """The same of a layer that FSDP2 shards, with weights in bf16 and gradients in float32 as torchtitan has them: the mean
    over ranks, of shards by the first dimension.

    Raises:
        AssertionError: they differ.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    expected, moe = step(copy.deepcopy(whole).bfloat16(), x, grad), copy.deepcopy(whole)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(x.device.type, (2,))
    if compiled:  # as torchtitan has blocks: before they are sharded
        moe.compile(backend="aot_eager", fullgraph=True)
    for part in (moe,) if compiled else (moe.routed_experts.inner_experts, moe):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    mine = slice(rank, rank + 1)
    found = step(moe, x[mine], grad[mine])
    for name, tensor in found.items():
        at = mine if name in ("y", "x") else rows_of(rank)
        other = expected[name][at]
        error = float((tensor * (1 if name in ("y", "x") else 2) - other).norm() / other.norm())
        assert tensor.shape == other.shape and error < most, (name, error)
    same_in_a_session(moe, x[mine], grad[mine], found, "grouped_mlp." if compiled else "inner_experts.mlp.1.")


def compare_compiled(moe: Any, x: torch.Tensor, grad: torch.Tensor) -> None:
    """Compiled as a whole, a rank's layer has the bits of its eager step.

    Raises:
        AssertionError: it has others.
    """
    expected = step(moe, x, grad)
    moe.compile(backend="aot_eager", fullgraph=True)
    found = step(moe, x, grad)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), expected.keys()
    same_in_a_session(moe, x, grad, {name: found[name] for name in found if "router" not in name}, "grouped_mlp.")


def same_in_a_session(
    moe: Any, x: torch.Tensor, grad: torch.Tensor, expected: dict[str, torch.Tensor], op: str = "inner_experts.mlp.1."
) -> None:
    """Three steps.

    Raises:
        AssertionError: something expected has other bits, or nothing moved.
    """
    from te_offload import OffloadSession

    with OffloadSession(moe, min_bytes=0) as session:
        for _ in range(3):
            with session.step():
                found = step(moe, x, grad)
            rows = session.records[-1].slots
            assert session.records[-1].bytes_out > 0
            assert expected and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert f"{op}act_input" in {row.name.split("/")[1].removeprefix("routed_experts.") for row in rows}


def rows_of(rank: int) -> slice:
    """Of a rank's experts among all."""
    return slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)


def take_weights(moe: Any, whole: Any, rank: int) -> None:
    """A rank's, of those of a whole layer: where shards are plain tensors each rank fills its own from the first number."""
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            weight = weights[name][rows_of(rank)] if "inner_experts" in name else weights[name]
            getattr(parameter, "to_local", lambda parameter=parameter: parameter)().copy_(weight)


def compare(rank: int, moe: Any, expected: dict[str, torch.Tensor], x: torch.Tensor, grad: torch.Tensor) -> None:
    """What a rank finds with its half of a batch, and what one finds with all of it.

    Raises:
        AssertionError: they differ.
    """
    mine = slice(rank, rank + 1)
    found = step(moe, x[mine], grad[mine])
    for name, tensor in found.items():
        other = expected[name]
        if name in ("y", "x"):
            other = other[mine]
        elif "inner_experts" in name:
            other = other[rows_of(rank)]
        else:  # the router's, of this rank's tokens
            dist.all_reduce(tensor)
        error = float((tensor - other).norm() / other.norm())
        assert tensor.shape == other.shape and error < 2e-2, (name, error)
    same_in_a_session(moe, x[mine], grad[mine], {name: found[name] for name in found if "router" not in name})
