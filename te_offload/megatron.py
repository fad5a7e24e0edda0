"""The experts of a Megatron-core model, of this package's ops: in the place of its `TEGroupedMLP`.

In: what Megatron-core hands to the module of its experts. Out: their rows. Keeps true: names of weights, shards in
distributed checkpoints, random numbers at the start, and what data parallelism and gradient norms read of a parameter
are those of `TEGroupedMLP`, so that one reads the other's checkpoints; settings that it would not compute are refused.
Does not: shard an expert over ranks (expert tensor parallelism); import Megatron-core before a module is made.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload import ops
from te_offload.errors import ArgumentError, NotInstalledError, UnsupportedError

_OP_OF_SLOT = {"fc1_input": "linear_fc1", "act_input": "activation", "fc2_input": "linear_fc2"}
_NO_LIMIT = torch.finfo(torch.bfloat16).max
_NO_STATE = torch.empty(0, dtype=torch.uint8, device="cpu")


class GroupedMLP(te.ops.Sequential):
    """What Megatron-core 0.16.1's `TEGroupedMLP` computes, with slots that can be offloaded one by one.

    FC1, an activation times the router's probabilities, FC2; in a layer spec
    ``ModuleSpec(module=GroupedMLP, params={...})``, where ``params`` may have the keywords. ``H`` is ``hidden_size`` (or
    ``moe_latent_size``), ``F`` ``moe_ffn_hidden_size``; weights are ``linear_fc1.weight0`` (2F, H; F if not gated), the
    gate's half first, and ``linear_fc2.weight0`` (H, F), for each local expert.

    Args:
        num_local_experts: experts of this rank. config: a `TransformerConfig`. submodules: not read.
        pg_collection: whose ``ep`` and ``expt_dp`` distributed checkpoints ask; ``None``: Megatron-core's global groups.
        no_offload_activation: slots that stay on the GPU: of ``"fc1_input"``, ``"act_input"``, ``"fc2_input"``.
        recompute_act_input, act_input_dtype: as of `te_offload.ops.ScaledSwiGLU`.
        keep_quantized_weight: as of `te_offload.ops.GroupedLinear`.

    Warns where ``recompute_modules`` has ``moe_act``, which changes nothing here.

    Raises:
        UnsupportedError: a setting that this module would not compute as Megatron-core does; all of them are named.
        ArgumentError: a slot of another name.
        NotInstalledError: there is no megatron-core.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        *,
        no_offload_activation: Collection[str] = (),
        recompute_act_input: bool = False,
        act_input_dtype: torch.dtype | None = None,
        keep_quantized_weight: bool = True,
    ) -> None:
        _check_settings(config)
        if config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ()):
            warnings.warn(
                "te_offload.megatron.GroupedMLP: recompute_modules has moe_act, which changes nothing here. Fused, no FC2 "
                "input is saved that could be computed again; op by op it is saved, for a session to offload.",
                stacklevel=2,
            )
        if unknown := sorted(set(no_offload_activation) - _OP_OF_SLOT.keys()):
            raise ArgumentError(
                f"GroupedMLP: no_offload_activation has {', '.join(unknown)}, but slots are {', '.join(_OP_OF_SLOT)}."
            )
        stays = {op: {"no_offload_activation": slot in no_offload_activation} for slot, op in _OP_OF_SLOT.items()}
        hidden, ffn = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        linear: dict[str, Any] = {
            "bias": config.add_bias_linear,
            "device": "cpu" if config.use_cpu_initialization else "cuda",
            "dtype": config.params_dtype,
            "accumulate_into_main_grad": config.gradient_accumulation_fusion,
            "delay_wgrad_compute": config.delay_wgrad_compute,
            "keep_quantized_weight": keep_quantized_weight,
        }
        columns = 2 * ffn if config.gated_linear_unit else ffn
        saving = {"recompute_act_input": recompute_act_input, "act_input_dtype": act_input_dtype}
        with _numbers_untouched(config):
            super().__init__(
                {
                    "linear_fc1": ops.GroupedLinear(
                        num_local_experts, hidden, columns, **stays["linear_fc1"], **linear
                    ),
                    "activation": _activation(config, **stays["activation"], **saving),
                    "linear_fc2": ops.GroupedLinear(
                        num_local_experts,
                        ffn,
                        hidden,
                        scale_bias=config.add_bias_linear,
                        **stays["linear_fc2"],
                        **linear,
                    ),
                }
            )
        self.config = config
        self.num_local_experts = num_local_experts
        self._groups = pg_collection
        self._fill()
        for op in self.children():
            op.register_load_state_dict_pre_hook(_fit_extra_states)

    def _fill(self) -> None:
        """Weights and biases as Megatron-core fills them, and with its attributes."""
        from megatron.core.tensor_parallel import random as numbers
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        config = self.config
        tracker = numbers.get_cuda_rng_tracker()
        forks = not config.use_cpu_initialization and tracker.is_initialized()
        of_experts = tracker.fork(numbers.get_expert_parallel_rng_tracker_name()) if forks else contextlib.nullcontext()
        with of_experts, torch.no_grad():
            for number, (name, fill) in enumerate(
                (("linear_fc1", config.init_method), ("linear_fc2", config.output_layer_init_method))
            ):
                for kind, parameter in getattr(self, name).named_parameters():
                    parameter.allreduce = config.expert_model_parallel_size == 1
                    is_weight = kind.startswith("weight")
                    # No rank has another's experts: gradient norms count what is unmarked on tensor-parallel rank 0 alone.
                    set_tensor_model_parallel_attributes(parameter, True, number if is_weight else 0, 1)
                    if not is_weight:
                        parameter.zero_()
                    elif config.perform_initialization:
                        fill(parameter)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The experts' rows, and no bias of theirs.

        Args:
            permuted_local_hidden_states: (T, H), the rows of one expert after the other.
            tokens_per_expert: (experts,) of any integer dtype, on the GPU or the CPU.
            permuted_probs: (T,), the router's.
        """
        x = permuted_local_hidden_states
        splits = tokens_per_expert.to(x.device, torch.int64, non_blocking=True)
        scale_of_bias = [permuted_probs] if self.config.add_bias_linear else []
        return super().forward(x, splits, permuted_probs, splits, *scale_of_bias), None

    def backward_dw(self) -> None:
        """The weight gradients, where ``delay_wgrad_compute`` has the backward leave them."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What Megatron-core's distributed checkpoints save and load, under the keys of its own experts.

        Delayed scaling's history, which te.ops keep for all experts of a rank, is in the first one's ``_extra_state``.
        """
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
        from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

        groups = self._groups or ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_dp"])
        first, of_all = groups.ep.rank() * self.num_local_experts, groups.ep.size() * self.num_local_experts
        replica = (0, 0, groups.expt_dp.rank())
        apart = bool((metadata or {}).get("singleton_local_shards", False))
        found = {}
        for name in ("linear_fc1", "linear_fc2"):
            op = getattr(self, name)
            state = op.get_extra_state()
            for local in range(self.num_local_experts):
                offsets = tuple(sharded_offsets)
                if not apart:
                    offsets += ((len(offsets), first + local, of_all),)
                key = f"{prefix}experts.{f'{first + local}.' if apart else ''}{name}"
                for kind in ("weight", "bias") if self.config.add_bias_linear else ("weight",):
                    shard = ShardedTensor.from_rank_offsets(
                        f"{key}.{kind}",
                        getattr(op, f"{kind}{local}"),
                        *offsets,
                        replica_id=replica,
                        prepend_axis_num=len(offsets),
                    )
                    if name == "linear_fc1" and self.config.gated_linear_unit:
                        shard = apply_swiglu_sharded_factory(shard, offsets, apart)
                    found[f"{prefix}{name}.{kind}{local}"] = shard
                found[f"{prefix}{name}._extra_state{local or ''}"] = make_sharded_object_for_checkpoint(
                    _NO_STATE if local else state, f"{key}._extra_state", offsets, replica
                )
        return found


@contextlib.contextmanager
def _numbers_untouched(config: Any) -> Iterator[None]:
    """te.ops fill their parameters, which are filled again: no random numbers of the process go into it."""
    with torch.random.fork_rng([] if config.use_cpu_initialization else [torch.cuda.current_device()]):
        yield


def _fit_extra_states(op: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Distributed checkpoints have one for each expert, and others may have none."""
    for number in range(1, getattr(op, "num_groups", 1)):
        state_dict.pop(f"{prefix}_extra_state{number}", None)
    state_dict.setdefault(f"{prefix}_extra_state", _NO_STATE)


