"""What Megatron-core asks of a GPU, on the CPU.

In: nothing. Out: a context in which its models, schedules, data parallelism and optimizer run on the CPU; a norm and an
attention for its layers' specs. Keeps true: inside of the context alone. Does not: run anything beside anything else;
streams and events are there by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode


class Norm(torch.nn.LayerNorm):
    """For Megatron-core's of a CPU, which refuses to be sequence parallel."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(torch.nn.Module):
    """For Megatron-core's core attention, which takes memory of a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2)


class _OnTheCpu(TorchFunctionMode):
    """``"cuda"`` is the CPU: what is made there, the device itself, and what a tensor says its type is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        if function is torch.device and str(args[0]).startswith("cuda"):
            args = ("cpu",)
        found = function(*args, **kwargs)
        is_name = function is torch.Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_name else found


class _CpuMesh(DeviceMesh):
    """Of the CPU, whatever it is asked for."""

    @staticmethod
    def from_group(group: Any, device_type: str, *args: Any, **keywords: Any) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu", *args, **keywords)


class _Stream:
    """A stream, and an event: everything is done when it is called."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name not in ("record", "wait", "wait_stream", "wait_event", "record_event", "synchronize"):
            raise AttributeError(name)
        return lambda *_: _Stream()


@contextlib.contextmanager
def on_the_cpu(*, reduces: bool) -> Iterator[None]:
    """Have Megatron-core run on the CPU. ``reduces``: tensor parallelism does, so that its results are of new memory."""
    from megatron.core import optimizer, utils
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel import random as their_random
    from megatron.core.transformer import transformer_block

    all_to_all = dist.all_to_all_single

    def with_numbers(out: Any, x: Any, **keywords: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if keywords.get(name) is not None:
                keywords[name] = [int(size) for size in keywords[name]]
        return all_to_all(out, x.contiguous(), **keywords)

    with pytest.MonkeyPatch.context() as patch, _OnTheCpu():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # its router moves its weights there
        for name, stand_in in {
            "synchronize": lambda *_: None,
            "stream": lambda _: contextlib.nullcontext(),
            "current_stream": _Stream,
            "default_stream": _Stream,
            "Stream": _Stream,
            "Event": _Stream,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        for name in ("range_push", "range_pop"):
            patch.setattr(torch.cuda.nvtx, name, lambda *_: None)
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patch.setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
        patch.setattr(dist, "all_to_all_single", with_numbers)  # its dispatcher has tensors of them
        patch.setattr(mcore_fsdp_adapter, "DeviceMesh", _CpuMesh)
        patch.setattr(transformer_block, "LayerNormImpl", Norm)
        patch.setattr(their_random, "fp8_autocast", lambda **_: contextlib.nullcontext())  # asks what the GPU can do
        patch.setattr(their_random, "_get_cuda_rng_state", lambda **_: None)  # of its checkpoints
        patch.setattr(their_random, "_set_cuda_rng_state", lambda *_, **__: None)
        patch.setattr(their_random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        patch.setattr(layers.RowParallelLinear, "backward_dw", lambda _: None, raising=False)  # its columns' has one
        if not reduces:  # else experts add their biases in place
            patch.setattr(layers, "reduce_from_tensor_model_parallel_region", lambda x, **_: x.clone())
        patch.setattr(optimizer, "Adam", torch.optim.AdamW)  # Transformer Engine's are kernels
        patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", True)
        for name, of_torch in {
            "multi_tensor_applier": "local_multi_tensor_applier",
            "l2_norm_impl": "local_multi_tensor_l2_norm",
            "multi_tensor_scale_impl": "local_multi_tensor_scale",
        }.items():
            patch.setattr(clip_grads, name, getattr(utils, of_torch))
        yield
