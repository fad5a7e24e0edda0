"""The experts of a torchtitan model, by the fused grouped MLP: an override for its ``--override.imports``.

In: torchtitan's config of its `GroupedExperts`. Out: a module in its place. Keeps true: parameters, how they are filled,
sharded and named in checkpoints are those of torchtitan's own `FusedGroupedExperts`, whose class this is; a weight in bf16
is read where it lies; what the fused op does not take, torchtitan's code computes in bf16, and a warning says why, or an
error where a recipe was asked for. Does not: keep weights in FP8, or scale with delay: that has state, of which
torchtitan's checkpoints do not know.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload import ops
from te_offload.errors import ArgumentError, NotInstalledError, UnsupportedError
from te_offload.functional import RECIPES as RECIPES
from te_offload.functional import SLOTS, grouped_mlp
from te_offload.fused import explain, find_windows, hopper
from te_offload.fused.calls import calls_of
from te_offload.fused.given import GivenGroupedLinear
from te_offload.ops import inside, te_adapter

try:
    from torch.distributed.tensor import DTensor
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts as _Stock
    from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts
except ImportError as error:
    raise NotInstalledError(
        f"te_offload.torchtitan is for torchtitan 0.3.0, which cannot be imported here: {error}."
    ) from error

_MLP = "mlp"


class GroupedExperts(FusedGroupedExperts):
    """What torchtitan 0.3.0's `GroupedExperts` computes, in bf16 or FP8, with slots that can be offloaded one by one.

    Parameters are ``w13`` (E, F, 2, D), gate and up side by side, and ``w2_EDF`` (E, D, F); in checkpoints ``w1_EFD``,
    ``w3_EFD`` and ``w2_EDF``, as of the stock module. Under expert or tensor parallelism each rank has its shard. Slots are
    named ``inner_experts.mlp.0.fc1_input``, ``...1.act_input`` and ``...2.fc2_input``, inside a layer; of a layer that is
    compiled whole ``grouped_mlp.fc1_input`` and ``grouped_mlp.act_input``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        """torchtitan's, and:

        Attributes:
            no_offload_activation: slots that stay on the GPU, of `SLOTS`.
            recompute_act_input: as of `te_offload.ops.ScaledSwiGLU`.
            recipe: in which the experts compute, of `RECIPES`; ``None``: that of a ``te.autocast`` around the model, else
                bf16; in what is compiled bf16, and an error in an autocast.
            keep_quantized_weight: as of `te_offload.ops.GroupedLinear`; by default the backward makes again what it reads
                of quantized weights, so that what FSDP2 frees after the forward has no copy; what is compiled always does.
        """

        no_offload_activation: tuple[str, ...] = ()
        recompute_act_input: bool = False
        recipe: str | None = None
        keep_quantized_weight: bool = False

    def __init__(self, config: Config) -> None:
        """See `Config`.

        Raises:
            ArgumentError: a slot, or a recipe, of another name.
        """
        super().__init__(config)
        if config.recipe is not None and config.recipe not in RECIPES:
            raise ArgumentError(
                f"GroupedExperts: recipe is {config.recipe!r}, but must be one of {', '.join(RECIPES)}, or None."
            )
        if unknown := sorted(set(config.no_offload_activation) - set(SLOTS)):
            raise ArgumentError(
                f"GroupedExperts: no_offload_activation has {', '.join(unknown)}, but slots are {', '.join(SLOTS)}."
            )
        stays: list[dict[str, Any]] = [
            {"no_offload_activation": slot in config.no_offload_activation} for slot in SLOTS
        ]
        pipeline = te.ops.Sequential(
            GivenGroupedLinear(keep_quantized_weight=config.keep_quantized_weight, **stays[0]),
            ops.ScaledSwiGLU(1, recompute_act_input=config.recompute_act_input, **stays[1]),
            GivenGroupedLinear(keep_quantized_weight=config.keep_quantized_weight, **stays[2]),
        )
        inside.hold(self, _MLP, pipeline)
        self._settings: dict[str, Any] = {
            "interleave": 1,
            "recompute_act_input": config.recompute_act_input,
            "no_offload_activation": config.no_offload_activation,
            "recipe": config.recipe,
        }
        self._recipe = None if config.recipe is None else RECIPES[config.recipe]()
        self._asked: Any = None  # of what the answer is
        self._answer: str | None = None
        self._said: str | None = None

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """The experts' rows, (R, D) in the input's dtype; zero beyond the last expert's.

        Args:
            x_RD: the rows of one expert after the other. num_tokens_per_expert_E: of this rank's experts; of any dtype.

        Raises:
            UnsupportedError: the fused op does not take these experts under the recipe that was asked for; with the reason.
        """
        if torch.compiler.is_compiling():
            if self._reason_against_tracing() is None:
                return self._traced(x_RD, num_tokens_per_expert_E)
            traced: torch.Tensor = super().forward(x_RD, num_tokens_per_expert_E)
            return traced
        pipeline: Any = inside.held(self, _MLP)
        fc1, _, fc2 = pipeline
        w13, w2 = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.w13, self.w2_EDF))
        fc1.give(w13.bfloat16().flatten(1, 2))
        fc2.give(w2.bfloat16().contiguous())
        try:
            recipe = te_adapter.active_recipe() if self._recipe is None else self._recipe
            reason = self._reason_against(pipeline, recipe)
            if reason is None:
                x = x_RD.bfloat16()
                splits = num_tokens_per_expert_E.to(x.device, torch.int64)
                scales = torch.ones(x.shape[0], dtype=torch.float32, device=x.device)
                with contextlib.nullcontext() if self._recipe is None else te.autocast(recipe=self._recipe):
                    y: torch.Tensor = pipeline(x, splits, scales, splits)
                return y.type_as(x_RD)
            self._raise_of(reason, pipeline)
        finally:
            fc1.take_back()
            fc2.take_back()
        calls_of(fc1).reason = reason  # for a session's report
        self._warn_of(reason)
        theirs: torch.Tensor = super().forward(x_RD, num_tokens_per_expert_E)
        return theirs

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _reason_against_tracing(self) -> str | None:
        """Why torch.compile does not get the fused op to see; ``None``: it does. Asked where it traces.

        Raises:
            UnsupportedError: of the fused op, under the recipe that was asked for.
        """
        pipeline: Any = inside.held(self, _MLP)
        w13, w2 = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.w13, self.w2_EDF))
        pipeline[0].give(w13.detach().flatten(1, 2))
        pipeline[2].give(w2.detach().contiguous())
        reason = self._reason_against(pipeline, self._recipe)
        try:
            self._raise_of(reason, pipeline)
        finally:
            for place in (0, 2):
                pipeline[place].take_back()
        if reason is not None:
            self._warn_of(reason)
        return reason

    def _traced(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """`forward`, as torch.compile meets it."""
        w13, w2 = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.w13, self.w2_EDF))
        weights = w13.bfloat16().flatten(1, 2), w2.bfloat16().contiguous()
        splits = num_tokens_per_expert_E.to(x_RD.device, torch.int64)
        y = grouped_mlp(x_RD.bfloat16(), *weights, splits, **self._settings)
        return y.type_as(x_RD)

    def _raise_of(self, reason: str | None, pipeline: Any) -> None:
        """Where a recipe was asked for."""
        if self._recipe is not None and reason is not None:
            fc1, _, fc2 = pipeline
            raise UnsupportedError(
                f"GroupedExperts: under {type(self._recipe).__name__}, as was asked for, the fused grouped MLP does not "
                f"take {fc1.num_groups} experts of {fc2.out_features} x {fc2.in_features}: {reason}. Without recipe= they "
                "compute in bf16."
            )

    def _warn_of(self, reason: str) -> None:
        """Once."""
        if reason != self._said:
            self._said = reason
            warnings.warn(f"te_offload.torchtitan: torchtitan's own code computes the experts: {reason}.", stacklevel=3)

    def _reason_against(self, pipeline: Any, recipe: Any) -> str | None:
        """Why the fused op does not take the experts here and now, under a recipe; ``None``: it does."""
        if recipe is not None and recipe.delayed():
            return "delayed scaling has state, of which torchtitan's checkpoints do not know"
        fc1 = pipeline[0]
        sizes = fc1.num_groups, fc1.out_features, fc1.in_features
        asked = os.environ.get(hopper.SWITCH), te_adapter.recipe_key(recipe), sizes
        if asked != self._asked:  # the answer takes the host most of a millisecond
            (window,) = find_windows(list(pipeline))
            support = explain(window, recipe)
            self._asked, self._answer = asked, None if support.ok else support.reason
        return self._answer


@override(target=_Stock.Config, description="Routed experts by te_offload's fused grouped MLP.")  # type: ignore[untyped-decorator]
def grouped_experts(
    config: Any,
    *,
    no_offload_activation: Collection[str] = (),
    recompute_act_input: bool = False,
    recipe: str | None = None,
    keep_quantized_weight: bool = False,
) -> Any:
    """An override of torchtitan's: `GroupedExperts` in the place of its stock module. What is of another class stays.

    ``--override.imports 'te_offload.torchtitan.grouped_experts={"recompute_act_input": true, "recipe": "fp8"}'``

    Args:
        config: what torchtitan would build. others: of `GroupedExperts.Config`.
    """
    if type(config) is not _Stock.Config:
        return config
    if isinstance(no_offload_activation, str):
        no_offload_activation = (no_offload_activation,)
    return derive(
        fused_grouped_experts(config),
        GroupedExperts.Config,
        no_offload_activation=tuple(no_offload_activation),
        recompute_act_input=recompute_act_input,
        recipe=recipe,
        keep_quantized_weight=keep_quantized_weight,
    )