def _activation(config: Any, **keywords: Any) -> torch.nn.Module:
    """The op for an activation of Megatron-core's, which `_check_settings` found to be one of these."""
    if not config.gated_linear_unit:
        return ops.ScaledSReLU(**keywords)
    if config.activation_func is torch.nn.functional.silu:
        return ops.ScaledSwiGLU(**keywords)
    limit = _NO_LIMIT if config.activation_func_clamp_value is None else config.activation_func_clamp_value
    return ops.ScaledClampedQGeGLU(limit=limit, glu_linear_offset=config.glu_linear_offset, **keywords)


def _check_settings(config: Any) -> None:
    try:
        from megatron.core import activations
        from megatron.core.fusions import fused_bias_geglu
    except ImportError as error:
        raise NotInstalledError(
            f"te_offload.megatron is for Megatron-core, which is not installed: {error}."
        ) from error
    function, gated = config.activation_func, config.gated_linear_unit
    is_quick = function in (activations.quick_gelu, fused_bias_geglu.quick_gelu)
    is_silu, is_squared = function is torch.nn.functional.silu, function is activations.squared_relu
    whose = sorted({"expert_fc1", "moe_act"} & set(config.offload_modules or ()))
    problems = {
        f"activation_func {getattr(function, '__name__', function)} with gated_linear_unit={gated} (ops: silu and "
        "quick_gelu with, squared_relu without)": not ((is_silu or is_quick) if gated else is_squared),
        "activation_func_clamp_value or glu_linear_offset, which the op has of quick_gelu alone": gated
        and is_silu
        and (config.activation_func_clamp_value is not None or config.glu_linear_offset != 0),
        "moe_apply_probs_on_input": config.moe_apply_probs_on_input,
        "activation_func_fp8_input_store (for FP8 with a scale a row: act_input_dtype=torch.float8_e4m3fn)": (
            config.activation_func_fp8_input_store
        ),
        f"expert_tensor_parallel_size={config.expert_tensor_parallel_size}": config.expert_tensor_parallel_size != 1,
        "init_model_with_meta_device": config.init_model_with_meta_device,
        f"offload_modules with {' and '.join(whose)} (an OffloadSession around layers or experts offloads these)": (
            config.fine_grained_activation_offloading and whose
        ),
    }
    if found := [name for name, is_so in problems.items() if is_so]:
        raise UnsupportedError(
            f"te_offload.megatron.GroupedMLP does not compute what this TransformerConfig asks of experts: "
            f"{'; '.join(found)}. Change that, or keep Megatron-core's experts."
        )
